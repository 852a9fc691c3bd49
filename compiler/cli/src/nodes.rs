//! `dump --node`: the nodes of a stage's text whose paths match a regular expression.

use gristmill::{Error, Result};
use gristmill_runtime::nearest::nearest;
use regex_lite::Regex;
use std::collections::BTreeSet;

/// The nodes that `--node` asks for.
pub struct NodeFilter {
    pattern: Regex,
}

impl NodeFilter {
    /// From the text of the flag.
    pub fn parse(pattern: &str) -> Result<NodeFilter> {
        let fail = |e: regex_lite::Error| {
            let message = format!("--node {pattern:?}: {e}").replace('\n', " ");
            Error::invalid(message).hint("--node '^/encoder/'")
        };
        let pattern = Regex::new(pattern).map_err(fail)?;
        Ok(NodeFilter { pattern })
    }

    /// The text of the nodes whose paths match, and the heads and ends of the graphs that they are in. A node is shown whole, with the nodes that
    /// are fused into it, where its own path matches or that of one of these.
    ///
    /// Errors when there is none, naming the nearest paths.
    pub fn apply(&self, text: &str) -> Result<String> {
        let lines: Vec<&str> = text.lines().collect();
        let mut rest = &lines[..];
        let (mut shown, mut depth, mut n_found) = (String::new(), 0, 0);
        while !rest.is_empty() {
            let (entry, after) = rest.split_at(entry_length(rest));
            rest = after;
            let is_found = entry.iter().any(|line| self.matches(line));
            n_found += usize::from(is_found);
            if is_found || is_frame(entry, depth) {
                shown += &entry.join("\n");
                shown.push('\n');
            }
            depth = depth_after(entry, depth);
        }
        match n_found {
            0 => Err(self.not_found(&lines)),
            _ => Ok(shown),
        }
    }

    fn matches(&self, line: &str) -> bool {
        path(line).is_some_and(|path| self.pattern.is_match(path))
    }

    fn not_found(&self, lines: &[&str]) -> Error {
        let known: BTreeSet<&str> = lines.iter().filter_map(|line| path(line)).collect();
        let pattern = self.pattern.as_str();
        let literal: String = pattern
            .chars()
            .filter(|c| !"^$.*+?()[]{}|\\".contains(*c))
            .collect();
        let near = nearest(&literal, known.iter().copied(), 3);
        let error = Error::invalid(format!(
            "--node {pattern:?} matches none of the {} node paths in the text",
            known.len()
        ));
        match near.is_empty() {
            true => error,
            false => error.hint(near.join(", ")),
        }
    }
}

/// Number of lines of the first entry: a node with its regions, or any other line.
fn entry_length(lines: &[&str]) -> usize {
    if !lines[0].trim_start().starts_with('%') {
        return 1;
    }
    let mut n_open = 0i32;
    for (i, line) in lines.iter().enumerate() {
        n_open += i32::from(line.ends_with('{'));
        n_open -= i32::from(line.trim_start().starts_with('}'));
        if n_open <= 0 {
            return i + 1;
        }
    }
    lines.len()
}

/// True for heads and ends of graphs, and for lines outside of them that are about no node.
fn is_frame(entry: &[&str], depth: usize) -> bool {
    let [line] = entry else { return false };
    is_head(line) || is_end(line) || depth == 0 && path(line).is_none()
}

fn depth_after(entry: &[&str], depth: usize) -> usize {
    match entry {
        [line] if is_head(line) => depth + 1,
        [line] if is_end(line) => depth.saturating_sub(1),
        _ => depth,
    }
}

fn is_head(line: &str) -> bool {
    line.ends_with('{')
}

fn is_end(line: &str) -> bool {
    line.trim() == "}"
}

/// Path of the node that a line is about, as it is printed: `%1: f32[2] = neg(%0) @ "/a"`, or `s0 = gm_copy(b0) -> b1  // /a`.
fn path(line: &str) -> Option<&str> {
    if let Some((_, rest)) = line.rsplit_once(" @ \"") {
        let mut quotes = rest.match_indices('"');
        let end = quotes.find(|(at, _)| !rest[..*at].ends_with('\\'))?.0;
        return Some(&rest[..end]);
    }
    let step = line.trim_start().strip_prefix('s')?;
    let (_, path) = step.rsplit_once("  // ")?;
    step.starts_with(|c: char| c.is_ascii_digit())
        .then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(pattern: &str, text: &str) -> String {
        NodeFilter::parse(pattern).unwrap().apply(text).unwrap()
    }

    const GRAPH: &str = r#"graph "g" {
  %0 = input "x": f32[2]
  %1: f32[2] = neg(%0) @ "/a"
  %2: f32[2] = cluster(%1) {kind = map} (graph "body" {
    %0 = input "a0": f32[2]
    %1: f32[2] = exp(%0) @ "/b \"1\""
    %2: f32[2] = if(%1) (graph "then" {
      output "r0" %0
    }) (graph "else" {
      output "r0" %0
    }) @ "/c"
    output "r0" %2
  }) on "/device:CPU:0" @ "/d"
  %3: f32[2] = sin(%2) @ "/a2"
  output "y" %3
}
"#;

    #[test]
    fn nodes_are_whole_and_graphs_keep_their_heads() {
        assert_eq!(
            shown("a$", GRAPH),
            "graph \"g\" {\n  %1: f32[2] = neg(%0) @ \"/a\"\n}\n"
        );
        let first = GRAPH.find("  %2").unwrap();
        let last = GRAPH.find("  %3").unwrap();
        let cluster = format!("graph \"g\" {{\n{}}}\n", &GRAPH[first..last]);
        for pattern in ["/b", "^/c$", "/d"] {
            assert_eq!(shown(pattern, GRAPH), cluster, "{pattern}");
        }
    }

    #[test]
    fn steps_are_found_in_schedules_and_programs() {
        let text = "// /device:CPU:0\nschedule \"g\": 2 steps\n   0: %1+0 = cluster map(%0:in0) @ \"/a\"\n   \
                    1: %2:out0 = cluster map(%1+0) after 0 @ \"/b\"\nprogram \"g\" {\n  input 0 \"x\": f32[2]\n  \
                    partition /device:CPU:0 {\n    b0 \"%0\": f32[2] input 0\n    s0 = v(b0) -> b1  // /a\n    \
                    s1 = v(b1) -> b2 after s0  // /b\n  }\n}\n";
        assert_eq!(
            shown("b", text),
            "// /device:CPU:0\nschedule \"g\": 2 steps\n   1: %2:out0 = cluster map(%1+0) after 0 @ \"/b\"\n\
             program \"g\" {\n  partition /device:CPU:0 {\n    s1 = v(b1) -> b2 after s0  // /b\n  }\n}\n"
        );
        let placed = "placement \"g\": heft\n/device:CPU:0 0 ns..1 ns map @ \"/a\": asked by \"x\"\n/device:CPU:0 1 ns..2 ns map @ \"/b\": only device\n";
        assert_eq!(
            shown("a", placed),
            placed
                .lines()
                .take(2)
                .map(|l| format!("{l}\n"))
                .collect::<String>()
        );
    }

    #[test]
    fn a_pattern_without_a_node_names_the_nearest() {
        let e = NodeFilter::parse("^/a3").unwrap().apply(GRAPH).unwrap_err();
        let text = e.to_string();
        assert!(
            text.starts_with("--node \"^/a3\" matches none of the 5 node paths"),
            "{text}"
        );
        assert!(text.contains("/a2"), "{text}");
        assert!(NodeFilter::parse("(").is_err());
    }
}
