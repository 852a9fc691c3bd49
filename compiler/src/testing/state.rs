//! Variables of random graphs: assigned, read and counted up, by nodes and in regions.

use super::graphs::{Generator, Operand};
use crate::ir::{Graph, Op, Origin, ScalarOp, Type, ValueId};
use gristmill_runtime::Tensor;

/// A variable that has a value.
#[derive(Clone)]
pub(super) struct Variable {
    name: String,
    ty: Type,
    /// Its value before the first run; without one, the graph assigns it before anything reads it.
    initial: Option<Tensor>,
}

impl Variable {
    fn read(&self) -> Op {
        Op::ReadVariable {
            container: String::new(),
            name: self.name.clone(),
            dtype: self.ty.dtype,
            shape: self.ty.shape.0.clone(),
            initial: self.initial.clone().map(Into::into),
        }
    }

    fn assign(&self) -> Op {
        Op::AssignVariable {
            container: String::new(),
            name: self.name.clone(),
        }
    }

    fn shape(&self) -> Vec<usize> {
        self.ty
            .static_shape()
            .expect("variables are of random tensors")
    }
}

/// The graph of a region under construction.
struct Region(Graph);

impl Region {
    fn add(&mut self, op: Op, operands: &[ValueId]) -> ValueId {
        let origin = Origin::new("/region");
        let results = self.0.add(op, operands, &origin);
        results.expect("operands are of one type")[0]
    }

    /// Reads the variable, adds `x` to it, assigns the sum and reads again: the difference of both reads is `x`.
    fn count_up(&mut self, variable: &Variable, x: ValueId) -> [ValueId; 2] {
        let before = self.add(variable.read(), &[]);
        let sum = self.add(Op::Map(ScalarOp::Add), &[before, x]);
        self.add(variable.assign(), &[sum]);
        let after = self.add(variable.read(), &[]);
        [before, after]
    }
}

/// `if condition { count up; return the value before } else { read, assign x; return both }` with operand x.
fn branches(variable: &Variable) -> Vec<Graph> {
    let mut then = Region(Graph::new("then"));
    let x = then.0.add_input("x", variable.ty.clone());
    let [before, _] = then.count_up(variable, x);
    then.0.add_output("y", before);
    let mut other = Region(Graph::new("else"));
    let x = other.0.add_input("x", variable.ty.clone());
    let before = other.add(variable.read(), &[]);
    other.add(variable.assign(), &[x]);
    let after = other.add(variable.read(), &[]);
    let both = other.add(Op::Map(ScalarOp::Max), &[before, after]);
    other.0.add_output("y", both);
    vec![then.0, other.0]
}

/// Counts the variable up by x and carries the value after it.
fn counting_body(variable: &Variable) -> Graph {
    let mut body = Region(Graph::new("body"));
    let _iteration = body
        .0
        .add_input("i", Type::new(gristmill_runtime::DType::I64, [0usize; 0]));
    let condition = body
        .0
        .add_input("c", Type::new(gristmill_runtime::DType::Bool, [0usize; 0]));
    let _carried = body.0.add_input("s", variable.ty.clone());
    let x = body.0.add_input("x", variable.ty.clone());
    let [_, after] = body.count_up(variable, x);
    body.0.add_output("c", condition);
    body.0.add_output("s", after);
    body.0
}

impl Generator<'_> {
    /// A variable of a random type, which has an initial value or is assigned before anything reads it.
    pub(super) fn add_variable(&mut self) {
        let value = self.fresh_value();
        let has_initial = self.options.initial_values && self.rng.one_in(2);
        let variable = Variable {
            name: format!("v{}", self.variables.len()),
            ty: Type::new(value.dtype(), value.shape().iter().copied()),
            initial: has_initial.then(|| value.clone()),
        };
        if has_initial {
            return self.variables.push(variable);
        }
        let operand = Operand::New(value, true);
        if self.try_add(variable.assign(), vec![operand], Vec::new()) {
            self.variables.push(variable);
        }
    }

    /// A read, an assignment of a value like `x` if that fits, or a region that counts up.
    pub(super) fn try_add_state(&mut self, x: usize) -> bool {
        let n = self.rng.below(self.variables.len());
        let variable = self.variables[n].clone();
        let operand = self.operand_for(&variable, x);
        match self.rng.below(6) {
            0 | 1 => self.try_add(variable.read(), Vec::new(), Vec::new()),
            2 | 3 => self.try_add(variable.assign(), vec![operand], Vec::new()),
            4 => {
                let condition = Operand::New(Tensor::scalar(self.rng.one_in(2)), true);
                self.try_add(Op::If, vec![condition, operand], branches(&variable))
            }
            _ => self.try_add_loop(&variable, operand),
        }
    }

    /// Value `x` if it has the variable's type, or a new one.
    fn operand_for(&mut self, variable: &Variable, x: usize) -> Operand {
        let shape = variable.shape();
        let value = &self.values[x].1;
        if value.dtype() == variable.ty.dtype && value.shape() == shape {
            return Operand::Value(x);
        }
        self.new_operand(variable.ty.dtype, &shape)
    }

    fn try_add_loop(&mut self, variable: &Variable, x: Operand) -> bool {
        let n = self.rng.below(3);
        let trips = Operand::New(Tensor::scalar(n as i64), false);
        let condition = Operand::New(Tensor::scalar(true), false);
        let start = self.new_operand(variable.ty.dtype, &variable.shape());
        let op = Op::Loop {
            carried: 1,
            trip: n.into(),
        };
        let operands = vec![trips, condition, start, x];
        self.try_add(op, operands, vec![counting_body(variable)])
    }
}
