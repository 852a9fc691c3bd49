//! README and guide against the binary: flags exist, files of the formats are accepted, links lead
//! to sections.

use crate::process::{gristmill, kit};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// README and the pages of the guide.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let folder = root.join("compiler/src/guide");
    let entries = fs::read_dir(folder).expect("the guide is there");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("the guide is readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "md"))
        .collect();
    paths.push(root.join("README.md"));
    paths.sort();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("pages are text");
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// Blocks of a page that are fenced with the name of a language.
fn fenced<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let bodies = page.split(&fence).skip(1);
    bodies.filter_map(|b| b.split("```").next()).collect()
}

fn page(name: &str) -> String {
    let found = pages().into_iter().find(|(path, _)| path.ends_with(name));
    found.expect("the page is there").1
}

/// Flags that a command gives to a verb.
fn verb_and_flags(command: &str) -> Option<(String, Vec<String>)> {
    let arguments = match command.strip_prefix("gristmill ") {
        Some(rest) => rest,
        None => command.strip_prefix("cargo run ")?.split_once(" -- ")?.1,
    };
    let mut words = arguments.split('#').next()?.split_whitespace();
    let verb = words.next()?.to_owned();
    let flags = words.filter(|w| w.starts_with("--")).map(str::to_owned);
    Some((verb, flags.collect()))
}

#[test]
fn commands_have_the_flags_that_pages_give_them() {
    let mut helps: BTreeMap<String, String> = BTreeMap::new();
    let mut n_flags = 0;
    for (path, text) in pages() {
        for command in fenced(&text, "sh").into_iter().flat_map(str::lines) {
            let Some((verb, flags)) = verb_and_flags(command) else {
                continue;
            };
            let help = helps.entry(verb.clone()).or_insert_with(|| {
                let ended = gristmill(Path::new("."), &[&verb, "--help"]);
                assert_eq!(ended.code, Some(0), "{verb}: {}", ended.stderr);
                ended.stdout
            });
            for flag in flags {
                let is_known = help.split_whitespace().any(|w| w == flag);
                assert!(is_known, "{}: {command}: no {flag}", path.display());
                n_flags += 1;
            }
        }
    }
    assert!(n_flags > 20, "{n_flags} flags");
}

#[test]
fn every_flag_in_the_prose_belongs_to_a_verb() {
    let verbs = [
        "run",
        "compile",
        "bench",
        "dump",
        "place",
        "calibrate",
        "devices",
        "variables",
        "server",
        "keys",
        "launch",
        "train",
        "check",
    ];
    let of_verb = |verb: &&str| gristmill(Path::new("."), &[*verb, "--help"]).stdout;
    let mut helps: Vec<String> = verbs.iter().map(of_verb).collect();
    // Executables have flags of their own.
    let runner = Path::new(kit()).join("gristmill-runner");
    let usage = std::process::Command::new(runner).arg("--help").output();
    helps.push(String::from_utf8(usage.unwrap().stdout).unwrap());
    let is_known = |flag: &str| {
        let mut words = helps.iter().flat_map(|help| help.split_whitespace());
        words.any(|word| word.trim_end_matches(',') == flag)
    };
    // Flags of cargo.
    let foreign = [
        "--release",
        "--workspace",
        "--features",
        "--path",
        "--no-deps",
        "--open",
        "--example",
        "--profile",
        "--package",
    ];
    let mut n_flags = 0;
    for (path, text) in pages() {
        let codes = text.split('`').skip(1).step_by(2);
        for word in codes.flat_map(str::split_whitespace) {
            let is_flag = word.strip_prefix("--").is_some_and(|name| !name.is_empty());
            if is_flag && !foreign.contains(&word) {
                assert!(is_known(word), "{}: {word}", path.display());
                n_flags += 1;
            }
        }
    }
    assert!(n_flags > 40, "{n_flags} flags");
}

#[test]
fn the_bare_problem_of_the_guide_is_solved() {
    let text = page("placement.md");
    let files = fenced(&text, "json");
    let [graph, topology] = files[..] else {
        panic!("a graph and a topology, not {} files", files.len());
    };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("graph.json"), graph).unwrap();
    fs::write(folder.path().join("devices.json"), topology).unwrap();
    let arguments = [
        "place",
        "--task-graph",
        "graph.json",
        "--topology",
        "devices.json",
    ];
    let ended = gristmill(folder.path(), &arguments);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("10.90 us"), "{}", ended.stdout);
}

#[test]
fn the_machine_of_the_guide_is_planned_for() {
    let text = page("placement.md");
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("machine.toml"), fenced(&text, "toml")[0]).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/digits/model.onnx");
    let model = model.to_str().expect("the checkout's path is text");
    let arguments = [
        "place",
        model,
        "--set",
        "batch=8",
        "--target",
        "machine.toml",
    ];
    let ended = gristmill(folder.path(), &arguments);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for device in ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"] {
        assert!(ended.stdout.contains(device), "{}", ended.stdout);
    }
}

/// The text form of the guide runs as a model.
#[test]
fn the_graph_of_the_guide_runs() {
    let text = page("command_line.md");
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("layer.ir"), fenced(&text, "text")[0]).unwrap();
    let ended = gristmill(folder.path(), &["run", "layer.ir", "--set", "batch=2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("y: f32[2, 3]"), "{}", ended.stdout);
}

#[test]
fn links_to_sections_have_their_headings() {
    let is_heading = |page: &str, anchor: &str| {
        let headings = page.lines().filter_map(|l| l.strip_prefix('#'));
        let slugs = headings.map(|h| h.trim_matches(['#', ' ']).to_lowercase().replace(' ', "-"));
        slugs.into_iter().any(|slug| slug == anchor)
    };
    let mut n_links = 0;
    for (path, text) in pages() {
        let targets = text.split("](").skip(1).filter_map(|t| t.split(')').next());
        for (file, anchor) in targets.filter_map(|t| t.split_once('#')) {
            let name = file.rsplit(['/', ':']).next().unwrap_or(file);
            let target = page(&format!("{}.md", name.trim_end_matches(".md")));
            assert!(
                is_heading(&target, anchor),
                "{}: {file}#{anchor}",
                path.display()
            );
            n_links += 1;
        }
    }
    assert!(n_links >= 4, "{n_links} links");
}
