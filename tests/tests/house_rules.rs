//! Rules of the house that no compiler checks: layers, rooms, licences, module docs, sizes, words,
//! leftovers, paths and links.
//!
//! Each rule reads the files of the checkout (not git), collects every violation and reports them together.

mod binary;
mod files;
mod layers;
mod licences;
mod prose;
mod rooms;
mod sources;
mod weight;

/// Fails with every violation on a line of its own.
fn assert_none(rule: &str, violations: Vec<String>) {
    assert!(
        violations.is_empty(),
        "{rule}:\n  {}\n",
        violations.join("\n  ")
    );
}
