//! Functions of bytes become tables of their 256 results.
//!
//! In quantised models activations are often a long chain of element-wise ops between a dequantisation
//! and a quantisation: what `gelu` is made of, with bytes in between. The result depends on one byte,
//! and can be looked up, as exactly as the interpreter has it. The table is the same chain of ops applied to all bytes; folding
//! computes it where scales are constants, and otherwise it takes 256 elements at run time.

use super::Rebuild;
use super::rebuild::each_node;
use crate::error::Result;
use crate::ir::{Graph, Node, Op, ScalarOp, ValueId};
use gristmill_kernels::table::ENTRIES;
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeMap;

/// Operations per element from which a lookup, with its pass over the bytes, is faster.
const WORTH: u32 = 16;

/// Elements from which a table is worth its own computation.
const LEAST_ELEMENTS: i64 = 4 * ENTRIES as i64;

/// Nodes of a chain, at most.
const MAX_NODES: usize = 64;

/// Looks up results of 8-bit integers where they are functions of one tensor of 8-bit integers, for CPUs.
/// Regions are gone through too.
pub fn byte_tables(g: &Graph) -> Result<Graph> {
    let sources = sources(g);
    each_node(
        g,
        &byte_tables,
        &mut |r, g, id, node| match Chain::of(g, &sources, node) {
            Some(chain) => {
                let y = chain.emit(g, r, node)?;
                r.set(node.outputs[0], y);
                Ok(())
            }
            None => r.copy(id, node),
        },
    )
}

/// The tensors behind an element of a value, at its own position.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    /// One element is for all.
    Single,
    /// Of bytes.
    One(ValueId),
    Others,
}

/// By value.
fn sources(g: &Graph) -> Vec<Source> {
    let mut sources = vec![Source::Others; g.n_values()];
    let leaf = |v: ValueId| match is_bytes(g, v) {
        true => Source::One(v),
        false => Source::Others,
    };
    for &v in &g.inputs {
        sources[v.0 as usize] = of_input(g, v).unwrap_or(leaf(v));
    }
    for (_, node) in g.nodes() {
        for &v in &node.outputs {
            let joined = match node.op {
                Op::Map(_) => joined(g, &sources, node),
                _ => Source::Others,
            };
            sources[v.0 as usize] = match (of_input(g, v), joined) {
                (Some(single), _) => single,
                (None, Source::Others) => leaf(v),
                (None, joined) => joined,
            };
        }
    }
    sources
}

fn is_bytes(g: &Graph, v: ValueId) -> bool {
    matches!(g.ty(v).dtype, DType::U8 | DType::I8)
}

fn of_input(g: &Graph, v: ValueId) -> Option<Source> {
    g.ty(v).shape.n_elements().is(1).then_some(Source::Single)
}

/// The source of an element-wise result, whose shape is that of its source.
fn joined(g: &Graph, sources: &[Source], node: &Node) -> Source {
    // A divisor of 0 is an error, and must not be met for bytes that do not occur.
    let may_fail = |op: ScalarOp| matches!(op, ScalarOp::Div | ScalarOp::Rem | ScalarOp::Mod);
    let is_integer = g.ty(node.outputs[0]).dtype.is_int();
    if is_integer && matches!(node.op, Op::Map(op) if may_fail(op)) {
        return Source::Others;
    }
    let shape = &g.ty(node.outputs[0]).shape;
    let mut all = Source::Single;
    for &v in &node.inputs {
        all = match (all, sources[v.0 as usize]) {
            (all, Source::Single) => all,
            (Source::Single, other) => other,
            (all, other) if all == other => all,
            _ => return Source::Others,
        };
    }
    match all {
        Source::One(leaf) if g.ty(leaf).shape != *shape => Source::Others,
        all => all,
    }
}

/// Element-wise ops from a tensor of bytes to another one.
struct Chain<'g> {
    leaf: ValueId,
    /// In order; the last one makes the result.
    nodes: Vec<&'g Node>,
}

impl<'g> Chain<'g> {
    /// The chain whose last op is `last`, if a lookup is faster.
    fn of(g: &'g Graph, sources: &[Source], last: &'g Node) -> Option<Chain<'g>> {
        let y = *last.outputs.first()?;
        let Source::One(leaf) = sources[y.0 as usize] else {
            return None;
        };
        let is_result = matches!(last.op, Op::Map(ScalarOp::Cast(DType::U8 | DType::I8)));
        let n = g.ty(leaf).shape.n_elements().as_const();
        if !is_result || leaf == y || n.is_some_and(|n| n < LEAST_ELEMENTS) {
            return None;
        }
        let mut by_value = BTreeMap::new();
        collect(g, (leaf, sources), last, &mut by_value);
        let flops = |n: &&Node| match n.op {
            Op::Map(op) => op.spec().flops,
            _ => 0,
        };
        let work: u32 = by_value.values().map(flops).sum();
        let nodes: Vec<&Node> = by_value.into_values().collect();
        (work >= WORTH && nodes.len() <= MAX_NODES).then_some(Chain { leaf, nodes })
    }

    /// The lookup, in the new graph.
    fn emit(self, g: &Graph, r: &mut Rebuild, last: &Node) -> Result<ValueId> {
        let origin = &last.origin;
        let bits: Vec<u8> = (0..=u8::MAX).collect();
        let all = Tensor::from_bytes(g.ty(self.leaf).dtype, &[ENTRIES], &bits)?;
        let mut made = BTreeMap::from([(self.leaf, r.graph.add_constant(all, origin))]);
        for node in self.nodes {
            let mut operands = Vec::with_capacity(node.inputs.len());
            for &v in &node.inputs {
                operands.push(match made.get(&v) {
                    Some(&there) => there,
                    None => single(r, last, v)?,
                });
            }
            let y = r.add_like(last, node.op.clone(), &operands, origin)?;
            made.insert(node.outputs[0], y);
        }
        let table = made[&last.outputs[0]];
        let at = r.get(self.leaf);
        let widen = Op::Map(ScalarOp::Cast(DType::I32));
        let at = r.add_like(last, widen, &[at], origin)?;
        r.add_like(last, Op::Gather { axis: 0 }, &[table, at], origin)
    }
}

/// The nodes between a leaf and `node`, by their results, which are in order.
fn collect<'g>(
    g: &'g Graph,
    (leaf, sources): (ValueId, &[Source]),
    node: &'g Node,
    nodes: &mut BTreeMap<ValueId, &'g Node>,
) {
    if nodes.len() > MAX_NODES || nodes.insert(node.outputs[0], node).is_some() {
        return;
    }
    let inner = |v: &ValueId| *v != leaf && sources[v.0 as usize] != Source::Single;
    for v in node.inputs.iter().filter(|v| inner(v)) {
        if let Some(producer) = g.def_node(*v) {
            collect(g, (leaf, sources), producer, nodes);
        }
    }
}

/// The only element of an old value, of rank 0.
fn single(r: &mut Rebuild, last: &Node, v: ValueId) -> Result<ValueId> {
    let v = r.get(v);
    match r.graph.ty(v).rank() {
        0 => Ok(v),
        _ => r.add_like(last, Op::Reshape { shape: vec![] }, &[v], &last.origin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp;
    use crate::ir::GraphBuilder;
    use crate::passes::clean;
    use crate::rng::Rng;

    fn dequantized(b: &mut GraphBuilder, q: ValueId, zero: f64, scale: ValueId) -> ValueId {
        let x = b.cast(q, DType::I32).unwrap();
        let zero = b.scalar(DType::I32, zero);
        let x = b.sub(x, zero).unwrap();
        let x = b.cast(x, DType::F32).unwrap();
        b.mul(x, scale).unwrap()
    }

    fn quantized(b: &mut GraphBuilder, x: ValueId, zero: f64, to: DType) -> ValueId {
        let scale = b.scalar(DType::F32, 0.037);
        let x = b.map(ScalarOp::Div, &[x, scale]).unwrap();
        let x = b.map(ScalarOp::Round, &[x]).unwrap();
        let zero = b.scalar(DType::F32, zero);
        let x = b.add_(x, zero).unwrap();
        b.cast(x, to).unwrap()
    }

    /// The ops of `gelu`, with bytes in between.
    fn activation(b: &mut GraphBuilder, q: ValueId, scale: ValueId, to: DType) -> ValueId {
        let x = dequantized(b, q, 3.0, scale);
        let e = b.map(ScalarOp::Erf, &[x]).unwrap();
        let between = quantized(b, e, 7.0, DType::U8);
        let step = b.scalar(DType::F32, 0.037);
        let e = dequantized(b, between, 7.0, step);
        let y = b.mul(x, e).unwrap();
        quantized(b, y, -2.0, to)
    }

    fn random_bytes(dtype: DType, n: usize) -> Tensor {
        let rng = &mut Rng(5);
        let bytes: Vec<u8> = (0..n).map(|_| rng.bits() as u8).collect();
        Tensor::from_bytes(dtype, &[n / 8, 8], &bytes).unwrap()
    }

    fn kernels(g: &Graph) -> Vec<String> {
        let setup = crate::testing::Setup::default();
        let lowered = crate::pipeline::lower(g.clone(), setup.config()).unwrap();
        let kernels = lowered.program.partitions[0].kernels.iter();
        kernels.map(|k| k.name().to_owned()).collect()
    }

    #[test]
    fn activations_of_bytes_are_looked_up() {
        for (from, to) in [
            (DType::U8, DType::U8),
            (DType::I8, DType::U8),
            (DType::U8, DType::I8),
            (DType::I8, DType::I8),
        ] {
            let mut b = GraphBuilder::new("g");
            let q = b.input("q", from, [200usize, 8]);
            let scale = b.scalar(DType::F32, 0.021);
            let y = activation(&mut b, q, scale, to);
            b.output("y", y);
            let g = b.finish().unwrap();
            let inputs = [random_bytes(from, 1600)];
            let after = clean(&byte_tables(&g).unwrap()).unwrap();
            let ops: Vec<&str> = after.nodes().map(|(_, n)| n.op.name()).collect();
            assert_eq!(ops, ["cast", "constant", "gather"], "{after}");
            let want = interp::run(&g, &inputs).unwrap();
            assert_eq!(interp::run(&after, &inputs).unwrap(), want);
            let kernels = kernels(&g);
            assert!(
                matches!(&kernels[..], [one] if one.ends_with("gm_table_bytes")),
                "{kernels:?}"
            );
            let compiled = crate::compile(&g, &crate::Options::default()).unwrap();
            let found = compiled.run([("q", inputs[0].clone())]).unwrap();
            assert_eq!(found["y"], want[0], "{from} to {to}");
        }
    }

    /// With a scale of run time the table is computed there.
    #[test]
    fn tables_of_run_time_scales_have_256_elements() {
        let mut b = GraphBuilder::new("g");
        let q = b.input("q", DType::U8, [200usize, 8]);
        let scale = b.input("scale", DType::F32, [1usize]);
        let y = activation(&mut b, q, scale, DType::U8);
        b.output("y", y);
        let g = b.finish().unwrap();
        let scale = Tensor::from_slice(&[0.013f32], &[1]).unwrap();
        let inputs = [random_bytes(DType::U8, 1600), scale];
        let after = clean(&byte_tables(&g).unwrap()).unwrap();
        for (_, node) in after.nodes().filter(|(_, n)| n.op.name() == "erf") {
            assert!(after.ty(node.outputs[0]).shape.n_elements().is(256));
        }
        let want = interp::run(&g, &inputs).unwrap();
        assert_eq!(interp::run(&after, &inputs).unwrap(), want);
    }

    #[test]
    fn a_division_of_integers_meets_only_bytes_that_occur() {
        let mut b = GraphBuilder::new("g");
        let q = b.input("q", DType::U8, [200usize, 8]);
        let x = b.cast(q, DType::I32).unwrap();
        let number = b.scalar(DType::I32, 1000.0);
        let x = b.map(ScalarOp::Mod, &[number, x]).unwrap();
        let x = b.map(ScalarOp::Mod, &[number, x]).unwrap();
        let y = b.cast(x, DType::U8).unwrap();
        b.output("y", y);
        let after = byte_tables(&b.finish().unwrap()).unwrap();
        assert!(
            after.nodes().all(|(_, n)| n.op.name() != "gather"),
            "{after}"
        );
    }

    #[test]
    fn short_chains_and_functions_of_two_tensors_stay() {
        let mut b = GraphBuilder::new("g");
        let q = b.input("q", DType::U8, [200usize, 8]);
        let p = b.input("p", DType::U8, [200usize, 8]);
        let scale = b.scalar(DType::F32, 0.021);
        let (x, y) = (
            dequantized(&mut b, q, 3.0, scale),
            dequantized(&mut b, p, 3.0, scale),
        );
        let relu = b.map(ScalarOp::Relu, &[x]).unwrap();
        let short = quantized(&mut b, relu, 1.0, DType::U8);
        let e = b.map(ScalarOp::Erf, &[x]).unwrap();
        let sum = b.add_(e, y).unwrap();
        let of_two = quantized(&mut b, sum, 1.0, DType::U8);
        b.output("short", short);
        b.output("of_two", of_two);
        let g = b.finish().unwrap();
        let after = byte_tables(&g).unwrap();
        assert!(
            after.nodes().all(|(_, n)| n.op.name() != "gather"),
            "{after}"
        );
    }
}
