//! Ops that a device has kernels for.

use crate::ir::Node;
use std::collections::BTreeMap;

/// The ops that a device can run: all but those listed, each with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Kernels {
    lacking: BTreeMap<String, String>,
}

impl Kernels {
    /// The kernels of the back ends, the same for every kind of device. A device that is only
    /// planned for is taken to have them all.
    pub fn all() -> Kernels {
        Kernels::default()
    }

    /// The same without the kernels of an op, for a reason.
    pub fn without(mut self, op: &str, why: &str) -> Kernels {
        self.lacking.insert(op.to_owned(), why.to_owned());
        self
    }

    /// Why a node cannot run, its regions included; `None` when it can.
    pub fn lacks(&self, node: &Node) -> Option<String> {
        let op = node.op.name();
        let own = self.lacking.get(op).map(|why| format!("{op}: {why}"));
        own.or_else(|| {
            node.regions
                .iter()
                .flat_map(|r| r.nodes())
                .find_map(|(_, n)| self.lacks(n))
        })
    }
}
