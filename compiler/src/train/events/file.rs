//! The event files of one run: a folder, to which each process of a training adds a file.

use super::proto::{Event, Number, Payload, SessionLog};
use super::record::{self, Next, Records};
use crate::error::{Error, Result};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Names of files: `events.out.tfevents.TIME.gristmill.PROCESS.NUMBER`, with the time in seconds, in ten digits.
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
    /// Holds the lock of the folder.
    _lock: Option<File>,
}

impl EventFile {
    /// A new file in the folder of a run, which is made if there is none. A training that goes on does so behind the step `last`.
    ///
    /// Errors when another training writes to the folder.
    pub(in crate::train) fn create(folder: &Path, training: &str, last: u64) -> Result<EventFile> {
        let created = EventFile::open(folder, training, last);
        created.map_err(|e| match e.kind() {
            ErrorKind::WouldBlock => {
                let message = format!("{}: another training writes to this log", folder.display());
                Error::invalid(message).hint("another folder for the log")
            }
            _ => error(folder, e),
        })
    }

    fn open(folder: &Path, training: &str, last: u64) -> io::Result<EventFile> {
        static N_FILES: AtomicU32 = AtomicU32::new(0);
        fs::create_dir_all(folder)?;
        let lock = lock(folder)?;
        let earlier = event_files(folder)?.last().and_then(|path| seconds(path));
        let now = wall_time() as u64;
        let begin = earlier.map_or(now, |earlier| now.max(earlier + 1));
        let (path, file) = loop {
            let (process, n) = (std::process::id(), N_FILES.fetch_add(1, Ordering::Relaxed));
            let path = folder.join(format!("{PREFIX}{begin:010}{WRITER}{process}.{n}"));
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                opened => break (path, opened?),
            }
        };
        let mut file = EventFile {
            path,
            file,
            n_bytes: 0,
            buffer: Vec::new(),
            _lock: lock,
        };
        file.add(0, Payload::FileVersion(VERSION.to_owned()))?;
        let session = SessionLog {
            status: START,
            msg: training.to_owned(),
        };
        file.add(last + 1, Payload::Session(session))?;
        Ok(file)
    }

    /// Its path.
    pub(in crate::train) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an event of now. An error leaves the file with whole records.
    pub(super) fn add(&mut self, step: u64, payload: Payload) -> io::Result<()> {
        let event = Event {
            wall_time: wall_time(),
            step: step as i64,
            payload: Some(payload),
        };
        self.buffer.clear();
        record::append(&event, &mut self.buffer);
        if let Err(e) = self.file.write_all(&self.buffer) {
            // Without this cut, the file ends in an unfinished record, which readers leave out.
            drop(self.file.set_len(self.n_bytes));
            return Err(e);
        }
        self.n_bytes += self.buffer.len() as u64;
        Ok(())
    }
}

/// The lock of a folder, until it is dropped. None where folders have no locks. `WouldBlock` when another process has it.
fn lock(folder: &Path) -> io::Result<Option<File>> {
    let file = match File::open(folder) {
        // Other systems do not open folders.
        Err(_) if !cfg!(unix) => return Ok(None),
        opened => opened?,
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(ErrorKind::WouldBlock.into()),
        // Some network file systems have no locks.
        Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => Ok(None),
        Err(TryLockError::Error(e)) => Err(e),
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

/// The training that a log goes on with.
pub(in crate::train) struct GoesOn<'a> {
    /// The training by its facts, as the second record of each file has it.
    pub(in crate::train) training: &'a str,
    /// The first loss of its log as the checkpoint has it, if any yet; `None` for a run without this check.
    pub(in crate::train) first: Option<Option<FirstLoss>>,
    /// The last step to keep.
    pub(in crate::train) step: u64,
    /// True where the loss of that step is of an epoch, and comes again.
    pub(in crate::train) repeats_loss: bool,
}

/// The step and the number of the first loss in a log.
pub(in crate::train) type FirstLoss = (u64, f32);

/// The tag of a loss.
const LOSS: &str = "loss";

impl GoesOn<'_> {
    fn keeps(&self, event: &Event) -> bool {
        let step = event.step as u64;
        match &event.payload {
            // The beginning of a file stays.
            Some(Payload::Session(_)) => true,
            Some(Payload::Summary(_)) if step == self.step && self.repeats_loss => {
                first_loss(event).is_none()
            }
            _ => step <= self.step,
        }
    }
}

/// The loss of a record.
fn first_loss(event: &Event) -> Option<FirstLoss> {
    let Some(Payload::Summary(summary)) = &event.payload else {
        return None;
    };
    let found = summary.value.iter().find(|value| value.tag == LOSS)?;
    match found.number {
        Some(Number::Scalar(x)) => Some((event.step as u64, x)),
        _ => None,
    }
}

/// Parts of the log in a folder.
pub(in crate::train) struct Log {
    files: Vec<PathBuf>,
    /// Lengths of files to cut.
    cuts: Vec<(PathBuf, u64)>,
    /// The first loss to keep.
    first: Option<FirstLoss>,
}

impl Log {
    /// True for a folder without a log.
    pub(in crate::train) fn is_new(&self) -> bool {
        self.files.is_empty()
    }

    /// The first loss of the records to keep.
    pub(in crate::train) fn first(&self) -> Option<FirstLoss> {
        self.first
    }

    /// Checks the folder of a run, and changes nothing. Without a training that goes on, the folder must have no log.
    ///
    /// Errors also when the log is of another training, and with the file and the place of a damaged record.
    pub(in crate::train) fn check(folder: &Path, goes_on: Option<&GoesOn>) -> Result<Log> {
        let files = event_files(folder).map_err(|e| error(folder, e))?;
        let mut log = Log {
            files,
            cuts: Vec::new(),
            first: None,
        };
        let Some(first) = log.files.first() else {
            return Ok(log);
        };
        let Some(goes_on) = goes_on else {
            let message = format!("{} is of an earlier training", first.display());
            let e = Error::invalid(message);
            return Err(e.hint("another folder for the log, or remove this one"));
        };
        let mut seen = false;
        for path in &log.files {
            let mut part = Part {
                goes_on,
                seen: &mut seen,
                kept: &mut log.first,
            };
            if let Some(n_bytes) = part.read(path)? {
                log.cuts.push((path.clone(), n_bytes));
            }
        }
        Ok(log)
    }

    /// Removes the records that a training which goes on does not keep.
    pub(in crate::train) fn cut(&self) -> Result<()> {
        for (path, n_bytes) in &self.cuts {
            let opened = OpenOptions::new().write(true).open(path);
            let cut = opened.and_then(|file| file.set_len(*n_bytes));
            cut.map_err(|e| error(path, e))?;
        }
        Ok(())
    }
}

/// The check of a log, file by file.
struct Part<'a> {
    goes_on: &'a GoesOn<'a>,
    /// True from the first loss on, kept or not.
    seen: &'a mut bool,
    /// The first loss to keep.
    kept: &'a mut Option<FirstLoss>,
}

impl Part<'_> {
    /// The number of bytes to keep of a file; `None` for all.
    fn read(&mut self, path: &Path) -> Result<Option<u64>> {
        if !name(path).contains(WRITER) {
            return Err(another(path));
        }
        let mut records = Records::open(path).map_err(|e| error(path, e))?;
        loop {
            let at = records.at();
            match records.next().map_err(|e| error(path, e))? {
                None => return Ok(None),
                Some(Next::Unfinished) => return Ok(Some(at)),
                Some(Next::Damaged) => return Err(damaged(path, at)),
                Some(Next::Event(event)) => {
                    if !self.is_own(&event) {
                        return Err(another(path));
                    }
                    if !self.goes_on.keeps(&event) {
                        return Ok(Some(at));
                    }
                }
            }
        }
    }

    /// False for a record of another training. Another rate or seed gives another first loss; a log without one in the checkpoint has none
    /// before it.
    fn is_own(&mut self, event: &Event) -> bool {
        if let Some(Payload::Session(session)) = &event.payload {
            return session.msg == self.goes_on.training;
        }
        let (Some(loss), false) = (first_loss(event), *self.seen) else {
            return true;
        };
        *self.seen = true;
        if self.goes_on.keeps(event) {
            *self.kept = Some(loss);
        }
        match self.goes_on.first {
            None => true,
            Some(None) => self.kept.is_none(),
            Some(Some(own)) => (own.0, own.1.to_bits()) == (loss.0, loss.1.to_bits()),
        }
    }
}

fn another(path: &Path) -> Error {
    let message = format!("{} is of another training", path.display());
    Error::invalid(message).hint("go on with the folder of this training's log, or an empty one")
}

fn damaged(path: &Path, at: u64) -> Error {
    let message = format!("{}: the record at byte {at} is damaged", path.display());
    Error::invalid(message).hint("remove the file, or its end from this byte on")
}

/// The events of all files of a run, in order. An unfinished record at the end of a file is left out, as a running training has one at times.
///
/// Errors with the file and the place of a damaged record.
pub(super) fn read(folder: &Path) -> Result<Vec<Event>> {
    let mut events = Vec::new();
    for path in event_files(folder).map_err(|e| error(folder, e))? {
        let mut records = Records::open(&path).map_err(|e| error(&path, e))?;
        loop {
            match records.next().map_err(|e| error(&path, e))? {
                Some(Next::Event(event)) => events.push(event),
                Some(Next::Damaged) => return Err(damaged(&path, records.at())),
                None | Some(Next::Unfinished) => break,
            }
        }
    }
    Ok(events)
}
