//! Handlers of the operators, one file per family, and the table of them all.

mod attention;
mod batch_norm;
mod constant;
mod contract;
mod contrib;
mod control;
mod dropout;
mod einsum;
mod elementwise;
mod image;
mod index;
mod linalg;
mod loss;
pub(super) mod movement;
mod norm;
mod pool;
mod quant;
mod recurrent;
mod reduce;
mod resize;
mod roi;
mod run_time;
mod sequence;
mod signal;
mod state;

use super::import::OpDef;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Any number of operands.
const MANY: usize = usize::MAX;

/// Tables of the standard domain.
const STANDARD: &[&[OpDef]] = &[
    attention::OPS,
    batch_norm::OPS,
    constant::OPS,
    contract::OPS,
    control::OPS,
    dropout::OPS,
    einsum::OPS,
    elementwise::OPS,
    elementwise::PLAIN_OPS,
    image::OPS,
    index::OPS,
    linalg::OPS,
    loss::OPS,
    movement::OPS,
    norm::OPS,
    pool::OPS,
    quant::OPS,
    recurrent::OPS,
    reduce::OPS,
    resize::OPS,
    roi::OPS,
    sequence::OPS,
    signal::OPS,
    state::OPS,
];

/// The handler of an operator; `domain` is empty for the standard domain.
pub(super) fn find(domain: &str, op_type: &str) -> Option<&'static OpDef> {
    type Table = BTreeMap<(&'static str, &'static str), &'static OpDef>;
    static TABLE: OnceLock<Table> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let standard = STANDARD
            .iter()
            .flat_map(|ops| ops.iter())
            .map(|d| (("", d.name), d));
        let others = [
            ("com.microsoft", contrib::OPS),
            ("ai.onnx.preview", attention::PREVIEW_OPS),
        ];
        let others = others
            .into_iter()
            .flat_map(|(domain, ops)| ops.iter().map(move |d| ((domain, d.name), d)));
        standard.chain(others).collect()
    });
    table.get(&(domain, op_type)).copied()
}

/// Operators whose meaning today is that of a version below 6.
pub(super) fn unchanged_before_6(op_type: &str) -> bool {
    matches!(op_type, "Not" | "Constant" | "Identity")
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_operator_is_listed_twice() {
        let mut names: Vec<&str> = super::STANDARD
            .iter()
            .flat_map(|ops| ops.iter())
            .map(|d| d.name)
            .collect();
        let n = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n);
    }
}
