//! Rooms of the compiler and of the runtime: arrows between top-level modules of a crate have no circles.

use super::assert_none;
use super::sources::{File, production};
use std::collections::{BTreeMap, BTreeSet};

/// Rooms that each room names.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// Room of a file below the sources of a crate. The crate's root does not count as a room.
fn room<'a>(sources: &str, path: &'a str) -> Option<&'a str> {
    let path = path.strip_prefix(sources)?;
    let first = path.split('/').next()?;
    let room = first.strip_suffix(".rs").unwrap_or(first);
    (!["lib", "main"].contains(&room)).then_some(room)
}

/// First names of all paths that begin at the crate's root: of `crate::a::B` the `a`, of
/// `crate::{a::B, C}` both `a` and `C`.
fn named(source: &str) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    for rest in source.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            names.insert(word(rest));
            continue;
        };
        let mut depth = 0;
        let mut is_start = true;
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => is_start = true,
                c if is_start && !c.is_whitespace() => {
                    names.insert(word(&list[at..]));
                    is_start = false;
                }
                _ => {}
            }
        }
    }
    names
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Rooms of the names that the crate's root re-exports: `pub use options::{AllReduce, Options}`.
fn reexports(root: &str) -> BTreeMap<&str, &str> {
    let mut rooms = BTreeMap::new();
    for rest in root.split("pub use ").skip(1) {
        let Some((path, _)) = rest.split_once(';') else {
            continue;
        };
        let room = word(path);
        for name in path.split(|c: char| !c.is_alphanumeric() && c != '_') {
            if !name.is_empty() && name != room {
                rooms.insert(name, room);
            }
        }
    }
    rooms
}

/// Arrows of a crate whose sources are in a folder, such as `compiler/src/`.
fn arrows(sources: &str) -> Arrows {
    let files: Vec<File> = production()
        .filter(|f| f.path.starts_with(sources))
        .collect();
    let root = files.iter().find(|f| f.path == format!("{sources}lib.rs"));
    let reexports = reexports(&root.expect("the crate has a root").text);
    let rooms: BTreeSet<&str> = files
        .iter()
        .filter_map(|f| room(sources, &f.path))
        .collect();
    let mut arrows = Arrows::new();
    for file in &files {
        let Some(from) = room(sources, &file.path) else {
            continue;
        };
        let code: Vec<&str> = file.text.lines().filter(|l| !is_comment(l)).collect();
        for name in named(&code.join("\n")) {
            let to = *reexports.get(name).unwrap_or(&name);
            if to != from && rooms.contains(to) {
                let targets = arrows.entry(from.into()).or_default();
                targets.insert(to.into());
            }
        }
    }
    arrows
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

/// Rooms that are left after taking away, again and again, those that name none of the others:
/// they are on circles, or lead to one.
fn on_circles(arrows: &Arrows) -> Arrows {
    let mut left = arrows.clone();
    loop {
        let rooms: BTreeSet<String> = left.keys().cloned().collect();
        let before = left.len();
        left.retain(|_, to| !to.is_disjoint(&rooms));
        if left.len() == before {
            return left;
        }
    }
}

#[test]
fn arrows_between_rooms_have_no_circle() {
    let crates = [
        ("compiler/src/", "codegen", "ir"),
        ("runtime/src/", "program", "text"),
    ];
    let mut lines = Vec::new();
    for (sources, from, to) in crates {
        let arrows = arrows(sources);
        assert!(arrows.len() > 10 && arrows[from].contains(to));
        for (from, to) in on_circles(&arrows) {
            lines.push(format!("{sources}{from} names {to:?}"));
        }
    }
    assert_none("break the circle between these rooms", lines);
}

#[test]
fn circles_are_found() {
    let source = "use crate::a::B;\nuse crate::{c::{D, e}, F};\nlet x = crate::g();";
    let names: Vec<&str> = named(source).into_iter().collect();
    assert_eq!(names, ["F", "a", "c", "g"]);
    let root = "pub use options::{AllReduce, Options};\npub use target::TargetCpu;";
    assert_eq!(reexports(root)["Options"], "options");
    let of = |to: &[&str]| to.iter().map(|&t| t.to_owned()).collect();
    let mut arrows: Arrows = BTreeMap::new();
    arrows.insert("a".into(), of(&["b"]));
    arrows.insert("b".into(), of(&["c"]));
    assert!(on_circles(&arrows).is_empty());
    arrows.insert("c".into(), of(&["b"]));
    assert_eq!(on_circles(&arrows).len(), 3);
}
