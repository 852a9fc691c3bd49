//! Contractions with views, epilogues and constant weights.

use super::harness::compile_clusters;
use super::harness::{check, steps};
use crate::codegen::cpu::{Fallback, Options, Rejected};
use crate::codegen::plan::KernelPlan;
use crate::codegen::testing::{Rng, as_cluster, compare};
use crate::ir::*;
use crate::options::ConvAlgorithm;
use gristmill_runtime::{DType, Tensor};

/// `y = epilogue(x w)` with everything a transformer layer puts behind a product.
#[test]
fn products_with_epilogues() {
    let rng = &mut Rng(11);
    for (m, k, n) in [(1, 33, 40), (7, 16, 65), (70, 24, 31)] {
        for constant in [false, true] {
            let x = rng.tensor(DType::F32, &[2, m, k], -1.0, 1.0);
            let w = rng.tensor(DType::F32, &[k, n], -1.0, 1.0);
            let bias = rng.tensor(DType::F32, &[n], -1.0, 1.0);
            let residual = rng.tensor(DType::F32, &[2, m, n], -1.0, 1.0);
            let mut b = GraphBuilder::new("layer");
            let vx = b.input("x", DType::F32, [2, m, k]);
            let mut inputs = vec![x.clone()];
            let mut weight = |b: &mut GraphBuilder, name: &str, t: &Tensor| {
                if constant {
                    b.constant(t.clone())
                } else {
                    inputs.push(t.clone());
                    b.input(name, t.dtype(), t.shape().iter().copied())
                }
            };
            let (vw, vbias) = (weight(&mut b, "w", &w), weight(&mut b, "bias", &bias));
            let vres = weight(&mut b, "residual", &residual);
            let y = b.matmul(vx, vw).unwrap();
            let y = b.add_(y, vbias).unwrap();
            let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
            let half = b.scalar(DType::F32, 0.5);
            let y = b.mul(half, y).unwrap();
            let y = b.sub(vres, y).unwrap();
            b.output("y", y);
            let g = b.finish().unwrap();
            check(&g, &inputs, 1e-5, rng);
            assert_eq!(steps(&g).len(), if constant { 1 } else { 2 });
        }
    }
}

#[test]
fn views_of_operands_become_strides() {
    let rng = &mut Rng(12);
    // q k^T per head, heads split out of a joint projection: [2, 5, 3 * 24] -> heads [2, 3, 5, 8].
    let mut b = GraphBuilder::new("scores");
    let x = b.input("x", DType::F32, [2, 5, 72]);
    let head = |b: &mut GraphBuilder, start: usize| {
        let part = b.slice_axis(x, 2, start, 24).unwrap();
        let part = b.reshape(part, [2, 5, 3, 8]).unwrap();
        b.transpose(part, &[0, 2, 1, 3]).unwrap()
    };
    let (q, k) = (head(&mut b, 0), head(&mut b, 24));
    let kt = b.transpose(k, &[0, 1, 3, 2]).unwrap();
    let s = b.matmul(q, kt).unwrap();
    b.output("s", s);
    let g = b.finish().unwrap();
    let x = rng.tensor(DType::F32, &[2, 5, 72], -1.0, 1.0);
    check(&g, &[x], 1e-5, rng);
    assert_eq!(steps(&g).len(), 2, "one packing, one product");
}

/// Extents of images by the number of their spatial axes.
const EXTENTS: [&[usize]; 3] = [&[8], &[9, 8], &[6, 5, 8]];

fn conv_graph(
    channels: usize,
    groups: usize,
    out: usize,
    layout: Layout,
    window: &Window,
    rng: &mut Rng,
) -> (Graph, Vec<Tensor>) {
    let n = window.strides.len();
    let (extents, taps) = (EXTENTS[n - 1], vec![3; n]);
    let per_group = channels / groups;
    let (xs, ws, bias) = match layout {
        Layout::ChannelsFirst => (
            [&[2, channels], extents].concat(),
            [&[out, per_group], &taps[..]].concat(),
            [&[out], &vec![1; n][..]].concat(),
        ),
        Layout::ChannelsLast => (
            [&[2], extents, &[channels]].concat(),
            [&taps[..], &[per_group, out]].concat(),
            vec![out],
        ),
    };
    let mut b = GraphBuilder::new("conv");
    let x = b.input("x", DType::F32, xs.iter().copied());
    let w = b.constant(rng.tensor(DType::F32, &ws, -1.0, 1.0));
    let bias = b.constant(rng.tensor(DType::F32, &bias, -1.0, 1.0));
    let y = b
        .add1(
            Op::Conv {
                window: window.clone(),
                groups,
                layout,
            },
            &[x, w],
        )
        .unwrap();
    let y = b.add_(y, bias).unwrap();
    let residual = b.input("residual", DType::F32, b.ty(y).static_shape().unwrap());
    let y = b.add_(y, residual).unwrap();
    let y = b.map(ScalarOp::HardSwish, &[y]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let inputs = g
        .inputs
        .iter()
        .map(|&v| rng.tensor(DType::F32, &g.ty(v).static_shape().unwrap(), -1.0, 1.0))
        .collect();
    (g, inputs)
}

fn window(strides: [usize; 2], dilations: [usize; 2]) -> Window {
    Window {
        strides: strides.to_vec(),
        dilations: dilations.to_vec(),
        pads_low: vec![1, 2],
        pads_high: vec![1, 1],
    }
}

/// Dilated or not, with any epilogue; a direct sum where the options ask for it, or where transforms
/// would be most of the work.
#[test]
fn convolutions_by_minimal_filtering() {
    let rng = &mut Rng(17);
    for layout in [Layout::ChannelsLast, Layout::ChannelsFirst] {
        for dilations in [[1, 1], [2, 1]] {
            let window = window([1, 1], dilations);
            let (g, inputs) = conv_graph(40, 1, 48, layout, &window, rng);
            check(&g, &inputs, 2e-5, rng);
            if layout == Layout::ChannelsLast {
                let [step] = &steps(&g)[..] else {
                    panic!("one step");
                };
                assert!(step.contains("gm_winograd"), "{step}");
            }
            let direct = Options {
                conv: ConvAlgorithm::Direct,
                ..Options::default()
            };
            let compiled = compile_clusters(&mut as_cluster(&g), &direct).unwrap();
            let mut kernels = compiled.kernels.iter();
            assert!(kernels.all(|k| !k.name.contains("winograd")));
        }
    }
    let (g, _) = conv_graph(8, 1, 40, Layout::ChannelsLast, &window([1, 1], [1, 1]), rng);
    assert!(steps(&g)[0].contains("gm_conv"), "few channels");
}

#[test]
fn convolutions_with_epilogues() {
    assert_convolutions(&window([2, 1], [1, 2]));
}

#[test]
fn convolutions_over_three_axes_with_epilogues() {
    let window = |strides: [usize; 3], dilations: [usize; 3]| Window {
        strides: strides.to_vec(),
        dilations: dilations.to_vec(),
        pads_low: vec![2, 1, 0],
        pads_high: vec![0, 1, 2],
    };
    assert_convolutions(&window([1, 1, 1], [1, 1, 1]));
    assert_convolutions(&window([1, 2, 1], [2, 1, 2]));
    assert_convolutions(&window([2, 1, 3], [1, 2, 1]));
}

/// Convolutions of few and many channels, in groups, and by channel, each with its epilogue in one step.
fn assert_convolutions(window: &Window) {
    let rng = &mut Rng(13);
    for layout in [Layout::ChannelsLast, Layout::ChannelsFirst] {
        for (channels, groups, out) in [(3, 1, 40), (32, 1, 20), (24, 24, 24), (8, 4, 12)] {
            let (g, inputs) = conv_graph(channels, groups, out, layout, window, rng);
            check(&g, &inputs, 1e-5, rng);
            if layout == Layout::ChannelsLast {
                assert_eq!(steps(&g).len(), 1);
            }
        }
    }
}

/// Two layers alike but for their weights, and a third that has the first one's.
#[test]
fn repeated_layers_share_code_and_weights() {
    let rng = &mut Rng(14);
    let mut layer = GraphBuilder::new("layer");
    let x = layer.input("x", DType::F32, [4, 40]);
    let w = layer.input("w", DType::F32, [40, 40]);
    let y = layer.matmul(x, w).unwrap();
    let y = layer.map(ScalarOp::Sin, &[y]).unwrap();
    layer.output("y", y);
    let layer = layer.finish().unwrap();
    let mut g = Graph::new("stack");
    let mut v = g.add_input("x", Type::new(DType::F32, [4usize, 40]));
    let weights = [0, 1].map(|_| {
        g.add_constant(
            rng.tensor(DType::F32, &[40, 40], -1.0, 1.0),
            &Origin::default(),
        )
    });
    for w in [weights[0], weights[1], weights[0]] {
        let op = Op::Cluster {
            kind: ClusterKind::Contract,
            anchor: 0,
            root: 1,
        };
        v = g
            .add_with_regions(op, &[v, w], vec![layer.clone()], &Origin::default())
            .unwrap()[0];
    }
    g.add_output("y", v);
    let compiled = compile_clusters(&mut g.clone(), &Options::default()).unwrap();
    let plans: Vec<_> = compiled.plans.values().collect();
    let entries = |p: &KernelPlan| -> Vec<usize> {
        p.steps
            .iter()
            .map(|s| compiled.kernels[s.kernel].function.entry().unwrap() as usize)
            .collect()
    };
    assert!(plans[0].steps.len() > 1, "a product and a map");
    assert!(entries(plans[0]) == entries(plans[1]) && entries(plans[0]) == entries(plans[2]));
    let panels = |p: &KernelPlan| {
        p.packed
            .iter()
            .map(|c| c.elements.tensor())
            .max_by_key(|t| t.size_bytes())
            .unwrap()
            .as_ptr()
    };
    assert_eq!(panels(plans[0]), panels(plans[2]));
    assert_ne!(panels(plans[0]), panels(plans[1]));
    let x = rng.tensor(DType::F32, &[4, 40], -1.0, 1.0);
    let expected = crate::interp::run(&g, std::slice::from_ref(&x)).unwrap();
    let options = crate::Options {
        opt_level: 0,
        check: true,
        ..crate::Options::default()
    };
    let made = crate::compile(&g, &options).unwrap();
    let found = made.run([("x", x)]).unwrap().into_tensors();
    compare(&expected[0], &found[0], 1e-5).unwrap();
}

/// The fallbacks of a body as a cluster.
fn fallbacks(b: GraphBuilder) -> Vec<Fallback> {
    let body = b.finish().unwrap();
    let compiled = compile_clusters(&mut as_cluster(&body), &Options::default());
    compiled.unwrap().fallbacks
}

#[test]
fn ops_without_a_form_on_the_tile_are_reported() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [4, 4]);
    let y = b.matmul(x, x).unwrap();
    let y = b.map(ScalarOp::Sin, &[y]).unwrap();
    b.output("y", y);
    let found = fallbacks(b);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].op, "sin");
    assert!(matches!(found[0].why, Rejected::Epilogue("sin")));
}

#[test]
fn products_that_run_in_loops_are_reported_with_their_work() {
    let mut b = GraphBuilder::new("g");
    b.set_origin("/layer/product");
    let x = b.input("x", DType::F64, [4, 4]);
    let y = b.matmul(x, x).unwrap();
    b.output("y", y);
    let found = fallbacks(b);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].node, "/layer/product");
    assert_eq!(found[0].why.to_string(), "no kernel for f64");
    assert_eq!(found[0].work.flops, 128);
}

#[test]
fn products_by_a_kernel_are_no_fallback() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [4, 4]);
    let y = b.matmul(x, x).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.output("y", y);
    assert!(fallbacks(b).is_empty());
}

#[test]
fn composite_ops_that_are_written_out_are_one_fallback() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [4, 6]);
    let softmax = Op::Softmax {
        axis: 0,
        log: false,
    };
    let y = b.add1(softmax, &[x]).unwrap();
    b.output("y", y);
    let found = fallbacks(b);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].op, "softmax");
    assert_eq!(found[0].why.to_string(), "kernels take the last axis only");
}
