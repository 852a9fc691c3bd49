//! Calls of precompiled task kernels: a descriptor, which is plain data, and the addresses it speaks of.

use super::body::Body;
use super::epilogue::{Chain, EpilogueTerm, Term};
use super::phases::Cover;
use super::rejected::Rejected;
use super::strided::Strided;
use crate::codegen::packing::Packing;
use crate::codegen::plan::PackedConstant;
use crate::ir::{Graph, Node, NodeId, ValueId};
use crate::options::ConvAlgorithm;
use gristmill_kernels::epilogue::{EpilogueKind, EpilogueOp, MAX_BATCH};
use gristmill_kernels::{Descriptor, Isa, OPERANDS, OUT, RHS, WORKSPACE};
use gristmill_runtime::{DType, Tensor};
use std::fmt;

/// Memory that an address of a call points into.
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
    /// Nodes that the task computes, in order; the last one's result is written.
    pub(super) nodes: Vec<NodeId>,
    /// The value that is written.
    pub(super) result: ValueId,
    /// An op that fusion put into the kernel and that runs apart, and the reason.
    pub(super) apart: Option<(NodeId, Rejected)>,
}

impl Task {
    /// Nodes that the task computes, for the cut of the body.
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
            results: vec![self.result],
        }
    }
}

/// A descriptor as a constant of bytes.
pub(super) fn descriptor(d: &impl Descriptor) -> Tensor {
    let bytes = d.bytes();
    Tensor::from_bytes(DType::U8, &[bytes.len()], bytes).expect("descriptors are small")
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
    pub(super) fn simple(
        symbol: &'static str,
        descriptor: Tensor,
        ptrs: Vec<Ptr>,
        items: usize,
        ns: f64,
    ) -> Call {
        Call {
            symbol,
            descriptor,
            ptrs,
            workspace_bytes: 0,
            items,
            cost_ns: ns as u64,
        }
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

/// Descriptor entries and operand addresses of an epilogue. `strides` gives an operand's row and batch strides.
pub(super) fn epilogue_ops(
    terms: &[EpilogueTerm],
    strides: &dyn Fn(usize) -> (i64, [isize; MAX_BATCH]),
) -> (Vec<EpilogueOp>, Vec<Ptr>) {
    let (mut ops, mut operands) = (Vec::new(), Vec::new());
    let mut n_tensors = 0;
    for t in terms {
        let mut op = EpilogueOp {
            kind: t.kind as u32,
            p0: t.p0,
            p1: t.p1,
            ..EpilogueOp::default()
        };
        if !matches!(t.term, Term::None) {
            op.operand = operands.len() as u32;
        }
        match &t.term {
            Term::None => {}
            Term::Scalar(c) => operands.push(Ptr::Read(Place::Packed(one(*c).into()), 0)),
            Term::Tensor(view) => {
                let (row, batch) = strides(n_tensors);
                n_tensors += 1;
                op.row_stride = row as isize;
                op.col_stride = view.strides.last().copied().unwrap_or(0) as isize;
                op.batch_stride = batch;
                operands.push(read(view));
            }
        }
        ops.push(op);
    }
    (ops, operands)
}

fn one(value: f32) -> Tensor {
    Tensor::scalar(value)
}

/// The address of a node's first result.
pub(super) fn result(node: &Node) -> Ptr {
    Ptr::Write(Place::Value(node.outputs[0]), 0)
}

/// Picoseconds per multiply-add of the contractions' kernels, for splitting only.
const PS_PER_MULTIPLY_ADD: u64 = 12;

/// Estimated time of a contraction and its epilogue on one thread.
pub(super) fn contraction_ns(multiply_adds: usize, n_elements: usize, chain: &Chain) -> u64 {
    let products = multiply_adds as u64 * PS_PER_MULTIPLY_ADD / 1000;
    products + (n_elements as f64 * epilogue_ns(&chain.terms)) as u64
}

/// Extra time of an epilogue in ns per element.
fn epilogue_ns(terms: &[EpilogueTerm]) -> f64 {
    terms
        .iter()
        .map(|t| {
            if t.kind as u32 >= EpilogueKind::Exp as u32 {
                0.3
            } else {
                0.05
            }
        })
        .sum()
}
