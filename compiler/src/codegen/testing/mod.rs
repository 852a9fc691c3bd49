//! Tests of all back ends: their cases, and the comparison with the interpreter.

mod bodies;
mod cases;

use crate::cluster::{bytes, coverage};
use crate::interp;
use crate::ir::{ClusterKind, Def, Graph, Node, Op, OpClass, Origin, Type};
pub use bodies::{random_maps, random_phases};
pub use cases::*;
use gristmill_runtime::{DType, Tensor};

/// A body, its operands, and the tolerated error of results: relative to the largest finite
/// magnitude and on top of the resolution of the dtype; 0 for none.
pub struct Case {
    pub body: Graph,
    pub inputs: Vec<Tensor>,
    pub tolerance: f64,
}

impl Case {
    /// One op, with its tolerance of the op table.
    pub fn of_table(op: &Op, inputs: Vec<Tensor>) -> Case {
        Case::of_op(op, inputs, op.spec().tolerance)
    }

    /// One op.
    pub fn of_op(op: &Op, inputs: Vec<Tensor>, tolerance: f64) -> Case {
        Case {
            body: graph_of(op, &inputs),
            inputs,
            tolerance,
        }
    }

    /// Panics unless `run`, which is given the body as the only cluster of a graph, agrees with the interpreter.
    pub fn check(&self, run: impl FnOnce(&Graph, &[Tensor]) -> Result<Vec<Tensor>, String>) {
        let Case {
            body,
            inputs,
            tolerance,
        } = self;
        let expected =
            interp::run(body, inputs).unwrap_or_else(|e| panic!("{body}\ninterpreter: {e}"));
        let found = run(&as_cluster(body), inputs).unwrap_or_else(|e| panic!("{body}\n{e}"));
        for (i, (want, have)) in expected.iter().zip(&found).enumerate() {
            if let Err(m) = compare(want, have, *tolerance) {
                panic!(
                    "{body}\noutput {i}: {m}\ninputs {inputs:?}\nexpected {want:?}\nfound {have:?}"
                );
            }
        }
    }
}

/// A small deterministic generator (the constants are Knuth's MMIX).
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Uniform in `lo..hi`.
    pub fn real(&mut self, lo: f64, hi: f64) -> f64 {
        lo + (hi - lo) * (self.next() % 65_536) as f64 / 65_536.0
    }

    /// A tensor whose elements are reals in `lo..hi`, converted.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize], lo: f64, hi: f64) -> Tensor {
        let mut t = Tensor::zeros(dtype, shape).unwrap();
        let size = dtype.size_bytes();
        let lo = if dtype.is_unsigned_int() {
            lo.max(0.0)
        } else {
            lo
        };
        for bytes in t.as_bytes_mut().chunks_exact_mut(size) {
            let bits = crate::ir::vecprog::real_bits(dtype, self.real(lo, hi));
            bytes.copy_from_slice(&bits.to_le_bytes()[..size]);
        }
        if dtype == DType::Bool {
            t.as_bytes_mut()
                .iter_mut()
                .for_each(|b| *b = (self.next() & 1) as u8);
        }
        t
    }
}

/// A graph with one node of `op` on inputs like `operands`.
pub fn graph_of(op: &Op, operands: &[Tensor]) -> Graph {
    let mut g = Graph::new("case");
    let inputs: Vec<_> = (operands.iter().enumerate())
        .map(|(i, t)| {
            g.add_input(
                &format!("x{i}"),
                Type::new(t.dtype(), t.shape().iter().copied()),
            )
        })
        .collect();
    let outputs = g
        .add(op.clone(), &inputs, &Origin::new("/case"))
        .unwrap_or_else(|e| panic!("{op:?}: {e}"));
    for (i, v) in outputs.into_iter().enumerate() {
        g.add_output(&format!("y{i}"), v);
    }
    g
}

/// `body` as the only cluster of a graph.
pub fn as_cluster(body: &Graph) -> Graph {
    let mut g = Graph::new("test");
    let inputs: Vec<_> = (body.inputs.iter().zip(&body.input_names))
        .map(|(&v, name)| g.add_input(name, body.ty(v).clone()))
        .collect();
    let (anchor, root) = anchor_and_root(body);
    let op = Op::Cluster {
        kind: ClusterKind::Map,
        anchor,
        root,
    };
    let outputs = g
        .add_with_regions(op, &inputs, vec![body.clone()], &Origin::new("/cluster"))
        .unwrap();
    for (o, v) in body.outputs.iter().zip(outputs) {
        g.add_output(&o.name, v);
    }
    g
}

/// The first node that has a kernel, or else the last one, and the node of the first result.
fn anchor_and_root(body: &Graph) -> (usize, usize) {
    let last = body.n_nodes().saturating_sub(1);
    let covered = body
        .nodes()
        .find(|(_, n)| is_covered(body, n))
        .map_or(last, |(id, _)| id.0 as usize);
    let root = match body.outputs.first().map(|o| body.value(o.value).def) {
        Some(Def::Node(id, _)) => id.0 as usize,
        _ => last,
    };
    (covered, root)
}

fn is_covered(body: &Graph, node: &Node) -> bool {
    bytes::left_side(body, node).is_some()
        || coverage::kernels_after_transposition(body, node).is_ok()
        || !matches!(
            node.op.class(),
            OpClass::Map | OpClass::View | OpClass::Source
        )
}

/// Puts a NaN, infinities and zeros of both signs at random places.
pub fn plant_specials(t: &mut Tensor, rng: &mut Rng) {
    if t.len() < 8 {
        return;
    }
    let (dtype, n, size) = (t.dtype(), t.len(), t.dtype().size_bytes());
    for v in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1.0] {
        let at = rng.below(n) * size;
        let bits = crate::ir::vecprog::real_bits(dtype, v).to_le_bytes();
        t.as_bytes_mut()[at..at + size].copy_from_slice(&bits[..size]);
    }
}

/// Says where `have` differs from `want`. Without a tolerance, equal numbers are expected.
pub fn compare(want: &Tensor, have: &Tensor, tolerance: f64) -> Result<(), String> {
    assert_eq!((want.dtype(), want.shape()), (have.dtype(), have.shape()));
    if !want.dtype().is_float() {
        return if want == have {
            Ok(())
        } else {
            Err("differs".into())
        };
    }
    let resolution = match want.dtype() {
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        DType::F8E4M3FN | DType::F8E4M3FNUZ => 0.126,
        DType::F8E5M2 | DType::F8E5M2FNUZ => 0.26,
        DType::F32 => 1e-6,
        _ => 1e-13,
    };
    let (want, have) = (want.to_f64s(), have.to_f64s());
    let scale = want
        .iter()
        .filter(|v| v.is_finite())
        .fold(0f64, |m, v| m.max(v.abs()));
    for (i, (&w, &h)) in want.iter().zip(&have).enumerate() {
        let same = w == h || w.is_nan() && h.is_nan();
        let is_near = tolerance > 0.0 && (w - h).abs() < w.abs() * resolution + scale * tolerance;
        if !same && !is_near {
            return Err(format!("element {i}: expected {w:e}, found {h:e}"));
        }
    }
    Ok(())
}
