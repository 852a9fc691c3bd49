//! All forms of kernels, and how they are numbered.

use super::*;
use crate::codegen::cuda::{Options, generate_with};

fn zeros(dtype: DType, shapes: &[&[usize]]) -> Vec<Tensor> {
    shapes
        .iter()
        .map(|s| Tensor::zeros(dtype, s).unwrap())
        .collect()
}

/// Large kernels of every family, and whether they use tensor cores.
fn kernels() -> Vec<(Graph, bool)> {
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::BF16);
    let product =
        |dtype, a: [usize; 2], b: [usize; 2]| graph_of(&Op::MatMul, &zeros(dtype, &[&a, &b]));
    let attention = |dtype, q: [usize; 3], k: [usize; 3]| {
        let op = Op::Attention {
            scale: Real(0.125),
            causal: true,
        };
        graph_of(&op, &zeros(dtype, &[&q, &k, &k]))
    };
    let sum = Op::Reduce {
        kind: ReduceKind::Sum,
        axes: vec![1],
        keepdims: false,
    };
    let softmax = Op::Softmax {
        axis: 1,
        log: false,
    };
    let conv = Op::Conv {
        window: Window {
            strides: vec![1, 2],
            dilations: vec![1, 1],
            pads_low: vec![1, 1],
            pads_high: vec![1, 1],
        },
        groups: 1,
        layout: Layout::ChannelsLast,
    };
    let cube = Op::Conv {
        window: Window {
            strides: vec![1; 3],
            dilations: vec![1; 3],
            pads_low: vec![1; 3],
            pads_high: vec![0; 3],
        },
        groups: 1,
        layout: Layout::ChannelsLast,
    };
    let by_tensors = vec![
        graph_of(&conv, &zeros(bf16, &[&[32, 28, 56, 96], &[3, 3, 96, 320]])),
        product(bf16, [4096, 512], [512, 4096]),
        graph_of(
            &cube,
            &zeros(f16, &[&[2, 30, 32, 34, 64], &[3, 3, 3, 64, 64]]),
        ),
        product(f16, [1000, 512], [512, 1032]),
        product(bf16, [16384, 512], [512, 64]),
        attention(f16, [16, 200, 64], [16, 200, 64]),
        attention(bf16, [2, 40, 128], [2, 4096, 128]),
        attention(bf16, [64, 512, 128], [64, 512, 128]),
    ];
    let others = vec![
        product(f32, [1000, 512], [512, 1000]),
        product(f16, [4, 4096], [4096, 4096]),
        product(f32, [4096, 4096], [4096, 8]),
        graph_of(&sum, &zeros(f32, &[&[64, 65536]])),
        graph_of(&softmax, &zeros(f16, &[&[4096, 1000]])),
        attention(f32, [16, 200, 64], [16, 200, 64]),
    ];
    by_tensors
        .into_iter()
        .map(|g| (g, true))
        .chain(others.into_iter().map(|g| (g, false)))
        .collect()
}

/// No form spills or has a stack, whether products go by `mma.sync` or by warp groups. Says how many there are of each.
#[test]
fn all_stay_in_registers() {
    let mut n_forms = Vec::new();
    for arch in ["sm_80", "sm_90a"].map(|a| Arch::parse(a).unwrap()) {
        let mut batch = Batch::new(arch);
        for (g, _) in kernels()
            .iter()
            .filter(|(_, by_tensors)| arch.has_wgmma() || *by_tensors)
        {
            let g = as_cluster(g);
            let n = generate(&g, arch).unwrap().forms[&NodeId(0)].n;
            (0..n).for_each(|form| drop(batch.add(&g, form)));
            n_forms.push(n);
        }
        let Some(nvrtc) = nvrtc_or_left_out("resources of all forms of kernels") else {
            continue;
        };
        for made in nvrtc::build(nvrtc, None, &batch.units()) {
            let made = made.unwrap_or_else(|e| panic!("{e}"));
            for (name, r) in &made.resources {
                assert!(
                    r.stack_bytes == 0 && r.spill_store_bytes == 0,
                    "{arch} {name}: {r:?}"
                );
            }
            // ptxas says so when it waits for each product of a warp group by itself.
            assert!(!made.log.contains("(C75"), "{}", made.log);
        }
    }
    insta::assert_compact_debug_snapshot!(n_forms, @"[5, 5, 3, 5, 4, 6, 5, 4, 6, 6, 6, 6, 6, 6, 5, 5, 2, 6, 6, 6, 3, 6]");
}

/// Numbers of a cluster's forms go through those of its kernels, one after the other, with all others as predicted.
#[test]
fn forms_of_several_kernels_are_numbered_one_after_the_other() {
    let mut b = GraphBuilder::new("two");
    let (x, w) = (
        b.input("x", DType::F32, [100, 80]),
        b.input("w", DType::F32, [80, 80]),
    );
    let y = b.matmul(x, w).unwrap();
    let y = b.matmul(y, w).unwrap();
    b.output("y", y);
    let g = as_cluster(&b.finish().unwrap());
    let of = |form: u8| {
        let options = Options {
            form,
            ..Arch::COMMON.into()
        };
        generate_with(&g, options)
            .unwrap()
            .forms
            .remove(&NodeId(0))
            .unwrap()
    };
    let first = of(0);
    let [a, b] = &first.choices[..] else {
        panic!("{first:?}")
    };
    assert!(
        a.n > 1 && b.n > 1 && usize::from(first.n) == a.n + b.n - 1,
        "{first:?}"
    );
    let numbers: Vec<Vec<usize>> = (0..=first.n)
        .map(|f| of(f).choices.iter().map(|c| c.number).collect())
        .collect();
    let expected = (0..a.n)
        .map(|i| vec![i, 0])
        .chain((1..b.n).map(|i| vec![0, i]))
        .chain([vec![0, 0]]);
    assert_eq!(numbers, expected.collect::<Vec<_>>());
}
