//! Opens the image in this executable or library.

use crate::embedded::{Range, embedded};
use gristmill_runtime::image::{Image, Parts};
use gristmill_runtime::{Error, ErrorKind};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The image here, whose code and constants are used where they lie. It is opened once.
///
/// Errors when there is none, when it is damaged, and when this CPU lacks instructions that it needs.
pub fn load() -> Result<Image, Error> {
    let parts = embedded().ok_or_else(|| {
        let message = "there is no model in this file (try: gristmill compile)";
        Error::new(ErrorKind::Unsupported, message)
    })?;
    let file = own_file();
    check_length(file.as_deref())?;
    let table = parts.table;
    let parts = Parts {
        head: bytes(parts.head),
        text: bytes(parts.text),
        table: std::ptr::slice_from_raw_parts_mut(table.start.cast_mut(), table.bytes),
        constants: bytes(parts.constants),
        folder: file.and_then(|p| p.parent().map(Path::to_owned)),
    };
    // SAFETY: the parts are segments of this executable, which its user trusts; each process opens them once.
    unsafe { Image::embedded(parts) }
}

/// The file that holds this code.
#[cfg(unix)]
fn own_file() -> Option<PathBuf> {
    use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
    use std::os::unix::ffi::OsStrExt;

    #[repr(C)]
    struct Info {
        file: *const c_char,
        base: *const c_void,
        symbol: *const c_char,
        address: *const c_void,
    }
    unsafe extern "C" {
        // Of the system's C library.
        fn dladdr(address: *const c_void, info: *mut Info) -> c_int;
    }
    // The runner is the process; its address would give the path that it was called by.
    if option_env!("CARGO_BIN_NAME").is_some() {
        return std::env::current_exe().ok().or_else(called_by);
    }
    let mut info = std::mem::MaybeUninit::<Info>::uninit();
    let here: fn() -> Option<PathBuf> = own_file;
    // SAFETY: the address is that of code, and there is room for the answer.
    let found = unsafe { dladdr(here as *const c_void, info.as_mut_ptr()) };
    if found == 0 {
        return None;
    }
    // SAFETY: it was written, and its name lives as long as this code is loaded.
    let name = unsafe { CStr::from_ptr(info.assume_init().file) };
    Path::new(OsStr::from_bytes(name.to_bytes()))
        .canonicalize()
        .ok()
}

#[cfg(not(unix))]
fn own_file() -> Option<PathBuf> {
    std::env::current_exe().ok()
}

/// The path that this executable was called by, for systems without /proc.
#[cfg(unix)]
fn called_by() -> Option<PathBuf> {
    let path = PathBuf::from(std::env::args_os().next()?);
    let has_folder = path.components().count() > 1;
    has_folder.then(|| path.canonicalize().ok()).flatten()
}

/// Errors for a file whose end is missing, as of a copy that was interrupted: the system maps pages that are not there, and touching them
/// would end the process by a signal.
fn check_length(path: Option<&Path>) -> Result<(), Error> {
    let Some(mut file) = path.and_then(|path| File::open(path).ok()) else {
        return Ok(());
    };
    let mut headers = Vec::new();
    let read = file.by_ref().take(4096).read_to_end(&mut headers);
    let (Ok(_), Ok(metadata)) = (read, file.metadata()) else {
        return Ok(());
    };
    match segments_end(&headers) {
        Some(end) if end > metadata.len() => Err(Error::invalid(format!(
            "the file is damaged: it has {} bytes of at least {end}",
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
