//! Epilogues: the element-wise ops that follow a contraction and run on its tiles while they are hot.

use super::range::Noted;
use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Call, Context, Place, Ptr, Task, read, written};
use crate::cluster::bytes::Quantization;
use crate::cluster::legal::epilogue_kind;
use crate::ir::{Graph, Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_kernels::epilogue::{EpilogueKind, EpilogueOp, MAX_BATCH, MAX_EPILOGUE};
use gristmill_kernels::quantize::Quantize;
use gristmill_runtime::{DType, Tensor};

/// The second operand of an epilogue op.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Term {
    /// Nothing, or the parameters alone.
    None,
    /// A tensor that broadcasts to the product's shape.
    Tensor(Strided),
    /// One number.
    Scalar(f32),
    /// The values where the smallest and the largest element are noted.
    Range([ValueId; 2]),
}

/// One op of an epilogue.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EpilogueTerm {
    pub(super) kind: EpilogueKind,
    pub(super) p0: f32,
    pub(super) p1: f32,
    pub(super) term: Term,
}

/// The element-wise ops on the tiles of a contraction.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    pub(super) terms: Vec<EpilogueTerm>,
    /// Nodes whose results exist only in registers, but for the last one's.
    pub(super) absorbed: Vec<NodeId>,
    /// The value that is written to memory.
    pub(super) result: ValueId,
    /// The range of the result.
    pub(super) noted: Option<Noted>,
    /// Quantisation of the result as it is written.
    pub(super) quantize: Quantize,
    /// An op that fusion put on the tile and that runs apart, and the reason.
    pub(super) apart: Option<(NodeId, Rejected)>,
}

/// Accepts operands that a kernel can address, given as views broadcast to the shape of its result.
type Fits<'f> = dyn Fn(&Strided) -> bool + 'f;

impl Chain {
    /// The ops after the contraction `node` that its kernel applies to its tiles.
    pub(super) fn of(cx: &Context, node: &Node, fits: &Fits) -> Chain {
        let mut chain = Chain {
            terms: Vec::new(),
            absorbed: Vec::new(),
            result: node.outputs[0],
            noted: None,
            quantize: Quantize::default(),
            apart: None,
        };
        chain.widen_sums(cx, node);
        while let Some((id, position)) = chain.next(cx) {
            match chain.term(cx, id, position, fits) {
                Ok(term) => chain.push(cx, id, term),
                Err(why) => {
                    chain.apart = why.map(|why| (id, why));
                    break;
                }
            }
        }
        chain.note_range(cx);
        chain
    }

    /// Notes the range of the result, if the body reduces it to that.
    fn note_range(&mut self, cx: &Context) {
        let has_form = cx.body.dtype(self.result) == DType::F32 && self.terms.len() < MAX_EPILOGUE;
        if let Some(noted) = Noted::of(cx, self.result).filter(|_| has_form) {
            self.terms.push(EpilogueTerm {
                kind: EpilogueKind::Range,
                p0: 0.0,
                p1: 0.0,
                term: Term::Range(noted.values),
            });
            self.noted = Some(noted);
        }
    }

    /// Sums of 8-bit integers become `f32` before the first op.
    fn widen_sums(&mut self, cx: &Context, node: &Node) {
        let Some((id, _)) = self.next(cx) else {
            return;
        };
        let g = &cx.body.graph;
        let widens = g.node(id).op == Op::Map(ScalarOp::Cast(DType::F32));
        if widens && g.ty(node.outputs[0]).dtype == DType::I32 {
            self.absorb(cx, id);
        }
    }

    fn push(&mut self, cx: &Context, id: NodeId, term: EpilogueTerm) {
        self.terms.push(term);
        self.absorb(cx, id);
    }

    fn absorb(&mut self, cx: &Context, id: NodeId) {
        self.absorbed.push(id);
        self.result = cx.body.graph.node(id).outputs[0];
    }

    /// The epilogue op that a reader of the result is. Errors give the reason why it is none, if fusion expects one.
    fn term(
        &self,
        cx: &Context,
        id: NodeId,
        position: usize,
        fits: &Fits,
    ) -> Result<EpilogueTerm, Option<Rejected>> {
        let user = cx.body.graph.node(id);
        let Op::Map(op) = user.op else {
            return Err(None);
        };
        let no_form = Some(Rejected::Epilogue(op.spec().name)).filter(|_| !cx.is_anchored(id));
        if self.terms.len() == MAX_EPILOGUE {
            return Err(no_form.map(|_| Rejected::EpilogueLength));
        }
        let is_f32 = cx.body.dtype(self.result) == DType::F32;
        let term = kind(&cx.body.graph, user, position).filter(|_| is_f32);
        let mut term = term.ok_or(no_form.clone())?;
        if let Term::Tensor(other) = &term.term {
            let shape = cx.body.shape(self.result);
            let view = operand_view(cx, other.base, shape, fits).ok_or(no_form)?;
            term.term = Term::Tensor(view);
        }
        Ok(term)
    }

    /// The only reader of the result so far, if that need not be stored, and the operand of the reader that the result is.
    fn next(&self, cx: &Context) -> Option<(NodeId, usize)> {
        let (body, current) = (cx.body, self.result);
        let is_output = body.graph.outputs.iter().any(|o| o.value == current);
        if (cx.in_memory)(current) || is_output {
            return None;
        }
        let [(id, position)] = cx.users[current.0 as usize][..] else {
            return None;
        };
        let result = body.graph.node(id).outputs[0];
        let is_whole = body.shape(result) == body.shape(current);
        is_whole.then_some((id, position))
    }

    /// The chain with the ops that make 8-bit integers of the result, if these follow.
    pub(super) fn quantized(self, cx: &Context) -> Chain {
        match self.clone().narrowed(cx) {
            Some(narrowed) => narrowed,
            None => self,
        }
    }

    fn narrowed(mut self, cx: &Context) -> Option<Chain> {
        let g = &cx.body.graph;
        let (mut step, mut zero) = (Quantization::No, 0);
        while step != Quantization::Done {
            let (id, _) = self.next(cx)?;
            let (next, point) = step.with(g, g.node(id), self.result)?;
            (step, zero) = (next, point.unwrap_or(zero));
            self.absorb(cx, id);
        }
        let divisor = self.divisor();
        let is_signed = cx.body.dtype(self.result) == DType::I8;
        self.quantize = Quantize::bytes(is_signed, divisor.unwrap_or(1.0), zero);
        if !self.quantize.is_valid() {
            return None;
        }
        if divisor.is_some_and(|d| d != 1.0) {
            self.terms.pop();
        }
        self.apart = None;
        Some(self)
    }

    /// The number that the last op divides by.
    fn divisor(&self) -> Option<f32> {
        match self.terms.last()? {
            EpilogueTerm {
                kind: EpilogueKind::Div,
                term: Term::Scalar(scale),
                ..
            } => Some(*scale),
            _ => None,
        }
    }

    /// The tensor operands, in order.
    pub(super) fn tensors(&self) -> Vec<&Strided> {
        let tensors = self.terms.iter().filter_map(|t| match &t.term {
            Term::Tensor(view) => Some(view),
            _ => None,
        });
        tensors.collect()
    }

    /// The task of the contraction `id`, which also computes `before`, with this epilogue.
    pub(super) fn into_task(
        self,
        cx: &Context,
        before: Vec<NodeId>,
        id: NodeId,
        mut calls: Vec<Call>,
        temps: Vec<usize>,
    ) -> Task {
        let mut nodes = before;
        nodes.push(id);
        nodes.extend(self.absorbed);
        let mut results = vec![self.result];
        if let Some(noted) = self.noted {
            calls.insert(0, noted.start(cx));
            nodes.extend(noted.nodes);
            results.extend(noted.values);
        }
        Task {
            calls,
            temps,
            nodes,
            results,
            apart: self.apart,
        }
    }
}

/// Entries of a descriptor's epilogue, and their number.
pub(super) type Entries = ([EpilogueOp; MAX_EPILOGUE], u32);

/// Descriptor entries and operand addresses of an epilogue. `strides` gives an operand's row and batch strides.
pub(super) fn epilogue_ops(
    terms: &[EpilogueTerm],
    strides: &dyn Fn(usize) -> (i64, [isize; MAX_BATCH]),
) -> Result<(Entries, Vec<Ptr>), Rejected> {
    let (mut entries, mut operands) = (Entries::default(), Vec::new());
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
            Term::Range(values) => operands.extend(values.map(written)),
            Term::Scalar(c) => {
                operands.push(Ptr::Read(Place::Packed(Tensor::scalar(*c).into()), 0))
            }
            Term::Tensor(view) => {
                let (row, batch) = strides(n_tensors);
                n_tensors += 1;
                op.row_stride = row as isize;
                op.col_stride = view.strides.last().copied().unwrap_or(0) as isize;
                op.batch_stride = batch;
                operands.push(read(view));
            }
        }
        if !op.append_to(&mut entries.0, &mut entries.1) {
            return Err(Rejected::EpilogueLength);
        }
    }
    Ok((entries, operands))
}

/// Picoseconds per multiply-add of the contractions' kernels, for splitting only.
const PS_PER_MULTIPLY_ADD: u64 = 12;

/// Estimated time of a contraction and its epilogue on one thread.
pub(super) fn contraction_ns(multiply_adds: usize, n_elements: usize, chain: &Chain) -> f64 {
    let products = multiply_adds as u64 * PS_PER_MULTIPLY_ADD / 1000;
    (products + (n_elements as f64 * epilogue_ns(&chain.terms)) as u64) as f64
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

/// An operand as the kernel can address it: through its views, or else in a buffer of its own.
fn operand_view(cx: &Context, v: ValueId, shape: &[usize], fits: &Fits) -> Option<Strided> {
    let has_unit_columns =
        |s: &Strided| s.strides.last().is_none_or(|&last| last == 0 || last == 1);
    let fits = |s: &Strided| has_unit_columns(s) && fits(s);
    let through = Strided::resolve(cx.body, v, cx.in_memory).broadcast(shape);
    let own = || Strided::own(cx.body, v).broadcast(shape).filter(fits);
    through.filter(fits).or_else(own)
}

/// The epilogue op that `user` is when its operand number `position` is the product.
fn kind(graph: &Graph, user: &Node, position: usize) -> Option<EpilogueTerm> {
    use EpilogueKind as K;
    let Op::Map(op) = user.op else { return None };
    let (kind, p0, p1) = epilogue_kind(op, position)?;
    let plain = EpilogueTerm {
        kind,
        p0,
        p1,
        term: Term::None,
    };
    let [_, _] = user.inputs[..] else {
        return Some(plain);
    };
    let other = user.inputs[1 - position];
    Some(match (kind, scalar(graph, other)) {
        (K::Add, Some(c)) => EpilogueTerm {
            kind: K::AddScalar,
            p0: c,
            ..plain
        },
        (K::Sub, Some(c)) => EpilogueTerm {
            kind: K::AddScalar,
            p0: -c,
            ..plain
        },
        (K::Mul, Some(c)) => EpilogueTerm {
            kind: K::MulScalar,
            p0: c,
            ..plain
        },
        (_, Some(c)) => EpilogueTerm {
            term: Term::Scalar(c),
            ..plain
        },
        (_, None) => EpilogueTerm {
            term: Term::Tensor(Strided {
                base: other,
                offset: 0,
                shape: vec![],
                strides: vec![],
            }),
            ..plain
        },
    })
}

/// The number that a one-element `f32` constant of at most the product's rank holds.
fn scalar(graph: &Graph, v: ValueId) -> Option<f32> {
    let t = graph.single(v).filter(|t| t.dtype() == DType::F32)?;
    let bits = t.as_bytes();
    let value = f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    Some(value)
}
