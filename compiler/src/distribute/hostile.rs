//! Programs and parts with errors, as a broken or hostile task may send them: each is compiled or refused, and the task goes on.

use super::constants::Digests;
use super::engine::{Compiler, compile};
use super::plan::plan;
use super::text::ProgramText;
use crate::error::{ErrorKind, Result};
use crate::options::Options;
use crate::session::Session;
use crate::testing::{RandomOptions, random_graph};
use crate::testing::{Rng, Setup};
use gristmill_remote::{Document, Engine, PartWire, TaskName};
use std::sync::Arc;

/// Texts with errors for each good one.
const N_MUTANTS: usize = 60;

fn own() -> TaskName {
    TaskName {
        job: "worker".into(),
        task: 0,
    }
}

/// Text with a few errors: bytes that differ, pieces that are gone, twice there or elsewhere, numbers that are large.
fn mutant(text: &str, rng: &mut Rng) -> String {
    const LARGE: [&str; 6] = [
        "0",
        "-1",
        "4294967296",
        "18446744073709551616",
        "99999999999",
        "1e308",
    ];
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..1 + rng.below(3) {
        let (at, n) = (rng.below(bytes.len()), 1 + rng.below(24));
        let end = (at + n).min(bytes.len());
        match rng.below(5) {
            0 => bytes[at] = b"{}[]()\"\\%:,0917ab \n"[rng.below(19)],
            1 => drop(bytes.drain(at..end)),
            2 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            3 => {
                let piece: Vec<u8> = bytes.drain(at..end).collect();
                let to = rng.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            _ => {
                let digit = bytes[at..].iter().position(u8::is_ascii_digit);
                let first = at + digit.unwrap_or(0);
                let digits = bytes[first..].iter().take_while(|b| b.is_ascii_digit());
                let end = first + digits.count();
                bytes.splice(first..end, LARGE[rng.below(LARGE.len())].bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Errors are the sender's, never ours.
fn is_told<T>(result: Result<T>, text: &str) -> bool {
    match result {
        Ok(_) => true,
        Err(e) => {
            assert_ne!(e.kind(), ErrorKind::Internal, "{e}\n{text}");
            false
        }
    }
}

#[test]
fn texts_with_errors_are_compiled_or_refused() {
    let setup = Setup::with_threads(1);
    let session = Session::new(&setup.settings).unwrap();
    let (known, mut rng) = (Digests::default(), Rng(7));
    let devices = Compiler::new(session.clone(), own()).devices();
    let devices = [(own(), devices)];
    let planned = |program: &Document| plan(program, &devices, &setup.settings, &known);
    let (mut n_taken, mut n_refused) = (0, 0);
    let n_seeds = std::env::var("GRISTMILL_TEST_SEEDS").ok();
    let n_seeds = n_seeds.map_or(8, |n| n.parse().unwrap());
    for seed in 0..n_seeds {
        let random = RandomOptions {
            n_variables: 1,
            initial_values: true,
            ..RandomOptions::default()
        };
        let (graph, _) = random_graph(seed, &random);
        let program = ProgramText::document(&graph, &Options::default(), &known).unwrap();
        let part = planned(&program).unwrap().shares[0].part.clone();
        let compiled = |part: &Document| {
            // A session of its own: variables of other types are no error of the text.
            let session = Session::new(&setup.settings)?;
            compile(&session, part, &known, Arc::new(PartWire::default()))
        };
        compiled(&part).unwrap();
        for _ in 0..N_MUTANTS {
            for (document, is_part) in [(&program, false), (&part, true)] {
                let text = mutant(document.text(), &mut rng);
                let document = Document::new(text.as_str(), document.constants().clone());
                let is_taken = match is_part {
                    true => is_told(compiled(&document), &text),
                    false => is_told(planned(&document), &text),
                };
                *(if is_taken {
                    &mut n_taken
                } else {
                    &mut n_refused
                }) += 1;
            }
        }
    }
    assert!(
        n_taken > 20 && n_refused > 200,
        "{n_taken} taken, {n_refused} refused"
    );
}

#[test]
fn deep_and_long_texts_are_refused() {
    let known = Digests::default();
    let program = |graph: &str| {
        let small = random_graph(1, &RandomOptions::default()).0;
        let document = ProgramText::document(&small, &Options::default(), &known).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(document.text()).unwrap();
        json["graph"] = graph.into();
        ProgramText::parse(&Document::from(json.to_string()), &known)
    };
    let deep = |open: &str, close: &str| {
        let n = 100_000;
        format!(
            "graph \"g\" {{ %0 = input \"x\": f32[{}{}]",
            open.repeat(n),
            close.repeat(n)
        )
    };
    for (open, close) in [
        ("[", "]"),
        ("(", ")"),
        ("(1 + ", ")"),
        ("min(1, ", ")"),
        ("-", ""),
    ] {
        let refused = program(&deep(open, close)).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput, "{open}");
    }
    let regions = "graph \"g\" { %0: f32[] = loop() (".repeat(100_000);
    assert_eq!(
        program(&regions).err().unwrap().kind(),
        ErrorKind::InvalidInput
    );
    let inputs = (0..=1_000_000).map(|i| format!("%{i}=input\"{i}\":f32[]"));
    let many = program(&format!("graph \"g\" {{{}", inputs.collect::<String>()));
    let many = many.err().unwrap();
    assert!(
        many.to_string().contains("more than 1000000 nodes"),
        "{many}"
    );
    let json = "[".repeat(100_000);
    let refused = ProgramText::parse(&Document::from(json), &known).err();
    assert_eq!(refused.unwrap().kind(), ErrorKind::InvalidInput);
}
