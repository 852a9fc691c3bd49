//! Programs and parts with errors, as a broken or hostile task may send them: each is compiled or refused, and the task goes on.

use super::constants::Digests;
use super::engine::{Compiler, compile};
use super::plan::plan;
use super::text::ProgramText;
use crate::error::{Error, ErrorKind, Result};
use crate::options::Options;
use crate::session::Session;
use crate::testing::{RandomOptions, random_graph};
use crate::testing::{Rng, Setup};
use gristmill_remote::{DeviceInfo, Document, Engine, Made, Plan, TaskName};
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

/// A task that divides and compiles texts.
struct Own {
    setup: Setup,
    known: Digests,
    devices: Vec<(TaskName, Vec<DeviceInfo>)>,
}

impl Own {
    fn new() -> Own {
        let setup = Setup::with_threads(1);
        let session = Session::new(&setup.settings).unwrap();
        let devices = Compiler::new(session, own()).devices();
        Own {
            setup,
            known: Digests::default(),
            devices: vec![(own(), devices)],
        }
    }

    fn divided(&self, program: &Document) -> Result<Plan> {
        plan(program, &self.devices, &self.setup.settings, &self.known)
    }

    fn compiled(&self, part: &Document) -> Result<Made> {
        // A session of its own: variables of other types are no error of the text.
        let session = Session::new(&self.setup.settings)?;
        compile(&session, part, &self.known, Arc::default())
    }
}

/// With the variable GRISTMILL_TEST_SEEDS, errors in the texts of so many graphs.
#[test]
fn texts_with_errors_are_compiled_or_refused() {
    let (own, mut rng) = (Own::new(), Rng(7));
    let n_seeds = std::env::var("GRISTMILL_TEST_SEEDS").map_or(8, |n| n.parse().unwrap());
    let (mut n_taken, mut n_refused) = (0, 0);
    let random = RandomOptions {
        n_variables: 1,
        initial_values: true,
        ..RandomOptions::default()
    };
    for seed in 0..n_seeds {
        let (graph, _) = random_graph(seed, &random);
        let program = ProgramText::document(&graph, &Options::default(), &own.known).unwrap();
        let part = own.divided(&program).unwrap().shares[0].part.clone();
        own.compiled(&part).unwrap();
        for i in 0..2 * N_MUTANTS {
            let document = if i % 2 == 0 { &program } else { &part };
            let text = mutant(document.text(), &mut rng);
            let document = Document::new(text.as_str(), document.constants().clone());
            let is_taken = match i % 2 {
                0 => is_told(own.divided(&document), &text),
                _ => is_told(own.compiled(&document), &text),
            };
            n_taken += usize::from(is_taken);
            n_refused += usize::from(!is_taken);
        }
    }
    let counts = format!("{n_taken} taken, {n_refused} refused");
    assert!(n_taken > 20 && n_refused > 200, "{counts}");
}

/// The error of a program with this text for its graph.
fn refused(graph: &str) -> Error {
    let known = Digests::default();
    let small = random_graph(1, &RandomOptions::default()).0;
    let document = ProgramText::document(&small, &Options::default(), &known).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(document.text()).unwrap();
    json["graph"] = graph.into();
    let parsed = ProgramText::parse(&Document::from(json.to_string()), &known);
    parsed.err().unwrap()
}

#[test]
fn deep_texts_are_refused() {
    let brackets = [
        ("[", "]"),
        ("(", ")"),
        ("(1 + ", ")"),
        ("min(1, ", ")"),
        ("-", ""),
    ];
    for (open, close) in brackets {
        let (open, close) = (open.repeat(100_000), close.repeat(100_000));
        let graph = format!("graph \"g\" {{ %0 = input \"x\": f32[{open}{close}]");
        assert_eq!(refused(&graph).kind(), ErrorKind::InvalidInput);
    }
    let regions = "graph \"g\" { %0: f32[] = loop() (".repeat(100_000);
    assert_eq!(refused(&regions).kind(), ErrorKind::InvalidInput);
    let json = ProgramText::parse(&Document::from("[".repeat(100_000)), &Digests::default());
    assert_eq!(json.err().unwrap().kind(), ErrorKind::InvalidInput);
}

#[test]
fn long_texts_are_refused() {
    let inputs = (0..=1_000_000).map(|i| format!("%{i}=input\"{i}\":f32[]"));
    let many = refused(&format!("graph \"g\" {{{}", inputs.collect::<String>()));
    assert!(many.message().contains("more than 1000000 nodes"), "{many}");
}
