//! Errors as numbers, with a message for each thread.

use gristmill_runtime::{Error, ErrorKind};
use std::cell::Cell;
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// Bytes of a message, its final 0 included; longer ones are cut.
const ROOM: usize = 1024;

thread_local! {
    /// Without a destructor, so that the library can be unloaded while threads that used it live on.
    static MESSAGE: Cell<[u8; ROOM]> = const { Cell::new([0; ROOM]) };
}

/// Runs a function of the interface; its result as a number.
pub fn guarded(f: impl FnOnce() -> Result<(), Error>) -> u32 {
    static SILENT: Once = Once::new();
    // Of this library's own standard library: hosts keep theirs.
    SILENT.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let error = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(payload) => {
            let text = payload.downcast_ref::<String>().cloned();
            let text = text.or_else(|| payload.downcast_ref::<&str>().map(|&s| s.to_owned()));
            let text = text.unwrap_or_else(|| "a panic without a message".to_owned());
            Error::new(ErrorKind::Internal, format!("a bug in gristmill: {text}"))
        }
    };
    keep(&error.to_string());
    u32::from(error.kind().exit_code())
}

fn keep(text: &str) {
    let mut end = text.len().min(ROOM - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = [0; ROOM];
    let without_ends = text.bytes().take(end).map(|b| b.max(1));
    bytes
        .iter_mut()
        .zip(without_ends)
        .for_each(|(to, from)| *to = from);
    MESSAGE.set(bytes);
}

/// The message of this thread's last error, good until its next one.
pub fn last() -> *const c_char {
    MESSAGE.with(|message| message.as_ptr().cast())
}
