//! `--timeout`: the end of a run that takes too long, such as that of a loop whose condition never fails.

use crate::output::error;
use gristmill::{Error, ErrorKind};
use gristmill_runtime::units::time_ns;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// The result of `run`. Where that takes longer than `limit`, the process ends with the exit code of
/// a limit that was passed: a kernel in progress cannot be stopped otherwise.
pub fn within<T>(limit: Option<Duration>, run: impl FnOnce() -> T) -> T {
    let Some(limit) = limit else {
        return run();
    };
    let (finished, waits) = channel::<()>();
    thread::spawn(move || {
        if waits.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            let e = late(limit);
            error(&e);
            std::process::exit(e.kind().exit_code().into());
        }
    });
    let result = run();
    drop(finished);
    result
}

fn late(limit: Duration) -> Error {
    let limit = time_ns(limit.as_nanos() as u64);
    let message = format!("the run has not ended after {limit}, the limit of --timeout");
    Error::new(ErrorKind::OutOfMemory, message).hint("a greater --timeout, or none")
}
