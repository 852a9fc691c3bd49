//! NumPy files: tensors from and to `.npy` (one array) and `.npz` (a zip archive of named arrays).
//!
//! Read: booleans, integers and floats of every size of [`DType`], either byte order, C or Fortran order. `V2` (as NumPy writes
//! the `bfloat16` of `ml_dtypes`) is read as `bf16`, `V1` (its 8-bit floats) as `u8`. Written: little-endian, C order. NumPy has no `bf16` and no
//! 8-bit floats of its own: such a tensor is *stored and read back as `u16` or `u8` with the same bits*;
//! [`Tensor::with_bits_as`] restores it.
//!
//! Headers are parsed here, since a file may come from anywhere and must not be able to exhaust memory or the stack; the archive format is
//! the zip crate's. A file shorter than its header promises is refused before any allocation of that size.

use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::files::{self, Kind};
use crate::tensor::{Tensor, checked_size_bytes};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use zip::read::ZipFile;
use zip::result::ZipError;
use zip::write::{FileOptions, ZipWriter};
use zip::{CompressionMethod, ZipArchive};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Longest accepted header; real ones take 118 bytes or little more.
const MAX_HEADER_BYTES: usize = 1 << 16;

impl Tensor {
    /// Reads a `.npy` file.
    pub fn from_npy(path: impl AsRef<Path>) -> Result<Tensor, Error> {
        let path = path.as_ref();
        let file =
            File::open(path).map_err(|e| io_error("cannot open it", e).context(path.display()))?;
        read_npy(BufReader::new(file)).map_err(|e| e.context(path.display()))
    }

    /// Writes a `.npy` file.
    pub fn to_npy(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        files::replace(path, |file| write_npy(file, self))
            .map_err(|e| io_error("cannot write it", e).context(path.display()))
    }
}

/// Reads one array in `.npy` format.
pub fn read_npy(mut from: impl Read) -> Result<Tensor, Error> {
    let header = read_header(&mut from)?;
    let size = checked_size_bytes(header.dtype, &header.shape)?;
    let mut bytes = Vec::new();
    // Grows with the bytes really there: the header alone must not cause a large allocation.
    from.take(size as u64)
        .read_to_end(&mut bytes)
        .map_err(|e| io_error("cannot read its data", e))?;
    if bytes.len() != size {
        let message = format!(
            "{}{:?} takes {size} bytes, the file has {}",
            header.dtype,
            header.shape,
            bytes.len()
        );
        return Err(Error::invalid(message));
    }
    if header.swapped {
        bytes
            .chunks_exact_mut(header.dtype.size_bytes())
            .for_each(<[u8]>::reverse);
    }
    if header.fortran_order {
        bytes = from_fortran_order(&bytes, header.dtype.size_bytes(), &header.shape);
    }
    Tensor::from_bytes(header.dtype, &header.shape, &bytes)
}

/// Writes one array in `.npy` format, version 1.0.
pub fn write_npy(to: &mut impl Write, tensor: &Tensor) -> io::Result<()> {
    let shape = match tensor.shape() {
        [n] => format!("({n},)"),
        shape => format!(
            "({})",
            shape
                .iter()
                .map(usize::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    };
    let descr = descr(tensor.dtype());
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // The format asks for data at a multiple of 64 bytes: magic, version and length take 10, the final newline 1.
    let padding = (10 + header.len() + 1).next_multiple_of(64) - (10 + header.len() + 1);
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let too_long = |_| io::Error::other("the shape has too many axes for the format");
    let length = u16::try_from(header.len()).map_err(too_long)?;
    to.write_all(MAGIC)?;
    to.write_all(&[1, 0])?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(header.as_bytes())?;
    to.write_all(tensor.as_bytes())
}

/// Reads a `.npz` file: names and arrays in the archive's order.
///
/// Skips other members than arrays. Errors when the checksum of an array disagrees with its bytes.
pub fn read_npz(path: impl AsRef<Path>) -> Result<Vec<(String, Tensor)>, Error> {
    let path = path.as_ref();
    read_archive(path).map_err(|e| e.context(path.display()))
}

/// An array in a file, as its bytes lie there: little-endian, in C order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its name in an archive; empty in a `.npy` file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
    /// Place of the first element in the file, in bytes.
    pub offset: u64,
}

/// Finds the array of a `.npy` file without reading it.
///
/// Errors when its bytes do not lie there as in memory (the other byte order, Fortran order), or are fewer than its header says.
pub fn locate_npy(path: impl AsRef<Path>) -> Result<Located, Error> {
    let path = path.as_ref();
    let located = || {
        let mut file = File::open(path).map_err(|e| io_error("cannot open it", e))?;
        let n = file.metadata().map_err(|e| io_error("cannot read it", e))?;
        let header = read_header(&mut file)?;
        let offset = file.stream_position();
        let offset = offset.map_err(|e| io_error("cannot read it", e))?;
        let room = n.len().saturating_sub(offset);
        locate(String::new(), header, offset, room)
    };
    located().map_err(|e| e.context(path.display()))
}

/// Finds the arrays of a `.npz` file without reading them. Skips other members than arrays.
///
/// Errors as [`locate_npy`] does, and when an array is compressed.
pub fn locate_npz(path: impl AsRef<Path>) -> Result<Vec<Located>, Error> {
    let path = path.as_ref();
    let located = || {
        let mut zip = open_archive(path)?;
        let mut arrays = Vec::new();
        for i in 0..zip.len() {
            let member = zip.by_index(i);
            let mut member = member.map_err(|e| Error::invalid(format!("member {i}: {e}")))?;
            let Some(name) = member.name().strip_suffix(".npy").map(str::to_owned) else {
                continue;
            };
            let array = locate_member(&name, &mut member);
            arrays.push(array.map_err(|e| e.context(format!("array {name:?}")))?);
        }
        Ok(arrays)
    };
    located().map_err(|e: Error| e.context(path.display()))
}

fn locate_member(name: &str, member: &mut ZipFile) -> Result<Located, Error> {
    if member.compression() != CompressionMethod::Stored {
        return Err(Error::invalid(
            "it is compressed and can only be read as a whole; numpy.savez stores arrays, numpy.savez_compressed compresses them",
        ));
    }
    let (begin, size) = (member.data_start(), member.size());
    let mut counted = Counted { from: member, n: 0 };
    let header = read_header(&mut counted)?;
    let n = counted.n;
    locate(name.to_owned(), header, begin + n, size.saturating_sub(n))
}

/// A reader that counts.
struct Counted<R> {
    from: R,
    n: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(bytes)?;
        self.n += n as u64;
        Ok(n)
    }
}

/// The array of a header whose elements begin at an offset and have `room` bytes.
fn locate(name: String, header: Header, offset: u64, room: u64) -> Result<Located, Error> {
    let Header { dtype, shape, .. } = header;
    let size = checked_size_bytes(dtype, &shape)?;
    if header.swapped && dtype.size_bytes() > 1 || header.fortran_order && shape.len() > 1 {
        return Err(Error::invalid(
            "its elements are big-endian or in Fortran order and can only be read as a whole",
        ));
    }
    if room < size as u64 {
        let message = format!("{dtype}{shape:?} takes {size} bytes, the file has {room}");
        return Err(Error::invalid(message));
    }
    Ok(Located {
        name,
        dtype,
        shape,
        offset,
    })
}

fn read_archive(path: &Path) -> Result<Vec<(String, Tensor)>, Error> {
    let mut zip = open_archive(path)?;
    let mut arrays = Vec::new();
    for i in 0..zip.len() {
        let member = zip
            .by_index(i)
            .map_err(|e| Error::invalid(format!("member {i}: {e}")))?;
        let Some(name) = member.name().strip_suffix(".npy").map(str::to_owned) else {
            continue;
        };
        let tensor = read_member(member).map_err(|e| e.context(format!("array {name:?}")))?;
        arrays.push((name, tensor));
    }
    Ok(arrays)
}

fn open_archive(path: &Path) -> Result<ZipArchive<BufReader<File>>, Error> {
    let file = File::open(path).map_err(|e| io_error("cannot open it", e))?;
    ZipArchive::new(BufReader::new(file)).map_err(|e| match files::Kind::of(path) {
        Some(kind) if kind != Kind::Zip => Error::invalid(format!(
            "it is {kind}, expected an archive of arrays (.npz)"
        )),
        _ => Error::invalid(format!("cannot open it as a zip archive: {e}")),
    })
}

/// Reads an array to the end of its member, where the archive's reader compares the checksum.
fn read_member(mut member: impl Read) -> Result<Tensor, Error> {
    let tensor = read_npy(&mut member)?;
    match member.read(&mut [0]) {
        Ok(0) => Ok(tensor),
        Ok(_) => Err(malformed("there are bytes after the last element")),
        Err(e) => Err(io_error("cannot read its data", e)),
    }
}

/// Writes a `.npz` file, uncompressed as `numpy.savez` does. The bytes depend on names and values only.
///
/// Replaces an existing file once all is written; an error leaves it unchanged.
pub fn write_npz<'a>(
    path: impl AsRef<Path>,
    arrays: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<(), Error> {
    let path = path.as_ref();
    files::replace(path, |file| write_archive(FailsOnce::new(file), arrays))
        .map_err(|e| io_error("cannot write it", e).context(path.display()))
}

fn write_archive<'a>(
    to: impl Write + Seek,
    arrays: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> io::Result<()> {
    let mut zip = ZipWriter::new(to);
    for (name, tensor) in arrays {
        let large = tensor.size_bytes() > u32::MAX as usize / 2;
        let options = FileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .large_file(large);
        zip.start_file(format!("{name}.npy"), options)
            .map_err(without_wrapper)?;
        write_npy(&mut zip, tensor)?;
    }
    zip.finish().map_err(without_wrapper)?.flush()
}

fn without_wrapper(e: ZipError) -> io::Error {
    match e {
        ZipError::Io(e) => e,
        e => e.into(),
    }
}

/// A writer that reports its first error and ignores all writes after it.
///
/// A [`ZipWriter`] that is dropped after an error tries to write the archive's directory, and prints to stderr
/// when that fails too.
struct FailsOnce<W> {
    inner: W,
    has_failed: bool,
    /// Offset from the start, which goes on after a failure: the archive's sizes are differences of it.
    position: u64,
}

impl<W> FailsOnce<W> {
    fn new(inner: W) -> FailsOnce<W> {
        FailsOnce {
            inner,
            has_failed: false,
            position: 0,
        }
    }
}

impl<W: Write> Write for FailsOnce<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = if self.has_failed {
            Ok(bytes.len())
        } else {
            self.inner.write(bytes)
        };
        match &written {
            Ok(n) => self.position += *n as u64,
            Err(e) => self.has_failed = e.kind() != io::ErrorKind::Interrupted,
        }
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.has_failed {
            return Ok(());
        }
        self.inner.flush().inspect_err(|_| self.has_failed = true)
    }
}

impl<W: Seek> Seek for FailsOnce<W> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        if !self.has_failed {
            let position = self
                .inner
                .seek(to)
                .inspect_err(|_| self.has_failed = true)?;
            self.position = position;
        } else if let SeekFrom::Start(position) = to {
            self.position = position;
        }
        Ok(self.position)
    }
}

fn io_error(what: &str, e: io::Error) -> Error {
    Error::invalid(format!("{what}: {e}"))
}

fn malformed(what: &str) -> Error {
    Error::invalid(format!("malformed .npy file: {what}"))
}

/// Dtypes without a name in NumPy: their bits are written as unsigned integers.
fn lacks_name(dtype: DType) -> bool {
    dtype == DType::BF16 || dtype.is_float8()
}

/// NumPy's type string of a dtype.
fn descr(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "<f4",
        DType::F64 => "<f8",
        DType::F16 => "<f2",
        DType::I8 => "|i1",
        DType::I16 => "<i2",
        DType::I32 => "<i4",
        DType::I64 => "<i8",
        DType::U8 | DType::F8E4M3FN | DType::F8E4M3FNUZ | DType::F8E5M2 | DType::F8E5M2FNUZ => {
            "|u1"
        }
        DType::U16 | DType::BF16 => "<u2",
        DType::U32 => "<u4",
        DType::U64 => "<u8",
        DType::Bool => "|b1",
    }
}

#[derive(Debug, PartialEq)]
struct Header {
    dtype: DType,
    /// Stored with the most significant byte first.
    swapped: bool,
    fortran_order: bool,
    shape: Vec<usize>,
}

fn read_header(from: &mut impl Read) -> Result<Header, Error> {
    let start = read_start(from)?;
    let mut read = |n: usize| {
        let mut bytes = vec![0; n];
        from.read_exact(&mut bytes)
            .map(|()| bytes)
            .map_err(|e| malformed(&format!("header: {e}")))
    };
    let length = match start[6] {
        1 => u16::from_le_bytes(read(2)?.try_into().expect("two bytes were read")) as usize,
        2 | 3 => u32::from_le_bytes(read(4)?.try_into().expect("four bytes were read")) as usize,
        version => {
            return Err(malformed(&format!(
                "format version {version}, expected 1, 2 or 3"
            )));
        }
    };
    if length > MAX_HEADER_BYTES {
        return Err(malformed(&format!(
            "a header of {length} bytes, at most {MAX_HEADER_BYTES} are read"
        )));
    }
    let text = String::from_utf8(read(length)?).map_err(|_| malformed("the header is not text"))?;
    parse_header(&text)
}

/// The first bytes, up to the version of the format.
fn read_start(from: &mut impl Read) -> Result<Vec<u8>, Error> {
    let mut start = Vec::new();
    let n = from.take(8).read_to_end(&mut start);
    let n = n.map_err(|e| io_error("cannot read its header", e))?;
    match Kind::of_start(&start) {
        Some(Kind::Npy) if n == 8 => Ok(start),
        Some(Kind::Npy) => Err(malformed("it ends in its header")),
        Some(kind) => Err(Error::invalid(format!(
            "it is {kind}, expected {}",
            Kind::Npy
        ))),
        None if n == 0 => Err(Error::invalid("the file is empty")),
        None => Err(malformed("its first bytes are not \\x93NUMPY")),
    }
}

/// Parses the Python dictionary with the keys `descr`, `fortran_order` and `shape`.
fn parse_header(text: &str) -> Result<Header, Error> {
    let (descr, _) = value(text, "descr")?
        .strip_prefix(['\'', '"'])
        .and_then(|t| t.split_once(['\'', '"']))
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "records and other structured dtypes are not supported",
            )
        })?;
    let (dtype, swapped) = parse_descr(descr)?;
    let order = value(text, "fortran_order")?;
    let fortran_order = match (order.starts_with("True"), order.starts_with("False")) {
        (false, false) => return Err(malformed("fortran_order is neither True nor False")),
        (is_fortran, _) => is_fortran,
    };
    let inside = value(text, "shape")?
        .strip_prefix('(')
        .and_then(|t| t.split_once(')'))
        .map(|(inside, _)| inside);
    let extents = inside
        .ok_or_else(|| malformed("shape is not a tuple"))?
        .split(',')
        .map(str::trim);
    let extent = |e: &str| {
        e.trim_end_matches('L')
            .parse()
            .map_err(|_| malformed(&format!("extent {e:?} in shape")))
    };
    let shape = extents
        .filter(|e| !e.is_empty())
        .map(extent)
        .collect::<Result<_, _>>()?;
    Ok(Header {
        dtype,
        swapped,
        fortran_order,
        shape,
    })
}

/// The text after `'key':`.
fn value<'a>(text: &'a str, key: &str) -> Result<&'a str, Error> {
    let after = ['\'', '"']
        .iter()
        .find_map(|q| text.split_once(&format!("{q}{key}{q}")));
    let after = after.and_then(|(_, after)| after.trim_start().strip_prefix(':'));
    after
        .map(str::trim_start)
        .ok_or_else(|| malformed(&format!("the header lacks {key:?}")))
}

/// dtype of a type string such as `<f4`, and whether it has the other byte order.
fn parse_descr(text: &str) -> Result<(DType, bool), Error> {
    let (order, kind) = match text.strip_prefix(['<', '>', '|', '=']) {
        Some(kind) => (&text[..1], kind),
        None => ("=", text),
    };
    let dtype = match kind {
        "?" => Some(DType::Bool),
        "V2" => Some(DType::BF16),
        // Some 8-bit float; the file does not say which.
        "V1" => Some(DType::U8),
        _ => DType::ALL
            .iter()
            .copied()
            .find(|&d| !lacks_name(d) && &descr(d)[1..] == kind),
    };
    let supported = "bool, i8 to i64, u8 to u64, f16, f32, f64";
    let unknown = || {
        Error::new(
            ErrorKind::Unsupported,
            format!("NumPy dtype {text:?} is not supported; convert it to {supported}"),
        )
    };
    Ok((dtype.ok_or_else(unknown)?, order == ">"))
}

/// Reorders elements from first-axis-fastest to last-axis-fastest.
fn from_fortran_order(bytes: &[u8], size: usize, shape: &[usize]) -> Vec<u8> {
    let strides: Vec<usize> = shape
        .iter()
        .scan(1, |step, &d| Some(std::mem::replace(step, *step * d)))
        .collect();
    let mut index = vec![0usize; shape.len()];
    let mut out = Vec::with_capacity(bytes.len());
    while out.len() < bytes.len() {
        let at: usize = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
        out.extend_from_slice(&bytes[at * size..(at + 1) * size]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(tensor: &Tensor) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_npy(&mut bytes, tensor).unwrap();
        bytes
    }

    /// A file with the given header text and data.
    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let length = (header.len() as u16).to_le_bytes();
        [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), data].concat()
    }

    fn error(bytes: &[u8]) -> String {
        read_npy(bytes).unwrap_err().to_string()
    }

    #[test]
    fn every_dtype_and_rank_round_trips() {
        for &dtype in DType::ALL {
            for shape in [&[][..], &[0], &[3], &[2, 0, 4], &[2, 3, 2]] {
                let mut tensor = Tensor::zeros(dtype, shape).unwrap();
                let modulus = if dtype == DType::Bool { 2 } else { 251 };
                tensor
                    .as_bytes_mut()
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, b)| *b = (i * 7 % modulus) as u8);
                let bytes = bytes_of(&tensor);
                assert_eq!((bytes.len() - tensor.size_bytes()) % 64, 0);
                let back = read_npy(&*bytes).unwrap();
                let back = if lacks_name(dtype) {
                    back.with_bits_as(dtype).unwrap()
                } else {
                    back
                };
                assert_eq!(back, tensor);
            }
        }
    }

    #[test]
    fn files_as_numpy_writes_them() {
        let expected =
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
        let bytes = bytes_of(&Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap());
        assert!(bytes.starts_with(expected));
        assert_eq!((bytes[127], bytes.len()), (b'\n', 136));

        let big_endian = file(
            "{'shape': (2,), 'fortran_order': False, 'descr': '>i2'}",
            &[0, 1, 1, 0],
        );
        assert_eq!(read_npy(&*big_endian).unwrap().as_slice::<i16>(), [1, 256]);
        let fortran = file(
            "{\"descr\": \"|u1\", \"fortran_order\": True, \"shape\": (2, 3)}",
            &[1, 4, 2, 5, 3, 6],
        );
        assert_eq!(
            read_npy(&*fortran).unwrap().as_slice::<u8>(),
            [1, 2, 3, 4, 5, 6]
        );
        let bf16 = file(
            "{'descr': '<V2', 'fortran_order': False, 'shape': ()}",
            &[0x80, 0x3f],
        );
        assert_eq!(read_npy(&*bf16).unwrap(), Tensor::scalar(half::bf16::ONE));
    }

    #[test]
    fn bad_files_are_refused() {
        let good = bytes_of(&Tensor::from_slice(&[1i64, 2, 3], &[3]).unwrap());
        for n in 0..good.len() {
            assert!(read_npy(&good[..n]).is_err(), "cut to {n} bytes");
        }
        let with = |descr: &str, shape: &str| {
            file(
                &format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"),
                &[],
            )
        };
        assert_eq!(
            error(&with("'<f4'", "(1152921504606846976, 4096)")),
            "a tensor f32[1152921504606846976, 4096] does not fit in memory"
        );
        assert_eq!(
            error(&with("'<f4'", "(1000000000000,)")),
            "f32[1000000000000] takes 4000000000000 bytes, the file has 0"
        );
        assert!(error(&with("'<U5'", "(1,)")).contains("NumPy dtype \"<U5\" is not supported"));
        assert!(
            error(&with("[('a', '<f4')]", "(1,)")).contains("structured dtypes are not supported")
        );
        assert!(error(&with("'<f4'", "(-1,)")).contains("extent \"-1\""));
        assert!(error(&with("'<f4'", "7")).contains("shape is not a tuple"));
        assert!(error(b"PK\x03\x04....").contains("it is a zip archive"));
        assert!(error(b"not an array").contains("its first bytes"));
        assert_eq!(error(b""), "the file is empty");
        assert!(
            error(&[&b"\x93NUMPY\x02\x00"[..], &[255; 4]].concat())
                .contains("a header of 4294967295 bytes")
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn archives_round_trip() {
        let folder = std::env::temp_dir().join(format!("gristmill-npz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.npz");
        let x = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
        let y = Tensor::scalar(true);
        write_npz(&path, [("x", &x), ("/layer/y", &y)]).unwrap();
        assert_eq!(
            read_npz(&path).unwrap(),
            [("x".to_owned(), x.clone()), ("/layer/y".to_owned(), y)]
        );
        x.to_npy(folder.join("x.npy")).unwrap();
        assert_eq!(Tensor::from_npy(folder.join("x.npy")).unwrap(), x);
        assert!(
            read_npz(folder.join("x.npy"))
                .unwrap_err()
                .to_string()
                .contains("it is one NumPy array (.npy), expected an archive of arrays (.npz)")
        );
        assert!(
            Tensor::from_npy(folder.join("none.npy"))
                .unwrap_err()
                .to_string()
                .contains("none.npy: cannot open it")
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    /// An archive of the array `x: [1, 2]`.
    fn archive() -> Vec<u8> {
        let x = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
        let mut bytes = io::Cursor::new(Vec::new());
        write_archive(&mut bytes, [("x", &x)]).unwrap();
        bytes.into_inner()
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn checksums_of_archives_are_verified() {
        let name = format!("gristmill-npz-checksum-{}.npz", std::process::id());
        let path = std::env::temp_dir().join(name);
        let elements = [0, 0, 0x80, 0x3f, 0, 0, 0, 0x40];
        let mut bytes = archive();
        let start = bytes.windows(8).position(|w| w == elements).unwrap();
        for bit in [0, 35, 63] {
            bytes[start + bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bytes).unwrap();
            let e = read_npz(&path).unwrap_err().to_string();
            assert!(e.contains("array \"x\": ") && e.contains("checksum"), "{e}");
            bytes[start + bit / 8] ^= 1 << (bit % 8);
        }
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read_npz(&path).unwrap()[0].1.as_slice::<f32>(), [1.0, 2.0]);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_member_with_bytes_after_its_array_is_refused() {
        let mut bytes = bytes_of(&Tensor::scalar(1f32));
        assert!(read_member(&*bytes).is_ok());
        bytes.push(0);
        let e = read_member(&*bytes).unwrap_err().to_string();
        assert!(e.contains("bytes after the last element"), "{e}");
    }

    /// A disk with room for `room` bytes, which counts the writes that it refuses.
    struct Full {
        bytes: io::Cursor<Vec<u8>>,
        room: usize,
        n_refused: usize,
    }

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.bytes.position() as usize + bytes.len() > self.room {
                self.n_refused += 1;
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.bytes.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for Full {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.bytes.seek(to)
        }
    }

    /// Each further error would be printed by the archive's writer when it is dropped.
    #[test]
    fn an_archive_on_a_full_disk_fails_once() {
        let x = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
        for room in 0..archive().len() {
            let mut full = Full {
                bytes: io::Cursor::new(Vec::new()),
                room,
                n_refused: 0,
            };
            let to = FailsOnce::new(&mut full);
            let e = write_archive(to, [("x", &x), ("y", &x)]).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::StorageFull, "{room} bytes");
            assert_eq!(full.n_refused, 1, "{room} bytes");
        }
    }
}
