//! Which ops a device has kernels for.

use crate::ir::Node;
use gristmill_runtime::device::DeviceKind;
use std::collections::BTreeMap;

/// The ops that a device can run: all but those listed, each with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Kernels {
    lacks_all: Option<String>,
    lacking: BTreeMap<String, String>,
}

impl Kernels {
    /// What the back end for a kind of device has.
    pub fn of(kind: DeviceKind) -> Kernels {
        match lacks_kernels(kind) {
            Some(why) => Kernels { lacks_all: Some(why), ..Kernels::default() },
            None => Kernels::default().without("all_reduce", "no code generator for it yet"),
        }
    }

    /// What a device that is only planned for is taken to have: everything.
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
        if let Some(why) = &self.lacks_all {
            return Some(why.clone());
        }
        let op = node.op.name();
        let own = self.lacking.get(op).map(|why| format!("{op}: {why}"));
        own.or_else(|| node.regions.iter().flat_map(|r| r.nodes()).find_map(|(_, n)| self.lacks(n)))
    }

    /// Why nothing can run on the device, if so.
    pub fn lacks_all(&self) -> Option<&str> {
        self.lacks_all.as_deref()
    }
}

/// Why nothing can run on a kind of device, if so.
pub fn lacks_kernels(kind: DeviceKind) -> Option<String> {
    (kind == DeviceKind::Gpu).then(|| "GPUs cannot be run on yet; their kernels run on emu devices".to_owned())
}
