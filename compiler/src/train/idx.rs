//! IDX files, the format of MNIST and its relatives.

use crate::error::{Error, Result};
use flate2::read::GzDecoder;
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{DType, Tensor, files};
use std::io::{self, BufReader, Read, Seek};
use std::path::Path;

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Most axes of an array.
const MAX_RANK: u8 = 8;

/// Reads an IDX file, compressed by gzip or not: two zero bytes, the element type, the number of axes, extents as big-endian `u32`, and
/// elements in row-major order, big-endian. Elements are `u8`, `i8`, `i16`, `i32`, `f32` or `f64`.
///
/// Errors with `InvalidInput` when the file is none, or has fewer or more bytes than it says.
pub fn read_idx(path: impl AsRef<Path>) -> Result<Tensor> {
    let path = path.as_ref();
    read_file(path).map_err(|e| e.context(path.display()))
}

fn read_file(path: &Path) -> Result<Tensor> {
    let mut file = BufReader::new(files::open(path).map_err(io)?);
    let mut first = [0; 2];
    file.read_exact(&mut first).map_err(io)?;
    file.rewind().map_err(io)?;
    match first == GZIP {
        true => read(GzDecoder::new(file)),
        false => read(file),
    }
}

fn io(e: io::Error) -> Error {
    Error::invalid(format!("cannot read it: {e}"))
}

fn read(mut from: impl Read) -> Result<Tensor> {
    let mut head = [0; 4];
    from.read_exact(&mut head).map_err(io)?;
    let [0, 0, element, rank] = head else {
        return Err(Error::invalid(
            "not an IDX file: it begins with other bytes",
        ));
    };
    let dtype = dtype_of(element)?;
    if rank > MAX_RANK {
        let message = format!("{rank} axes, expected at most {MAX_RANK}");
        return Err(Error::invalid(message));
    }
    let mut shape = Vec::new();
    for _ in 0..rank {
        let mut extent = [0; 4];
        from.read_exact(&mut extent).map_err(io)?;
        shape.push(u32::from_be_bytes(extent) as usize);
    }
    elements(from, dtype, &shape)
}

fn dtype_of(element: u8) -> Result<DType> {
    Ok(match element {
        0x08 => DType::U8,
        0x09 => DType::I8,
        0x0b => DType::I16,
        0x0c => DType::I32,
        0x0d => DType::F32,
        0x0e => DType::F64,
        other => {
            let message = format!("not an IDX file: element type {other:#04x}");
            return Err(Error::invalid(message));
        }
    })
}

fn elements(from: impl Read, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let size = checked_size_bytes(dtype, shape)?;
    let mut bytes = Vec::new();
    // Grows with the bytes that are there: the head alone must not ask for memory.
    let read = from.take(size as u64 + 1).read_to_end(&mut bytes);
    read.map_err(io)?;
    if bytes.len() != size {
        let has = match bytes.len() > size {
            true => "more".to_owned(),
            false => bytes.len().to_string(),
        };
        let message = format!("{dtype}{shape:?} takes {size} bytes, the file has {has}");
        return Err(Error::invalid(message));
    }
    let width = dtype.size_bytes();
    bytes.chunks_exact_mut(width).for_each(<[u8]>::reverse);
    Ok(Tensor::from_bytes(dtype, shape, &bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    const NUMBERS: [u8; 16] = [0, 0, 0x0b, 2, 0, 0, 0, 2, 0, 0, 0, 1, 1, 2, 0xff, 0xfe];

    #[test]
    fn plain_and_compressed_files_are_read() {
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        packed.write_all(&NUMBERS).unwrap();
        for bytes in [NUMBERS.to_vec(), packed.finish().unwrap()] {
            let read = read_idx(file(&bytes).path()).unwrap();
            assert_eq!(read, Tensor::from_slice(&[258i16, -2], &[2, 1]).unwrap());
        }
    }

    #[test]
    fn damaged_files_are_refused() {
        let error = |bytes: &[u8]| read_idx(file(bytes).path()).unwrap_err().to_string();
        for n in 0..NUMBERS.len() {
            error(&NUMBERS[..n]);
        }
        assert!(error(&[&NUMBERS[..], &[0]].concat()).ends_with("the file has more"));
        assert!(error(&NUMBERS[..15]).ends_with("takes 4 bytes, the file has 3"));
        assert!(error(&[1, 0, 8, 1]).contains("not an IDX file"));
        assert!(error(&[0, 0, 7, 1]).contains("element type 0x07"));
        let huge = [&[0, 0, 8, 3][..], &[0xff; 12], &[1]].concat();
        error(&huge);
        error(&[0x1f, 0x8b, 8, 0]);
    }
}
