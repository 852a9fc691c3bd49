//! Hand-computed work and orderings that must hold on any device.

use super::*;
use crate::cluster;
use crate::ir::{Dim, GraphBuilder, ScalarOp, Shape};
use crate::{DType, Tensor};
use gristmill_kernels::Isa;

fn device() -> DeviceProfile {
    DeviceProfile::cpu(Isa::Avx512, 1)
}

fn f32s(shape: &[usize]) -> Type {
    Type::new(DType::F32, shape.iter().copied())
}

#[test]
fn flops_of_contractions() {
    let extents = Extents::default();
    let matmul = work::of_op(
        &Op::MatMul,
        &[f32s(&[2, 3, 5]), f32s(&[5, 7])],
        &[f32s(&[2, 3, 7])],
        &extents,
    );
    assert_eq!(
        (matmul.class, matmul.flops),
        (WorkClass::MatMul, 2 * 2 * 3 * 5 * 7)
    );
    let window = crate::ir::Window {
        strides: vec![1; 2],
        dilations: vec![1; 2],
        pads_low: vec![1; 2],
        pads_high: vec![1; 2],
    };
    for (layout, w) in [
        (crate::ir::Layout::ChannelsFirst, [8, 2, 3, 3]),
        (crate::ir::Layout::ChannelsLast, [3, 3, 2, 8]),
    ] {
        let op = Op::Conv {
            window: window.clone(),
            groups: 2,
            layout,
        };
        let conv = work::of_op(
            &op,
            &[f32s(&[1, 4, 6, 6]), f32s(&w)],
            &[f32s(&[1, 8, 6, 6])],
            &extents,
        );
        assert_eq!(
            (conv.class, conv.flops),
            (WorkClass::Conv, 2 * 8 * 36 * 2 * 9)
        );
    }
    let op = Op::Attention {
        scale: 1.0.into(),
        causal: false,
    };
    let qkv = [f32s(&[2, 4, 8]), f32s(&[2, 6, 8]), f32s(&[2, 6, 8])];
    assert_eq!(
        work::of_op(&op, &qkv, &[f32s(&[2, 4, 8])], &extents).flops,
        2 * 4 * 6 * (16 + 16 + 14)
    );
}

#[test]
fn symbols_count_as_the_stated_extent() {
    let shape = Shape::from_iter([Dim::symbol("batch"), 4.into()]);
    assert_eq!(Extents::default().elements(&shape), 4);
    let eight = Extents {
        bindings: [("batch".to_owned(), 8)].into(),
        unknown_extent: 1,
    };
    assert_eq!(eight.elements(&shape), 32);
}

#[test]
fn a_gather_does_not_read_its_whole_table() {
    let mut b = GraphBuilder::new("g");
    let table = b.input("table", DType::F32, [50_000usize, 64]);
    let ids = b.input("ids", DType::I64, [4usize]);
    let rows = b.add1(Op::Gather { axis: 0 }, &[table, ids]).unwrap();
    b.output("rows", rows);
    let g = b.finish().unwrap();
    let (clustered, _) =
        cluster::cluster(&g, &cluster::Fusion::greedy(Default::default())).unwrap();
    for g in [&g, &clustered] {
        let (_, node) = g.nodes().next().unwrap();
        assert_eq!(
            work::traffic(g, node, &Extents::default()),
            Bytes(2 * 4 * 64 * 4 + 4 * 8)
        );
    }
}

#[test]
fn a_fused_epilogue_is_cheaper_than_two_kernels() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [64usize, 256]);
    let w = b.constant(Tensor::zeros(DType::F32, &[256, 256]).unwrap());
    let y = b.matmul(x, w).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let (clustered, _) =
        cluster::cluster(&g, &cluster::Fusion::greedy(Default::default())).unwrap();
    let model = CostModel::default();
    assert!(model.graph_ns(&clustered, &device()) < model.graph_ns(&g, &device()));
    let bigger = DeviceProfile::cpu(Isa::Avx2, 1);
    assert!(model.graph_ns(&clustered, &device()) < model.graph_ns(&clustered, &bigger));
}

/// A graph of one map, with names that should not matter.
fn map_of(name: &str, op: ScalarOp, n: usize) -> crate::ir::Graph {
    let mut b = GraphBuilder::new(name);
    let x = b.input(name, DType::F32, [n]);
    let y = b.map(op, &[x]).unwrap();
    b.output(name, y);
    let (clustered, _) = cluster::cluster(
        &b.finish().unwrap(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    clustered
}

#[test]
fn signatures_know_shapes_and_ops_but_no_names() {
    let of = |g: &crate::ir::Graph| signature(g, g.node(NodeId(0)));
    let one = of(&map_of("a", ScalarOp::Exp, 16));
    assert_eq!(one, of(&map_of("b", ScalarOp::Exp, 16)));
    assert_ne!(one, of(&map_of("a", ScalarOp::Exp, 17)));
    assert_ne!(one, of(&map_of("a", ScalarOp::Neg, 16)));
}

/// What is measured of a graph's first node, recorded for a device.
fn record(
    measured: &mut Measured,
    g: &crate::ir::Graph,
    d: &DeviceProfile,
    times: &[u64],
) -> Nanos {
    let (node, costs) = (g.node(NodeId(0)), CostModel::default());
    let times = times.iter().copied().map(Nanos).collect();
    measured.record(&costs, d, [(g, node, times)]);
    costs.analytic_ns(g, node, d)
}

/// Records maps of `n` elements, each measured as so many times its predicted time.
fn record_maps(measured: &mut Measured, n: std::ops::Range<usize>, ratio: impl Fn(usize) -> f64) {
    for n in n {
        let g = map_of("g", ScalarOp::Exp, n);
        let predicted = CostModel::default().node_ns(&g, NodeId(0), &device());
        let time = (predicted.0 as f64 * ratio(n)).round() as u64;
        record(measured, &g, &device(), &[time; 3]);
    }
}

/// Estimate of a map, as measured / predicted, and its origin.
fn estimated(measured: &Measured, op: ScalarOp, n: usize, d: &DeviceProfile) -> (f64, Evidence) {
    let (g, costs) = (map_of("g", op, n), CostModel::default());
    let node = g.node(NodeId(0));
    let with_times = CostModel {
        measured: Arc::new(measured.clone()),
        ..CostModel::default()
    };
    let (time, evidence) = with_times.estimate(&g, node, d);
    let factor = time.0 as f64 / costs.analytic_ns(&g, node, d).0 as f64;
    ((factor * 100.0).round() / 100.0, evidence)
}

/// Elements of maps that take many launches.
const LARGE: usize = 1 << 20;

#[test]
fn measured_times_and_two_predictions_are_averaged() {
    let g = map_of("g", ScalarOp::Exp, LARGE);
    let mut measured = Measured::default();
    let a = record(&mut measured, &g, &device(), &[0]).0;
    let (low, high) = (a * 3 / 4, a * 100);
    for (times, expected) in [
        ([low; 4], (2 * a + 4 * low) / 6),
        // A prediction that is a hundred times off counts as half of the measured time.
        ([high; 4], (high + 4 * high) / 6),
    ] {
        let mut measured = Measured::default();
        record(&mut measured, &g, &device(), &times);
        let costs = CostModel {
            measured: Arc::new(measured.clone()),
            ..CostModel::default()
        };
        let (time, evidence) = costs.estimate(&g, g.node(NodeId(0)), &device());
        assert!(time.0.abs_diff(expected) <= 1, "{time} of {expected}");
        assert_eq!(evidence, Evidence::Measured);
        let other = DeviceProfile::cpu(Isa::Avx512, 2);
        let elsewhere = estimated(&measured, ScalarOp::Exp, LARGE, &other);
        assert_eq!(elsewhere, (1.0, Evidence::Rates));
    }
}

#[test]
fn similar_clusters_correct_each_other_within_bounds() {
    let similar = |ratio: &dyn Fn(usize) -> f64, op, n| {
        let mut measured = Measured::default();
        record_maps(&mut measured, LARGE..LARGE + 6, ratio);
        estimated(&measured, op, n, &device())
    };
    let unknown = (1.0, Evidence::Rates);
    let exp = ScalarOp::Exp;
    // exp(6 ln 1.5 / (6 + 2)).
    let corrected = similar(&|_| 1.5, exp, LARGE * 3 / 2);
    assert_eq!(corrected, (1.36, Evidence::Similar));
    // Whatever was measured, the correction is bounded.
    assert_eq!(similar(&|_| 50.0, exp, LARGE / 3 * 2).0, 2.0);
    assert_eq!(similar(&|_| 0.01, exp, LARGE / 3 * 2).0, 0.5);
    // Another size, another limiting rate, or measurements that disagree.
    assert_eq!(similar(&|_| 1.5, exp, LARGE * 3), unknown);
    assert_eq!(similar(&|_| 1.5, ScalarOp::Neg, LARGE), unknown);
    let alternating = |n: usize| [0.2, 1.5][n % 2];
    assert_eq!(similar(&alternating, exp, LARGE * 3 / 2), unknown);
}

#[test]
fn few_and_tiny_clusters_correct_no_others() {
    let mut measured = Measured::default();
    record_maps(&mut measured, LARGE..LARGE + 2, |_| 1.5);
    record_maps(&mut measured, 16..32, |_| 20.0);
    for n in [LARGE * 3 / 2, 40] {
        let estimate = estimated(&measured, ScalarOp::Exp, n, &device());
        assert_eq!(estimate, (1.0, Evidence::Rates), "{n}");
    }
}

/// `h' = h w`, 100 times.
fn recurrence(width: usize) -> crate::ir::Graph {
    let mut body = GraphBuilder::new("step");
    let [h, w] = [("h", 1), ("w", width)].map(|(name, n)| body.input(name, DType::F32, [n, width]));
    let y = body.matmul(h, w).unwrap();
    body.output("h", y);
    let mut b = GraphBuilder::new("g");
    let [h, w] = [("h", 1), ("w", width)].map(|(name, n)| b.input(name, DType::F32, [n, width]));
    let op = Op::Scan {
        carried: 1,
        scanned: 0,
        length: 100.into(),
        reverse: false,
    };
    let results = b.add_with_regions(op, &[h, w], vec![body.into_graph()]);
    b.output("h", results.unwrap()[0]);
    b.finish().unwrap()
}

#[test]
fn weights_that_fit_the_caches_are_read_there_in_each_iteration() {
    let costs = CostModel::default();
    let per_iteration = |width: usize| {
        let g = recurrence(width);
        let product = g.node(NodeId(0)).regions[0].nodes().next().unwrap().1;
        let alone = costs.analytic_ns(&g.node(NodeId(0)).regions[0], product, &device());
        let looped = costs.node_ns(&g, NodeId(0), &device());
        looped.0 as f64 / (100 * alone.0) as f64
    };
    let (cached, streamed) = (per_iteration(1024), per_iteration(4096));
    assert!((0.2..0.6).contains(&cached), "{cached}");
    assert!((0.99..1.01).contains(&streamed), "{streamed}");
}

/// `h' = -h` in `depth` loops of one iteration around each other.
fn nested(depth: usize) -> crate::ir::Graph {
    let mut b = GraphBuilder::new("g");
    let h = b.input("h", DType::F32, [1]);
    let y = match depth {
        0 => b.map(ScalarOp::Neg, &[h]).unwrap(),
        _ => {
            let op = Op::Scan {
                carried: 1,
                scanned: 0,
                length: 1.into(),
                reverse: false,
            };
            b.add_with_regions(op, &[h], vec![nested(depth - 1)])
                .unwrap()[0]
        }
    };
    b.output("h", y);
    b.finish().unwrap()
}

/// Twice the work for each loop around another would never end.
#[test]
fn nested_loops_are_priced_in_time() {
    let g = nested(48);
    let time = CostModel::default().node_ns(&g, NodeId(0), &device());
    assert!(time > Nanos::ZERO);
}

/// A convolution of 3x3 over 56x56 pixels with 64 channels before and after.
fn convolution(stride: usize) -> crate::ir::Graph {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [1usize, 56, 56, 64]);
    let w = b.constant(Tensor::zeros(DType::F32, &[3, 3, 64, 64]).unwrap());
    let op = Op::Conv {
        window: crate::ir::Window {
            strides: vec![stride; 2],
            dilations: vec![1; 2],
            pads_low: vec![1; 2],
            pads_high: vec![1; 2],
        },
        groups: 1,
        layout: Layout::ChannelsLast,
    };
    let y = b.add1(op, &[x, w]).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

#[test]
fn minimal_filtering_is_priced_where_code_generation_chooses_it() {
    let price = |stride: usize, direct_convolutions: bool, device: &DeviceProfile| {
        let costs = CostModel {
            direct_convolutions,
            ..CostModel::default()
        };
        let g = convolution(stride);
        costs.graph_ns(&g, device).0 as f64
    };
    let share = |stride: usize, device: &DeviceProfile| {
        price(stride, false, device) / price(stride, true, device)
    };
    // Measured: 0.32 of direct sums on Zen 5.
    let filtered = share(1, &device());
    assert!((0.25..0.45).contains(&filtered), "{filtered}");
    assert_eq!(share(2, &device()), 1.0);
    assert_eq!(share(1, &DeviceProfile::emulator(1)), 1.0);
}

#[test]
fn samples_keep_count_sum_least_and_the_latest() {
    let g = map_of("g", ScalarOp::Exp, 16);
    let mut measured = Measured::default();
    record(&mut measured, &g, &device(), &(1..=20).collect::<Vec<_>>());
    let (_, s) = measured.samples().next().unwrap();
    assert_eq!(
        (s.count, s.sum, s.min, s.class.as_str()),
        (20, Nanos(210), Nanos(1), "map map f32")
    );
    assert_eq!(s.recent, (5..=20).map(Nanos).collect::<Vec<_>>());
}

#[test]
fn times_survive_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = store::times_path(&dir.path().join("new"));
    assert_eq!(store::load_times(&path, "m"), (Measured::default(), None));
    let mut measured = Measured::default();
    record(
        &mut measured,
        &map_of("g", ScalarOp::Exp, 16),
        &device(),
        &[7, 9],
    );
    record(
        &mut measured,
        &map_of("g", ScalarOp::Neg, 16),
        &device(),
        &[5],
    );
    store::save_times(&path, "m", &measured).unwrap();
    assert_eq!(store::load_times(&path, "m"), (measured, None));
    let kept: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
    assert_eq!(kept.len(), 1, "no unfinished file stays");
}

#[test]
fn files_of_times_that_do_not_fit_are_named_and_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let path = store::times_path(dir.path());
    let mut measured = Measured::default();
    record(
        &mut measured,
        &map_of("g", ScalarOp::Exp, 16),
        &device(),
        &[7, 9],
    );
    store::save_times(&path, "m", &measured).unwrap();
    let good = std::fs::read_to_string(&path).unwrap();
    let warning = |text: &str, machine: &str| {
        std::fs::write(&path, text).unwrap();
        let (measured, warning) = store::load_times(&path, machine);
        assert!(measured.is_empty());
        let warning = warning.expect("a warning");
        warning
            .strip_prefix(&path.display().to_string())
            .expect("the file is named first")
            .to_owned()
    };
    let hash = good
        .split("\"cluster\":\"")
        .nth(1)
        .and_then(|rest| rest.get(..16))
        .expect("a row")
        .to_owned();
    let warnings = [
        warning(&good, "another"),
        warning(&good[..good.len() / 2], "m"),
        warning(&good.replace("codegen 2", "codegen 0"), "m")
            .replace(env!("CARGO_PKG_VERSION"), "VERSION"),
        warning(&good.replace("\"count\":2", "\"count\":0"), "m").replace(&hash, "HASH"),
        warning(&good.replace("\"count\"", "\"number\""), "m"),
    ];
    insta::assert_snapshot!(warnings.join("\n"), @r#"
    : it is of another machine, "m"; the file is ignored (delete it, or measure again)
    : not JSON: EOF while parsing a value at line 1 column 112; the file is ignored (delete it, or measure again)
    : format "gristmill/times/2 of VERSION codegen 0", expected "gristmill/times/2 of VERSION codegen 2"; the file is ignored (delete it, or measure again)
    : the times of cluster HASH contradict each other; the file is ignored (delete it, or measure again)
    : unknown field `number`, expected one of `profile`, `cluster`, `class`, `analytic_ns`, `count`, `sum_ns`, `min_ns`, `recent_ns`; the file is ignored (delete it, or measure again)
    "#);
}

/// A convolution of 128 images with as many output pixels as input pixels, channels last.
fn conv_of(side: usize, channels: usize, size: usize, filters: usize) -> (Op, [Type; 3]) {
    let pad = size / 2;
    let window = crate::ir::Window {
        strides: vec![1; 2],
        dilations: vec![1; 2],
        pads_low: vec![pad; 2],
        pads_high: vec![pad; 2],
    };
    let op = Op::Conv {
        window,
        groups: 1,
        layout: crate::ir::Layout::ChannelsLast,
    };
    let image = |channels| f32s(&[128, side, side, channels]);
    let weights = f32s(&[size, size, channels, filters]);
    (op, [image(channels), weights, image(filters)])
}

/// Times per operation on one thread of a Xeon (AVX-512), as multiples of those of 5x5 windows over 64 channels: the model finds each
/// within 15 %.
#[test]
fn convolutions_of_few_channels_take_the_time_of_whole_vectors() {
    let direct = CostModel {
        direct_convolutions: true,
        ..CostModel::default()
    };
    // The cache is as large as any operand, so that only arithmetic counts.
    let device = DeviceProfile {
        cache_bytes: Bytes(1 << 30),
        ..device()
    };
    let per_flop = |side, channels, size, filters| {
        let (op, [x, w, y]) = conv_of(side, channels, size, filters);
        let (seconds, _) = direct.of_op(&op, &[&x, &w], &[y], &device);
        seconds / (128 * side * side * size * size * channels * filters) as f64
    };
    let large = per_flop(12, 64, 5, 64);
    for (side, channels, size, filters, measured) in [
        (28, 1, 5, 6, 11.12),
        (28, 1, 5, 16, 3.52),
        (28, 1, 3, 8, 17.49),
        (14, 16, 5, 6, 4.47),
        (14, 16, 5, 16, 1.57),
        (14, 16, 5, 32, 1.18),
        (24, 3, 5, 64, 1.31),
    ] {
        let ratio = per_flop(side, channels, size, filters) / large;
        let error = ratio / measured - 1.0;
        assert!(
            error.abs() < 0.15,
            "{side} {channels} {size} {filters}: {ratio}"
        );
    }
}

#[test]
fn only_right_hand_sides_that_are_not_constant_are_packed() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [8usize, 256]);
    let w = b.input("w", DType::F32, [256usize, 40]);
    let c = b.constant(Tensor::zeros(DType::F32, &[256, 40]).unwrap());
    for (name, w) in [("by_input", w), ("by_constant", c)] {
        let y = b.matmul(x, w).unwrap();
        b.output(name, y);
    }
    let g = b.finish().unwrap();
    let (clustered, _) =
        cluster::cluster(&g, &cluster::Fusion::greedy(Default::default())).unwrap();
    let packed = |node| tiles::packed_bytes(&clustered, node, &Extents::default(), &device());
    let bytes: Vec<u64> = clustered
        .nodes()
        .filter(|(_, n)| matches!(n.op, Op::Cluster { .. }))
        .map(|(_, n)| packed(n))
        .collect();
    // Read once, and written with 64 columns: two panels of two vectors.
    assert_eq!(bytes, [256 * (40 + 64) * 4, 0]);
}
