//! Lines of results and messages, and the colours of their labels.

use clap::{ColorChoice, ValueEnum};
use gristmill::Result;
use gristmill_runtime::command::output::color;
pub use gristmill_runtime::command::output::{
    error, flush, message, outlive_reader, stop, text, unescaped, warning,
};
use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering};

/// Prints a line of results on standard output.
macro_rules! outln {
    ($($arg:tt)*) => { $crate::output::text(&format!($($arg)*)) };
}
/// Prints a line on standard error.
macro_rules! errln {
    ($($arg:tt)*) => { $crate::output::message(&format!($($arg)*)) };
}
/// Prints a note on standard error, unless `--quiet` is given.
macro_rules! noteln {
    ($($arg:tt)*) => { $crate::output::note(&format!($($arg)*)) };
}
pub(crate) use {errln, noteln, outln};

/// `--quiet`.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Prints no notes and no progress from here on.
pub fn be_quiet() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

/// True after [`be_quiet`].
pub fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// Prints lines on standard error, unless `--quiet` is given.
pub fn note(lines: &str) {
    if !is_quiet() {
        message(lines);
    }
}

/// Prints warnings.
pub fn warnings(list: &[String]) {
    list.iter().for_each(warning);
}

/// `--perf`: names kernels for `perf` from here on, and says where.
pub fn name_kernels(is_wanted: bool) -> Result<()> {
    if is_wanted {
        let path = gristmill_runtime::perf::start()?;
        noteln!("kernels are named in {}", path.display());
    }
    Ok(())
}

/// `--color`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Color {
    /// The choice among the arguments of this process, before they are parsed: errors of parsing are coloured too.
    pub fn of_arguments(arguments: impl Iterator<Item = std::ffi::OsString>) -> Color {
        let texts: Vec<String> = arguments.filter_map(|a| a.into_string().ok()).collect();
        let pairs = texts.windows(2).filter(|pair| pair[0] == "--color");
        let values = pairs.map(|pair| pair[1].as_str());
        let joined = texts
            .iter()
            .filter_map(|text| text.strip_prefix("--color="));
        let chosen = values.chain(joined).last().unwrap_or_default();
        Color::from_str(chosen, false).unwrap_or(Color::Auto)
    }

    /// The same for the parser of arguments.
    pub fn choice(self) -> ColorChoice {
        match self {
            Color::Auto => ColorChoice::Auto,
            Color::Always => ColorChoice::Always,
            Color::Never => ColorChoice::Never,
        }
    }

    /// Colours labels from here on, or does not.
    pub fn apply(self) {
        let is_colored = match self {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                let is_refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
                io::stderr().is_terminal() && !is_refused
            }
        };
        color(is_colored);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_color_is_found_among_the_arguments() {
        let color = |list: &[&str]| Color::of_arguments(list.iter().map(std::ffi::OsString::from));
        assert_eq!(color(&["run", "m", "--color", "never"]), Color::Never);
        assert_eq!(color(&["run", "--color=always", "m"]), Color::Always);
        assert_eq!(color(&["run", "--color", "blue"]), Color::Auto);
    }
}
