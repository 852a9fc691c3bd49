//! Calls of precompiled task kernels: a descriptor, which is plain data, and the addresses it speaks of.

use super::body::Body;
use super::phases::Cover;
use super::rejected::Rejected;
use super::strided::{Axis, Strided, collapse};
use crate::codegen::packing::Packing;
use crate::codegen::plan::PackedConstant;
use crate::ir::{Graph, Node, NodeId, ValueId};
use crate::options::ConvAlgorithm;
use gristmill_kernels::copy::CopyDesc;
use gristmill_kernels::{Isa, OPERANDS, OUT, RHS, TaskCall, WORKSPACE, calls};
use gristmill_runtime::{DType, Tensor};
use std::fmt;

/// Memory behind an address of a call.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// The buffer of a value.
    Value(ValueId),
    /// A constant made for this call.
    Packed(PackedConstant),
    /// Intermediate memory of the task, by number.
    Temp(usize),
}

/// An entry of the array of addresses.
#[derive(Clone, Debug)]
pub(super) enum Ptr {
    /// Absent.
    Null,
    /// This thread's workspace.
    Workspace,
    /// Read at a byte offset.
    Read(Place, i64),
    /// Written at a byte offset.
    Write(Place, i64),
}

/// One call of a task kernel.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) symbol: &'static str,
    pub(super) descriptor: Tensor,
    pub(super) ptrs: Vec<Ptr>,
    pub(super) workspace_bytes: usize,
    pub(super) items: usize,
    /// Estimated time of all items on one thread.
    pub(super) cost_ns: u64,
}

/// The call as text: kernel, items, addresses and the descriptor's bytes as hexadecimal words of 8.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call {
            symbol,
            items,
            cost_ns,
            workspace_bytes,
            ..
        } = self;
        writeln!(
            f,
            "{symbol} items {items} cost {cost_ns} ns workspace {workspace_bytes} bytes"
        )?;
        for (i, ptr) in self.ptrs.iter().enumerate() {
            writeln!(f, "address {i}: {ptr}")?;
        }
        for line in self.descriptor.as_bytes().chunks(64) {
            let words: Vec<String> = line.chunks(8).map(hexadecimal).collect();
            writeln!(f, "{}", words.join(" "))?;
        }
        Ok(())
    }
}

fn hexadecimal(little_endian: &[u8]) -> String {
    let digits = little_endian.iter().rev().map(|b| format!("{b:02x}"));
    let digits: String = digits.collect();
    let short = digits.trim_start_matches('0');
    if short.is_empty() {
        "0".into()
    } else {
        short.into()
    }
}

impl fmt::Display for Ptr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ptr::Null => f.write_str("none"),
            Ptr::Workspace => f.write_str("workspace"),
            Ptr::Read(place, offset) => write!(f, "read {place} + {offset}"),
            Ptr::Write(place, offset) => write!(f, "write {place} + {offset}"),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Value(v) => write!(f, "value {}", v.0),
            Place::Packed(constant) => write!(f, "constant {}", constant.elements),
            Place::Temp(i) => write!(f, "intermediate {i}"),
        }
    }
}

/// A part of a body that precompiled kernels compute.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) calls: Vec<Call>,
    /// Bytes of each intermediate buffer.
    pub(super) temps: Vec<usize>,
    /// The computed nodes.
    pub(super) nodes: Vec<NodeId>,
    /// The written values. Calls are made where the first is defined.
    pub(super) results: Vec<ValueId>,
    /// An op that fusion put into the kernel and that runs apart, and the reason.
    pub(super) apart: Option<(NodeId, Rejected)>,
}

impl Task {
    /// The task of one node and one call.
    pub(super) fn single(
        cx: &Context,
        id: NodeId,
        node: &Node,
        call: Call,
    ) -> Result<Task, Rejected> {
        let result = node.outputs[0];
        if cx.body.n_elements(result) == 0 || call.items == 0 {
            return Err(Rejected::Empty);
        }
        Ok(Task {
            calls: vec![call],
            temps: vec![],
            nodes: vec![id],
            results: vec![result],
            apart: None,
        })
    }

    /// The computed nodes, for the cut of the body.
    pub(super) fn cover(&self) -> Cover {
        let needs = self
            .calls
            .iter()
            .flat_map(|c| &c.ptrs)
            .filter_map(|p| match p {
                Ptr::Read(Place::Value(v), _) => Some(*v),
                _ => None,
            });
        Cover {
            needs: needs.collect(),
            nodes: self.nodes.clone(),
            results: self.results.clone(),
        }
    }
}

/// A body, its surroundings, and the target: all that matching a node needs.
pub(super) struct Context<'a> {
    pub(super) body: &'a Body,
    pub(super) outer: &'a Graph,
    /// The cluster node in `outer`.
    pub(super) cluster: &'a Node,
    pub(super) users: &'a [Vec<(NodeId, usize)>],
    pub(super) in_memory: &'a dyn Fn(ValueId) -> bool,
    /// Instruction set of kernels and of packed weights.
    pub(super) isa: Isa,
    pub(super) constants: &'a Packing<'a>,
    pub(super) conv: ConvAlgorithm,
}

impl Call {
    /// A call without workspace, of an estimated time on one thread.
    pub(super) fn new(kernel: TaskCall, ptrs: Vec<Ptr>, items: usize, ns: f64) -> Call {
        let bytes = kernel.descriptor;
        let descriptor = Tensor::from_bytes(DType::U8, &[bytes.len()], bytes);
        Call {
            symbol: kernel.symbol,
            descriptor: descriptor.expect("descriptors are small"),
            ptrs,
            workspace_bytes: 0,
            items,
            cost_ns: ns as u64,
        }
    }

    /// A copy of a view into `out`, whose strides are given, from element `at` on; `None` when there are too many loops.
    pub(super) fn copy(
        isa: Isa,
        body: &Body,
        x: &Strided,
        out: ValueId,
        strides: &[i64],
        at: i64,
    ) -> Option<Call> {
        let bytes = body.dtype(x.base).size_bytes();
        let axes = collapse(&x.shape, &[&x.strides, strides]);
        let dims: Vec<_> = axes.iter().map(Axis::copied).collect();
        let desc = CopyDesc::new(isa, bytes as u32, &dims)?;
        let from = Ptr::Read(Place::Value(x.base), x.offset * bytes as i64);
        let to = Ptr::Write(Place::Value(out), at * bytes as i64);
        let ptrs = pointers(from, Ptr::Null, to, false, vec![]);
        let n_elements: usize = x.shape.iter().product();
        let ns = (n_elements * bytes) as f64 * 0.1;
        Some(Call::new(calls::gm_copy(&desc), ptrs, desc.n_items(), ns))
    }
}

impl Context<'_> {
    /// True for the nodes that the cluster's anchor became.
    pub(super) fn is_anchored(&self, id: NodeId) -> bool {
        self.body.anchor.contains(&id)
    }

    /// `v` through its views, where `fits` accepts it, else `v` in a buffer of its own.
    pub(super) fn view(&self, v: ValueId, fits: impl Fn(&Strided) -> bool) -> Strided {
        let view = Strided::resolve(self.body, v, self.in_memory);
        if fits(&view) {
            view
        } else {
            Strided::own(self.body, v)
        }
    }
}

/// A read of an `f32` view.
pub(super) fn read(view: &Strided) -> Ptr {
    Ptr::Read(Place::Value(view.base), view.offset * 4)
}

/// Addresses of a call: left- and right-hand side, output, workspace, epilogue operands.
pub(super) fn pointers(
    lhs: Ptr,
    rhs: Ptr,
    out: Ptr,
    has_workspace: bool,
    operands: Vec<Ptr>,
) -> Vec<Ptr> {
    let mut ptrs = vec![
        lhs,
        rhs,
        out,
        if has_workspace {
            Ptr::Workspace
        } else {
            Ptr::Null
        },
    ];
    debug_assert_eq!((RHS, OUT, WORKSPACE, OPERANDS), (1, 2, 3, ptrs.len()));
    ptrs.extend(operands);
    ptrs
}

/// The address of a node's first result.
pub(super) fn result(node: &Node) -> Ptr {
    written(node.outputs[0])
}

/// The address where a value is written.
pub(super) fn written(v: ValueId) -> Ptr {
    Ptr::Write(Place::Value(v), 0)
}
