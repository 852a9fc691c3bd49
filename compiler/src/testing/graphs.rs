//! Random graphs: grown node by node, each evaluated as it is added, so that a graph always runs.

use super::state::Variable;
use super::{Rng, random_indices, random_tensor};
use crate::interp::{self, Store, compare};
use crate::ir::{
    Dim, Extremum, Graph, Layout, Op, Origin, PadMode, PoolKind, ReduceKind, ScalarOp, ScatterKind,
    Type, ValueId, Window,
};
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeSet;

/// Size and contents of random graphs.
#[derive(Clone, Debug)]
pub struct RandomOptions {
    /// Number of ops, constants not counted.
    pub n_nodes: usize,
    /// Dtypes of inputs and casts.
    pub dtypes: Vec<DType>,
    /// Largest rank of a value.
    pub max_rank: usize,
    /// Largest extent of an input's axis.
    pub max_extent: usize,
    /// True when an input's axis may be empty.
    pub allow_empty_axes: bool,
    /// Variables that are read and assigned, in regions too.
    pub n_variables: usize,
    /// True when some variables have an initial value, so that a run begins with what the one before has left. The others are assigned
    /// before they are read.
    pub initial_values: bool,
    /// Extents that axes of inputs have now and then, beside those up to `max_extent`. No constant has a multiple of one, so that they can
    /// become symbols: see [`super::with_symbols`].
    pub large_extents: Vec<usize>,
    /// True when inputs hold NaN, infinities and extreme values. Otherwise no value is beyond 1e4.
    pub special_values: bool,
    /// True for many slices, most of which are the first elements of their operand, and for comparisons of floats that are elements of inputs.
    /// An axis then has up to 40 times `max_extent` elements, so that such slices often differ from their operands by a few bytes.
    pub first_parts: bool,
}

impl Default for RandomOptions {
    /// Ten ops over `f32` and `i64`, rank up to 4, extents up to 7.
    fn default() -> RandomOptions {
        RandomOptions {
            n_nodes: 10,
            dtypes: vec![DType::F32, DType::I64],
            max_rank: 4,
            max_extent: 7,
            allow_empty_axes: false,
            n_variables: 0,
            initial_values: false,
            large_extents: Vec::new(),
            special_values: false,
            first_parts: false,
        }
    }
}

/// A random graph and inputs for it. Ops that turn a rounding error into a large one (rounding, comparing or sorting
/// computed floats, poles) are left out, so results can be compared under a tolerance. Every value is used or a result.
pub fn random_graph(seed: u64, options: &RandomOptions) -> (Graph, Vec<Tensor>) {
    let mut g = Generator {
        rng: Rng(seed),
        graph: Graph::new(&format!("random {seed}")),
        inputs: Vec::new(),
        values: Vec::new(),
        exact: BTreeSet::new(),
        store: Store::new(),
        variables: Vec::new(),
        options,
    };
    for _ in 0..2 {
        let t = g.fresh_value();
        g.add_operand(Operand::New(t, true));
    }
    (0..options.n_variables).for_each(|_| g.add_variable());
    let mut left = options.n_nodes;
    // Proposals that do not fit are dropped; element-wise ones always fit somewhere, so this ends early.
    for _ in 0..options.n_nodes * 200 {
        if left == 0 {
            break;
        }
        let x = g.recent();
        if !g.variables.is_empty() && g.rng.one_in(3) {
            left -= usize::from(g.try_add_state(x));
        } else if let Some((op, operands)) = g.propose(x) {
            left -= usize::from(g.try_add(op, operands, Vec::new()));
        }
    }
    g.finish()
}

/// A value of the graph, or a tensor that becomes an input (`true`) or a constant if the proposal is accepted.
pub(super) enum Operand {
    Value(usize),
    New(Tensor, bool),
}

pub(super) type Proposal = Option<(Op, Vec<Operand>)>;

pub(super) struct Generator<'a> {
    pub(super) rng: Rng,
    graph: Graph,
    inputs: Vec<Tensor>,
    pub(super) values: Vec<(ValueId, Tensor)>,
    /// Values whose elements are elements of inputs, so that comparing them depends on no rounding.
    exact: BTreeSet<ValueId>,
    /// Values of variables after the nodes so far.
    store: Store,
    pub(super) variables: Vec<Variable>,
    pub(super) options: &'a RandomOptions,
}

const FLOAT_UNARY: &[ScalarOp] = &[
    ScalarOp::Neg,
    ScalarOp::Abs,
    ScalarOp::Exp,
    ScalarOp::Sin,
    ScalarOp::Cos,
    ScalarOp::Tanh,
    ScalarOp::Atan,
    ScalarOp::Asinh,
    ScalarOp::Erf,
    ScalarOp::Relu,
    ScalarOp::Sigmoid,
    ScalarOp::Gelu,
    ScalarOp::GeluTanh,
    ScalarOp::Silu,
    ScalarOp::Softplus,
    ScalarOp::Softsign,
    ScalarOp::Mish,
    ScalarOp::HardSwish,
];
const INT_UNARY: &[ScalarOp] = &[
    ScalarOp::Neg,
    ScalarOp::Abs,
    ScalarOp::Sign,
    ScalarOp::BitNot,
    ScalarOp::Relu,
];
const NUMBER_BINARY: &[ScalarOp] = &[
    ScalarOp::Add,
    ScalarOp::Sub,
    ScalarOp::Mul,
    ScalarOp::Min,
    ScalarOp::Max,
];
const INT_BINARY: &[ScalarOp] = &[
    ScalarOp::BitAnd,
    ScalarOp::BitOr,
    ScalarOp::BitXor,
    ScalarOp::Shl,
    ScalarOp::Shr,
    ScalarOp::Div,
    ScalarOp::Mod,
    ScalarOp::Rem,
];
const BOOL_BINARY: &[ScalarOp] = &[
    ScalarOp::And,
    ScalarOp::Or,
    ScalarOp::Xor,
    ScalarOp::Eq,
    ScalarOp::Ne,
];
const COMPARISONS: &[ScalarOp] = &[
    ScalarOp::Eq,
    ScalarOp::Ne,
    ScalarOp::Lt,
    ScalarOp::Le,
    ScalarOp::Gt,
    ScalarOp::Ge,
];

/// Sums of several updates depend on their order only by rounding.
const SCATTER_KINDS: &[ScatterKind] = &[
    ScatterKind::Set,
    ScatterKind::Add,
    ScatterKind::Max,
    ScatterKind::Min,
];

fn dims(shape: &[usize]) -> Vec<Dim> {
    shape.iter().map(|&d| d.into()).collect()
}

/// True for an op that gives elements of its operands, and their opposites.
fn is_exact(op: &Op) -> bool {
    use ScalarOp::{Abs, Clamp, Max, Min, Neg, Relu};
    match op {
        Op::Map(op) => matches!(op, Neg | Abs | Relu | Min | Max | Clamp),
        op => matches!(
            op,
            Op::Slice { .. }
                | Op::Transpose { .. }
                | Op::Reshape { .. }
                | Op::Broadcast { .. }
                | Op::Concat { .. }
        ),
    }
}

fn parametric_ops() -> [ScalarOp; 6] {
    [
        ScalarOp::LeakyRelu {
            alpha: 0.125.into(),
        },
        ScalarOp::Elu { alpha: 1.0.into() },
        ScalarOp::Celu { alpha: 2.0.into() },
        ScalarOp::Selu {
            alpha: 1.67326319.into(),
            gamma: 1.05070102.into(),
        },
        ScalarOp::HardSigmoid {
            alpha: 0.2.into(),
            beta: 0.5.into(),
        },
        ScalarOp::ClampTo {
            lo: (-1.0).into(),
            hi: 0.75.into(),
        },
    ]
}

impl Generator<'_> {
    pub(super) fn fresh_value(&mut self) -> Tensor {
        let dtype = self.rng.pick(&self.options.dtypes);
        let rank = self.rng.below(self.options.max_rank + 1);
        let shape: Vec<usize> = (0..rank).map(|_| self.extent()).collect();
        self.tensor(dtype, &shape)
    }

    fn extent(&mut self) -> usize {
        if !self.options.large_extents.is_empty() && self.rng.one_in(3) {
            return self.rng.pick(&self.options.large_extents);
        }
        match self.rng.below(12) {
            0 if self.options.allow_empty_axes => 0,
            0 if self.options.first_parts => 1 + self.rng.below(40 * self.options.max_extent),
            0 | 1 => 1,
            _ => 1 + self.rng.below(self.options.max_extent),
        }
    }

    pub(super) fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        random_tensor(&mut self.rng, dtype, shape, self.options.special_values)
    }

    /// A new operand, an input or a constant.
    pub(super) fn new_operand(&mut self, dtype: DType, shape: &[usize]) -> Operand {
        let t = self.tensor(dtype, shape);
        let is_large = |n: &usize| {
            self.options
                .large_extents
                .iter()
                .any(|l| n.is_multiple_of(*l))
        };
        let must_be_input = shape.iter().any(is_large);
        Operand::New(t, self.rng.one_in(2) || must_be_input)
    }

    /// A value, the last ones more often, so that chains form.
    fn recent(&mut self) -> usize {
        let n = self.values.len();
        if self.rng.one_in(3) {
            self.rng.below(n)
        } else {
            n - 1 - self.rng.below(n.min(3))
        }
    }

    fn add_operand(&mut self, operand: Operand) -> ValueId {
        match operand {
            Operand::Value(i) => self.values[i].0,
            Operand::New(t, true) => {
                let ty = Type::new(t.dtype(), t.shape().iter().copied());
                let v = self.graph.add_input(&format!("x{}", self.inputs.len()), ty);
                self.inputs.push(t.clone());
                self.values.push((v, t));
                self.exact.insert(v);
                v
            }
            Operand::New(t, false) => self.graph.add_constant(t, &Origin::new("/constant")),
        }
    }

    /// Adds the op if it fits its operands and its results are not too large.
    pub(super) fn try_add(&mut self, op: Op, operands: Vec<Operand>, regions: Vec<Graph>) -> bool {
        let tensors: Vec<&Tensor> = operands
            .iter()
            .map(|o| match o {
                Operand::Value(i) => &self.values[*i].1,
                Operand::New(t, _) => t,
            })
            .collect();
        let mut store = self.store.clone();
        let Ok(results) = interp::eval_with_state(&op, &tensors, &regions, &mut store) else {
            return false;
        };
        if !results.iter().all(|t| self.is_acceptable(t)) {
            return false;
        }
        self.store = store;
        let args: Vec<ValueId> = operands.into_iter().map(|o| self.add_operand(o)).collect();
        let origin = Origin::new(&format!("/{}_{}", op.name(), self.graph.n_nodes()));
        let is_exact = is_exact(&op) && args.iter().all(|v| self.exact.contains(v));
        let ids = self
            .graph
            .add_with_regions(op, &args, regions, &origin)
            .expect("it was evaluated");
        if is_exact {
            self.exact.extend(&ids);
        }
        self.values.extend(ids.into_iter().zip(results));
        true
    }

    /// True for results that later ops can read: not too large and, unless special values are asked
    /// for, without extreme numbers.
    fn is_acceptable(&self, t: &Tensor) -> bool {
        let is_small = t.shape().len() <= self.options.max_rank && t.len() <= 4096;
        if !is_small || self.options.special_values || !t.dtype().is_float() {
            return is_small;
        }
        let zeros = Tensor::zeros(t.dtype(), t.shape()).expect("as large as t");
        compare::allclose(&zeros, t, 0.0, 1e4).ok
    }

    /// Values that nothing reads, and now and then another one, become results.
    fn finish(mut self) -> (Graph, Vec<Tensor>) {
        let users = self.graph.users();
        let mut n = 0;
        for (v, _) in &self.values {
            let is_input = self.graph.def_node(*v).is_none();
            if !is_input && (users[v.0 as usize].is_empty() || self.rng.one_in(8)) {
                self.graph.add_output(&format!("y{n}"), *v);
                n += 1;
            }
        }
        (self.graph, self.inputs)
    }

    fn propose(&mut self, x: usize) -> Proposal {
        if self.options.first_parts && self.rng.one_in(3) {
            return match self.rng.one_in(3) {
                true => self.comparison(x),
                false => self.first_part(x),
            };
        }
        match self.rng.below(12) {
            0 | 1 => self.unary(x),
            2 | 3 => self.binary(x),
            4 => self.ternary(x),
            5 | 6 => self.view(x),
            7 => self.reduction(x),
            8 => self.row_op(x),
            9 => self.contraction(x),
            10 => self.indexed(x),
            _ => self.windowed(x),
        }
    }

    fn unary(&mut self, x: usize) -> Proposal {
        let dtype = self.values[x].1.dtype();
        let op = match dtype {
            _ if self.rng.one_in(5) => self.cast(dtype)?,
            DType::Bool => ScalarOp::Not,
            d if d.is_int() => self.rng.pick(INT_UNARY),
            _ if self.rng.one_in(4) => self.rng.pick(&parametric_ops()),
            _ => self.rng.pick(FLOAT_UNARY),
        };
        Some((Op::Map(op), vec![Operand::Value(x)]))
    }

    /// A cast, but none that would cut a computed float to an integer.
    fn cast(&mut self, from: DType) -> Option<ScalarOp> {
        let to = self.rng.pick(&self.options.dtypes);
        (to != from && (to.is_float() || !from.is_float())).then_some(ScalarOp::Cast(to))
    }

    /// Another operand that broadcasts with `x`: a value if there is one, or a new one.
    fn partner(&mut self, x: usize) -> Operand {
        let (dtype, shape) = (self.values[x].1.dtype(), self.values[x].1.shape().to_vec());
        let y = self.recent();
        let other = &self.values[y].1;
        if other.dtype() == dtype
            && crate::ir::broadcast_shapes(&dims(&shape), &dims(other.shape())).is_ok()
        {
            return Operand::Value(y);
        }
        let drop = self.rng.below(shape.len() + 1);
        let small: Vec<usize> = shape[drop..]
            .iter()
            .map(|&d| if self.rng.one_in(3) { 1 } else { d })
            .collect();
        self.new_operand(dtype, &small)
    }

    fn binary(&mut self, x: usize) -> Proposal {
        let dtype = self.values[x].1.dtype();
        let op = match dtype {
            DType::Bool => self.rng.pick(BOOL_BINARY),
            d if d.is_int() && self.rng.one_in(4) => self.rng.pick(COMPARISONS),
            d if d.is_int() && self.rng.one_in(3) => self.rng.pick(INT_BINARY),
            _ => self.rng.pick(NUMBER_BINARY),
        };
        let y = self.partner(x);
        let operands = if self.rng.one_in(2) {
            vec![Operand::Value(x), y]
        } else {
            vec![y, Operand::Value(x)]
        };
        Some((Op::Map(op), operands))
    }

    /// A comparison of two values whose elements are elements of inputs.
    fn comparison(&mut self, x: usize) -> Proposal {
        let n = self.values.len();
        let mut exact = (0..n).filter(|i| self.exact.contains(&self.values[*i].0));
        let x = match self.exact.contains(&self.values[x].0) {
            true => x,
            false => exact.next_back()?,
        };
        let y = match self.partner(x) {
            Operand::Value(y) if !self.exact.contains(&self.values[y].0) => Operand::Value(x),
            y => y,
        };
        let op = match self.values[x].1.dtype() {
            DType::Bool => ScalarOp::Ne,
            _ => self.rng.pick(COMPARISONS),
        };
        Some((Op::Map(op), vec![Operand::Value(x), y]))
    }

    /// The first elements of `x` in memory, most often nearly all.
    fn first_part(&mut self, x: usize) -> Proposal {
        let shape = self.shape(x);
        let axis = shape.iter().position(|&d| d > 1)?;
        let left_out = 1 + self.rng.below((shape[axis] - 1).min(16));
        let mut sizes = shape.clone();
        sizes[axis] -= left_out;
        let op = Op::Slice {
            starts: vec![0.into(); shape.len()],
            sizes: dims(&sizes),
            steps: vec![1; shape.len()],
        };
        Some((op, vec![Operand::Value(x)]))
    }

    fn ternary(&mut self, x: usize) -> Proposal {
        let y = self.partner(x);
        if self.values[x].1.dtype() != DType::Bool && self.rng.one_in(3) {
            let z = self.partner(x);
            return Some((Op::Map(ScalarOp::Clamp), vec![Operand::Value(x), y, z]));
        }
        let shape = self.values[x].1.shape().to_vec();
        let found = (0..self.values.len()).find(|&i| {
            let t = &self.values[i].1;
            t.dtype() == DType::Bool
                && crate::ir::broadcast_shapes(&dims(t.shape()), &dims(&shape)).is_ok()
        });
        let condition = match found {
            Some(i) => Operand::Value(i),
            None => self.new_operand(DType::Bool, &shape),
        };
        Some((
            Op::Map(ScalarOp::Select),
            vec![condition, Operand::Value(x), y],
        ))
    }

    /// An axis of a value, unless it has none.
    fn axis(&mut self, x: usize) -> Option<usize> {
        let rank = self.values[x].1.shape().len();
        (rank > 0).then(|| self.rng.below(rank))
    }

    fn view(&mut self, x: usize) -> Proposal {
        let shape = self.shape(x);
        let op = match self.rng.below(6) {
            0 => self.transpose(shape.len()),
            1 => Op::Reshape {
                shape: dims(&self.other_shape(&shape)),
            },
            2 => self.broadcast(&shape),
            3 => self.slice(&shape),
            4 => return self.pad(x),
            _ => return self.concat(x),
        };
        Some((op, vec![Operand::Value(x)]))
    }

    fn shape(&self, x: usize) -> Vec<usize> {
        self.values[x].1.shape().to_vec()
    }

    fn transpose(&mut self, rank: usize) -> Op {
        let mut perm: Vec<usize> = (0..rank).collect();
        (1..rank).for_each(|i| perm.swap(i, self.rng.below(i + 1)));
        Op::Transpose { perm }
    }

    fn broadcast(&mut self, shape: &[usize]) -> Op {
        let mut repeated = |d: &usize| if *d == 1 { self.extent() } else { *d };
        let wide: Vec<usize> = shape.iter().map(&mut repeated).collect();
        let lead = if self.rng.one_in(2) {
            vec![self.extent()]
        } else {
            vec![]
        };
        let shape = dims(&[lead, wide].concat());
        Op::Broadcast { shape }
    }

    fn pad(&mut self, x: usize) -> Proposal {
        let (dtype, rank) = (self.values[x].1.dtype(), self.shape(x).len());
        let mode = self.rng.pick(&[
            PadMode::Constant,
            PadMode::Reflect,
            PadMode::Edge,
            PadMode::Wrap,
        ]);
        let mut border = || (0..rank).map(|_| self.rng.below(3)).collect();
        let (low, high) = (border(), border());
        let mut operands = vec![Operand::Value(x)];
        if mode == PadMode::Constant {
            operands.push(Operand::New(self.tensor(dtype, &[]), false));
        }
        Some((Op::Pad { low, high, mode }, operands))
    }

    /// The value before and behind another one of the same rank, or a new one.
    fn concat(&mut self, x: usize) -> Proposal {
        let (dtype, shape) = (self.values[x].1.dtype(), self.shape(x));
        let axis = self.axis(x)?;
        let y = self.recent();
        let mut part = shape.clone();
        part[axis] = self.extent();
        let other = &self.values[y].1;
        let y = if other.dtype() == dtype && other.shape().len() == shape.len() {
            Operand::Value(y)
        } else {
            self.new_operand(dtype, &part)
        };
        let operands = vec![Operand::Value(x), y, Operand::Value(x)];
        Some((Op::Concat { axis }, operands))
    }

    /// Another shape of as many elements: axes merged, split or of extent 1 added.
    fn other_shape(&mut self, shape: &[usize]) -> Vec<usize> {
        let mut out = shape.to_vec();
        let at = self.rng.below(out.len() + 1);
        match self.rng.below(3) {
            0 if at + 1 < out.len() => {
                out[at] *= out[at + 1];
                out.remove(at + 1);
            }
            1 if at < out.len() => {
                let divisors: Vec<usize> = (2..out[at])
                    .filter(|d| out[at].is_multiple_of(*d))
                    .collect();
                if !divisors.is_empty() {
                    let d = self.rng.pick(&divisors);
                    out[at] /= d;
                    out.insert(at + 1, d);
                }
            }
            _ => out.insert(at, 1),
        }
        out
    }

    fn slice(&mut self, shape: &[usize]) -> Op {
        let (mut starts, mut sizes, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        for &n in shape {
            let start = self.rng.below(n);
            let step = self.rng.pick(&[1i64, 1, 1, 2, -1, -2]);
            let room = if step > 0 {
                (n - start).div_ceil(step as usize)
            } else {
                start / step.unsigned_abs() as usize + 1
            };
            let size = if n == 0 { 0 } else { 1 + self.rng.below(room) };
            starts.push(start.into());
            sizes.push(size.into());
            steps.push(step);
        }
        Op::Slice {
            starts,
            sizes,
            steps,
        }
    }

    fn reduction(&mut self, x: usize) -> Proposal {
        let (dtype, rank) = (self.values[x].1.dtype(), self.values[x].1.shape().len());
        let axis = self.axis(x)?;
        let keepdims = self.rng.one_in(2);
        if dtype.is_int() && self.rng.one_in(4) {
            let kind = self.rng.pick(&[Extremum::Max, Extremum::Min]);
            let op = Op::ArgReduce {
                kind,
                axis,
                keepdims,
                select_last: self.rng.one_in(2),
            };
            return Some((op, vec![Operand::Value(x)]));
        }
        let kinds = [
            ReduceKind::Max,
            ReduceKind::Min,
            ReduceKind::Sum,
            ReduceKind::Mean,
            ReduceKind::Prod,
        ];
        let kind = self.rng.pick(if dtype == DType::Bool {
            &kinds[..2]
        } else {
            &kinds
        });
        let axes = (0..rank)
            .filter(|&a| a == axis || self.rng.one_in(3))
            .collect();
        Some((
            Op::Reduce {
                kind,
                axes,
                keepdims,
            },
            vec![Operand::Value(x)],
        ))
    }

    /// Softmax, norms, running sums, and sorting of integers.
    fn row_op(&mut self, x: usize) -> Proposal {
        let (dtype, shape) = (self.values[x].1.dtype(), self.values[x].1.shape().to_vec());
        let axis = self.axis(x)?;
        let epsilon = 0.01.into();
        let one = |op| Some((op, vec![Operand::Value(x)]));
        match self.rng.below(6) {
            0 => one(Op::CumSum {
                axis,
                exclusive: self.rng.one_in(2),
                reverse: self.rng.one_in(2),
            }),
            1 if dtype.is_int() => {
                let k = self.rng.below(shape[axis] + 1).into();
                one(Op::TopK {
                    k,
                    axis,
                    largest: self.rng.one_in(2),
                })
            }
            2 => one(Op::Softmax {
                axis,
                log: self.rng.one_in(3),
            }),
            3 => {
                let gamma = self.new_operand(dtype, &shape[axis..]);
                let beta = self.new_operand(dtype, &shape[axis..]);
                Some((
                    Op::LayerNorm { axis, epsilon },
                    vec![Operand::Value(x), gamma, beta],
                ))
            }
            4 => {
                let axes = (0..shape.len()).filter(|_| self.rng.one_in(2)).collect();
                one(Op::Standardize { axes, epsilon })
            }
            _ => {
                let gamma = self.new_operand(dtype, &shape[axis..]);
                Some((
                    Op::RmsNorm { axis, epsilon },
                    vec![Operand::Value(x), gamma],
                ))
            }
        }
    }

    fn contraction(&mut self, x: usize) -> Proposal {
        let (dtype, shape) = (self.values[x].1.dtype(), self.shape(x));
        let [batch @ .., m, k] = &shape[..] else {
            return None;
        };
        if !batch.is_empty() && self.rng.one_in(3) {
            return self.conv(x, dtype, &shape);
        }
        let n = self.extent();
        match self.rng.below(4) {
            0 if dtype.is_float() => self.attention(x, n.max(1)),
            1 => {
                let lhs = self.new_operand(dtype, &[n, *m]);
                Some((Op::MatMul, vec![lhs, Operand::Value(x)]))
            }
            2 => {
                let rhs = self.new_operand(dtype, &[batch, &[*k, n]].concat());
                Some((Op::MatMul, vec![Operand::Value(x), rhs]))
            }
            _ => {
                let rhs = self.new_operand(dtype, &[*k, n]);
                Some((Op::MatMul, vec![Operand::Value(x), rhs]))
            }
        }
    }

    /// Attention of the queries `x` to `n_keys` keys.
    fn attention(&mut self, x: usize, n_keys: usize) -> Proposal {
        let (dtype, shape) = (self.values[x].1.dtype(), self.shape(x));
        let (batch, width) = (&shape[..shape.len() - 2], shape[shape.len() - 1]);
        let op = Op::Attention {
            scale: (1.0 / (width.max(1) as f64).sqrt()).into(),
            causal: self.rng.one_in(2),
        };
        let keys = self.new_operand(dtype, &[batch, &[n_keys, width]].concat());
        let values = self.new_operand(dtype, &[batch, &[n_keys, 3]].concat());
        Some((op, vec![Operand::Value(x), keys, values]))
    }

    /// Strides, dilations and pads for `n` spatial axes.
    fn window(&mut self, n: usize) -> Window {
        let mut each =
            |least: usize, spread: usize| (0..n).map(|_| least + self.rng.below(spread)).collect();
        Window {
            strides: each(1, 2),
            dilations: each(1, 2),
            pads_low: each(0, 2),
            pads_high: each(0, 2),
        }
    }

    fn conv(&mut self, x: usize, dtype: DType, shape: &[usize]) -> Proposal {
        let n = shape.len() - 2;
        let window = self.window(n);
        let kernel: Vec<usize> = (0..n).map(|_| 1 + self.rng.below(3)).collect();
        let layout = self
            .rng
            .pick(&[Layout::ChannelsFirst, Layout::ChannelsLast]);
        let channels = if layout == Layout::ChannelsFirst {
            shape[1]
        } else {
            shape[n + 1]
        };
        let groups = if channels > 0 && self.rng.one_in(3) {
            channels
        } else {
            1
        };
        let out = groups * (1 + self.rng.below(3));
        if self.rng.one_in(4) {
            let weights = self.new_operand(dtype, &[&[shape[1], 2], kernel.as_slice()].concat());
            let output_pads = vec![0; n];
            return Some((
                Op::ConvTranspose {
                    window,
                    output_pads,
                    groups: 1,
                },
                vec![Operand::Value(x), weights],
            ));
        }
        let weights = match layout {
            Layout::ChannelsFirst => [&[out, channels / groups], kernel.as_slice()].concat(),
            Layout::ChannelsLast => [kernel.as_slice(), &[channels / groups, out]].concat(),
        };
        let weights = self.new_operand(dtype, &weights);
        Some((
            Op::Conv {
                window,
                groups,
                layout,
            },
            vec![Operand::Value(x), weights],
        ))
    }

    fn windowed(&mut self, x: usize) -> Proposal {
        let rank = self.values[x].1.shape().len();
        let n = rank.checked_sub(2).filter(|&n| n > 0)?;
        let kind = self
            .rng
            .pick(&[PoolKind::Max, PoolKind::Avg, PoolKind::AvgIncludePad]);
        let layout = self
            .rng
            .pick(&[Layout::ChannelsFirst, Layout::ChannelsLast]);
        // At least as wide as the padding, so that no window lies in the padding alone.
        let size: Vec<usize> = (0..n).map(|_| 2 + self.rng.below(2)).collect();
        let mut window = self.window(n);
        window.dilations = vec![1; n];
        let op = Op::Pool {
            kind,
            size,
            window,
            ceil: self.rng.one_in(3),
            layout,
        };
        Some((op, vec![Operand::Value(x)]))
    }

    fn indexed(&mut self, x: usize) -> Proposal {
        let (dtype, shape) = (self.values[x].1.dtype(), self.shape(x));
        let axis = self.axis(x)?;
        let extent = shape[axis];
        if extent == 0 {
            return None;
        }
        let index_dtype = self.rng.pick(&[DType::I32, DType::I64]);
        let mut along = shape;
        along[axis] = 1 + self.rng.below(4);
        match self.rng.below(5) {
            0 | 1 => {
                let at = self.rng.pick(&[vec![], vec![3], vec![2, 2]]);
                let at = self.indices(index_dtype, &at, extent);
                Some((Op::Gather { axis }, vec![Operand::Value(x), at]))
            }
            2 => {
                let at = self.indices(index_dtype, &along, extent);
                Some((Op::GatherElements { axis }, vec![Operand::Value(x), at]))
            }
            3 => {
                let at = self.indices(index_dtype, &along, extent);
                let updates = self.new_operand(dtype, &along);
                let kind = self.rng.pick(SCATTER_KINDS);
                let op = Op::ScatterElements { axis, kind };
                Some((op, vec![Operand::Value(x), at, updates]))
            }
            _ => self.indexed_rows(x, index_dtype),
        }
    }

    /// Two rows gathered or scattered by index vectors.
    fn indexed_rows(&mut self, x: usize, index_dtype: DType) -> Proposal {
        let (dtype, shape) = (self.values[x].1.dtype(), self.shape(x));
        if shape[0] == 0 {
            return None;
        }
        let at = self.indices(index_dtype, &[2, 1], shape[0]);
        let updates = self.new_operand(dtype, &[&[2], &shape[1..]].concat());
        if self.rng.one_in(2) {
            return Some((Op::GatherNd { batch_dims: 0 }, vec![Operand::Value(x), at]));
        }
        let kind = self.rng.pick(SCATTER_KINDS);
        Some((Op::ScatterNd { kind }, vec![Operand::Value(x), at, updates]))
    }

    fn indices(&mut self, dtype: DType, shape: &[usize], extent: usize) -> Operand {
        Operand::New(random_indices(&mut self.rng, dtype, shape, extent), true)
    }
}
