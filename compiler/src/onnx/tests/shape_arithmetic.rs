//! Random arithmetic on shapes: a model over symbols at several sizes beside its import for these
//! sizes alone, where all of it is arithmetic on numbers.

use super::{i64s, info, int, model, node};
use crate::compiled::compile;
use crate::interp;
use crate::ir::Graph;
use crate::onnx::{Model, Specialisation, proto::*};
use crate::options::Options;
use crate::rng::Rng;
use gristmill_runtime::Tensor;

/// A random model of `x: f32[N, M]` and `z: f32[P, 4]`. Scalars are `i64[1]`.
struct Generator {
    rng: Rng,
    nodes: Vec<NodeProto>,
    constants: Vec<TensorProto>,
    outputs: Vec<ValueInfoProto>,
    scalars: Vec<String>,
    n: usize,
}

impl Generator {
    fn name(&mut self) -> String {
        self.n += 1;
        format!("v{}", self.n)
    }

    fn add(&mut self, op: &str, inputs: &[&str]) -> String {
        self.add_with(op, inputs, vec![])
    }

    fn add_with(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let output = self.name();
        let mut made = node(op, inputs, &[&output]);
        made.attribute = attributes;
        self.nodes.push(made);
        output
    }

    fn ints(&mut self, values: &[i64]) -> String {
        let name = self.name();
        let dims = [values.len() as i64];
        self.constants.push(i64s(&name, &dims, values));
        name
    }

    fn scalar(&mut self) -> String {
        match self.rng.one_in(4) {
            true => {
                let value = self.rng.pick(&[-100, -6, -3, -1, 0, 1, 2, 5, 100]);
                self.ints(&[value])
            }
            false => self.rng.pick(&self.scalars),
        }
    }

    /// A scalar from `low` to `high`.
    fn bounded(&mut self, low: i64, high: i64) -> String {
        let (s, low, high) = (self.scalar(), self.ints(&[low]), self.ints(&[high]));
        let s = self.add("Max", &[&s, &low]);
        self.add("Min", &[&s, &high])
    }

    fn arithmetic(&mut self) -> String {
        let (a, b) = (self.scalar(), self.scalar());
        let divisor = self.rng.pick(&[1, 2, 3, 5]);
        let divisor = self.ints(&[divisor]);
        match self.rng.below(8) {
            0 | 1 => self.add("Add", &[&a, &b]),
            2 => self.add("Sub", &[&a, &b]),
            3 => self.add("Mul", &[&a, &b]),
            4 => self.add("Div", &[&a, &divisor]),
            5 => self.add("Mod", &[&a, &divisor]),
            6 => self.add("Max", &[&a, &b]),
            _ => {
                let order = self.rng.pick(&["Less", "Greater", "Equal"]);
                let condition = self.add(order, &[&a, &b]);
                let other = self.scalar();
                self.add("Where", &[&condition, &a, &other])
            }
        }
    }

    fn joined(&mut self, parts: &[String]) -> String {
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        self.add_with("Concat", &parts, vec![int("axis", 0)])
    }

    fn consumer(&mut self, x: &str) -> String {
        match self.rng.below(7) {
            0..=2 => {
                let (start, end) = (self.scalar(), self.scalar());
                let axis = self.rng.below(2) as i64;
                let step = self.rng.pick(&[1, 1, 2, 3, -1, -2]);
                let (axis, step) = (self.ints(&[axis]), self.ints(&[step]));
                self.add("Slice", &[x, &start, &end, &axis, &step])
            }
            3 => {
                let repeats = [self.bounded(0, 3), self.bounded(1, 2)];
                let repeats = self.joined(&repeats);
                self.add("Tile", &[x, &repeats])
            }
            4 => {
                let pads: Vec<String> = (0..4).map(|_| self.bounded(0, 3)).collect();
                let pads = self.joined(&pads);
                self.add("Pad", &[x, &pads])
            }
            5 => {
                let shape = [self.bounded(0, 5), self.bounded(0, 4)];
                let shape = self.joined(&shape);
                self.add("ConstantOfShape", &[&shape])
            }
            _ => {
                let (axis, output) = (self.rng.below(2) as i64, self.name());
                let first = self.name();
                let mut split = node("Split", &[x], &[&first, &output]);
                split.attribute = vec![int("axis", axis), int("num_outputs", 2)];
                self.nodes.push(split);
                output
            }
        }
    }

    fn output(&mut self, name: &str, elem_type: i32) {
        if !self.outputs.iter().any(|o| o.name == name) {
            self.outputs.push(info(name, elem_type, &[]));
        }
    }

    fn model(seed: u64) -> Model {
        let mut g = Generator {
            rng: Rng(seed),
            nodes: vec![],
            constants: vec![],
            outputs: vec![],
            scalars: vec![],
            n: 0,
        };
        for input in ["x", "z"] {
            for axis in 0..2 {
                let ends = vec![int("start", axis), int("end", axis + 1)];
                let extent = g.add_with("Shape", &[input], ends);
                g.scalars.push(extent);
            }
        }
        if seed % 2 == 1 {
            let found = g.add("NonZero", &["x"]);
            let count = g.add_with("Shape", &[&found], vec![int("start", 1)]);
            g.scalars.push(count);
            g.output(&found, 7);
        }
        for _ in 0..1 + g.rng.below(5) {
            let scalar = g.arithmetic();
            g.scalars.push(scalar);
        }
        for _ in 0..1 + g.rng.below(3) {
            let x = g.rng.pick(&["x", "x", "z"]);
            let y = g.consumer(x);
            let shape = g.add("Shape", &[&y]);
            g.output(&shape, 7);
            if g.rng.one_in(2) {
                g.output(&y, 1);
            }
        }
        model(GraphProto {
            name: format!("seed {seed}"),
            node: g.nodes,
            initializer: g.constants,
            input: vec![info("x", 1, &["N", "M"]), info("z", 1, &["P", "4"])],
            output: g.outputs,
            ..Default::default()
        })
    }
}

fn matrix(rng: &mut Rng, shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|_| rng.below(4) as f32 - 1.0).collect();
    Tensor::from_slice(&values, shape).unwrap()
}

#[test]
fn random_shape_arithmetic_is_that_of_numbers() {
    let (mut n_runs, mut n_errors) = (0, 0);
    for seed in 0..300 {
        let model = Generator::model(seed);
        let options = Options {
            opt_level: [2, 0, 1][seed as usize % 3],
            ..Options::default()
        };
        let compiled = compile(&model, &options).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let mut rng = Rng(seed);
        for _ in 0..3 {
            let [n, m, p] = [(); 3].map(|()| rng.pick(&[0, 1, 2, 3, 4, 5, 8, 13]));
            let inputs = [matrix(&mut rng, &[n, m]), matrix(&mut rng, &[p, 4])];
            let shapes = ["x", "z"].into_iter().zip(&inputs);
            let alone = Specialisation {
                shapes: shapes
                    .map(|(n, t)| (n.to_owned(), t.shape().to_vec()))
                    .collect(),
                ..Specialisation::default()
            };
            let expected = model.graph(&alone).and_then(|g| interp::run(&g, &inputs));
            let found = compiled.run_ordered(&inputs);
            let what = format!("seed {seed}, x[{n}, {m}], z[{p}, 4]");
            let (Ok(expected), Ok(found)) = (&expected, &found) else {
                assert_eq!(
                    expected.is_ok(),
                    found.is_ok(),
                    "{what}: {expected:?} {found:?}"
                );
                n_errors += 1;
                continue;
            };
            for (e, (name, f)) in expected.iter().zip(found.iter()) {
                let same = e.shape() == f.shape() && e.as_bytes() == f.as_bytes();
                assert!(same, "{what}: {name} is {f}, expected {e}");
            }
            n_runs += 1;
        }
    }
    assert!(n_runs > 850, "{n_runs} runs, {n_errors} errors");
}

#[test]
fn random_graphs_over_symbols_are_read_from_their_text() {
    let mut n_graphs = 0;
    for seed in 0..1000 {
        let graph = Generator::model(seed).graph(&Specialisation::default());
        let Ok(graph) = graph else { continue };
        let text = graph.to_string();
        let parsed = Graph::parse(&text).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
        assert_eq!(parsed.to_string(), text, "seed {seed}");
        n_graphs += 1;
    }
    assert!(n_graphs > 950, "{n_graphs} graphs");
}
