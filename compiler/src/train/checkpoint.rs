//! Checkpoints: the whole state of training, in one file each.

use super::data::{Batches, Dataset};
use super::fit_state::{self, FitState};
use super::trainer::Trainer;
use crate::error::{Error, Result};
use crate::ir::Type;
use gristmill_runtime::files;
use gristmill_runtime::safetensors::{self, Notes, Saved, label};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A folder with the newest checkpoints of one training.
///
/// A file `step-NUMBER.safetensors` has the variables, the slots of the optimiser, averages and the number of steps, and in its notes the
/// [`Position`] in the data. The writer syncs a temporary file, renames it, and removes older checkpoints only then: the last finished
/// checkpoint survives a crash at any time.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    n_kept: usize,
    facts: Notes,
}

/// Names of files: the kind, the number of steps, and the ending.
const STEP: &str = "step-";
const WEIGHTS: &str = "weights-";
const ENDING: &str = ".safetensors";

/// The position of training in its data: the batches of [`Dataset::shuffled`] so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Seed of the order of examples.
    pub seed: u64,
    /// Number of examples.
    pub n_examples: u64,
    /// Examples of a batch.
    pub batch_size: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// Completed batches of the epoch.
    pub n_batches: u64,
}

/// A loaded checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// Its file.
    pub path: PathBuf,
    /// The position in the data.
    pub position: Position,
    /// Damaged newer files, with the reason.
    pub damaged: Vec<String>,
    /// The state of the `fit` around the trainer.
    pub(super) state: FitState,
    /// Steps of the trainer at its time.
    pub(super) n_steps: u64,
}

/// The contents of a file in the making.
pub(super) struct Snapshot<'a> {
    pub(super) trainer: &'a Trainer,
    pub(super) position: &'a Position,
    pub(super) state: &'a FitState,
    /// Without the optimiser's state and all that a training goes on from.
    pub(super) weights_alone: bool,
}

impl Snapshot<'_> {
    /// Writes a file with notes of its own.
    pub(super) fn write(&self, mut notes: Notes, path: &Path) -> Result<()> {
        self.trainer.check_finite()?;
        check_names(&notes, self.trainer.state())?;
        if self.weights_alone {
            return write(path, &self.trainer.weights()?, &notes);
        }
        let is_own = |container: &str, name: &str| {
            let state = self.trainer.state();
            state.contains_key(&key(container, name))
        };
        let mut values = self.trainer.resources().values(is_own)?;
        if values.len() < self.trainer.state().len() {
            let e = Error::invalid("variables have no values before the first step");
            return Err(e.hint("a checkpoint after a step"));
        }
        values.extend(self.state.tensors());
        notes.extend(self.position.notes());
        notes.insert(fit_state::NOTE.to_owned(), self.state.note()?);
        write(path, &values, &notes)
    }
}

/// Writes a file, and brings its name to the disk.
fn write(path: &Path, values: &[Saved], notes: &Notes) -> Result<()> {
    safetensors::write(path, values, notes)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    let synced = sync(folder.unwrap_or(Path::new(".")));
    synced.map_err(|e| Error::invalid(format!("{}: {e}", path.display())))
}

impl Position {
    /// The beginning of a data set.
    pub fn start(data: &dyn Dataset, batch_size: usize, seed: u64) -> Position {
        Position {
            seed,
            n_examples: data.len() as u64,
            batch_size: batch_size as u64,
            epoch: 0,
            n_batches: 0,
        }
    }

    /// The remaining batches of the epoch.
    ///
    /// Errors when the data set has another number of examples than the position's.
    pub fn rest<'d>(&self, data: &'d dyn Dataset) -> Result<Batches<'d>> {
        if data.len() as u64 != self.n_examples {
            let (n, own) = (data.len(), self.n_examples);
            let message = format!("a data set of {n} examples, the checkpoint's had {own}");
            return Err(Error::invalid(message));
        }
        let mut batches = Batches::shuffled(data, self.batch_size as usize, self.seed, self.epoch);
        batches.skip_batches(self.n_batches as usize);
        Ok(batches)
    }

    /// Begins the next epoch.
    pub fn next_epoch(&mut self) {
        self.epoch += 1;
        self.n_batches = 0;
    }

    fn fields(&self) -> [(&'static str, u64); 5] {
        [
            ("seed", self.seed),
            ("examples", self.n_examples),
            ("batch size", self.batch_size),
            ("epoch", self.epoch),
            ("batches", self.n_batches),
        ]
    }

    fn notes(&self) -> Notes {
        let fields = self.fields().into_iter();
        let texts = fields.map(|(name, value)| (name.to_owned(), value.to_string()));
        texts.collect()
    }

    fn of(notes: &Notes) -> Result<Position> {
        let field = |name: &str| {
            let text = notes.get(name);
            let value = text.and_then(|text| text.parse::<u64>().ok());
            value.ok_or_else(|| {
                Error::invalid(format!(
                    "not a checkpoint: its notes lack the number {name:?}"
                ))
            })
        };
        Ok(Position {
            seed: field("seed")?,
            n_examples: field("examples")?,
            batch_size: field("batch size")?,
            epoch: field("epoch")?,
            n_batches: field("batches")?,
        })
    }
}

impl Checkpoints {
    /// The checkpoints of a folder. Creates a missing folder, keeps the newest `n_kept` checkpoints (at least one), and removes unfinished
    /// files of killed processes, but none that another process is still writing.
    pub fn new(folder: impl Into<PathBuf>, n_kept: usize) -> Result<Checkpoints> {
        let checkpoints = Checkpoints {
            folder: folder.into(),
            n_kept: n_kept.max(1),
            facts: Notes::new(),
        };
        fs::create_dir_all(&checkpoints.folder).map_err(|e| checkpoints.error(e))?;
        files::remove_unfinished(&checkpoints.folder).map_err(|e| checkpoints.error(e))?;
        Ok(checkpoints)
    }

    /// Facts about the training by name, such as [`TensorDataset::digest`](super::TensorDataset::digest) of its data. Checkpoints have them in their notes, and [`Checkpoints::resume`]
    /// refuses one that has another fact of a name. The names `seed`, `examples`, `batch size`, `epoch`, `batches` and `fit` are taken: with them, a
    /// checkpoint cannot be saved.
    pub fn with_facts(self, facts: BTreeMap<String, String>) -> Checkpoints {
        Checkpoints { facts, ..self }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a checkpoint and removes old ones. Returns the path of the new file.
    ///
    /// Errors with `NotFinite` when a weight is NaN or infinite, and with `InvalidInput` before the first step and when the file cannot be
    /// written.
    pub fn save(&self, trainer: &Trainer, position: &Position) -> Result<PathBuf> {
        self.add(&Snapshot {
            trainer,
            position,
            state: &FitState::default(),
            weights_alone: false,
        })
    }

    /// Writes a file and removes old ones of its kind. Returns its path.
    pub(super) fn add(&self, snapshot: &Snapshot) -> Result<PathBuf> {
        let kind = match snapshot.weights_alone {
            true => WEIGHTS,
            false => STEP,
        };
        let step = snapshot.trainer.n_steps()?;
        let path = self.folder.join(format!("{kind}{step:012}{ENDING}"));
        snapshot.write(self.facts.clone(), &path)?;
        let mut old = self.named(kind)?;
        old.retain(|file| *file < path);
        for old in old.into_iter().rev().skip(self.n_kept - 1) {
            fs::remove_file(old).map_err(|e| self.error(e))?;
        }
        Ok(path)
    }

    /// Loads the newest undamaged checkpoint; `None` if the folder has no checkpoints.
    ///
    /// Errors, and changes nothing, when all checkpoints are damaged, or the newest undamaged one is of another model or has other facts.
    pub fn resume(&self, trainer: &Trainer) -> Result<Option<Resumed>> {
        let mut damaged = Vec::new();
        for path in self.files()?.into_iter().rev() {
            match safetensors::read(&path) {
                Ok(contents) => {
                    let resumed = self.restore(trainer, &path, contents);
                    let resumed = resumed.map_err(|e| e.context(path.display()))?;
                    return Ok(Some(Resumed { damaged, ..resumed }));
                }
                Err(e) => damaged.push(e.to_string()),
            }
        }
        none_whole(&damaged).map_or(Ok(None), Err)
    }

    /// Loads a checkpoint from a file, such as the best one of a [`ModelCheckpoint`](super::ModelCheckpoint).
    ///
    /// Errors, and changes nothing, when it is damaged, of another model, or has other facts, or weights alone.
    pub fn resume_from(&self, trainer: &Trainer, path: impl AsRef<Path>) -> Result<Resumed> {
        let path = path.as_ref();
        let resumed = self.restore(trainer, path, safetensors::read(path)?);
        resumed.map_err(|e| e.context(path.display()))
    }

    /// The files of checkpoints, oldest first.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        self.named(STEP)
    }

    /// The files of a kind, oldest first.
    fn named(&self, kind: &str) -> Result<Vec<PathBuf>> {
        let mut names = self.names()?;
        names.retain(|name| name.starts_with(kind) && name.ends_with(ENDING));
        names.sort();
        Ok(names.iter().map(|name| self.folder.join(name)).collect())
    }

    /// Errors when the folder has files of an earlier training, with which a new one must not mix its own.
    pub fn check_unused(&self) -> Result<()> {
        if self.files()?.is_empty() && self.named(WEIGHTS)?.is_empty() {
            return Ok(());
        }
        let folder = self.folder.display();
        Err(Error::invalid(format!(
            "{folder} has checkpoints of an earlier training"
        )))
    }

    fn restore(
        &self,
        trainer: &Trainer,
        path: &Path,
        mut contents: safetensors::Contents,
    ) -> Result<Resumed> {
        let position = Position::of(&contents.notes)?;
        let state = FitState::of(&mut contents)?;
        check(trainer.state(), &contents.variables)?;
        self.check_facts(&contents.notes)?;
        trainer.resources().restore(contents.variables)?;
        Ok(Resumed {
            path: path.to_owned(),
            position,
            damaged: Vec::new(),
            state,
            n_steps: trainer.n_steps()?,
        })
    }

    /// Errors when notes have another fact of a name. Checkpoints of earlier versions have none.
    fn check_facts(&self, notes: &Notes) -> Result<()> {
        for (name, here) in &self.facts {
            if let Some(there) = notes.get(name).filter(|there| *there != here) {
                let e = Error::invalid(format!(
                    "a checkpoint of another training: {name} was {there}, here it is {here}"
                ));
                return Err(e.hint("another folder of checkpoints"));
            }
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>> {
        let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().into_string().ok());
        let entries = fs::read_dir(&self.folder).map_err(|e| self.error(e))?;
        let names: io::Result<Vec<Option<String>>> = entries.map(name).collect();
        Ok(names
            .map_err(|e| self.error(e))?
            .into_iter()
            .flatten()
            .collect())
    }

    fn error(&self, e: io::Error) -> Error {
        Error::invalid(format!("{}: {e}", self.folder.display()))
    }
}

/// The newest undamaged file of a folder: a checkpoint, or weights alone, as a [`ModelCheckpoint`](super::ModelCheckpoint) writes them.
/// `None` if there is none. [`Trainer::load_weights`] takes it.
///
/// Errors when the folder cannot be read, and when all of its files are damaged.
pub fn latest_checkpoint(folder: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    let folder = folder.as_ref();
    let error = |e: io::Error| Error::invalid(format!("{}: {e}", folder.display()));
    let mut files: Vec<(String, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder).map_err(error)? {
        let path = entry.map_err(error)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let stem = name.and_then(|name| name.strip_suffix(ENDING));
        let step = stem.and_then(|s| s.strip_prefix(STEP).or(s.strip_prefix(WEIGHTS)));
        files.extend(step.map(|step| (step.to_owned(), path.clone())));
    }
    files.sort();
    let mut damaged = Vec::new();
    for (_, path) in files.into_iter().rev() {
        match safetensors::read(&path) {
            Ok(_) => return Ok(Some(path)),
            Err(e) => damaged.push(e.to_string()),
        }
    }
    none_whole(&damaged).map_or(Ok(None), Err)
}

/// The error of a folder whose files are all damaged; `None` without files.
fn none_whole(damaged: &[String]) -> Option<Error> {
    let all = damaged.join("; ");
    let error = || Error::invalid(format!("no checkpoint is whole: {all}"));
    (!damaged.is_empty()).then(error)
}

impl Trainer {
    /// Loads the model's variables and their averages from a checkpoint or a file of weights, and nothing else: the optimiser's state stays.
    /// Averages that the file lacks become the weights.
    ///
    /// Errors with `InvalidInput`, and changes nothing, when the file is damaged, lacks a variable, or has it with another type.
    pub fn load_weights(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let contents = safetensors::read(path)?;
        let values = self.weights_of(contents.variables);
        let values = values.map_err(|e| e.context(path.display()))?;
        self.resources().restore(values)?;
        self.note_averages();
        Ok(())
    }

    fn weights_of(&self, saved: Vec<Saved>) -> Result<Vec<Saved>> {
        let found = |container: &str, name: &str| {
            let mut saved = saved.iter();
            saved.find(|s| s.container == container && s.name == name)
        };
        // Before the first step, averages have no value yet.
        let step = saved.iter().find(|s| s.name == crate::ir::random::STEP);
        let is_new = step.is_some_and(|s| s.value.to_f64s() == [0.0]);
        let mut values = Vec::new();
        let own = self.state().iter();
        for ((container, name), ty) in own.filter(|((c, n), _)| self.is_weight(c, n)) {
            let weight = name.strip_prefix("average/");
            let own = match weight {
                Some(_) if is_new => None,
                _ => found(container, name),
            };
            let value = own.or_else(|| found(container, weight?));
            let Some(value) = value else {
                let name = label(container, name);
                return Err(Error::invalid(format!("it lacks the variable {name:?}")));
            };
            check_type(ty, value).map_err(Error::invalid)?;
            values.push(Saved {
                container: container.clone(),
                name: name.clone(),
                value: value.value.clone(),
            });
        }
        Ok(values)
    }
}

/// Brings names of files to the disk.
fn sync(folder: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => fs::File::open(folder)?.sync_all(),
        false => Ok(()),
    }
}

fn key(container: &str, name: &str) -> (String, String) {
    (container.to_owned(), name.to_owned())
}

/// Errors when facts or a container have names that files need for themselves.
fn check_names(facts: &Notes, state: &BTreeMap<(String, String), Type>) -> Result<()> {
    let position = Position::default().fields().map(|(name, _)| name);
    let mut reserved = position.into_iter().chain([fit_state::NOTE]);
    if let Some(name) = reserved.find(|name| facts.contains_key(*name)) {
        let e = Error::invalid(format!("checkpoints have a note {name:?} of their own"));
        return Err(e.hint("another name for this fact"));
    }
    match state.keys().any(|(c, _)| c == fit_state::CONTAINER) {
        true => {
            let name = fit_state::CONTAINER;
            let e = Error::invalid(format!(
                "checkpoints have a container {name:?} of their own"
            ));
            Err(e.hint("another name for the container"))
        }
        false => Ok(()),
    }
}

/// Says what is wrong with a value of another type.
fn check_type(ty: &Type, saved: &Saved) -> Result<(), String> {
    let (dtype, shape) = (saved.value.dtype(), saved.value.shape());
    match ty.dtype == dtype && ty.static_shape().as_deref() == Some(shape) {
        true => Ok(()),
        false => {
            let name = label(&saved.container, &saved.name);
            Err(format!("its {name:?} is {dtype}{shape:?}, expected {ty}"))
        }
    }
}

/// Errors unless the values match exactly these variables.
fn check(state: &BTreeMap<(String, String), Type>, values: &[Saved]) -> Result<()> {
    let of_another = |what: String| {
        let e = Error::invalid(format!(
            "a checkpoint of another model or optimiser: {what}"
        ));
        Err(e.hint("another folder of checkpoints"))
    };
    for saved in values {
        let name = label(&saved.container, &saved.name);
        let Some(ty) = state.get(&key(&saved.container, &saved.name)) else {
            return of_another(format!(
                "it has a variable {name:?}, which the trainer lacks"
            ));
        };
        check_type(ty, saved).or_else(of_another)?;
    }
    let has = |(container, name): &(String, String)| {
        let mut values = values.iter();
        values.any(|s| (&s.container, &s.name) == (container, name))
    };
    match state.keys().find(|key| !has(key)) {
        Some((container, name)) => {
            let name = label(container, name);
            of_another(format!("it lacks the variable {name:?}"))
        }
        None => Ok(()),
    }
}
