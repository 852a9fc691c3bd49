//! One self-contained page: a timeline to zoom into, memory over time, and the explanation of each
//! node. It needs no network.
//!
//! [`chart`] is the data that the page's script draws on a canvas; [`sections`] are tables and nodes,
//! which are readable without the script. A bar leads to the explanation of its node by `#n7`, the
//! node's number.

mod chart;
mod sections;

use super::{Explanation, StreamUse, Subject};
use crate::cost::Nanos;
use crate::units::printable;
use chart::{Chart, counted};
use sections::Sections;

const TEMPLATE: &str = include_str!("html/page.html");
const STYLE: &str = include_str!("html/page.css");
const SCRIPT: &str = include_str!("html/page.js");

/// Facts of the problem and the command, by name.
pub type Header<'a> = &'a [(&'static str, String)];

/// The page of a placement with its explanation; `file` is the name of the model's file.
pub fn page(s: &Subject, e: &Explanation, file: &str, header: Header) -> String {
    let (file, graph) = (escaped(file), escaped(s.name));
    let title = match graph.is_empty() {
        true => file.clone(),
        false => format!("{file}: {graph}"),
    };
    let (sections, chart) = (Sections::new(s, e), Chart::new(s, e));
    filled(&[
        ("title", &title),
        ("file", &file),
        ("graph", &graph),
        ("style", STYLE),
        ("script", SCRIPT),
        ("setup", &list("setup", header)),
        ("facts", &facts(s, e)),
        ("legend", &chart.legend()),
        ("data", &chart.json()),
        ("tables", &sections.tables()),
        ("number_of_nodes", &counted(e.nodes.len(), "node")),
        ("nodes", &sections.nodes()),
    ])
}

/// The template with values for its names; the values are not looked at.
fn filled(values: &[(&str, &str)]) -> String {
    let mut parts = TEMPLATE.split("{{");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("}}").expect("every name is closed");
        let value = values.iter().find(|v| v.0 == name);
        out.push_str(value.expect("every name has a value").1);
        out.push_str(rest);
    }
    out
}

/// The result in a few words: time, bound, and period of a stream.
fn facts(s: &Subject, e: &Explanation) -> String {
    let solution = s.solution;
    let (bound, name) = (solution.lower_bound, &solution.bound);
    let mut facts = vec![
        ("time of a run", solution.timeline.makespan.to_string()),
        ("algorithm", solution.algorithm.clone()),
        ("lower bound", format!("{bound} ({name})")),
    ];
    facts.extend(
        s.sources
            .map(|sources| ("predicted times", sources.to_string())),
    );
    facts.extend(e.stream.iter().flat_map(stream_facts));
    list("facts", &facts)
}

/// A list of names and values; the values are text.
fn list(id: &str, facts: &[(&str, String)]) -> String {
    let fact = |(name, value): &(&str, String)| {
        format!("<div><dt>{name}</dt><dd>{}</dd></div>", escaped(value))
    };
    let facts: String = facts.iter().map(fact).collect();
    format!("<dl id=\"{id}\">{facts}</dl>")
}

fn stream_facts(stream: &StreamUse) -> [(&'static str, String); 5] {
    let [period, time, bound] =
        [stream.period_ns, stream.time_ns, stream.lower_bound_ns].map(|ns| Nanos(ns).to_string());
    [
        ("period", period),
        ("stream", format!("{} runs in {time}", stream.samples)),
        ("lower bound of the stream", bound),
        ("runs in flight", stream.in_flight.to_string()),
        ("bottleneck", stream.bottleneck.clone()),
    ]
}

/// Text on one line in which nothing is markup.
fn escaped(text: &str) -> String {
    let text = printable(text);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
