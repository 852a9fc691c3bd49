//! Examples in files, read when they are needed.

use super::{Batch, Dataset, Epoch, check_places};
use crate::error::{Error, Result};
use crate::ir::constant::DataFile;
use gristmill_runtime::npy::{Located, locate_npy, locate_npz};
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{DType, Tensor};
use std::path::Path;
use std::sync::Arc;

/// Examples in files, which may be larger than memory: each batch reads its own rows. The files stay open and must not change.
#[derive(Clone)]
pub struct FileDataset {
    parts: Vec<Part>,
    n: usize,
}

/// Some examples, one after the other.
#[derive(Clone)]
struct Part {
    n: usize,
    arrays: Vec<Rows>,
}

/// Rows of a tensor at regular distances in a file.
#[derive(Clone)]
struct Rows {
    name: String,
    file: Arc<DataFile>,
    dtype: DType,
    /// The shape of a row.
    shape: Vec<usize>,
    offset: u64,
    distance: u64,
    /// One more than the largest class, for labels of a format.
    n_classes: Option<u8>,
}

/// Extents of an image of CIFAR-10: channels, rows, columns.
const CIFAR10: [usize; 3] = [3, 32, 32];
/// Bytes of a record: the class and the image.
const CIFAR10_RECORD: u64 = 1 + 3 * 32 * 32;

impl FileDataset {
    /// The arrays of a NumPy archive. It stores them (`numpy.savez`) rather than compresses them; [`read_npz`](crate::read_npz) reads both
    /// as a whole.
    ///
    /// Errors with `InvalidInput`, naming the file, when it is no such archive, an array is compressed, big-endian or in Fortran order, or
    /// first axes differ.
    pub fn npz(path: impl AsRef<Path>) -> Result<FileDataset> {
        let path = path.as_ref();
        let file = open(path)?;
        let arrays = locate_npz(path)?.into_iter();
        let arrays = arrays.map(|array| (file.clone(), array)).collect();
        let part = Part::of(arrays).map_err(|e| e.context(path.display()))?;
        Ok(FileDataset::of(vec![part]))
    }

    /// NumPy files with an array each, by the names of inputs. Errors as [`FileDataset::npz`] does.
    pub fn npy<N: Into<String>, P: AsRef<Path>>(
        files: impl IntoIterator<Item = (N, P)>,
    ) -> Result<FileDataset> {
        let array = |(name, path): (N, P)| {
            let array = locate_npy(&path)?;
            let name = name.into();
            Ok((open(path.as_ref())?, Located { name, ..array }))
        };
        let arrays = files.into_iter().map(array).collect::<Result<_>>()?;
        Ok(FileDataset::of(vec![Part::of(arrays)?]))
    }

    /// The binary files of CIFAR-10 (`data_batch_1.bin` and so on), one after the other: `image` `u8[3, 32, 32]` and `label` `u8` from 0 to 9.
    ///
    /// Errors with `InvalidInput`, naming the file, when there is none or one is not made of records of 3,073 bytes. A label out of range is an
    /// error of the batch with it.
    pub fn cifar10<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<FileDataset> {
        let part = |path: P| Part::cifar10(path.as_ref());
        let parts = paths.into_iter().map(part).collect::<Result<Vec<Part>>>()?;
        match parts.is_empty() {
            true => Err(Error::invalid("a data set without files")),
            false => Ok(FileDataset::of(parts)),
        }
    }

    fn of(parts: Vec<Part>) -> FileDataset {
        let n = parts.iter().map(|part| part.n).sum();
        FileDataset { parts, n }
    }
}

fn open(path: &Path) -> Result<Arc<DataFile>> {
    let file = DataFile::open(path);
    let file = file.map_err(|e| Error::invalid(format!("{}: cannot open it: {e}", path.display())));
    Ok(Arc::new(file?))
}

impl Part {
    /// Arrays whose first axes are examples.
    fn of(arrays: Vec<(Arc<DataFile>, Located)>) -> Result<Part> {
        let n = arrays.first().and_then(|(_, a)| a.shape.first().copied());
        let Some(n) = n else {
            return Err(Error::invalid("expected an array with an axis of examples"));
        };
        let first = arrays[0].1.name.clone();
        let rows = |(file, array): (Arc<DataFile>, Located)| {
            let (name, shape) = (array.name, array.shape);
            if shape.first() != Some(&n) {
                return Err(Error::invalid(format!(
                    "array {name:?} has shape {shape:?}, expected as many examples as {first:?}"
                )));
            }
            let size = checked_size_bytes(array.dtype, &shape[1..])?;
            Ok(Rows {
                name,
                file,
                dtype: array.dtype,
                shape: shape[1..].to_vec(),
                offset: array.offset,
                distance: size as u64,
                n_classes: None,
            })
        };
        let arrays = arrays.into_iter().map(rows).collect::<Result<_>>()?;
        Ok(Part { n, arrays })
    }

    fn cifar10(path: &Path) -> Result<Part> {
        let file = open(path)?;
        let size = file.len_bytes();
        if size == 0 || size % CIFAR10_RECORD != 0 {
            let path = path.display();
            return Err(Error::invalid(format!(
                "{path}: {size} bytes, expected records of {CIFAR10_RECORD} bytes (CIFAR-10, binary version)"
            )));
        }
        let rows = |name: &str, shape: &[usize], offset, n_classes| Rows {
            name: name.to_owned(),
            file: file.clone(),
            dtype: DType::U8,
            shape: shape.to_vec(),
            offset,
            distance: CIFAR10_RECORD,
            n_classes,
        };
        Ok(Part {
            n: (size / CIFAR10_RECORD) as usize,
            arrays: vec![
                rows("image", &CIFAR10, 1, None),
                rows("label", &[], 0, Some(10)),
            ],
        })
    }
}

impl Rows {
    /// Reads a row. Errors name the file and the row in it.
    fn read(&self, row: usize, bytes: &mut [u8]) -> Result<()> {
        let path = self.file.path().display();
        let of = |message: String| Error::invalid(format!("{path}: example {row}: {message}"));
        let read = self
            .file
            .read(bytes, self.offset + row as u64 * self.distance);
        read.map_err(|e| of(format!("cannot read {:?}: {e}", self.name)))?;
        if self.dtype == DType::Bool {
            bytes.iter_mut().for_each(|b| *b = u8::from(*b != 0));
        }
        match (self.n_classes, bytes) {
            (Some(n), [label]) if *label >= n => {
                let (name, last) = (&self.name, n - 1);
                Err(of(format!(
                    "{name:?} is {label}, expected a class from 0 to {last}"
                )))
            }
            _ => Ok(()),
        }
    }
}

impl Dataset for FileDataset {
    fn len(&self) -> usize {
        self.n
    }

    fn rows(&self, places: &[usize], _: Epoch) -> Result<Batch> {
        check_places(places, self.n)?;
        let mut batch = Batch::new();
        for (k, array) in self.parts[0].arrays.iter().enumerate() {
            let shape = [&[places.len()], &array.shape[..]].concat();
            let mut all = Tensor::zeros(array.dtype, &shape)?;
            let size = all.size_bytes() / places.len().max(1);
            for (i, &place) in places.iter().enumerate() {
                let (part, row) = self.locate(place);
                part.arrays[k].read(row, &mut all.as_bytes_mut()[i * size..][..size])?;
            }
            batch.push((array.name.clone(), all));
        }
        Ok(batch)
    }
}

impl FileDataset {
    /// The part of a place, and the row in it.
    fn locate(&self, place: usize) -> (&Part, usize) {
        let mut row = place;
        for part in &self.parts {
            if row < part.n {
                return (part, row);
            }
            row -= part.n;
        }
        unreachable!("places are below the number of all examples")
    }
}
