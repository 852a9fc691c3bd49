//! Standard output and standard error: results, warnings and errors.

use crate::error::ErrorKind;
use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of one line of an error, and lines of an error, that are printed; the rest is counted.
const MAX_LINE_BYTES: usize = 4000;
const MAX_ERROR_LINES: usize = 60;

/// True when labels on standard error are coloured.
static IS_COLORED: AtomicBool = AtomicBool::new(false);

/// True when the process goes on after the reader of standard output has gone.
static OUTLIVES_READER: AtomicBool = AtomicBool::new(false);

/// From here on, a reader of standard output that goes away does not end the process: results on it are dropped. For long work that writes files.
pub fn outlive_reader() {
    OUTLIVES_READER.store(true, Ordering::Relaxed);
}

/// Colours labels on standard error from here on, or does not.
pub fn color(is_colored: bool) {
    IS_COLORED.store(is_colored, Ordering::Relaxed);
}

/// Prints lines of results on standard output. A failed write ends the process, unless [`outlive_reader`] was called and the reader has gone.
pub fn text(lines: &str) {
    unescaped(&escaped(lines));
}

/// The same for text in which control characters cannot stand for themselves, such as JSON.
pub fn unescaped(lines: &str) {
    let mut out = io::stdout().lock();
    if let Err(e) = out
        .write_all(lines.as_bytes())
        .and_then(|()| out.write_all(b"\n"))
    {
        failed(&e);
    }
}

/// Writes out all results. Called at the end, since buffered ones are otherwise lost without a word.
pub fn flush() {
    if let Err(e) = io::stdout().flush() {
        failed(&e);
    }
}

fn failed(e: &io::Error) {
    let has_gone = e.kind() == io::ErrorKind::BrokenPipe;
    if !(has_gone && OUTLIVES_READER.load(Ordering::Relaxed)) {
        stop(e);
    }
}

/// Ends the process after a failed write of results: quietly when the reader has gone, as `head` does.
pub fn stop(e: &io::Error) -> ! {
    if e.kind() == io::ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    error(format_args!("cannot write to standard output: {e}"));
    std::process::exit(i32::from(ErrorKind::InvalidInput.exit_code()));
}

/// Prints lines on standard error. There is nowhere to report a failure to.
pub fn message(lines: &str) {
    let _ = writeln!(io::stderr(), "{}", escaped(lines));
}

/// Prints a warning.
pub fn warning(text: impl fmt::Display) {
    labelled("warning", "33", &text.to_string());
}

/// Prints an error, shortened where it is very long.
pub fn error(text: impl fmt::Display) {
    labelled("error", "31", &shortened(&text.to_string()));
}

fn labelled(label: &str, color: &str, text: &str) {
    let text = escaped(text);
    // One write, so that lines of several threads do not mix.
    let line = if IS_COLORED.load(Ordering::Relaxed) {
        format!("\x1b[1;{color}m{label}:\x1b[0m {text}\n")
    } else {
        format!("{label}: {text}\n")
    };
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Text whose control characters, except for line feeds and tabs, are escaped: names in a model must not move the cursor.
fn escaped(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_harmful(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// The first lines of an error and the last, which has the hint, each without its middle if it is long.
fn shortened(text: &str) -> String {
    let lines: Vec<&str> = text.split('\n').collect();
    let n_first = lines.len().min(MAX_ERROR_LINES);
    let mut out = String::new();
    for line in &lines[..n_first] {
        out += &without_middle(line);
        out.push('\n');
    }
    if let Some((last, dropped)) = lines[n_first..].split_last() {
        if !dropped.is_empty() {
            let _ = writeln!(out, "  .. {} more lines ..", dropped.len());
        }
        out += &without_middle(last);
    }
    out.truncate(out.trim_end().len());
    out
}

fn without_middle(line: &str) -> Cow<'_, str> {
    if line.len() <= MAX_LINE_BYTES {
        return Cow::Borrowed(line);
    }
    let start = line.floor_char_boundary(MAX_LINE_BYTES * 3 / 4);
    let end = line.ceil_char_boundary(line.len() - MAX_LINE_BYTES / 4);
    Cow::Owned(format!(
        "{} .. {} more bytes .. {}",
        &line[..start],
        end - start,
        &line[end..]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_lines_stay() {
        assert_eq!(escaped("a\n\tb"), "a\n\tb");
        assert_eq!(escaped("\x1b[2J\r\u{9b}é"), "\\u{1b}[2J\\r\\u{9b}é");
    }

    #[test]
    fn long_errors_keep_their_start_and_their_hint() {
        assert_eq!(shortened("a\nb (try: c)"), "a\nb (try: c)");
        let long = format!("{}end (try: c)", "line\n".repeat(1000));
        let text = shortened(&long);
        assert!(
            text.ends_with("  .. 940 more lines ..\nend (try: c)"),
            "{text}"
        );
        assert_eq!(text.lines().count(), MAX_ERROR_LINES + 2);
        let long = format!("start {} (try: c)", "é".repeat(100_000));
        let text = shortened(&long);
        assert!(text.len() < MAX_LINE_BYTES + 50, "{}", text.len());
        assert!(text.starts_with("start é") && text.ends_with("é (try: c)"));
    }
}
