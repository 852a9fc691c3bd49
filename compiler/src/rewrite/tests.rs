//! Each rule has a case in `cases/` that fires it; its results are compared with the interpreter's.

use super::*;
use crate::ir::print::PrintOptions;
use std::collections::BTreeSet;

const FILES: &[(&str, &str)] =
    &[("simplify", include_str!("cases/simplify.txt")), ("views", include_str!("cases/views.txt"))];

/// Cases of a file: (rule, graph).
fn cases(text: &str) -> Vec<(&str, Graph)> {
    let sections = text.split("## ").skip(1);
    let case = |s: &'static str| {
        let (rule, body) = s.split_once('\n').expect("a rule name, then the graph");
        (
            rule.trim(),
            Graph::parse(&format!("graph \"{}\" {{\n{body}}}", rule.trim())).unwrap_or_else(|e| panic!("{rule}: {e}")),
        )
    };
    // The files are compiled in, so the text is static.
    sections.map(|s| case(Box::leak(s.to_owned().into_boxed_str()))).collect()
}

#[test]
fn every_rule_has_a_case() {
    let with_case: BTreeSet<&str> = FILES.iter().flat_map(|(_, t)| cases(t)).map(|(r, _)| r).collect();
    let names: Vec<&str> = rule_list().iter().map(|r| r.name).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "rule names are unique");
    let missing: Vec<&&str> = names.iter().filter(|n| !with_case.contains(**n)).collect();
    assert!(missing.is_empty(), "rules without a case: {missing:?}");
    let unknown: Vec<&&str> = with_case.iter().filter(|c| !names.contains(c)).collect();
    assert!(unknown.is_empty(), "cases of no rule: {unknown:?}");
}

#[test]
fn rules_fire() {
    for (file, text) in FILES {
        let mut out = String::new();
        for (rule, g) in cases(text) {
            let (new, report) = rewrite(&g, &Options::default()).unwrap();
            assert!(report.fired(rule) > 0, "{rule} did not fire:\n{report}");
            assert!(report.phases.iter().all(|p| p.stop == StopReason::Saturated), "{rule}:\n{report}");
            out += &format!("{}\n", new.to_text(PrintOptions::SHORT));
        }
        insta::assert_snapshot!(*file, out);
    }
}
