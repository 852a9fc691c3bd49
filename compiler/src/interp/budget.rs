//! A limit on the work of evaluations, for callers that may do without their results.

use crate::cost::{Extents, work};
use crate::error::{Error, Result};
use crate::ir::{Op, Type};
use gristmill_runtime::Tensor;

/// Units that an op costs beside its elements: dispatch, type rule, allocation of the results.
const UNITS_PER_OP: u64 = 256;

/// Work that evaluations may take, each and together. A unit is about one operation on one element.
#[derive(Clone, Copy, Debug)]
pub struct WorkBudget {
    each: u64,
    left: u64,
}

impl WorkBudget {
    /// At most `each` units for one evaluation, and `total` for all of them.
    pub fn new(each: u64, total: u64) -> WorkBudget {
        WorkBudget { each, left: total }
    }

    /// A meter for the next evaluation.
    pub(super) fn meter(&self) -> Meter {
        Meter {
            left: Some(self.each.min(self.left)),
            exceeded: false,
        }
    }

    /// Subtracts the units that an evaluation took from `meter`.
    pub(super) fn charge(&mut self, meter: &Meter) {
        let rest = meter.left.unwrap_or(0);
        self.left -= self.each.min(self.left) - rest;
    }
}

/// Units that one evaluation has left.
pub(super) struct Meter {
    /// `None` without a limit.
    left: Option<u64>,
    exceeded: bool,
}

impl Meter {
    /// A meter that no evaluation exhausts.
    pub fn unlimited() -> Meter {
        Meter {
            left: None,
            exceeded: false,
        }
    }

    /// True when an evaluation ended because nothing was left.
    pub fn exceeded(&self) -> bool {
        self.exceeded
    }

    /// Takes the units of an op without regions. Operands that do not fit it are for its type rule
    /// to report.
    pub fn take_op(&mut self, op: &Op, inputs: &[&Tensor]) -> Result<()> {
        if self.left.is_none() {
            return Ok(());
        }
        let operands: Vec<Type> = inputs.iter().map(|t| type_of(t)).collect();
        match (op.spec().infer)(op, &operands, &[]) {
            Ok(results) => self.take(units_of(op, &operands, &results)),
            Err(_) => Ok(()),
        }
    }

    /// Takes `units`, and those of one op.
    pub fn take(&mut self, units: u64) -> Result<()> {
        let Some(left) = &mut self.left else {
            return Ok(());
        };
        match left.checked_sub(units.saturating_add(UNITS_PER_OP)) {
            Some(rest) => {
                *left = rest;
                Ok(())
            }
            None => {
                (*left, self.exceeded) = (0, true);
                let message = "the evaluation takes more work than its limit";
                Err(Error::unsupported(message))
            }
        }
    }
}

fn type_of(t: &Tensor) -> Type {
    Type::new(t.dtype(), t.shape().iter().copied())
}

/// Arithmetic, and elements written.
fn units_of(op: &Op, operands: &[Type], results: &[Type]) -> u64 {
    let extents = Extents::default();
    let arithmetic = work::of_op(op, operands, results, &extents).flops;
    let written = results.iter().map(|t| extents.elements(&t.shape));
    arithmetic.saturating_add(written.fold(0, u64::saturating_add))
}
