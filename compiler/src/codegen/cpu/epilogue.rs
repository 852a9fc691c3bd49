//! Epilogues: the element-wise ops that follow a contraction and run on its tiles while they are hot.

use super::body::Body;
use super::strided::Strided;
use crate::cluster::bytes::{self, Quantizing};
use crate::cluster::legal::epilogue_kind;
use crate::ir::{Graph, Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_kernels::epilogue::{EpilogueKind, MAX_EPILOGUE, Quantize};
use gristmill_runtime::DType;

/// What an epilogue op combines the product with.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Term {
    /// Nothing, or the parameters alone.
    None,
    /// A tensor that broadcasts to the product's shape.
    Tensor(Strided),
    /// One number.
    Scalar(f32),
}

/// One op of an epilogue.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EpilogueTerm {
    pub(super) kind: EpilogueKind,
    pub(super) p0: f32,
    pub(super) p1: f32,
    pub(super) term: Term,
}

/// The element-wise ops that a contraction takes along.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chain {
    pub(super) terms: Vec<EpilogueTerm>,
    /// Nodes whose results exist only in registers, but for the last one's.
    pub(super) absorbed: Vec<NodeId>,
    /// What is written to memory.
    pub(super) result: ValueId,
    /// How it is written.
    pub(super) quantize: Quantize,
}

/// Why element-wise ops after a contraction cannot run as its epilogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// The body has no matrix product or convolution.
    NoAnchor,
    /// More than one: the ops' names.
    SeveralAnchors(Vec<&'static str>),
    /// The anchor's dtype or layout has no packed kernel.
    Anchor(String),
    /// An op that is no epilogue op, or reads the product in another shape: its name.
    Op(&'static str),
    /// More ops than a descriptor holds.
    TooLong,
}

impl std::fmt::Display for Rejected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rejected::NoAnchor => f.write_str("no matrix product or convolution"),
            Rejected::SeveralAnchors(names) => {
                write!(f, "several contractions: {}", names.join(", "))
            }
            Rejected::Anchor(why) => f.write_str(why),
            Rejected::Op(name) => write!(f, "{name} is no epilogue op of the kernels"),
            Rejected::TooLong => write!(f, "more than {MAX_EPILOGUE} epilogue ops"),
        }
    }
}

/// Whether `node` computes a kind of contraction that has a packed kernel with epilogues.
pub(super) fn anchor(graph: &Graph, node: &Node) -> Result<(), Rejected> {
    let x = graph.ty(node.inputs[0]);
    if bytes::left_side(graph, node).is_some() {
        return Ok(());
    }
    let rejected = |why: &str| {
        Err(Rejected::Anchor(format!(
            "{} of {x}: {why}",
            node.op.name()
        )))
    };
    if x.dtype != DType::F32 {
        return rejected("only f32, and 8-bit integers by a constant, have packed kernels");
    }
    match &node.op {
        Op::MatMul => Ok(()),
        Op::Conv {
            layout: crate::ir::Layout::ChannelsLast,
            ..
        } if matches!(x.rank(), 3 | 4) => Ok(()),
        Op::Conv { .. } => {
            rejected("only one or two spatial axes with channels last have packed kernels")
        }
        _ => rejected("not a product that is packed"),
    }
}

/// Whether everything in `body` but views of operands runs as one contraction with an epilogue.
///
/// The body may hold views, constants, one matrix product or convolution, and element-wise ops after it. On success gives the number of
/// epilogue ops.
pub fn legal_epilogue(body: &Graph) -> Result<usize, Rejected> {
    let contractions: Vec<&Node> = body
        .nodes()
        .map(|(_, n)| n)
        .filter(|n| {
            matches!(
                n.op,
                Op::MatMul | Op::Conv { .. } | Op::ConvTranspose { .. }
            )
        })
        .collect();
    let node = match contractions[..] {
        [] => return Err(Rejected::NoAnchor),
        [one] => one,
        _ => {
            return Err(Rejected::SeveralAnchors(
                contractions.iter().map(|n| n.op.name()).collect(),
            ));
        }
    };
    anchor(body, node)?;
    let users = body.users();
    let mut current = node.outputs[0];
    let mut n_terms = 0;
    while body.outputs.iter().all(|o| o.value != current) {
        let [(user, position)] = users[current.0 as usize][..] else {
            let name = users[current.0 as usize]
                .first()
                .map_or("a dead value", |(n, _)| body.node(*n).op.name());
            return Err(Rejected::Op(name));
        };
        let user = body.node(user);
        if current == node.outputs[0] && begins(body, node, user) {
            current = user.outputs[0];
            continue;
        }
        if kind(body, user, position).is_none() || body.ty(user.outputs[0]) != body.ty(current) {
            return Err(Rejected::Op(user.op.name()));
        }
        n_terms += 1;
        current = user.outputs[0];
    }
    if n_terms > MAX_EPILOGUE {
        Err(Rejected::TooLong)
    } else {
        Ok(n_terms)
    }
}

/// Whether `user` takes the sums of a product of 8-bit integers on to `f32`, where epilogues go on.
fn begins(g: &Graph, node: &Node, user: &Node) -> bool {
    user.op == Op::Map(ScalarOp::Cast(DType::F32)) && g.ty(node.outputs[0]).dtype == DType::I32
}

/// The ops after `node` that its kernel can take along. `stop` says which values have a buffer, `fits` whether the kernel can address an
/// operand, given as a view broadcast to the product's shape.
pub(super) fn chain(
    body: &Body,
    node: &Node,
    users: &[Vec<(NodeId, usize)>],
    stop: &dyn Fn(ValueId) -> bool,
    fits: &dyn Fn(&Strided) -> bool,
) -> Chain {
    let result = node.outputs[0];
    let mut chain = Chain {
        terms: Vec::new(),
        absorbed: Vec::new(),
        result,
        quantize: Quantize::default(),
    };
    let shape = body.shape(chain.result).to_vec();
    while chain.terms.len() < MAX_EPILOGUE {
        let current = chain.result;
        let Some((id, position)) = chain.next(body, users, stop) else {
            break;
        };
        let user = body.graph.node(id);
        if current == node.outputs[0] && begins(&body.graph, node, user) {
            chain.absorbed.push(id);
            chain.result = user.outputs[0];
            continue;
        }
        if body.dtype(current) != DType::F32 {
            break;
        }
        let Some(mut term) = kind(&body.graph, user, position) else {
            break;
        };
        if let Term::Tensor(other) = &term.term {
            let Some(view) = operand_view(body, other.base, &shape, stop, fits) else {
                break;
            };
            term.term = Term::Tensor(view);
        }
        chain.terms.push(term);
        chain.absorbed.push(id);
        chain.result = user.outputs[0];
    }
    chain
}

impl Chain {
    /// The only user of the result so far, if that need not be stored, and which of its operands the result is.
    fn next(
        &self,
        body: &Body,
        users: &[Vec<(NodeId, usize)>],
        stop: &dyn Fn(ValueId) -> bool,
    ) -> Option<(NodeId, usize)> {
        let current = self.result;
        if stop(current) || body.graph.outputs.iter().any(|o| o.value == current) {
            return None;
        }
        let [(id, position)] = users[current.0 as usize][..] else {
            return None;
        };
        let is_whole = body.shape(body.graph.node(id).outputs[0]) == body.shape(current);
        is_whole.then_some((id, position))
    }

    /// Takes along what makes 8-bit integers of the result, if that is what follows.
    pub(super) fn quantized(
        mut self,
        body: &Body,
        users: &[Vec<(NodeId, usize)>],
        stop: &dyn Fn(ValueId) -> bool,
    ) -> Chain {
        let mut ahead = self.clone();
        let (mut step, mut zero) = (Quantizing::No, 0);
        while step != Quantizing::Done {
            let Some((id, _)) = ahead.next(body, users, stop) else {
                return self;
            };
            let user = body.graph.node(id);
            let Some((next, point)) = step.with(&body.graph, user, ahead.result) else {
                return self;
            };
            (step, zero) = (next, point.unwrap_or(zero));
            ahead.absorbed.push(id);
            ahead.result = user.outputs[0];
        }
        let divisor = match ahead.terms.last() {
            Some(EpilogueTerm {
                kind: EpilogueKind::Div,
                term: Term::Scalar(scale),
                ..
            }) => *scale,
            _ => 1.0,
        };
        let is_signed = body.dtype(ahead.result) == DType::I8;
        ahead.quantize = Quantize::bytes(is_signed, divisor, zero);
        if ahead.quantize.is_valid() {
            if divisor != 1.0 {
                ahead.terms.pop();
            }
            self = ahead;
        }
        self
    }
}

/// An operand as the kernel can address it: through its views, or else in a buffer of its own.
fn operand_view(
    body: &Body,
    v: ValueId,
    shape: &[usize],
    stop: &dyn Fn(ValueId) -> bool,
    fits: &dyn Fn(&Strided) -> bool,
) -> Option<Strided> {
    let unit = |s: &Strided| s.strides.last().is_none_or(|&last| last == 0 || last == 1) && fits(s);
    let through = Strided::resolve(body, v, stop)
        .broadcast(shape)
        .filter(unit);
    through.or_else(|| Strided::own(body, v).broadcast(shape).filter(unit))
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
