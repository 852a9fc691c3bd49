//! Weight of functions, in tokens: lines can be made few by making them wide, tokens cannot.

use super::assert_none;
use super::sources::{production, room};
use std::collections::BTreeMap;

/// Ceilings of a room's functions: 90th percentile and largest. They may only fall; a room without
/// a row has [`GOAL`]. A median has no ceiling, because it rewards helpers with a single caller.
const CEILINGS: &[(&str, [usize; 2])] = &[
    ("compiler/solver", [314, 564]),
    ("compiler/src", [280, 566]),
    ("compiler/src/codegen", [280, 688]),
    ("compiler/src/ir", [280, 624]),
    ("compiler/src/place", [312, 505]),
    ("kernels", [280, 423]),
];
const GOAL: [usize; 2] = [280, 400];

/// Name and tokens of each function of a formatted source.
fn functions(source: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        if let Some(name) = function_name(lines[at]) {
            let end = end_of_function(&lines, at);
            let body = &lines[at..=end];
            found.push((name, body.iter().map(|line| n_tokens(line)).sum()));
            at = end;
        }
        at += 1;
    }
    found
}

/// Name of the function whose signature begins on this line.
fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_qualifier = |word: &str| {
        ["const", "unsafe", "async", "extern", "\"C\"", "in"].contains(&word)
            || word.starts_with("pub")
            || word.ends_with(')')
    };
    let end = after.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    (end > 0 && before.split_whitespace().all(is_qualifier)).then(|| &after[..end])
}

/// Index of the last line of the function that begins at `start`; a trait's declaration has no body
/// and ends with a semicolon.
fn end_of_function(lines: &[&str], start: usize) -> usize {
    let first = lines[start].trim_end();
    if first.ends_with('}') || first.ends_with(';') {
        return start;
    }
    let indent = first.len() - first.trim_start().len();
    let closes = |line: &&str| {
        let text = line.trim_start();
        let is_end = text.starts_with('}') || text.trim_end().ends_with(';');
        line.len() - text.len() == indent && is_end
    };
    let body = lines[start + 1..].iter();
    body.clone()
        .position(closes)
        .map_or(lines.len() - 1, |n| start + 1 + n)
}

/// Tokens of a line: words, numbers, string literals and single punctuation characters; comments
/// have none.
fn n_tokens(line: &str) -> usize {
    let code = line.split(" //").next().unwrap_or(line).trim_start();
    if code.starts_with("//") {
        return 0;
    }
    let mut rest = code;
    let mut n = 0;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => string_length(rest),
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        n += usize::from(!first.is_whitespace());
        rest = &rest[length..];
    }
    n
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Bytes of the string literal that begins here, or 1 when it does not end on this line.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    1
}

#[test]
fn functions_are_light() {
    let mut rooms: BTreeMap<String, Vec<(usize, String)>> = BTreeMap::new();
    for file in production() {
        let weights = rooms.entry(room(&file.path)).or_default();
        let found = functions(&file.text).into_iter();
        weights.extend(found.map(|(name, n)| (n, format!("{}: {name}", file.path))));
    }
    let mut violations = Vec::new();
    for (room, mut weights) in rooms {
        weights.sort();
        let row = CEILINGS.iter().find(|row| row.0 == room);
        let ceilings = row.map_or(GOAL, |row| row.1);
        let Some((_, heaviest)) = weights.last() else {
            continue;
        };
        let quantile = |percent: usize| weights[(weights.len() - 1) * percent / 100].0;
        let found = [90, 100].map(quantile);
        if found.iter().zip(&ceilings).any(|(n, ceiling)| n > ceiling) {
            violations.push(format!(
                "{room}: 90th percentile and largest are {found:?} tokens, ceilings {ceilings:?}; \
                 the heaviest is {heaviest}"
            ));
        }
    }
    assert_none(
        "split functions at a joint that a reader would name",
        violations,
    );
}

#[test]
fn tokens_of_functions_are_counted() {
    let source = r#"
impl A {
    pub(crate) fn a(x: u8) -> u8 {
        // Nothing.
        x + 1
    }
}
fn b() {}
extern "C" fn c() {
    f("a \" b");
}
let fn_x = 1;
trait D {
    fn d(
        &self,
    ) -> u8;
    fn e(&self) {}
}
"#;
    let found = functions(source);
    assert_eq!(found, [("a", 19), ("b", 6), ("c", 13), ("d", 11), ("e", 8)]);
}
