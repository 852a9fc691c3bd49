//! Where the values of a cluster's body are, while a back end generates its kernels one after the other.

use super::body::Body;
use super::plan::{Arg, KernelPlan, PackedConstant};
use crate::error::Result;
use crate::ir::{Op, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A plan being made, and the buffers of the values that its steps so far have put in memory.
pub(super) struct Placed {
    pub(super) location: BTreeMap<ValueId, Arg>,
    pub(super) plan: KernelPlan,
}

impl Placed {
    /// Before the first step: operands, and constants of more than one element, are in memory.
    pub(super) fn new(body: &Body) -> Result<Placed> {
        let mut placed = Placed {
            location: BTreeMap::new(),
            plan: KernelPlan::default(),
        };
        for (i, &v) in body.graph.inputs.iter().enumerate() {
            placed.location.insert(v, Arg::Operand(i as u32));
        }
        for (_, node) in body.graph.nodes() {
            if let Op::Constant { value } = &node.op
                && value.len() != 1
            {
                let arg = placed.pack(value.tensor()?);
                placed.location.insert(node.outputs[0], arg);
            }
        }
        Ok(placed)
    }

    /// A buffer for a constant that the plan keeps.
    pub(super) fn pack(&mut self, constant: impl Into<PackedConstant>) -> Arg {
        self.plan.packed.push(constant.into());
        Arg::Packed(self.plan.packed.len() as u32 - 1)
    }

    /// The buffer that a phase writes `v` to: the first result that it is, or scratch.
    pub(super) fn destination(&mut self, body: &Body, v: ValueId) -> Arg {
        match body.graph.outputs.iter().position(|o| o.value == v) {
            Some(i) => Arg::Result(i as u32),
            None => {
                self.plan
                    .scratch
                    .push(body.n_elements(v) * body.dtype(v).size_bytes());
                Arg::Scratch(self.plan.scratch.len() as u32 - 1)
            }
        }
    }

    /// Notes what a step writes. A value that has a buffer already is read from there.
    pub(super) fn note_written(&mut self, writes: Vec<(ValueId, Arg)>) {
        for (v, arg) in writes {
            self.location.entry(v).or_insert(arg);
        }
    }

    /// Values that pulling `roots` loads, in order; the roots themselves are computed.
    pub(super) fn leaves(&self, body: &Body, roots: &[ValueId]) -> Vec<(ValueId, Arg)> {
        let mut found = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut todo = roots.to_vec();
        while let Some(v) = todo.pop() {
            if !seen.insert(v) {
                continue;
            }
            if let Some(&arg) = self.location.get(&v) {
                found.insert(v, arg);
            } else if let Some(node) = body.graph.def_node(v) {
                todo.extend(&node.inputs);
            }
        }
        found.into_iter().collect()
    }

    /// Results that no step writes: operands handed through, constants, and second names of a value. Those without elements are left out.
    pub(super) fn unwritten(&self, body: &Body) -> Vec<(ValueId, Arg)> {
        let results = body
            .graph
            .outputs
            .iter()
            .enumerate()
            .map(|(i, o)| (o.value, Arg::Result(i as u32)));
        results
            .filter(|(v, arg)| {
                body.n_elements(*v) > 0 && !self.plan.steps.iter().any(|s| s.args.contains(arg))
            })
            .collect()
    }
}
