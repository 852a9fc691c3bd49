//! Executables with flipped bits, and without their ends: checked parts are refused by a sentence, and no damage to a model ends a process by
//! a signal.

use super::{compiled, data, run};
use crate::process::kit;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An executable of the digits.
struct Digits {
    /// Removed at the end.
    _folder: tempfile::TempDir,
    program: PathBuf,
    /// Places of head, text, table and constants in the file, which are its last segments.
    parts: [Range<u64>; 4],
    bytes: u64,
    /// Outcome of a run without damage.
    whole: String,
}

const FLAGS: [&str; 4] = ["--inputs", "batch.npz", "--labels", "labels.npy"];

impl Digits {
    fn new() -> Digits {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("digits");
        let output = ["-o", program.to_str().unwrap(), "--kit", kit()];
        let words = ["compile", "model.onnx", "--set", "batch=360"];
        compiled(&data("digits"), &[&words[..], &output].concat());
        let mut digits = Digits {
            parts: parts(&program),
            bytes: std::fs::metadata(&program).unwrap().len(),
            whole: String::new(),
            program,
            _folder: folder,
        };
        let (code, out, err) = digits.run();
        assert_eq!(code, Some(0), "{err}");
        digits.whole = out;
        digits
    }

    /// Exit code, results without times, and errors.
    fn run(&self) -> (Option<i32>, String, String) {
        let (code, out, err) = run(&self.program, &data("digits"), &FLAGS);
        let results = out.lines().filter(|line| !line.starts_with("opened in"));
        (code, results.collect(), err)
    }

    fn file(&self) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).open(&self.program).unwrap()
    }

    fn flip(&self, at: u64, bit: u32) {
        let mut file = self.file();
        let mut byte = [0];
        file.seek(SeekFrom::Start(at)).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(&[byte[0] ^ 1 << bit]).unwrap();
    }

    /// Runs with each of some bits flipped; gives the outcomes with their places.
    fn flipped(&self, places: impl Iterator<Item = u64>) -> Vec<(u64, Option<i32>, String)> {
        let outcome = |(i, at): (usize, u64)| {
            let bit = i as u32 % 8;
            self.flip(at, bit);
            let (code, out, err) = self.run();
            self.flip(at, bit);
            let text = match code {
                Some(0) => out,
                _ => err,
            };
            (at, code, text)
        };
        places.enumerate().map(outcome).collect()
    }
}

/// The places of the last four segments that are loaded.
fn parts(program: &Path) -> [Range<u64>; 4] {
    let bytes = std::fs::read(program).unwrap();
    let long = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let n = usize::from(u16::from_le_bytes(*bytes[56..].first_chunk().unwrap()));
    let entries = (0..n).map(|i| long(32) as usize + i * 56);
    let loaded = entries.filter(|&at| bytes[at..at + 4] == [1, 0, 0, 0]);
    let mut ranges: Vec<_> = loaded
        .map(|at| long(at + 8)..long(at + 8) + long(at + 32))
        .collect();
    ranges.sort_by_key(|range| range.start);
    let parts: [Range<u64>; 4] = ranges.split_off(ranges.len() - 4).try_into().unwrap();
    assert!(bytes[parts[0].start as usize..].starts_with(b"GMIMAGE\0"));
    parts
}

/// Some places of a range: its ends, and others between them at even distances.
fn spread(range: &Range<u64>, n: u64) -> impl Iterator<Item = u64> {
    let (start, last) = (range.start, range.end - 1 - range.start);
    (0..n).map(move |i| start + last * i / (n - 1))
}

#[test]
fn damage_is_refused_or_harmless() {
    let digits = Digits::new();
    let [head, text, table, constants] = digits.parts.clone();
    let is_refused = |code: Option<i32>, said: &str| match code {
        Some(2) => said.contains("is damaged") || said.contains("no image of gristmill"),
        Some(3) => said.contains("the image"),
        _ => false,
    };
    // Header with table of sections; then names and programs, with gaps between them that nothing reads.
    let header = head.start..head.start + 40 + 4 * 24;
    for (at, code, said) in digits.flipped(spread(&header, 14)) {
        assert!(is_refused(code, &said), "header, {at}: {code:?} {said}");
    }
    let mut n_refused = 0;
    for (at, code, said) in digits.flipped(spread(&head, 10)) {
        let is_whole = code == Some(0) && said == digits.whole;
        n_refused += usize::from(!is_whole);
        assert!(
            is_whole || is_refused(code, &said),
            "head, {at}: {code:?} {said}"
        );
    }
    assert!(n_refused > 5, "{n_refused} of the head are refused");
    for (at, code, said) in digits.flipped(spread(&text, 10)) {
        let is_refused = code == Some(2) && said.contains("the checksum of its text differs");
        assert!(is_refused, "text, {at}: {code:?} {said}");
    }
    // The table is written when the image is opened, and symbols are for debuggers.
    let symbols = constants.end..digits.bytes;
    let unread = spread(&table, 5).chain(spread(&symbols, 5));
    for (at, code, said) in digits.flipped(unread) {
        assert!(
            code == Some(0) && said == digits.whole,
            "{at}: {code:?} {said}"
        );
    }
    // Constants are not checked when an image is opened: other weights give other results. Kernels check the descriptors among them.
    for (at, code, said) in digits.flipped(spread(&constants, 8)) {
        let is_descriptor = code == Some(1) && said.contains("a malformed descriptor");
        assert!(
            code == Some(0) || is_descriptor,
            "constants, {at}: {code:?} {said}"
        );
    }
    assert_eq!(digits.run().1, digits.whole, "all damage was undone");
    check_ends(&digits);
}

/// Takes more and more of the end away.
fn check_ends(digits: &Digits) {
    let model = digits.parts[0].start..digits.parts[3].end;
    let mut ends: Vec<u64> = spread(&model, 8).collect();
    ends.extend(digits.parts.iter().skip(1).map(|part| part.start));
    ends.extend([digits.bytes - 1, model.end]);
    ends.sort_unstable();
    for end in ends.into_iter().rev() {
        digits.file().set_len(end).unwrap();
        let (code, out, err) = digits.run();
        match end >= model.end {
            true => assert!(code == Some(0) && out == digits.whole, "{end}: {err}"),
            false => assert!(
                code == Some(2) && err.contains("is damaged"),
                "{end}: {code:?} {err}"
            ),
        }
    }
}
