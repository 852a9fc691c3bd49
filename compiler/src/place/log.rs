//! The placement log: one line per op of the model, as TensorFlow's `log_device_placement` prints
//! it.

use super::Placement;
use crate::ir::{Graph, Node, NodeId, Op};
use crate::units::printable;

impl Placement {
    /// `name: (op): /job:localhost/replica:0/task:0/device:CPU:0` for every op of the placed graph
    /// in order, those inside clusters and other regions too; then the requests that were quietly
    /// released. Constants, which have no device of their own, are not listed.
    pub fn device_log(&self, g: &Graph) -> String {
        let mut out = String::new();
        for (id, node) in g.nodes() {
            if let Some(device) = self.device_of(id) {
                log_node(&mut out, id, node, &self.devices[device].full());
            }
        }
        for copy in &self.copies {
            log_node(
                &mut out,
                copy.node,
                g.node(copy.node),
                &self.devices[copy.placed.device].full(),
            );
        }
        for line in &self.log {
            out.push_str(line);
            out.push('\n');
        }
        out
    }
}

/// A cluster stands for the ops of its body; other nodes are listed before those of their regions.
fn log_node(out: &mut String, id: NodeId, node: &Node, device: &str) {
    let op = node.op.name();
    if matches!(node.op, Op::Constant { .. }) {
        return;
    }
    if !matches!(node.op, Op::Cluster { .. }) {
        let name = match node.origin.as_str() {
            "" => format!("{op}#{}", id.0),
            path => printable(path).into_owned(),
        };
        out.push_str(&format!("{name}: ({op}): {device}\n"));
    }
    for (id, inner) in node.regions.iter().flat_map(|r| r.nodes()) {
        log_node(out, id, inner, device);
    }
}
