//! Rules of the house that no compiler checks: layers, licences, module docs, sizes, leftovers, paths and links.
//!
//! Each rule reads the files of the checkout (not git), collects every violation and reports them together.

mod binary;
mod files;
mod layers;
mod licences;

/// Fails with every violation on a line of its own.
fn assert_none(rule: &str, violations: Vec<String>) {
    assert!(
        violations.is_empty(),
        "{rule}:\n  {}\n",
        violations.join("\n  ")
    );
}
