//! Fused attention through its precompiled kernel.

use super::rejected::Rejected;
use super::strided::{Axis, Strided, collapse};
use super::task::{Call, Context, Ptr, Task, pointers, read, result};
use crate::ir::{Node, NodeId, Op, ValueId};
use gristmill_kernels::attention::AttentionDesc;
use gristmill_kernels::calls;

/// Estimated times in ns: of an element of keys and values, which is read or packed, and of a multiply-add with it.
const KEY_NS: f64 = 0.12;
const MULTIPLY_ADD_NS: f64 = 0.015;

// Tensors of the loops around the kernel; a mask follows.
const QUERIES: usize = 0;
const KEYS: usize = 1;
const VALUES: usize = 2;
const RESULT: usize = 3;
const MASK: usize = 4;

/// The operands, `[.., rows, depth]` each, and the result.
struct Operands {
    q: Strided,
    k: Strided,
    v: Strided,
    /// Broadcast to `[.., queries, keys]`.
    mask: Option<Strided>,
    out: Strided,
}

/// The task of an attention.
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let Op::Attention { scale, causal } = node.op else {
        return Err(Rejected::Empty);
    };
    let o = Operands::find(cx, node)?;
    let lead = o.batch_and_heads()?;
    let mut desc = o.descriptor(cx, &lead);
    desc.causal = u32::from(causal);
    desc.scale = scale.0 as f32;
    desc.plan(1);
    let mask = o.mask.as_ref().map_or(Ptr::Null, read);
    let operands = vec![read(&o.v), mask];
    let ptrs = pointers(read(&o.q), read(&o.k), result(node), true, operands);
    let keys = desc.batch * desc.heads * desc.n_keys * (desc.depth + desc.value_depth);
    let ns = keys as f64 * (KEY_NS + MULTIPLY_ADD_NS * desc.n_queries as f64);
    let call = Call {
        workspace_bytes: desc.workspace_bytes(),
        ..Call::new(calls::gm_attention_f32(&desc), ptrs, desc.n_items(), ns)
    };
    Task::single(cx, id, node, call)
}

impl Operands {
    fn find(cx: &Context, node: &Node) -> Result<Operands, Rejected> {
        let [q, k, v] = [0, 1, 2].map(|i| cx.view(node.inputs[i], has_unit_depth));
        let out = Strided::own(cx.body, node.outputs[0]);
        let n_keys = rows(&k);
        if n_keys == 0 {
            return Err(Rejected::Empty);
        }
        let mask = match node.inputs.get(3) {
            Some(&mask) => Some(mask_view(cx, mask, &out, n_keys)?),
            None => None,
        };
        Ok(Operands { q, k, v, mask, out })
    }

    /// The loops around the kernel: batch and heads, or less.
    fn batch_and_heads(&self) -> Result<Vec<Axis>, Rejected> {
        let n = self.out.shape.len() - 2;
        let mut strides: Vec<&[i64]> = Vec::new();
        for operand in [&self.q, &self.k, &self.v, &self.out] {
            strides.push(&operand.strides[..n]);
        }
        strides.extend(self.mask.iter().map(|m| &m.strides[..n]));
        let lead = collapse(&self.out.shape[..n], &strides);
        if lead.len() > 2 {
            return Err(Rejected::Loops);
        }
        Ok(lead)
    }

    fn descriptor(&self, cx: &Context, lead: &[Axis]) -> AttentionDesc {
        let (batch, heads) = match lead {
            [batch, heads] => (batch.extent, heads.extent),
            [heads] => (1, heads.extent),
            _ => (1, 1),
        };
        let (n_queries, n_keys) = (rows(&self.q), rows(&self.k));
        let mut desc = AttentionDesc::new(cx.isa, batch, heads, n_queries, n_keys, depth(&self.q));
        desc.value_depth = depth(&self.v);
        desc.q_stride = head_strides(&self.q, lead, QUERIES);
        desc.k_stride = head_strides(&self.k, lead, KEYS);
        desc.v_stride = head_strides(&self.v, lead, VALUES);
        desc.o_stride = head_strides(&self.out, lead, RESULT);
        if let Some(mask) = &self.mask {
            desc.mask_stride = head_strides(mask, lead, MASK);
        }
        desc
    }
}

fn has_unit_depth(v: &Strided) -> bool {
    v.strides.last() == Some(&1) && v.strides.iter().all(|&s| s >= 0)
}

fn rows(x: &Strided) -> usize {
    x.shape[x.shape.len() - 2]
}

fn depth(x: &Strided) -> usize {
    x.shape[x.shape.len() - 1]
}

/// The mask through its views if its keys are contiguous then, else in a buffer of its own.
fn mask_view(
    cx: &Context,
    mask: ValueId,
    out: &Strided,
    n_keys: usize,
) -> Result<Strided, Rejected> {
    let mut scores = out.shape.clone();
    *scores.last_mut().expect("an attention has a depth") = n_keys;
    let fits = |v: &Strided| v.strides.last() == Some(&1) || n_keys == 1;
    let through = Strided::resolve(cx.body, mask, cx.in_memory).broadcast(&scores);
    let own = || Strided::own(cx.body, mask).broadcast(&scores);
    let found = through.filter(fits).or_else(|| own().filter(fits));
    found.ok_or(Rejected::Strides(3))
}

/// Batch, head and row strides of an operand, whose leading axes have been joined to two at most.
fn head_strides(x: &Strided, lead: &[Axis], operand: usize) -> [isize; 3] {
    let row = x.strides[x.strides.len() - 2] as isize;
    match lead {
        [batch, heads] => [
            batch.strides[operand] as isize,
            heads.strides[operand] as isize,
            row,
        ],
        [heads] => [0, heads.strides[operand] as isize, row],
        _ => [0, 0, row],
    }
}
