//! `TensorProto` to [`Tensor`]: element types, the several data fields, external files.

use super::proto::{StringStringEntryProto, TensorProto};
use super::skim::IN_MODEL;
use crate::error::{Error, Result};
use crate::ir::ConstData;
use crate::ir::constant::DataFile;
use gristmill_runtime::sync::lock;
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{DType, Tensor};
use prost::Message;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};

/// The dtype of an ONNX `TensorProto.DataType`. Strings, complex numbers and types below 8 bits are
/// unsupported.
pub fn dtype_of(data_type: i32) -> Result<DType> {
    Ok(match data_type {
        1 => DType::F32,
        2 => DType::U8,
        3 => DType::I8,
        4 => DType::U16,
        5 => DType::I16,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        12 => DType::U32,
        13 => DType::U64,
        16 => DType::BF16,
        17 => DType::F8E4M3FN,
        18 => DType::F8E4M3FNUZ,
        19 => DType::F8E5M2,
        20 => DType::F8E5M2FNUZ,
        other => {
            return match dtype_name(other) {
                Some(name) => Err(Error::unsupported(format!(
                    "element type {name} is not supported"
                ))),
                None => Err(Error::invalid(format!(
                    "element type number {other} is not one of ONNX"
                ))),
            };
        }
    })
}

fn dtype_name(data_type: i32) -> Option<&'static str> {
    Some(match data_type {
        8 => "string",
        14 => "complex64",
        15 => "complex128",
        21 => "uint4",
        22 => "int4",
        23 => "float4e2m1",
        24 => "float8e8m0",
        25 => "uint2",
        26 => "int2",
        _ => return None,
    })
}

/// The tensor of a serialised `TensorProto`, as in the `.pb` files of ONNX test data, with its
/// name.
pub fn tensor_from_pb(bytes: &[u8]) -> Result<(String, Tensor)> {
    let proto = TensorProto::decode(bytes)
        .map_err(|e| Error::invalid(format!("not a TensorProto: {e}")))?;
    let tensor = tensor_of(&proto, &External::none())?;
    Ok((proto.name, tensor))
}

/// Extents of a tensor, checked to be possible.
pub(super) fn shape_of(proto: &TensorProto) -> Result<Vec<usize>> {
    let (name, dims) = (&proto.name, &proto.dims);
    extents_of(dims)
        .ok_or_else(|| Error::invalid(format!("tensor {name:?} has impossible dims {dims:?}")))
}

fn extents_of(dims: &[i64]) -> Option<Vec<usize>> {
    dims.iter().map(|&d| usize::try_from(d).ok()).collect()
}

/// The tensor as a constant: a large one whose bytes lie in a file is read when it is needed.
pub(super) fn constant_of(proto: &TensorProto, external: &External) -> Result<ConstData> {
    if proto.data_location != 1 {
        return Ok(tensor_of(proto, external)?.into());
    }
    stored(proto, external).map_err(|e| e.context(format!("tensor {:?}", proto.name)))
}

/// A tensor whose bytes lie in a file.
fn stored(proto: &TensorProto, external: &External) -> Result<ConstData> {
    let (dtype, shape) = (dtype_of(proto.data_type)?, shape_of(proto)?);
    external.constant(&proto.external_data, dtype, &shape)
}

/// Decodes a tensor. Nothing is allocated before the bytes for it are known to exist.
pub(super) fn tensor_of(proto: &TensorProto, external: &External) -> Result<Tensor> {
    decode(proto, external).map_err(|e| e.context(format!("tensor {:?}", proto.name)))
}

fn decode(proto: &TensorProto, external: &External) -> Result<Tensor> {
    if proto.data_location == 1 {
        return stored(proto, external)?.tensor();
    }
    let (dtype, shape) = (dtype_of(proto.data_type)?, shape_of(proto)?);
    let size = checked_size_bytes(dtype, &shape).map_err(|e| Error::invalid(e.to_string()))?;
    if !proto.raw_data.is_empty() {
        return Ok(Tensor::from_bytes(dtype, &shape, &proto.raw_data)?);
    }
    let bytes = typed_data(proto, dtype);
    if bytes.len() != size {
        let (n, held) = (size / dtype.size_bytes(), bytes.len() / dtype.size_bytes());
        return Err(Error::invalid(format!(
            "{dtype}{shape:?} needs {n} elements, the file has {held}"
        )));
    }
    Ok(Tensor::from_bytes(dtype, &shape, &bytes)?)
}

/// The elements of the typed data field of `dtype`, little-endian.
fn typed_data(p: &TensorProto, dtype: DType) -> Vec<u8> {
    let ints = |width| low_bytes(p.int32_data.iter().map(|v| v.to_le_bytes()), width);
    let unsigned = |width| low_bytes(p.uint64_data.iter().map(|v| v.to_le_bytes()), width);
    match dtype {
        DType::F32 => low_bytes(p.float_data.iter().map(|v| v.to_le_bytes()), 4),
        DType::F64 => low_bytes(p.double_data.iter().map(|v| v.to_le_bytes()), 8),
        DType::I64 => low_bytes(p.int64_data.iter().map(|v| v.to_le_bytes()), 8),
        DType::U64 | DType::U32 => unsigned(dtype.size_bytes()),
        DType::Bool => p.int32_data.iter().map(|&v| (v != 0) as u8).collect(),
        _ => ints(dtype.size_bytes()),
    }
}

/// The first `width` bytes of each element.
fn low_bytes<const N: usize>(elements: impl Iterator<Item = [u8; N]>, width: usize) -> Vec<u8> {
    elements.flat_map(|b| b.into_iter().take(width)).collect()
}

/// Files and folders of external data.
#[derive(Clone, Default)]
pub struct External {
    /// The folder that external data files must lie in.
    folder: Option<PathBuf>,
    /// The model file, which holds the payloads that [`skim`](super::skim) left there.
    model: Option<PathBuf>,
    /// Files opened so far.
    files: Arc<Mutex<BTreeMap<PathBuf, Arc<DataFile>>>>,
}

/// Entries of `external_data`.
pub(super) struct ExternalData<'a> {
    pub location: &'a str,
    pub offset: u64,
    pub length: Option<u64>,
}

impl<'a> ExternalData<'a> {
    pub fn read(entries: &'a [StringStringEntryProto]) -> Result<ExternalData<'a>> {
        let mut place = ExternalData {
            location: "",
            offset: 0,
            length: None,
        };
        for e in entries {
            match e.key.as_str() {
                "location" => place.location = &e.value,
                "offset" => place.offset = number(e)?,
                "length" => place.length = Some(number(e)?),
                _ => {}
            }
        }
        Ok(place)
    }
}

fn number(e: &StringStringEntryProto) -> Result<u64> {
    let (key, value) = (&e.key, &e.value);
    value
        .parse()
        .map_err(|_| Error::invalid(format!("external data: {key} {value:?} is not a number")))
}

fn unreadable(location: &str, e: std::io::Error) -> Error {
    Error::invalid(format!("external data {location:?}: {e}"))
}

/// Errors unless a path is relative and stays in its folder.
fn check_plain(location: &str) -> Result<()> {
    let mut parts = Path::new(location).components();
    let plain = parts.all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if !location.is_empty() && plain {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "external data {location:?} must be a relative path inside the model's folder"
    )))
}

fn check_regular(location: &str, path: &Path) -> Result<()> {
    if path.is_file() {
        return Ok(());
    }
    let kind = if path.is_dir() {
        "a folder"
    } else {
        "a device, pipe or socket"
    };
    let message = format!("external data {location:?} is {kind}, not a regular file");
    Err(Error::invalid(message))
}

impl External {
    /// No folder: external data is refused, as for a model from memory.
    pub fn none() -> External {
        External::default()
    }

    /// The folder of a model file.
    pub fn beside(model: &Path) -> External {
        let folder = model
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        External {
            folder: Some(folder.to_owned()),
            model: Some(model.to_owned()),
            ..External::default()
        }
    }

    /// The file of the model, unless it is from memory.
    pub fn model(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    /// The tensor that the entries of `external_data` describe. Errors when the file cannot hold
    /// it.
    fn constant(
        &self,
        entries: &[StringStringEntryProto],
        dtype: DType,
        shape: &[usize],
    ) -> Result<ConstData> {
        let size = checked_size_bytes(dtype, shape).map_err(|e| Error::invalid(e.to_string()))?;
        let place = ExternalData::read(entries)?;
        let (location, offset) = (place.location, place.offset);
        if let Some(length) = place.length.filter(|l| *l != size as u64) {
            return Err(Error::invalid(format!(
                "external data {location:?}: {dtype}{shape:?} takes {size} bytes, length says {length}"
            )));
        }
        let path = self.resolve(location)?;
        let file = self.open(&path).map_err(|e| unreadable(location, e))?;
        let held = file.len_bytes();
        if offset.checked_add(size as u64).is_none_or(|end| end > held) {
            return Err(Error::invalid(format!(
                "external data {location:?} has {held} bytes; {size} at offset {offset} are needed"
            )));
        }
        ConstData::stored(&file, offset, dtype, shape)
    }

    fn open(&self, path: &Path) -> std::io::Result<Arc<DataFile>> {
        let mut files = lock(&self.files);
        if let Some(found) = files.get(path) {
            return Ok(found.clone());
        }
        let file = Arc::new(DataFile::open(path)?);
        files.insert(path.to_owned(), file.clone());
        Ok(file)
    }

    /// The regular file at a path below the model's folder: relative, without `..`, and not led out
    /// by a symbolic link.
    pub fn resolve(&self, location: &str) -> Result<PathBuf> {
        if let (IN_MODEL, Some(model)) = (location, &self.model) {
            return Ok(model.clone());
        }
        let Some(folder) = &self.folder else {
            return Err(Error::invalid(format!(
                "external data {location:?} of a model that is not a file"
            ))
            .hint("load the model by its path"));
        };
        check_plain(location)?;
        let io = |e| unreadable(location, e);
        let path = folder.join(location).canonicalize().map_err(io)?;
        if !self.is_inside(&path, folder).map_err(io)? {
            return Err(Error::invalid(format!(
                "external data {location:?} leads out of the model's folder"
            ))
            .hint("copy the file there"));
        }
        check_regular(location, &path)?;
        Ok(path)
    }

    /// True for a resolved path below the model's folder, or below that of the file which the model
    /// is a link to: caches of models keep files in one folder and links to them in another.
    fn is_inside(&self, path: &Path, folder: &Path) -> std::io::Result<bool> {
        if path.starts_with(folder.canonicalize()?) {
            return Ok(true);
        }
        let Some(model) = &self.model else {
            return Ok(false);
        };
        let resolved = model.canonicalize()?;
        Ok(resolved.parent().is_some_and(|f| path.starts_with(f)))
    }
}

/// The dense tensor of a sparse one with linear or coordinate indices; at most `limit_bytes` large.
pub(super) fn dense_of(
    values: &TensorProto,
    indices: &TensorProto,
    dims: &[i64],
    external: &External,
    limit_bytes: usize,
) -> Result<Tensor> {
    let values = tensor_of(values, external)?;
    let indices = tensor_of(indices, external)?;
    let bad = || {
        let given = indices.shape();
        Error::invalid(format!(
            "sparse tensor with dims {dims:?} and indices {given:?}"
        ))
    };
    let shape = extents_of(dims).ok_or_else(bad)?;
    let size = checked_size_bytes(values.dtype(), &shape).map_err(|_| bad())?;
    if size > limit_bytes {
        let message = format!("a sparse tensor of {size} bytes when dense");
        return Err(Error::unsupported(message));
    }
    let places = places_of(&indices, values.len(), &shape).ok_or_else(bad)?;
    let mut dense = Tensor::zeros(values.dtype(), &shape)?;
    let width = values.dtype().size_bytes();
    let elements = values.as_bytes().chunks_exact(width);
    for (element, place) in elements.zip(places) {
        dense.as_bytes_mut()[place * width..][..width].copy_from_slice(element);
    }
    Ok(dense)
}

/// Row-major positions of `n` elements; `None` when the indices do not fit them or the shape.
fn places_of(indices: &Tensor, n: usize, shape: &[usize]) -> Option<Vec<usize>> {
    if indices.dtype() != DType::I64 || indices.shape().first() != Some(&n) {
        return None;
    }
    let indices_per_element = match indices.shape() {
        [_] => 1,
        [_, k] if *k == shape.len() => *k,
        _ => return None,
    };
    let flat = [shape.iter().product()];
    let extents = if indices.shape().len() == 1 {
        &flat[..]
    } else {
        shape
    };
    let all = indices.as_slice::<i64>();
    let of_element = |i: usize| &all[i * indices_per_element..][..indices_per_element];
    (0..n).map(|i| row_major(of_element(i), extents)).collect()
}

/// Row-major position of coordinates; `None` when one is out of range.
fn row_major(coordinates: &[i64], shape: &[usize]) -> Option<usize> {
    coordinates.iter().zip(shape).try_fold(0, |at, (&c, &d)| {
        let c = usize::try_from(c).ok().filter(|c| *c < d)?;
        Some(at * d + c)
    })
}

/// Elements of an integer or `bool` tensor as `i64`; `None` for other dtypes and for `u64` beyond
/// `i64`.
pub(super) fn to_i64s(t: &Tensor) -> Option<Vec<i64>> {
    macro_rules! by {
        ($T:ty) => {
            Some(t.as_slice::<$T>().iter().map(|&v| v as i64).collect())
        };
    }
    match t.dtype() {
        DType::I8 => by!(i8),
        DType::I16 => by!(i16),
        DType::I32 => by!(i32),
        DType::I64 => by!(i64),
        DType::U8 => by!(u8),
        DType::U16 => by!(u16),
        DType::U32 => by!(u32),
        DType::U64 => t
            .as_slice::<u64>()
            .iter()
            .map(|&v| i64::try_from(v).ok())
            .collect(),
        DType::Bool => by!(bool),
        _ => None,
    }
}

/// A tensor of an integer dtype or `bool` from `i64` values, wrapping.
pub(super) fn from_i64s(dtype: DType, values: &[i64], shape: &[usize]) -> Result<Tensor> {
    let width = dtype.size_bytes();
    let bytes: Vec<u8> = match dtype {
        DType::Bool => values.iter().map(|&v| (v != 0) as u8).collect(),
        _ => values
            .iter()
            .flat_map(|v| v.to_le_bytes().into_iter().take(width))
            .collect(),
    };
    Ok(Tensor::from_bytes(dtype, shape, &bytes)?)
}
