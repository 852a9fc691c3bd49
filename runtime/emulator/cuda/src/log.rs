//! Log of the driver's calls in a file that tests read.
//!
//! A line is the name of a function and those of its arguments that are numbers or handles, with the number of the current context:
//! `cuGraphLaunch context=1 graph=4352 stream=4112`. A launch is followed by `kernel NAME`, a copy from or to memory that is not pinned by `pageable`
//! and the function.

use crate::world::{self, Settings};
use std::ffi::{c_int, c_uint};
use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;

/// Calls that programs make all the time, and that ask for nothing.
const LEFT_OUT: [&str; 4] = [
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuGetErrorName",
    "cuGetErrorString",
];

/// Adds a call.
pub fn call(name: &str, arguments: &[(&str, Option<u64>)]) {
    let Some(file) = file().filter(|_| !LEFT_OUT.contains(&name)) else {
        return;
    };
    let numbers = arguments
        .iter()
        .filter_map(|(name, n)| Some(format!(" {name}={}", (*n)?)));
    write(
        file,
        &format!(
            "{name} context={}{}",
            world::current(),
            numbers.collect::<String>()
        ),
    );
}

/// Adds a note to the last call.
pub fn note(what: &str, text: &str) {
    file()
        .iter()
        .for_each(|file| write(file, &format!("{what} {text}")));
}

/// A line at once, so that those of several threads do not mix. A log that cannot be written is no reason for a driver to fail.
fn write(mut file: &File, line: &str) {
    let _ = file.write_all(format!("{line}\n").as_bytes());
}

fn file() -> Option<&'static File> {
    static LOG: OnceLock<Option<File>> = OnceLock::new();
    let open = || {
        let path = Settings::of_process().ok()?.log?;
        File::options().create(true).append(true).open(path).ok()
    };
    LOG.get_or_init(open).as_ref()
}

/// An argument of a function.
pub trait Argument {
    /// The number to be shown, if any.
    fn number(&self) -> Option<u64> {
        None
    }
}

macro_rules! numbers {
    ($($ty:ty)*) => {$(
        impl Argument for $ty {
            fn number(&self) -> Option<u64> {
                Some(*self as u64)
            }
        }
    )*};
}

numbers!(c_int c_uint u8 u64 usize);

impl<T> Argument for *const T {}
impl<T> Argument for *mut T {}
impl<T> Argument for Option<T> {}
