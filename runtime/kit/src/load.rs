//! Opens the image in this executable.

use crate::embedded::{Range, embedded};
use gristmill_runtime::image::{Image, Parts};
use gristmill_runtime::{Error, ErrorKind};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The image in this executable, whose code and constants are used where they lie. It is opened once.
///
/// Errors when there is none, when it is damaged, and when this CPU lacks instructions that it needs.
pub fn load() -> Result<Image, Error> {
    let parts = embedded().ok_or_else(|| {
        let message = "there is no model in this executable (try: gristmill compile)";
        Error::new(ErrorKind::Unsupported, message)
    })?;
    check_length()?;
    let table = parts.table;
    let parts = Parts {
        head: bytes(parts.head),
        text: bytes(parts.text),
        table: std::ptr::slice_from_raw_parts_mut(table.start.cast_mut(), table.bytes),
        constants: bytes(parts.constants),
        folder: folder(),
    };
    // SAFETY: the parts are segments of this executable, which its user trusts; each command opens them once.
    unsafe { Image::embedded(parts) }
}

/// The folder of this executable. Without /proc, that of the path that it was called by.
fn folder() -> Option<PathBuf> {
    let called = || {
        let path = PathBuf::from(std::env::args_os().next()?);
        let has_folder = path.components().count() > 1;
        has_folder.then(|| path.canonicalize().ok()).flatten()
    };
    let program = std::env::current_exe().ok().or_else(called);
    program.and_then(|p| p.parent().map(Path::to_owned))
}

/// Errors for an executable whose end is missing, as of a copy that was interrupted: the system maps what is not there, and touching it would
/// end the process by a signal.
fn check_length() -> Result<(), Error> {
    let Ok(mut file) = File::open("/proc/self/exe") else {
        return Ok(());
    };
    let mut headers = Vec::new();
    let read = file.by_ref().take(4096).read_to_end(&mut headers);
    let (Ok(_), Ok(metadata)) = (read, file.metadata()) else {
        return Ok(());
    };
    match segments_end(&headers) {
        Some(end) if end > metadata.len() => Err(Error::invalid(format!(
            "this executable is damaged: it has {} bytes of at least {end}",
            metadata.len()
        ))),
        _ => Ok(()),
    }
}

/// The end in the file of all that the system maps, by the headers at its start.
fn segments_end(headers: &[u8]) -> Option<u64> {
    let long = |at: usize| Some(u64::from_le_bytes(*headers.get(at..)?.first_chunk()?));
    let half = |at: usize| Some(u16::from_le_bytes(*headers.get(at..)?.first_chunk()?));
    let (table, n) = (usize::try_from(long(32)?).ok()?, half(56)?);
    let ends = (0..usize::from(n)).map(|i| {
        let entry = table.checked_add(i * 56)?;
        long(entry + 8)?.checked_add(long(entry + 32)?)
    });
    ends.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

fn bytes(range: Range) -> &'static [u8] {
    // SAFETY: the range is a segment of this executable, which stays mapped.
    unsafe { std::slice::from_raw_parts(range.start, range.bytes) }
}
