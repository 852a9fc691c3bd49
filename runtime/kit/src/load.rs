//! Opens the image in this executable.

use crate::embedded::{Range, embedded};
use gristmill_runtime::image::{Image, Parts};
use gristmill_runtime::{Error, ErrorKind};
use std::path::Path;

/// The image in this executable, whose code and constants are used where they lie. It is opened once.
///
/// Errors when there is none, when it is damaged, and when this CPU lacks instructions that it needs.
pub fn load() -> Result<Image, Error> {
    let parts = embedded().ok_or_else(|| {
        let message = "there is no model in this executable (try: gristmill compile)";
        Error::new(ErrorKind::Unsupported, message)
    })?;
    let table = parts.table;
    let program = std::env::current_exe().ok();
    let parts = Parts {
        head: bytes(parts.head),
        text: bytes(parts.text),
        table: std::ptr::slice_from_raw_parts_mut(table.start.cast_mut(), table.bytes),
        constants: bytes(parts.constants),
        folder: program.and_then(|p| p.parent().map(Path::to_owned)),
    };
    // SAFETY: the parts are segments of this executable, which its user trusts; each command opens them once.
    unsafe { Image::embedded(parts) }
}

fn bytes(range: Range) -> &'static [u8] {
    // SAFETY: the range is a segment of this executable, which stays mapped.
    unsafe { std::slice::from_raw_parts(range.start, range.bytes) }
}
