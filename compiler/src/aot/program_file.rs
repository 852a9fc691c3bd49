//! Programs where a model is expected: executables and libraries that hold a compiled one, and all others of the format ELF.

use super::elf::ELF_MAGIC;
use super::fill::{DESCRIPTOR_ALIGN, MAGIC};
use crate::error::Error;
use gristmill_runtime::files;
use std::io::{self, Read};
use std::path::Path;

/// A file of the format ELF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramFile {
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

/// Larger parts are none, but the letters of a program that has the descriptor's magic among its constants.
const MAX_HEAD_BYTES: u64 = 1 << 40;

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
        let mut found = places.filter(|&at| bytes[at..].starts_with(MAGIC));
        let head_bytes = |at: usize| long(at + MAGIC.len() + size_of::<u64>());
        let head_bytes = found
            .find(|&at| head_bytes(at) < MAX_HEAD_BYTES)
            .map(head_bytes);
        // A library begins nowhere.
        match (head_bytes, long(ENTRY)) {
            (None, _) => ProgramFile::Other,
            (Some(0), _) => ProgramFile::Template,
            (Some(_), 0) => ProgramFile::Library,
            (Some(_), _) => ProgramFile::Executable,
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
        bytes[descriptor + 16..descriptor + 24].copy_from_slice(&head_bytes.to_le_bytes());
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
