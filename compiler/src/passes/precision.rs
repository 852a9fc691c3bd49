//! Products in half precision, where that was asked for.

use super::Rebuild;
use crate::error::Result;
use crate::ir::{Graph, Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;
use std::collections::BTreeMap;

/// Rounds the operands of the `f32` products, convolutions and attentions that `is_meant` takes to
/// `to`, which their results have as well; all else stays `f32`, as in mixed precision
/// (Micikevicius and others, arXiv:1710.03740, section 3): sums are `f32`. An operand that several
/// products share is rounded once, one that another such product made is taken as it is. Regions
/// are gone through too.
///
/// Returns the new graph and the number of nodes whose operands differ.
pub fn lower_precision(
    g: &Graph,
    to: DType,
    is_meant: &dyn Fn(&Node) -> bool,
) -> Result<(Graph, usize)> {
    let mut lowering = Lowering {
        to,
        rebuild: Rebuild::new(g),
        rounded: BTreeMap::new(),
        n: 0,
    };
    let ordered = g.ordered();
    for (id, node) in g.nodes() {
        if is_tensor_product(g, node) && !ordered[id.0 as usize] && is_meant(node) {
            lowering.lower(g, node)?;
        } else if node.regions.is_empty() || matches!(node.op, Op::Cluster { .. }) {
            lowering.rebuild.copy(id, node)?;
        } else {
            lowering.lower_regions(id, node, is_meant)?;
        }
    }
    Ok((lowering.rebuild.finish(g), lowering.n))
}

/// True for a node that tensor cores compute.
fn is_tensor_product(g: &Graph, node: &Node) -> bool {
    let is_product = matches!(
        node.op,
        Op::MatMul | Op::Conv { .. } | Op::ConvTranspose { .. } | Op::Attention { .. }
    );
    is_product && g.ty(node.outputs[0]).dtype == DType::F32
}

struct Lowering {
    to: DType,
    rebuild: Rebuild,
    /// Rounded values by the old `f32` ones.
    rounded: BTreeMap<ValueId, ValueId>,
    n: usize,
}

impl Lowering {
    fn lower_regions(
        &mut self,
        id: NodeId,
        node: &Node,
        is_meant: &dyn Fn(&Node) -> bool,
    ) -> Result<()> {
        let mut node = node.clone();
        for region in &mut node.regions {
            let (lowered, n) = lower_precision(region, self.to, is_meant)?;
            *region = lowered;
            self.n += n;
        }
        self.rebuild.copy(id, &node)
    }

    fn lower(&mut self, g: &Graph, node: &Node) -> Result<()> {
        let inputs = node
            .inputs
            .iter()
            .map(|&v| self.round(g, v, node))
            .collect::<Result<Vec<_>>>()?;
        let product = self.rebuild.graph.add_copy(node, &inputs)?[0];
        let wide = self.cast(product, DType::F32, node)?;
        self.rounded.insert(node.outputs[0], product);
        self.rebuild.set(node.outputs[0], wide);
        self.n += 1;
        Ok(())
    }

    /// An operand of `node`, rounded on the device of `node`.
    fn round(&mut self, g: &Graph, v: ValueId, node: &Node) -> Result<ValueId> {
        if g.ty(v).dtype != DType::F32 {
            return Ok(self.rebuild.get(v));
        }
        if let Some(&rounded) = self.rounded.get(&v) {
            return Ok(rounded);
        }
        let rounded = self.cast(self.rebuild.get(v), self.to, node)?;
        self.rounded.insert(v, rounded);
        Ok(rounded)
    }

    /// A cast on the device of `node`.
    fn cast(&mut self, v: ValueId, to: DType, node: &Node) -> Result<ValueId> {
        let cast = Node {
            op: Op::Map(ScalarOp::Cast(to)),
            regions: Vec::new(),
            ..node.clone()
        };
        Ok(self.rebuild.graph.add_copy(&cast, &[v])?[0])
    }
}
