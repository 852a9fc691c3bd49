//! A line of progress for work of unknown length.

use crate::output::{is_quiet, note};
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::RefCell;
use std::time::Duration;

/// Time between two frames.
const FRAME: Duration = Duration::from_millis(120);

/// A line with the time that has passed, which goes away at the end. Where standard error is not a terminal: one note.
#[derive(Default)]
pub struct Spinner {
    bar: RefCell<Option<ProgressBar>>,
}

impl Spinner {
    /// Says which work begins.
    pub fn begin(&self, text: &str) {
        let bar = ProgressBar::new_spinner();
        if is_quiet() || bar.is_hidden() {
            return note(text);
        }
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}, {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(text.to_owned());
        bar.enable_steady_tick(FRAME);
        *self.bar.borrow_mut() = Some(bar);
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
