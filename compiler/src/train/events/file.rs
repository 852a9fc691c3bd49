//! The event files of one run: a folder, to which each process of a training adds a file.

use super::proto::{Event, SessionLog, What};
use super::record::{self, Flaw, Records};
use crate::error::{Error, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Names of files: what all readers look for, with the time in ten digits and the writer behind it.
const PREFIX: &str = "events.out.tfevents.";
const WRITER: &str = ".gristmill.";
/// The format: with [`SessionLog`], and with steps that may go back.
const VERSION: &str = "brain.Event:2";
/// A [`SessionLog`] for the beginning of a process.
const START: i32 = 1;

/// An event file in writing.
pub(in crate::train) struct EventFile {
    path: PathBuf,
    file: File,
    /// The length of all whole records.
    n_bytes: u64,
    buffer: Vec<u8>,
}

impl EventFile {
    /// A new file in the folder of a run, which is made if there is none, behind the kept records. True for the first file.
    ///
    /// Errors when the folder has the log of another training.
    pub(in crate::train) fn create(
        folder: &Path,
        training: &str,
        kept: Option<Kept>,
    ) -> Result<(EventFile, bool)> {
        let is_first = ready(folder, training, kept)?;
        let last = kept.map_or(0, |kept| kept.step);
        let created = EventFile::open(folder, training, last);
        Ok((created.map_err(|e| error(folder, e))?, is_first))
    }

    fn open(folder: &Path, training: &str, last: u64) -> io::Result<EventFile> {
        static N_FILES: AtomicU32 = AtomicU32::new(0);
        fs::create_dir_all(folder)?;
        let earlier = event_files(folder)?.last().and_then(|path| seconds(path));
        let now = wall_time() as u64;
        let begin = earlier.map_or(now, |earlier| now.max(earlier + 1));
        let (path, file) = loop {
            let (process, n) = (std::process::id(), N_FILES.fetch_add(1, Ordering::Relaxed));
            let path = folder.join(format!("{PREFIX}{begin:010}{WRITER}{process}.{n}"));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                opened => break (path, opened?),
            }
        };
        let mut file = EventFile {
            path,
            file,
            n_bytes: 0,
            buffer: Vec::new(),
        };
        file.add(0, What::FileVersion(VERSION.to_owned()))?;
        let session = SessionLog {
            status: START,
            msg: training.to_owned(),
        };
        file.add(last + 1, What::Session(session))?;
        Ok(file)
    }

    /// Its path.
    pub(in crate::train) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an event of now. An error leaves the file with whole records.
    pub(super) fn add(&mut self, step: u64, what: What) -> io::Result<()> {
        let event = Event {
            wall_time: wall_time(),
            step: step as i64,
            what: Some(what),
        };
        self.buffer.clear();
        record::append(&event, &mut self.buffer);
        if let Err(e) = self.file.write_all(&self.buffer) {
            // What cannot be cut off is an unfinished record, which readers leave out.
            drop(self.file.set_len(self.n_bytes));
            return Err(e);
        }
        self.n_bytes += self.buffer.len() as u64;
        Ok(())
    }
}

/// Seconds since 1970.
fn wall_time() -> f64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.map_or(0.0, |t| t.as_secs_f64())
}

fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The time in a name.
fn seconds(path: &Path) -> Option<u64> {
    let name = name(path);
    let digits = name.strip_prefix(PREFIX)?.split('.').next()?;
    digits.parse().ok()
}

fn error(path: &Path, e: io::Error) -> Error {
    Error::invalid(format!("{}: {e}", path.display()))
}

/// The event files of a folder, of this and of other writers, in the order in which readers take them. None if there is no folder.
fn event_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if name(&path).contains("tfevents") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The last records that a log keeps when its training goes on.
#[derive(Clone, Copy)]
pub(in crate::train) struct Kept {
    /// Steps up to this one.
    pub(in crate::train) step: u64,
    /// Without the loss of this step, which is that of an epoch and comes again.
    pub(in crate::train) ends_before_loss: bool,
}

impl Kept {
    fn has(self, event: &Event) -> bool {
        let step = event.step as u64;
        match &event.what {
            // What a file begins with stays.
            Some(What::Session(_)) => true,
            Some(What::Summary(s)) if step == self.step && self.ends_before_loss => {
                s.value.iter().all(|value| value.tag != LOSS)
            }
            _ => step <= self.step,
        }
    }
}

/// The tag of a loss.
pub(in crate::train) const LOSS: &str = "loss";

/// Makes a folder ready for the log of a training: records that it does not keep are removed, and unfinished ones. True for a folder without a
/// log.
///
/// Errors when the folder has a log and the training is a new one, or another one than the log's.
fn ready(folder: &Path, training: &str, kept: Option<Kept>) -> Result<bool> {
    let files = event_files(folder).map_err(|e| error(folder, e))?;
    let Some(first) = files.first() else {
        return Ok(true);
    };
    let Some(kept) = kept else {
        let message = format!("{} is of an earlier training", first.display());
        return Err(Error::invalid(message).hint("another folder for the log, or remove this one"));
    };
    for path in &files {
        let is_own =
            name(path).contains(WRITER) && training_of(path)?.is_none_or(|t| t == training);
        if !is_own {
            let message = format!("{} is of another training", path.display());
            let e = Error::invalid(message);
            return Err(
                e.hint("the log of this model, seed, batch size and data, or an empty folder")
            );
        }
    }
    for path in &files {
        cut(path, kept).map_err(|e| error(path, e))?;
    }
    Ok(false)
}

/// The training of a file; `None` when a crash has left the file without it.
fn training_of(path: &Path) -> Result<Option<String>> {
    let bytes = fs::read(path).map_err(|e| error(path, e))?;
    let session = |event: Event| match event.what {
        Some(What::Session(log)) => Some(log.msg),
        _ => None,
    };
    Ok(Records::new(&bytes)
        .map_while(std::result::Result::ok)
        .find_map(session))
}

fn cut(path: &Path, kept: Kept) -> io::Result<()> {
    let bytes = fs::read(path)?;
    let mut records = Records::new(&bytes);
    loop {
        let at = records.at() as u64;
        match records.next() {
            None => return Ok(()),
            Some(Ok(event)) if kept.has(&event) => {}
            Some(_) => return OpenOptions::new().write(true).open(path)?.set_len(at),
        }
    }
}

/// The events of all files of a run, in order. An unfinished record at the end of a file is left out, as a running training has one at times.
///
/// Errors with the file and the place of a damaged record.
pub(super) fn read(folder: &Path) -> Result<Vec<Event>> {
    let mut events = Vec::new();
    for path in event_files(folder).map_err(|e| error(folder, e))? {
        let bytes = fs::read(&path).map_err(|e| error(&path, e))?;
        let mut records = Records::new(&bytes);
        while let Some(event) = records.next() {
            match event {
                Ok(event) => events.push(event),
                Err(Flaw::Unfinished) => break,
                Err(Flaw::Damaged) => {
                    let at = records.at();
                    let message = format!("{}: the record at byte {at} is damaged", path.display());
                    return Err(Error::invalid(message));
                }
            }
        }
    }
    Ok(events)
}
