//! Programs where a model is expected: executables and libraries that hold a compiled one, and all others of the format ELF.

use super::elf::ELF_MAGIC;
use super::embedding::{DESCRIPTOR_ALIGN, MAGIC};
use crate::error::Error;
use gristmill_runtime::files;
use std::io::{self, Read};
use std::path::Path;

/// A file of the format ELF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramFile {
    /// An executable with a model.
    Executable,
    /// A shared library with a model.
    Library,
    /// A file of the kit, without a model.
    Template,
    /// Any other.
    Other,
}

/// The descriptor is in front of the model, in a part of some MB.
const SEARCHED_BYTES: u64 = 64 << 20;

/// Larger numbers are none, but the letters of a program that has the descriptor's magic among its constants.
const MAX_NUMBER: u64 = 1 << 40;

/// Numbers of a descriptor: the distance and the size of each part, of which the first is the head.
const N_NUMBERS: usize = 8;

impl ProgramFile {
    /// Its kind, if the file is one. `None` also for a file that cannot be read: its reader says why.
    pub fn of(path: &Path) -> Option<ProgramFile> {
        let read = files::open(path).and_then(begin);
        read.ok()
            .flatten()
            .map(|bytes| ProgramFile::of_bytes(&bytes))
    }

    fn of_bytes(bytes: &[u8]) -> ProgramFile {
        let long = |at: usize| {
            let long = bytes.get(at..).and_then(|rest| rest.first_chunk());
            long.map_or(0, |&long| u64::from_le_bytes(long))
        };
        let places = (0..bytes.len()).step_by(DESCRIPTOR_ALIGN);
        let found = places.filter(|&at| bytes[at..].starts_with(MAGIC));
        let numbers = |at: usize| -> [u64; N_NUMBERS] {
            std::array::from_fn(|i| long(at + MAGIC.len() + i * size_of::<u64>()))
        };
        let has_model = found.filter_map(|at| has_model(numbers(at))).next();
        // A library begins nowhere.
        match (has_model, long(ENTRY)) {
            (None, _) => ProgramFile::Other,
            (Some(false), _) => ProgramFile::Template,
            (Some(true), 0) => ProgramFile::Library,
            (Some(true), _) => ProgramFile::Executable,
        }
    }

    /// An error for its use as a model.
    pub fn error(self) -> Error {
        let (message, hint) = match self {
            ProgramFile::Executable => (
                "an executable that holds a compiled model and runs by itself",
                "it describes itself with --info, and lists its flags with --help",
            ),
            ProgramFile::Library => (
                "a shared library that holds a compiled model, for programs",
                "the header NAME.h and the Python module NAME.py beside it call it",
            ),
            ProgramFile::Template => (
                "a file of the kit, which holds no model",
                "gristmill compile MODEL -o NAME makes an executable of it",
            ),
            ProgramFile::Other => return Error::invalid("an ELF file, not a model"),
        };
        Error::invalid(message).hint(hint)
    }
}

/// `Some(true)` for the descriptor of a model, `Some(false)` for one that is still empty, `None` for other bytes.
fn has_model(numbers: [u64; N_NUMBERS]) -> Option<bool> {
    let distances = || numbers.iter().step_by(2);
    let is_filled = numbers[1] > 0 && distances().all(|&d| d > 0);
    let is_empty = numbers.iter().all(|&n| n == 0);
    let are_numbers = numbers.iter().all(|&n| n < MAX_NUMBER);
    (are_numbers && (is_filled || is_empty)).then_some(is_filled)
}

/// Place of the entry point in the header.
const ENTRY: usize = 24;

/// The first part of a file of the format ELF.
fn begin(mut file: std::fs::File) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; ELF_MAGIC.len()];
    file.read_exact(&mut bytes)?;
    if bytes != ELF_MAGIC {
        return Ok(None);
    }
    file.take(SEARCHED_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header, and a descriptor behind other bytes of its magic.
    fn file(entry: u64, head_bytes: u64) -> Vec<u8> {
        let mut bytes = vec![0; 8 * DESCRIPTOR_ALIGN];
        bytes[..4].copy_from_slice(&ELF_MAGIC);
        bytes[ENTRY..ENTRY + 8].copy_from_slice(&entry.to_le_bytes());
        let [unaligned, letters, descriptor] = [70, 128, 256];
        bytes[unaligned..unaligned + 8].copy_from_slice(MAGIC);
        bytes[letters..letters + 24].copy_from_slice(b"GMDESCR1it has no descri");
        bytes[descriptor..descriptor + 8].copy_from_slice(MAGIC);
        let distance = u64::from(head_bytes > 0) * 4096;
        for (i, n) in [distance, head_bytes, distance, 0, distance, 0, distance, 0]
            .iter()
            .enumerate()
        {
            bytes[descriptor + 8 + 8 * i..][..8].copy_from_slice(&n.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn programs_are_told_apart() {
        assert_eq!(ProgramFile::of_bytes(&file(64, 9)), ProgramFile::Executable);
        assert_eq!(ProgramFile::of_bytes(&file(0, 9)), ProgramFile::Library);
        assert_eq!(ProgramFile::of_bytes(&file(64, 0)), ProgramFile::Template);
        for end in [4, 20, 64, 256] {
            let part = &file(64, 9)[..end];
            assert_eq!(ProgramFile::of_bytes(part), ProgramFile::Other);
        }
    }
}
