//! Signals that ask the process to end.

use gristmill::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Exit code of a process that a signal has ended, as shells report it.
pub const INTERRUPTED: i32 = 128 + SIGINT;

/// Is set by each Ctrl-C, by each request to terminate, and by the end of the terminal.
pub fn flag() -> Result<Arc<AtomicBool>> {
    let set = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, set.clone()).map_err(|e| unheard(signal, &e))?;
    }
    Ok(set)
}

fn unheard(signal: i32, e: &std::io::Error) -> Error {
    Error::internal(format!("cannot wait for signal {signal}: {e}"))
}

/// Is set by Ctrl-C, and by a request to terminate; a second one ends the process at once.
pub fn interrupt() -> Result<Arc<AtomicBool>> {
    let interrupt = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let set = flag::register_conditional_shutdown(signal, INTERRUPTED, interrupt.clone())
            .and_then(|_| flag::register(signal, interrupt.clone()));
        set.map_err(|e| unheard(signal, &e))?;
    }
    Ok(interrupt)
}
