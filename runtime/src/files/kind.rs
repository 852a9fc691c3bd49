//! Kinds of files by their first bytes, for errors about a file that is of another kind than expected.

use super::open;
use std::fmt;
use std::io::Read;
use std::path::Path;

/// Bytes that tell the kind of a file.
const N_BYTES: u64 = 24;

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No bytes at all.
    Empty,
    /// A zip archive: `.npz` of NumPy, `.pt` of PyTorch.
    Zip,
    /// One array of NumPy.
    Npy,
    /// A pickled object of Python.
    Pickle,
    /// HDF5, as Keras writes it.
    Hdf5,
    /// A model of TensorFlow Lite.
    TfLite,
    /// Tensors in the format safetensors.
    Safetensors,
    /// A model of llama.cpp.
    Gguf,
    /// The place holder of a file that Git LFS has not fetched.
    LfsPointer,
    /// A web page.
    Html,
}

impl Kind {
    /// The kind of a regular file; `None` for any other, and for one that cannot be read: its reader says why.
    pub fn of(path: &Path) -> Option<Kind> {
        let mut start = Vec::new();
        let read = open(path).and_then(|file| file.take(N_BYTES).read_to_end(&mut start));
        match read {
            Ok(0) => Some(Kind::Empty),
            Ok(_) => Kind::of_start(&start),
            Err(_) => None,
        }
    }

    /// The kind of a file that begins with these bytes.
    pub(crate) fn of_start(start: &[u8]) -> Option<Kind> {
        const MAGICS: &[(usize, &[u8], Kind)] = &[
            (0, b"PK\x03\x04", Kind::Zip),
            (0, b"PK\x05\x06", Kind::Zip),
            (0, b"\x93NUMPY", Kind::Npy),
            (0, b"\x80\x02", Kind::Pickle),
            (0, b"\x80\x04", Kind::Pickle),
            (0, b"\x89HDF\r\n", Kind::Hdf5),
            (4, b"TFL3", Kind::TfLite),
            (7, b"\0{\"", Kind::Safetensors),
            (0, b"GGUF", Kind::Gguf),
            (0, b"version https://git-lfs", Kind::LfsPointer),
            (0, b"<!DOCTYPE", Kind::Html),
            (0, b"<!doctype", Kind::Html),
            (0, b"<html", Kind::Html),
        ];
        let has = |at: usize, magic: &[u8]| start.get(at..).is_some_and(|s| s.starts_with(magic));
        let found = MAGICS.iter().find(|(at, magic, _)| has(*at, magic));
        found.map(|(.., kind)| *kind)
    }

    /// A step towards the file that was meant, if there is one whatever the reader.
    pub fn hint(self) -> Option<&'static str> {
        match self {
            Kind::LfsPointer => Some("git lfs pull"),
            Kind::Empty | Kind::Html => Some("download or write it again"),
            _ => None,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Empty => "an empty file",
            Kind::Zip => "a zip archive, as .npz and .pt files are",
            Kind::Npy => "one NumPy array (.npy)",
            Kind::Pickle => "a pickled Python object",
            Kind::Hdf5 => "an HDF5 file, as Keras writes",
            Kind::TfLite => "a TensorFlow Lite model",
            Kind::Safetensors => "a safetensors file",
            Kind::Gguf => "a GGUF file",
            Kind::LfsPointer => "a Git LFS pointer to a file that was not fetched",
            Kind::Html => "an HTML page",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_their_first_bytes() {
        let folder = std::env::temp_dir().join(format!("gristmill-kinds-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let kind = |bytes: &[u8]| {
            let path = folder.join("file");
            std::fs::write(&path, bytes).unwrap();
            Kind::of(&path)
        };
        assert_eq!(kind(b""), Some(Kind::Empty));
        assert_eq!(kind(b"PK\x03\x04rest"), Some(Kind::Zip));
        assert_eq!(kind(b"\x93NUMPY\x01"), Some(Kind::Npy));
        assert_eq!(kind(b"\x10\0\0\0TFL3"), Some(Kind::TfLite));
        assert_eq!(kind(b"\x40\0\0\0\0\0\0\0{\"__"), Some(Kind::Safetensors));
        assert_eq!(kind(b"\x08\x09\x12"), None);
        assert_eq!(Kind::of(&folder), None);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
