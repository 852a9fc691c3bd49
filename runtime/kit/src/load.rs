//! Opens the image in this executable.

use crate::embedded::{Parts, Range, embedded};
use gristmill_runtime::image::Image;
use gristmill_runtime::{Error, ErrorKind};

/// The image in this executable. Errors when there is none, when it is damaged, and when this CPU lacks what it needs.
pub fn load() -> Result<Image, Error> {
    let parts = embedded().ok_or_else(|| {
        let message = "there is no model in this executable (try: gristmill compile)";
        Error::new(ErrorKind::Unsupported, message)
    })?;
    // SAFETY: the parts are those of this executable, which its user trusts.
    unsafe { Image::from_bytes(&joined(&parts)?) }
}

/// Bytes of the size of an image in its head.
const TOTAL: std::ops::Range<usize> = 16..24;

/// The parts at their places in the file that they were written to.
fn joined(parts: &Parts) -> Result<Vec<u8>, Error> {
    let damaged = || Error::invalid("the image in this executable is damaged");
    let [head, text, constants] = [parts.head, parts.text, parts.constants].map(bytes);
    let total = head.get(TOTAL).and_then(|total| total.try_into().ok());
    let total = u64::from_le_bytes(total.ok_or_else(damaged)?) as usize;
    let gap = total.checked_sub(head.len() + text.len() + constants.len());
    let gap = gap.filter(|&gap| gap < MAX_GAP).ok_or_else(damaged)?;
    let mut image = Vec::with_capacity(total);
    image.extend(head);
    image.extend(text);
    image.resize(image.len() + gap, 0);
    image.extend(constants);
    Ok(image)
}

/// Constants begin at the next large page.
const MAX_GAP: usize = 64 << 10;

fn bytes(range: Range) -> &'static [u8] {
    // SAFETY: the range is a segment of this executable, which stays mapped.
    unsafe { std::slice::from_raw_parts(range.start, range.bytes) }
}
