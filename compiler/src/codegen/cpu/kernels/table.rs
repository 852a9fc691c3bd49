//! Lookups of bytes in a table of 256 bytes.

use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Call, Context, Place, Ptr, Task, pointers, result};
use crate::cluster::bytes;
use crate::ir::{Node, NodeId};
use gristmill_kernels::calls;
use gristmill_kernels::table::TableDesc;

/// Estimated time of an element in ns, without the instructions for whole vectors.
const ELEMENT_NS: f64 = 0.4;

/// The task of a lookup whose indices are bytes.
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let lookup = bytes::lookup(&cx.body.graph, node).ok_or(Rejected::Empty)?;
    let n = cx.body.n_elements(node.outputs[0]);
    let desc = TableDesc::new(cx.isa, n);
    let table = cx.view(node.inputs[0], Strided::is_contiguous);
    let at = cx.view(lookup.bytes, Strided::is_contiguous);
    let address = |view: &Strided| Ptr::Read(Place::Value(view.base), view.offset);
    let ptrs = pointers(address(&at), address(&table), result(node), false, vec![]);
    let ns = n as f64 * ELEMENT_NS;
    let call = Call::new(calls::gm_table_bytes(&desc), ptrs, desc.n_items(), ns);
    let task = Task::single(cx, id, node, call)?;
    Ok(Task {
        nodes: vec![lookup.widening, id],
        ..task
    })
}
