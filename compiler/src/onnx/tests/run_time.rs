//! Extents that only a run shows: results are those of the same model with the values known at
//! import, interpreted and compiled.

use super::{attribute, graph_attribute, i64s, info, int, model, node};
use crate::compiled::{Compiled, compile};
use crate::interp::{self, compare::allclose};
use crate::onnx::{Model, Specialisation, proto::*};
use crate::options::Options;
use gristmill_runtime::Tensor;

fn graph(nodes: Vec<NodeProto>, inputs: Vec<ValueInfoProto>, outputs: &[&str]) -> GraphProto {
    GraphProto {
        name: "g".to_owned(),
        node: nodes,
        input: inputs,
        output: outputs.iter().map(|o| info(o, 1, &[])).collect(),
        ..Default::default()
    }
}

fn ints(values: &[i64]) -> Tensor {
    Tensor::from_slice(values, &[values.len()]).unwrap()
}

fn bools(values: &[bool]) -> Tensor {
    Tensor::from_slice(values, &[values.len()]).unwrap()
}

/// The first numbers of a sequence without order.
fn floats(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 37) % 19) as f32 - 9.0).collect();
    Tensor::from_slice(&values, shape).unwrap()
}

/// Models, and the inputs that decide extents of each.
struct Checked {
    model: Model,
    compiled: Compiled,
}

impl Checked {
    fn new(g: GraphProto) -> Checked {
        let model = model(g);
        let compiled = compile(&model, &Options::default()).unwrap();
        assert!(!compiled.is_whole(), "the data decides no extent");
        Checked { model, compiled }
    }

    /// Runs with these inputs, of which those that are no floats decide extents.
    fn check(&self, inputs: &[Tensor]) {
        let names = self.compiled.inputs().iter().map(|(name, _)| name.clone());
        let deciding = names.zip(inputs).filter(|(_, t)| !t.dtype().is_float());
        let spec = Specialisation {
            values: deciding.map(|(name, t)| (name, t.clone())).collect(),
            ..Specialisation::default()
        };
        let by_value = self.model.graph(&spec).unwrap();
        let expected = interp::run(&by_value, inputs).unwrap();
        let graph = self.model.graph(&Specialisation::default()).unwrap();
        let interpreted = interp::run(&graph, inputs).unwrap();
        let results = self.compiled.run_ordered(inputs).unwrap();
        for found in [interpreted, results.into_tensors()] {
            for (expected, found) in expected.iter().zip(&found) {
                let close = allclose(expected, found, 1e-5, 1e-5);
                assert!(close.ok, "{close}: {spec:?}");
            }
        }
    }

    fn error(&self, inputs: &[Tensor]) -> String {
        let graph = self.model.graph(&Specialisation::default()).unwrap();
        let interpreted = interp::run(&graph, inputs).unwrap_err().to_string();
        let compiled = self.compiled.run_ordered(inputs).unwrap_err().to_string();
        assert_eq!(interpreted, compiled);
        compiled
    }
}

#[test]
fn reshape_copies_and_fills() {
    let nodes = vec![node("Reshape", &["x", "shape"], &["y"])];
    let inputs = vec![info("x", 1, &["4", "6"]), info("shape", 7, &["2"])];
    let m = Checked::new(graph(nodes, inputs, &["y"]));
    for shape in [[3, 8], [-1, 3], [0, -1], [4, 6], [2, -1], [24, 1], [0, 0]] {
        m.check(&[floats(&[4, 6]), ints(&shape)]);
    }
    let wrong = m.error(&[floats(&[4, 6]), ints(&[-2, 3])]);
    assert!(
        wrong.contains("Reshape_0:y") && wrong.contains("is -2"),
        "{wrong}"
    );
    m.check(&[floats(&[4, 6]), ints(&[12, 2])]);
}

#[test]
fn an_extent_known_in_part_joins_the_others() {
    let mut join = node("Concat", &["n", "rest"], &["shape"]);
    join.attribute = vec![int("axis", 0)];
    let nodes = vec![join, node("Reshape", &["x", "shape"], &["y"])];
    let inputs = vec![info("x", 1, &["4", "6"]), info("n", 7, &["1"])];
    let m = Checked::new(GraphProto {
        initializer: vec![i64s("rest", &[2], &[2, -1])],
        ..graph(nodes, inputs, &["y"])
    });
    for n in [1, 2, 3, 4, 6, 12] {
        m.check(&[floats(&[4, 6]), ints(&[n])]);
    }
}

#[test]
fn slices_are_clamped_as_numpy_does() {
    let mut slice = graph(
        vec![node("Slice", &["x", "from", "to", "axes", "steps"], &["y"])],
        vec![
            info("x", 1, &["7", "5"]),
            info("from", 7, &["2"]),
            info("to", 7, &["2"]),
        ],
        &["y"],
    );
    slice.initializer = vec![i64s("axes", &[2], &[0, 1]), i64s("steps", &[2], &[2, -1])];
    let m = Checked::new(slice);
    let bounds = [-100, -7, -3, -1, 0, 1, 4, 6, 7, 100];
    for (i, from) in bounds.into_iter().enumerate() {
        for to in bounds {
            let other = bounds[(i + 3) % bounds.len()];
            m.check(&[floats(&[7, 5]), ints(&[from, other]), ints(&[to, from])]);
        }
    }
}

#[test]
fn ranges_and_repetitions_have_the_length_that_operands_say() {
    let nodes = vec![
        node("Range", &["from", "to", "step"], &["r"]),
        node("ConstantOfShape", &["shape"], &["c"]),
        node("Tile", &["x", "shape"], &["t"]),
        node("Expand", &["x", "wide"], &["e"]),
        node("TopK", &["x", "k"], &["v", "i"]),
    ];
    let inputs = vec![
        info("x", 1, &["3", "4"]),
        info("from", 7, &[]),
        info("to", 7, &[]),
        info("step", 7, &[]),
        info("shape", 7, &["2"]),
        info("wide", 7, &["3"]),
        info("k", 7, &["1"]),
    ];
    let m = Checked::new(graph(nodes, inputs, &["r", "c", "t", "e", "v", "i"]));
    for (from, to, step, k) in [(0, 5, 1, 0), (3, -8, -2, 1), (5, 5, 3, 3), (9, 2, 1, 4)] {
        let range = [from, to, step].map(Tensor::scalar::<i64>);
        let [from, to, step] = range;
        let (shape, wide) = (ints(&[k, 2]), ints(&[k + 1, 3, 4]));
        m.check(&[floats(&[3, 4]), from, to, step, shape, wide, ints(&[k])]);
    }
    let zero = Tensor::scalar(0i64);
    let (shape, wide) = (ints(&[1 << 30, 1 << 30]), ints(&[1, 3, 4]));
    let range = [zero.clone(), zero, Tensor::scalar(1i64)];
    let [from, to, step] = range;
    let huge = [floats(&[3, 4]), from, to, step, shape, wide, ints(&[1])];
    let results = m.compiled.run_ordered(&huge);
    assert!(results.is_err(), "no machine has 2^62 bytes");
}

fn text(name: &str, value: &'static str) -> AttributeProto {
    AttributeProto {
        s: prost::bytes::Bytes::from_static(value.as_bytes()),
        ..attribute(name, attribute_type::STRING)
    }
}

#[test]
fn images_are_resized_to_lengths_that_operands_say() {
    let coordinates = [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_half_pixel_for_nn",
    ];
    for mode in ["nearest", "linear", "cubic"] {
        for (i, coordinate) in coordinates.into_iter().enumerate() {
            let mut resize = node("Resize", &["x", "", "", "sizes"], &["y"]);
            let rounding = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"][i % 4];
            resize.attribute = vec![
                text("mode", mode),
                text("coordinate_transformation_mode", coordinate),
                text("nearest_mode", rounding),
                int("exclude_outside", (i % 2) as i64),
            ];
            let inputs = vec![
                info("x", 1, &["1", "2", "5", "7"]),
                info("sizes", 7, &["4"]),
            ];
            let m = Checked::new(graph(vec![resize], inputs, &["y"]));
            for sizes in [[1, 2, 10, 7], [1, 2, 3, 3], [1, 2, 1, 50], [1, 2, 25, 70]] {
                m.check(&[floats(&[1, 2, 5, 7]), ints(&sizes)]);
            }
        }
    }
}

#[test]
fn borders_are_as_wide_as_operands_say() {
    for mode in ["constant", "edge", "reflect", "wrap"] {
        let mut pad = node("Pad", &["x", "pads"], &["y"]);
        pad.attribute = vec![text("mode", mode)];
        let inputs = vec![info("x", 1, &["4", "5"]), info("pads", 7, &["4"])];
        let mut g = graph(vec![pad], inputs, &["y"]);
        g.name = mode.to_owned();
        let m = Checked::new(g);
        let grown = [[0, 1, 2, 3], [3, 0, 0, 4], [0, 0, 0, 0], [1, 1, 1, 1]];
        let cut = [[0, -1, 0, 0], [-1, 2, 1, -2], [-2, -2, -2, -3]];
        for pads in grown.into_iter().chain(cut) {
            m.check(&[floats(&[4, 5]), ints(&pads)]);
        }
        let all_and_more = [floats(&[4, 5]), ints(&[0, -3, 0, -3])];
        let error = m.compiled.run_ordered(&all_and_more).unwrap_err();
        assert_eq!(error.node(), Some("Pad_0:y"), "{error}");
    }
}

#[test]
fn selections_take_the_elements_that_hold() {
    let mut unique = node("Unique", &["n"], &["u", "first", "inverse", "count"]);
    unique.attribute = vec![int("sorted", 0)];
    let nodes = vec![
        node("NonZero", &["n"], &["places"]),
        node("Compress", &["x", "m"], &["kept"]),
        unique,
    ];
    let inputs = vec![
        info("x", 1, &["2", "3"]),
        info("n", 7, &["5"]),
        info("m", 9, &["6"]),
    ];
    let outputs = ["places", "kept", "u", "first", "inverse", "count"];
    let m = Checked::new(graph(nodes, inputs, &outputs));
    let all = [
        [true; 6],
        [false; 6],
        [true, false, false, true, false, true],
    ];
    for (mask, n) in all
        .into_iter()
        .zip([[0; 5], [3, 1, 3, 0, 1], [1, 2, 3, 4, 5]])
    {
        m.check(&[floats(&[2, 3]), ints(&n), bools(&mask)]);
    }
}

#[test]
fn extents_that_must_be_equal_are_checked_by_the_run() {
    let nodes = vec![
        node("Compress", &["x", "a"], &["p"]),
        node("Compress", &["x", "b"], &["q"]),
        node("Mul", &["p", "q"], &["y"]),
    ];
    let inputs = vec![
        info("x", 1, &["4"]),
        info("a", 9, &["4"]),
        info("b", 9, &["4"]),
    ];
    let m = Checked::new(graph(nodes, inputs, &["y"]));
    let (a, b) = (
        bools(&[true, false, true, false]),
        bools(&[false, true, true, false]),
    );
    m.check(&[floats(&[4]), a.clone(), b.clone()]);
    let wrong = m.error(&[floats(&[4]), a.clone(), bools(&[true; 4])]);
    assert!(wrong.contains("shape [4] where [2] is needed"), "{wrong}");
    m.check(&[floats(&[4]), b, a]);
}

#[test]
fn targets_and_parts_that_do_not_fit_are_errors_of_the_run() {
    let split = NodeProto {
        attribute: vec![int("axis", 1)],
        ..node("Split", &["x", "parts"], &["left", "right"])
    };
    let nodes = vec![node("Expand", &["x", "wide"], &["e"]), split];
    let inputs = vec![
        info("x", 1, &["3", "4"]),
        info("wide", 7, &["2"]),
        info("parts", 7, &["2"]),
    ];
    let m = Checked::new(graph(nodes, inputs, &["e", "left", "right"]));
    let run = |wide: [i64; 2], parts: [i64; 2]| [floats(&[3, 4]), ints(&wide), ints(&parts)];
    m.check(&run([3, 4], [1, 3]));
    m.check(&run([1, 4], [4, 0]));
    let wrong = m.error(&run([2, 4], [1, 3]));
    assert!(
        wrong.contains("shape [3, 4] where [2, 4] is needed"),
        "{wrong}"
    );
    let wrong = m.error(&run([3, 1], [1, 2]));
    assert!(
        wrong.contains("shape [3, 4] where [3, 3] is needed"),
        "{wrong}"
    );
}

fn one_branch(op_type: &str, inputs: &[&str]) -> GraphProto {
    graph(vec![node(op_type, inputs, &["r"])], vec![], &["r"])
}

#[test]
fn branches_may_give_other_extents() {
    let mut choice = node("If", &["c"], &["y"]);
    choice.attribute = vec![
        graph_attribute("then_branch", one_branch("Compress", &["x", "m"])),
        graph_attribute("else_branch", one_branch("Neg", &["x"])),
    ];
    let nodes = vec![choice, node("Add", &["y", "y"], &["z"])];
    let inputs = vec![
        info("x", 1, &["4"]),
        info("c", 9, &[]),
        info("m", 9, &["4"]),
    ];
    let m = Checked::new(graph(nodes, inputs, &["z"]));
    for c in [true, false] {
        let mask = bools(&[true, true, false, true]);
        m.check(&[floats(&[4]), Tensor::scalar(c), mask]);
    }
}

/// `for i in 0..n { go = s < limit; s = s + x[i..i + 1]; rows.push(s); joined = concat(joined, s) }`.
fn sums() -> GraphProto {
    let mut join = node("Concat", &["joined", "t"], &["longer"]);
    join.attribute = vec![int("axis", 0)];
    let body = GraphProto {
        initializer: vec![i64s("one", &[1], &[1]), i64s("first", &[1], &[0])],
        ..graph(
            vec![
                node("Unsqueeze", &["i", "first"], &["from"]),
                node("Add", &["from", "one"], &["to"]),
                node("Slice", &["x", "from", "to"], &["part"]),
                node("ReduceSum", &["part"], &["added"]),
                node("Add", &["s", "added"], &["t"]),
                join,
                node("Less", &["t", "limit"], &["more"]),
                node("Squeeze", &["more"], &["again"]),
                node("Identity", &["t"], &["row"]),
            ],
            vec![
                info("i", 7, &[]),
                info("go", 9, &[]),
                info("s", 1, &["1"]),
                info("joined", 1, &["n"]),
            ],
            &["again", "t", "longer", "row"],
        )
    };
    let mut turn = node(
        "Loop",
        &["n", "yes", "start", "none"],
        &["s", "joined", "rows"],
    );
    turn.attribute = vec![graph_attribute("body", body)];
    let inputs = vec![
        info("x", 1, &["6"]),
        info("start", 1, &["1"]),
        info("none", 1, &["0"]),
        info("limit", 1, &["1"]),
        info("n", 7, &[]),
        info("yes", 9, &[]),
    ];
    graph(vec![turn], inputs, &["s", "joined", "rows"])
}

#[test]
fn loops_end_when_the_data_says_and_their_values_grow() {
    let m = Checked::new(sums());
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[6]).unwrap();
    let one = |v: f32| Tensor::from_slice(&[v], &[1]).unwrap();
    let none = Tensor::from_slice::<f32>(&[], &[0]).unwrap();
    for (n, limit, expected) in [
        (6, 7.0, vec![1.0, 3.0, 6.0, 10.0]),
        (2, 99.0, vec![1.0, 3.0]),
        (0, 99.0, vec![]),
    ] {
        let (n, yes) = (Tensor::scalar::<i64>(n), Tensor::scalar(true));
        let inputs = [x.clone(), one(0.0), none.clone(), one(limit), n, yes];
        let graph = m.model.graph(&Specialisation::default()).unwrap();
        let interpreted = interp::run(&graph, &inputs).unwrap();
        let results = m.compiled.run_ordered(&inputs).unwrap().into_tensors();
        assert_eq!(results, interpreted);
        assert_eq!(results[1].as_slice::<f32>(), expected);
        assert_eq!(results[2].shape(), [expected.len(), 1]);
    }
}

/// `max(n, 4)` and `n` elements are added: they are taken to be equal, and no size at which they are
/// not goes through.
#[test]
fn extents_that_are_taken_to_be_equal_are_checked_at_every_size() {
    let nodes = vec![
        node("Shape", &["x"], &["n"]),
        node("Max", &["n", "four"], &["m"]),
        node("ConstantOfShape", &["m"], &["zeros"]),
        node("Add", &["x", "zeros"], &["y"]),
    ];
    let mut g = graph(nodes, vec![info("x", 1, &["n"])], &["y"]);
    g.initializer = vec![i64s("four", &[1], &[4])];
    let model = model(g);
    let compiled = compile(&model, &Options::default()).unwrap();
    for (n, fits) in [
        (4, true),
        (7, true),
        (0, false),
        (2, false),
        (1, true),
        (5, true),
    ] {
        let found = compiled.run_ordered(&[floats(&[n])]);
        assert_eq!(found.is_ok(), fits, "{n} elements: {found:?}");
        if let Ok(found) = found {
            assert_eq!(found["y"].shape(), [n.max(4)]);
        }
    }
}
