//! Generated CUDA kernels: their text, and what NVRTC says of them.

mod archs;
mod attention;
mod build;
mod bundle;
mod contract;
mod few_queries;
mod forms;
mod library;
mod lines;
mod pixels;
mod rows;
mod run;
mod skinny;
mod tensor;
mod windows;

use super::{disassemble, generate, nvrtc};
use crate::codegen::testing::{self, Case, Rng, as_cluster, graph_of};
use crate::ir::*;
use crate::target::Arch;
use crate::testing::nvrtc_or_left_out;
use build::Batch;
use gristmill_runtime::{DType, Tensor};

/// Architectures that every release of kernels is compiled for.
const ARCHS: [&str; 7] = [
    "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a",
];

/// The disassembly of a cubin; without `nvdisasm`, says what is left out.
fn machine_code(nvrtc: &nvrtc::Nvrtc, cubin: &[u8], what: &str) -> Option<String> {
    match disassemble(nvrtc, cubin) {
        Ok(text) => Some(text),
        Err(e) if std::env::var_os("GRISTMILL_NVDISASM").is_some() => panic!("{e}"),
        Err(e) => {
            eprintln!("left out: machine code of {what}: {e}");
            None
        }
    }
}

/// True if PTX has such an access to words of so many bits, of whichever type: compilers of some
/// releases say `u32` where others say `f32`.
fn moves(ptx: &str, access: &str, bits: usize) -> bool {
    let has = |ty| ptx.contains(&format!("{access}.{ty}{bits}"));
    ["b", "u", "f"].into_iter().any(has)
}

/// Kernels of one op, as text.
fn listing(body: &Graph) -> String {
    generate(&as_cluster(body), Arch::COMMON).unwrap().listing
}

fn op_listing(op: Op, operands: &[Tensor]) -> String {
    listing(&graph_of(&op, operands))
}

#[test]
fn canonical_kernels() {
    let x = |d: DType, s: &[usize]| Tensor::zeros(d, s).unwrap();
    let f = |s: &[usize]| x(DType::F32, s);
    let mut b = GraphBuilder::new("bias_gelu");
    let (v, bias) = (
        b.input("x", DType::F32, [64, 128]),
        b.input("bias", DType::F32, [128]),
    );
    let y = b.add_(v, bias).unwrap();
    let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
    b.output("y", y);
    insta::assert_snapshot!("map_bias_gelu", listing(&b.finish().unwrap()));
    let mut b = GraphBuilder::new("half");
    let v = b.input("x", DType::F16, [4, 6]);
    let t = b.transpose(v, &[1, 0]).unwrap();
    let y = b.map(ScalarOp::Exp, &[t]).unwrap();
    let y = b.cast(y, DType::BF16).unwrap();
    b.output("y", y);
    insta::assert_snapshot!("map_transposed_half", listing(&b.finish().unwrap()));
    let i = |s: &[usize]| x(DType::I32, s);
    insta::assert_snapshot!(
        "map_integer_remainder",
        op_listing(Op::Map(ScalarOp::Mod), &[i(&[9]), i(&[9])])
    );
    let sum = Op::Reduce {
        kind: ReduceKind::Sum,
        axes: vec![1],
        keepdims: false,
    };
    insta::assert_snapshot!("reduce_sum", op_listing(sum, &[f(&[6, 70])]));
    let at = x(DType::I64, &[5]);
    insta::assert_snapshot!(
        "gather",
        op_listing(Op::Gather { axis: 0 }, &[f(&[7, 3]), at.clone()])
    );
    let pad = Op::Pad {
        low: vec![2, 0],
        high: vec![1, 3],
        mode: PadMode::Reflect,
    };
    insta::assert_snapshot!("pad_reflect", op_listing(pad, &[f(&[3, 4])]));
    insta::assert_snapshot!(
        "concat",
        op_listing(Op::Concat { axis: 1 }, &[f(&[2, 3]), f(&[2, 5])])
    );
    insta::assert_snapshot!(
        "matmul",
        op_listing(
            Op::MatMul,
            &[x(DType::F16, &[5, 7]), x(DType::F16, &[7, 3])]
        )
    );
    let window = Window {
        strides: vec![2],
        dilations: vec![1],
        pads_low: vec![1],
        pads_high: vec![0],
    };
    let conv = Op::Conv {
        window,
        groups: 2,
        layout: Layout::ChannelsLast,
    };
    insta::assert_snapshot!("conv", op_listing(conv, &[f(&[2, 9, 4]), f(&[3, 2, 6])]));
    insta::assert_snapshot!(
        "top_k",
        op_listing(
            Op::TopK {
                k: 3.into(),
                axis: 0,
                largest: true
            },
            &[f(&[9])]
        )
    );
    let scatter = Op::ScatterNd {
        kind: ScatterKind::Add,
    };
    insta::assert_snapshot!(
        "scatter",
        op_listing(scatter, &[f(&[4, 3]), x(DType::I64, &[5, 1]), f(&[5, 3])])
    );
}

#[test]
fn contiguous_elements_move_in_vectors() {
    let Some(nvrtc) = nvrtc_or_left_out("the accesses of vectors") else {
        return;
    };
    let mut b = GraphBuilder::new("scaled");
    let (x, s) = (
        b.input("x", DType::F32, [64, 128]),
        b.input("s", DType::F32, [64, 1]),
    );
    let h = b.input("h", DType::F16, [128]);
    let h = b.cast(h, DType::F32).unwrap();
    let y = b.mul(x, s).unwrap();
    let y = b.add_(y, h).unwrap();
    b.output("y", y);
    let body = b.finish().unwrap();
    insta::assert_snapshot!("map_vectors", listing(&body));
    let made = generate(&as_cluster(&body), Arch::COMMON).unwrap();
    let ptx = nvrtc.compile(&made.units[0]).unwrap().ptx;
    for (access, bits) in [
        ("ld.global.nc.v4", 32),
        ("ld.global.nc.v4", 16),
        ("st.global.v4", 32),
    ] {
        assert!(moves(&ptx, access, bits), "{access}, {bits} bits: {ptx}");
    }
    let rng = &mut Rng(33);
    let inputs = [
        (DType::F32, &[64, 128][..]),
        (DType::F32, &[64, 1]),
        (DType::F16, &[128]),
    ];
    let mut cases = vec![Case {
        body,
        inputs: inputs.map(|(d, s)| rng.tensor(d, s, -2.0, 2.0)).to_vec(),
        tolerance: 0.0,
    }];
    for dtype in DType::ALL.iter().copied() {
        let x = || Tensor::zeros(dtype, &[48]).unwrap();
        let op = if dtype == DType::Bool {
            ScalarOp::And
        } else {
            ScalarOp::Max
        };
        let operands: Vec<Tensor> = [x(), x()]
            .iter()
            .map(|t| rng.tensor(t.dtype(), t.shape(), -9.0, 9.0))
            .collect();
        cases.push(Case::of_op(&Op::Map(op), operands, 0.0));
    }
    cases
        .iter()
        .for_each(|c| assert!(listing(&c.body).contains("gm_store<"), "{}", c.body));
    run::check_all("vectors", &cases);
    // A slice of five elements that a loop hands to its body may begin anywhere.
    let mut b = GraphBuilder::new("part");
    let x = b.input("x", DType::F32, [5]);
    let y = b.slice_axis(x, 0, 0, 4).unwrap();
    let y = b.map(ScalarOp::Neg, &[y]).unwrap();
    b.output("y", y);
    assert!(!listing(&b.finish().unwrap()).contains("gm_store<"));
}

/// `x * tanh(x)` rounds twice, by one instruction each: eight more would take as long as the memory
/// does.
#[test]
fn half_types_are_rounded_by_one_instruction() {
    let Some(nvrtc) = nvrtc_or_left_out("conversions to half types") else {
        return;
    };
    for (dtype, name, arch, n) in [
        (DType::F16, "f16", "sm_75", 16),
        (DType::F16, "f16", "sm_90a", 16),
        (DType::BF16, "bf16", "sm_80", 16),
        (DType::BF16, "bf16", "sm_90a", 16),
        // There is none.
        (DType::BF16, "bf16", "sm_75", 0),
    ] {
        let mut b = GraphBuilder::new("map");
        let x = b.input("x", dtype, [1024]);
        let t = b.map(ScalarOp::Tanh, &[x]).unwrap();
        let y = b.mul(x, t).unwrap();
        b.output("y", y);
        let g = as_cluster(&b.finish().unwrap());
        let made = generate(&g, Arch::parse(arch).unwrap()).unwrap();
        let compiled = nvrtc.compile(&made.units[0]).unwrap();
        let conversions = format!("cvt.rn.{name}.f32");
        let found = compiled.ptx.matches(&conversions).count();
        assert_eq!(found, n, "{arch}: {}", compiled.ptx);
    }
}

/// Equal kernels are one source, whatever they are for.
#[test]
fn repeated_layers_share_their_source() {
    let mut g = Graph::new("layers");
    let mut v = g.add_input("x", Type::new(DType::F32, [8usize]));
    let body = graph_of(
        &Op::Map(ScalarOp::Relu),
        &[Tensor::zeros(DType::F32, &[8]).unwrap()],
    );
    for _ in 0..3 {
        let op = Op::Cluster {
            kind: ClusterKind::Map,
            anchor: 0,
            root: 0,
        };
        v = g
            .add_with_regions(op, &[v], vec![body.clone()], &Origin::new("/layer"))
            .unwrap()[0];
    }
    g.add_output("y", v);
    let made = generate(&g, Arch::COMMON).unwrap();
    assert_eq!(
        (made.units.len(), made.kernels.len(), made.plans.len()),
        (1, 3, 3)
    );
    let names: Vec<&str> = made.kernels.iter().map(|k| k.name.as_str()).collect();
    assert_eq!(
        names,
        ["layers_0_0_map", "layers_1_0_map", "layers_2_0_map"]
    );
    assert_eq!(
        made.listing
            .matches("// the code of layers_0_0_map")
            .count(),
        2
    );
}

/// Positions that do not fit 32 bits are counted in 64.
#[test]
fn large_tensors_have_wide_indices() {
    let of = |n: usize| {
        let mut b = GraphBuilder::new("large");
        let x = b.input("x", DType::I8, [n]);
        let y = b.map(ScalarOp::Neg, &[x]).unwrap();
        b.output("y", y);
        listing(&b.finish().unwrap())
    };
    assert!(of(1 << 29).contains("typedef int ix;"));
    let wide = of((1 << 32) + 1);
    assert!(
        wide.contains("typedef long long ix;") && wide.contains("p0 < 4294967297ll"),
        "{wide}"
    );
}
