//! Rooms of the compiler: arrows between its top-level modules have no circles.

use super::assert_none;
use super::sources::{File, production};
use std::collections::{BTreeMap, BTreeSet};

/// Rooms that each room names.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// Room of a file below `compiler/src`; the crate's root is no room.
fn room(path: &str) -> Option<&str> {
    let path = path.strip_prefix("compiler/src/")?;
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

fn arrows() -> Arrows {
    let files: Vec<File> = production().collect();
    let root = files.iter().find(|f| f.path == "compiler/src/lib.rs");
    let reexports = reexports(&root.expect("the compiler has a root").text);
    let rooms: BTreeSet<&str> = files.iter().filter_map(|f| room(&f.path)).collect();
    let mut arrows = Arrows::new();
    for file in &files {
        let Some(from) = room(&file.path) else {
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
    let arrows = arrows();
    assert!(arrows.len() > 10 && arrows["codegen"].contains("ir"));
    let left = on_circles(&arrows);
    let lines = left.iter().map(|(from, to)| format!("{from} names {to:?}"));
    assert_none("break the circle between these rooms", lines.collect());
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
