//! Values of constants: held in memory, or made from a file and other constants when they are needed.
//!
//! Large weights pass through the compiler without their elements: the ops that folding applies to them (a transpose, a factor, a
//! concatenation) is noted down, and done when code generation packs the result. So one weight per thread of code generation
//! is in memory at a time, besides those of the program.

use super::ops::Op;
use super::scalar::ScalarOp;
use crate::error::{Error, Result};
use gristmill_runtime::sync::lock;
use gristmill_runtime::tensor::{Spares, WeakTensor, checked_size_bytes};
use gristmill_runtime::{DType, Tensor};
use std::cmp::Ordering;
use std::fmt;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

/// Size from which a constant is worth making late.
pub const DEFER_BYTES: usize = 1 << 16;
/// Ops that making one constant may take; beyond, the result is computed at once, since a shared operand is made for each use.
const MAX_OPS: usize = 12;

/// A constant's value. Held ones are equal and hashed by content, others by how they are made.
#[derive(Clone)]
pub struct ConstData(Arc<Repr>);

/// Bytes as integers: products of bytes are written with these.
pub const WIDEN: &Op = &Op::Map(ScalarOp::Cast(DType::I32));

enum Repr {
    Held(Tensor),
    Deferred(Box<Deferred>),
}

struct Deferred {
    dtype: DType,
    shape: Vec<usize>,
    source: Source,
    n_ops: usize,
    /// The tensor made last: shared while somebody holds it.
    made: Mutex<Option<WeakTensor>>,
}

#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Source {
    /// Bytes of a file.
    Stored(Stored),
    /// The result of an op.
    Made { op: Op, operands: Vec<ConstData> },
}

/// A file that constants are read from; it stays open, so that it may be removed meanwhile.
pub struct DataFile {
    path: PathBuf,
    /// Number of the opening: another one of the same path may find other bytes.
    number: u64,
    len_bytes: u64,
    file: File,
    /// Held by readers where reading moves a position of the file.
    #[cfg(not(unix))]
    position: Mutex<()>,
}

impl DataFile {
    /// Opens a file.
    pub fn open(path: &Path) -> std::io::Result<DataFile> {
        static N_OPENED: AtomicU64 = AtomicU64::new(0);
        let file = File::open(path)?;
        Ok(DataFile {
            path: path.to_owned(),
            number: N_OPENED.fetch_add(1, Relaxed),
            len_bytes: file.metadata()?.len(),
            file,
            #[cfg(not(unix))]
            position: Mutex::default(),
        })
    }

    /// Fills `bytes` from `offset` on. Threads read at once where the system allows it.
    #[cfg(unix)]
    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, offset)
    }

    /// Fills `bytes` from `offset` on.
    #[cfg(not(unix))]
    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let _position = lock(&self.position);
        (&self.file).seek(SeekFrom::Start(offset))?;
        (&self.file).read_exact(bytes)
    }

    /// Its path when it was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its size when it was opened.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

/// Where the little-endian bytes of a tensor lie.
#[derive(Clone)]
struct Stored {
    file: Arc<DataFile>,
    offset: u64,
}

impl Stored {
    fn key(&self) -> (&Path, u64, u64) {
        (&self.file.path, self.offset, self.file.number)
    }

    fn read(&self, dtype: DType, shape: &[usize], spares: &Spares) -> Result<Tensor> {
        let mut tensor = spares.tensor(dtype, shape)?;
        let read = self.file.read(tensor.as_bytes_mut(), self.offset);
        read.map_err(|e| Error::invalid(format!("cannot read {}: {e}", self.file.path.display())))?;
        if dtype == DType::Bool {
            tensor
                .as_bytes_mut()
                .iter_mut()
                .for_each(|b| *b = (*b != 0) as u8);
        }
        Ok(tensor)
    }
}

impl PartialEq for Stored {
    fn eq(&self, other: &Stored) -> bool {
        self.key() == other.key()
    }
}
impl Eq for Stored {}
impl Hash for Stored {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}
impl PartialOrd for Stored {
    fn partial_cmp(&self, other: &Stored) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Stored {
    fn cmp(&self, other: &Stored) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl Deferred {
    fn tensor(&self, spares: &Spares) -> Result<Tensor> {
        let mut made = lock(&self.made);
        if let Some(t) = made.as_ref().and_then(WeakTensor::upgrade) {
            return Ok(t);
        }
        let t = match &self.source {
            Source::Stored(s) => s.read(self.dtype, &self.shape, spares)?,
            Source::Made { op, operands } => {
                let operands = operands.iter().map(|x| x.tensor_in(spares));
                let operands = operands.collect::<Result<Vec<_>>>()?;
                let all: Vec<&Tensor> = operands.iter().collect();
                super::eval::eval_tensors(op, &all)?.swap_remove(0)
            }
        };
        *made = Some(t.downgrade());
        Ok(t)
    }
}

/// Identity of a constant: the same for clones, and for no other while it is kept.
#[derive(Clone)]
pub struct Identity(Weak<Repr>);

impl Identity {
    /// True while the constant is kept.
    pub fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Identity) -> bool {
        self.0.ptr_eq(&other.0)
    }
}
impl Eq for Identity {}
impl Hash for Identity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.as_ptr().hash(state);
    }
}

/// How a constant comes about: equal ones have the same elements. It keeps no elements in memory.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// A tensor in memory, by its identity.
    Held(Identity),
    /// Bytes of a file.
    Stored {
        /// Number of the opened file.
        file: u64,
        /// Position of the first byte.
        offset: u64,
        /// Element type.
        dtype: DType,
        /// Extents.
        shape: Vec<usize>,
    },
    /// The result of an op.
    Made {
        /// The op.
        op: Op,
        /// Its operands.
        operands: Vec<Recipe>,
    },
}

/// View of another constant.
pub enum Viewed<'a> {
    /// Axes permuted: axis `i` of the constant is axis `perm[i]` of the other.
    Transposed(&'a ConstData, &'a [usize]),
    /// The same elements in row-major order under another shape.
    Reshaped(&'a ConstData),
    /// The same numbers in `i32`, of signed bytes.
    Widened(&'a ConstData),
    /// No view.
    Plain,
}

impl ConstData {
    /// A tensor in memory.
    pub fn held(value: Tensor) -> ConstData {
        ConstData(Arc::new(Repr::Held(value)))
    }

    /// The tensor at `offset` bytes into a file, read when it is needed; a small one now.
    ///
    /// Errors when the sizes are impossible or reading fails. That the file is long enough is for the caller to check.
    pub fn stored(
        file: &Arc<DataFile>,
        offset: u64,
        dtype: DType,
        shape: &[usize],
    ) -> Result<ConstData> {
        let size = checked_size_bytes(dtype, shape)?;
        let stored = Stored {
            file: file.clone(),
            offset,
        };
        if size < DEFER_BYTES {
            return Ok(ConstData::held(stored.read(
                dtype,
                shape,
                &Spares::default(),
            )?));
        }
        Ok(ConstData::deferred(Source::Stored(stored), dtype, shape, 0))
    }

    /// The only result, `dtype[shape]`, of `op` on constants, when it is large and `op` can do it for any operands; `None` otherwise.
    pub fn made(
        op: &Op,
        operands: &[&ConstData],
        dtype: DType,
        shape: &[usize],
    ) -> Option<ConstData> {
        let size = checked_size_bytes(dtype, shape).ok()?;
        let n_ops = operands.iter().map(|c| c.n_ops()).sum::<usize>() + 1;
        let is_widening = op == WIDEN && operands[0].dtype() == DType::I8;
        let can_wait = is_widening || never_fails(op, dtype);
        if size < DEFER_BYTES || n_ops > MAX_OPS || !can_wait {
            return None;
        }
        if let Some(bytes) = ConstData::made_of_bytes(op, operands, shape) {
            return ConstData::made(WIDEN, &[&bytes], dtype, shape);
        }
        let source = Source::Made {
            op: op.clone(),
            operands: operands.iter().map(|&c| c.clone()).collect(),
        };
        Some(ConstData::deferred(source, dtype, shape, n_ops))
    }

    /// A view or concatenation of widened bytes as one of the bytes, which are a quarter of the size.
    fn made_of_bytes(op: &Op, operands: &[&ConstData], shape: &[usize]) -> Option<ConstData> {
        if !moves_elements(op) {
            return None;
        }
        let bytes: Option<Vec<&ConstData>> = operands
            .iter()
            .map(|c| match c.viewed() {
                Viewed::Widened(bytes) => Some(bytes),
                _ => None,
            })
            .collect();
        ConstData::made(op, &bytes?, DType::I8, shape)
    }

    fn deferred(source: Source, dtype: DType, shape: &[usize], n_ops: usize) -> ConstData {
        let made = Mutex::new(None);
        ConstData(Arc::new(Repr::Deferred(Box::new(Deferred {
            dtype,
            shape: shape.to_vec(),
            source,
            n_ops,
            made,
        }))))
    }

    fn n_ops(&self) -> usize {
        match &*self.0 {
            Repr::Held(_) => 0,
            Repr::Deferred(d) => d.n_ops,
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &*self.0 {
            Repr::Held(t) => t.dtype(),
            Repr::Deferred(d) => d.dtype,
        }
    }

    /// Extent of each axis.
    pub fn shape(&self) -> &[usize] {
        match &*self.0 {
            Repr::Held(t) => t.shape(),
            Repr::Deferred(d) => &d.shape,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the elements in bytes.
    pub fn size_bytes(&self) -> usize {
        self.len() * self.dtype().size_bytes()
    }

    /// The tensor if it is in memory, as all small ones are.
    pub fn in_memory(&self) -> Option<&Tensor> {
        match &*self.0 {
            Repr::Held(t) => Some(t),
            Repr::Deferred(_) => None,
        }
    }

    /// The tensor, made now if it is not in memory; the made one is not kept here, but shared while somebody keeps it.
    ///
    /// Errors when a file cannot be read.
    pub fn tensor(&self) -> Result<Tensor> {
        self.tensor_in(&Spares::default())
    }

    /// The tensor, as by [`ConstData::tensor`], in the memory of spare ones.
    pub fn tensor_in(&self, spares: &Spares) -> Result<Tensor> {
        match &*self.0 {
            Repr::Held(t) => Ok(t.clone()),
            Repr::Deferred(d) => d.tensor(spares),
        }
    }

    /// Its identity, which clones share.
    pub fn identity(&self) -> Identity {
        Identity(Arc::downgrade(&self.0))
    }

    /// How the constant comes about.
    pub fn recipe(&self) -> Recipe {
        let d = match &*self.0 {
            Repr::Held(_) => return Recipe::Held(self.identity()),
            Repr::Deferred(d) => d,
        };
        match &d.source {
            Source::Stored(s) => Recipe::Stored {
                file: s.file.number,
                offset: s.offset,
                dtype: d.dtype,
                shape: d.shape.clone(),
            },
            Source::Made { op, operands } => Recipe::Made {
                op: op.clone(),
                operands: operands.iter().map(ConstData::recipe).collect(),
            },
        }
    }

    /// The view that made this constant, if one did and has not been done yet.
    pub fn viewed(&self) -> Viewed<'_> {
        let Repr::Deferred(d) = &*self.0 else {
            return Viewed::Plain;
        };
        match &d.source {
            Source::Made {
                op: Op::Transpose { perm },
                operands,
            } => Viewed::Transposed(&operands[0], perm),
            Source::Made {
                op: Op::Reshape { .. },
                operands,
            } => Viewed::Reshaped(&operands[0]),
            Source::Made { op, operands } if op == WIDEN && operands[0].dtype() == DType::I8 => {
                Viewed::Widened(&operands[0])
            }
            _ => Viewed::Plain,
        }
    }
}

impl From<Tensor> for ConstData {
    fn from(t: Tensor) -> ConstData {
        ConstData::held(t)
    }
}

/// True when the interpreter takes the op for all operands that its type rule takes, with one result.
fn never_fails(op: &Op, dtype: DType) -> bool {
    match op {
        Op::Map(_) => dtype.is_float(),
        _ => moves_elements(op),
    }
}

/// True for ops which move elements of any type and change none.
fn moves_elements(op: &Op) -> bool {
    matches!(
        op,
        Op::Transpose { .. } | Op::Reshape { .. } | Op::Concat { .. }
    )
}

impl fmt::Debug for ConstData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = match &*self.0 {
            Repr::Held(t) => return t.fmt(f),
            Repr::Deferred(d) => d,
        };
        write!(f, "{}{:?} of ", d.dtype, d.shape)?;
        match &d.source {
            Source::Stored(s) => write!(f, "{} at {}", s.file.path.display(), s.offset),
            Source::Made { op, operands } => write!(f, "{} {operands:?}", op.name()),
        }
    }
}

impl PartialEq for ConstData {
    fn eq(&self, other: &ConstData) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.cmp(other) == Ordering::Equal
    }
}
impl Eq for ConstData {}
impl Hash for ConstData {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.dtype().hash(state);
        self.shape().hash(state);
        match &*self.0 {
            Repr::Held(t) => t.as_bytes()[..t.size_bytes().min(64)].hash(state),
            Repr::Deferred(d) => d.source.hash(state),
        }
    }
}
impl PartialOrd for ConstData {
    fn partial_cmp(&self, other: &ConstData) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ConstData {
    fn cmp(&self, other: &ConstData) -> Ordering {
        let key = |c: &ConstData| (c.dtype(), c.shape().to_vec());
        key(self)
            .cmp(&key(other))
            .then_with(|| match (&*self.0, &*other.0) {
                (Repr::Held(a), Repr::Held(b)) => a.as_bytes().cmp(b.as_bytes()),
                (Repr::Deferred(a), Repr::Deferred(b)) => a.source.cmp(&b.source),
                (Repr::Held(_), Repr::Deferred(_)) => Ordering::Less,
                (Repr::Deferred(_), Repr::Held(_)) => Ordering::Greater,
            })
    }
}

#[cfg(test)]
mod tests;
