//! Opens the image in this executable or library.

use crate::embedded::{Range, embedded};
use gristmill_runtime::image::{Image, Parts};
use gristmill_runtime::{Error, ErrorKind};
use std::path::{Path, PathBuf};

/// The image here, whose code and constants are used where they lie. It is opened once.
///
/// Errors when there is none, when it is damaged, and when this CPU lacks instructions that it needs.
pub fn load() -> Result<Image, Error> {
    let parts = embedded().ok_or_else(|| {
        let message = "there is no model in this file (try: gristmill compile)";
        Error::new(ErrorKind::Unsupported, message)
    })?;
    let table = parts.table;
    let parts = Parts {
        head: bytes(parts.head),
        text: bytes(parts.text),
        table: std::ptr::slice_from_raw_parts_mut(table.start.cast_mut(), table.bytes),
        constants: bytes(parts.constants),
        folder: own_file().and_then(|p| p.parent().map(Path::to_owned)),
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
    if cfg!(target_feature = "crt-static") {
        return std::env::current_exe().ok();
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

fn bytes(range: Range) -> &'static [u8] {
    // SAFETY: the range is a segment of this executable, which stays mapped.
    unsafe { std::slice::from_raw_parts(range.start, range.bytes) }
}
