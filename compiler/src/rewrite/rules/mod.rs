//! The rules, one declaration each, grouped by family; and the phases that run them.

mod contract;
mod layout;
mod recognise;
mod simplify;
mod views;

use super::run::{Exactness, Root, Rule};
use super::terms::{RuleResult, Terms};
use crate::ir::{Op, ScalarOp};
use egg::Id;

/// Declares rules: text name, effect on results, ops at which it may fire, function.
macro_rules! rules {
    ($($(#[doc = $doc:literal])* $name:literal $exactness:ident at $root:pat => $apply:expr;)*) => {
        pub(crate) const RULES: &[$crate::rewrite::run::Rule] = &[$( $crate::rewrite::run::Rule {
            name: $name,
            doc: concat!($($doc),*),
            exactness: $crate::rewrite::run::Exactness::$exactness,
            root: |op| matches!(op, $root),
            apply: $apply,
        } ),*];
    };
}
pub(crate) use rules;

/// A phase of rewriting: a group of rules run to saturation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Algebra and identity views; every rule shrinks or normalises.
    Simplify,
    /// Composites, attention, and constants folded into weights.
    Recognise,
    /// Channels-last convolutions; transposes meet and cancel.
    Layout,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: &[Phase] = &[Phase::Simplify, Phase::Recognise, Phase::Layout];

    /// Text name.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Simplify => "simplify",
            Phase::Recognise => "recognise",
            Phase::Layout => "layout",
        }
    }

    /// Lowest optimisation level that runs it.
    pub fn min_level(self) -> u8 {
        match self {
            Phase::Simplify | Phase::Recognise => 1,
            Phase::Layout => 2,
        }
    }

    /// Classes are visited operands first, so that a transpose crosses the whole graph in one iteration; later iterations
    /// mostly find more ways to place the same transposes.
    pub(crate) fn max_iterations(self) -> usize {
        if self == Phase::Layout { 4 } else { usize::MAX }
    }

    pub(crate) fn rules(self) -> Vec<&'static Rule> {
        let families: &[&'static [Rule]] = match self {
            Phase::Simplify => &[simplify::RULES, views::RULES],
            Phase::Recognise => &[
                simplify::RULES,
                views::RULES,
                recognise::RULES,
                contract::RULES,
            ],
            Phase::Layout => &[layout::RULES, views::RULES, contract::RULES],
        };
        families.iter().flat_map(|f| f.iter()).collect()
    }
}

/// A rule as the documentation and tests see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// The phase that runs it.
    pub phase: Phase,
    /// Name.
    pub name: &'static str,
    /// The rewrite, as a formula or in a sentence.
    pub doc: &'static str,
    /// Effect on results.
    pub exactness: Exactness,
}

/// All rules, by phase and family. A rule that several phases run is listed for the first.
pub fn rule_list() -> Vec<RuleInfo> {
    let mut all: Vec<RuleInfo> = Vec::new();
    for &phase in Phase::ALL {
        for r in phase.rules() {
            if !all.iter().any(|i| i.name == r.name) {
                all.push(RuleInfo {
                    phase,
                    name: r.name,
                    doc: r.doc.trim(),
                    exactness: r.exactness,
                });
            }
        }
    }
    all
}

/// `x` in the type of `like`: broadcast when the shapes differ.
pub(crate) fn as_shape_of(t: &mut Terms, x: Id, like: Id) -> RuleResult {
    let shape = t.ty(like).shape.0.clone();
    t.broadcast(x, shape)
}

/// The element-wise op `op` of `x`, in the type of the root.
pub(crate) fn map_like(t: &mut Terms, r: &Root, op: ScalarOp, x: Id) -> RuleResult {
    let y = t.map(op, &[x])?;
    as_shape_of(t, y, r.class)
}

/// The answer of `f` for the two operands of a commutative root, in either order.
pub(crate) fn either<T>(args: &[Id], f: impl Fn(Id, Id) -> Option<T>) -> Option<T> {
    f(args[0], args[1]).or_else(|| f(args[1], args[0]))
}

/// First of the axes that a norm normalises.
pub(crate) fn norm_axis(op: &Op) -> Option<usize> {
    match *op {
        Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => Some(axis),
        _ => None,
    }
}
