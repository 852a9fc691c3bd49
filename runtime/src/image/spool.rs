//! Constants on their way into an image: in a file, so that memory holds one at a time.

use crate::error::Error;
use crate::files;
use crate::sync::lock;
use crate::tensor::{ALIGN_BYTES, Tensor};
use memmap2::{MmapOptions, MmapRaw};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Size from which a tensor goes to the file: a page. Most tensors below it are descriptors, of a few hundred bytes.
const MIN_BYTES: usize = 4 << 10;

/// Bytes of the file that are mapped together: each mapping is an entry in a table of the system, which has a limit.
const SEGMENT_BYTES: usize = 16 << 20;

/// A temporary file that takes the bytes of tensors. It has no name, so that it is gone once the spool and the tensors are, however the
/// process ends.
///
/// The system may write its pages to the disk and drop them from memory, other than those of memory that is allocated.
pub struct Spool {
    /// The file that the constants are for, which errors name.
    output: PathBuf,
    contents: Mutex<Contents>,
}

struct Contents {
    file: File,
    /// The segment that is being filled, and its bytes in use.
    segment: Option<(Arc<MmapRaw>, usize)>,
    /// Size of the file in bytes: a whole number of segments.
    end: usize,
    /// Places by the size and the checksum of their bytes.
    by_content: HashMap<(usize, u32), Vec<Place>>,
}

/// Bytes that were written.
#[derive(Clone)]
struct Place {
    segment: Arc<MmapRaw>,
    offset: usize,
    n_bytes: usize,
}

impl Place {
    fn bytes(&self) -> &[u8] {
        let first = self.segment.as_ptr().wrapping_add(self.offset);
        // SAFETY: the range lies in the segment, which `self` holds, and was written before there was a place. Nothing is written twice,
        // and nobody else can open the file.
        unsafe { std::slice::from_raw_parts(first, self.n_bytes) }
    }
}

impl Spool {
    /// An empty spool for the constants of `output`, in its folder; for a device or a pipe, in that of temporary files.
    ///
    /// Errors when no file can be created there.
    pub fn beside(output: &Path) -> Result<Spool, Error> {
        let file = files::nameless(output).map_err(|e| failed(output, &e))?;
        let contents = Contents {
            file,
            segment: None,
            end: 0,
            by_content: HashMap::new(),
        };
        Ok(Spool {
            output: output.to_owned(),
            contents: Mutex::new(contents),
        })
    }

    /// The tensor with its bytes in the file, at a multiple of [`ALIGN_BYTES`]; the file has equal bytes once. One of less than 4 KiB is
    /// given back as it is.
    ///
    /// Errors when the file cannot be written or mapped.
    pub fn keep(&self, tensor: &Tensor) -> Result<Tensor, Error> {
        let bytes = tensor.as_bytes();
        if bytes.len() < MIN_BYTES {
            return Ok(tensor.clone());
        }
        let mut contents = lock(&self.contents);
        let placed = contents.place(bytes);
        let place = placed.map_err(|e| failed(&self.output, &e))?;
        // SAFETY: bytes of a place never change, and the tensor holds the segment; truth values were those of a tensor.
        unsafe {
            let owner = place.segment.clone();
            Tensor::borrowed(tensor.dtype(), tensor.shape(), place.bytes(), owner)
        }
    }
}

impl Contents {
    /// The place of some bytes, which are written unless they are there.
    fn place(&mut self, bytes: &[u8]) -> io::Result<Place> {
        let key = (bytes.len(), crc32fast::hash(bytes));
        let mut alike = self.by_content.get(&key).into_iter().flatten();
        if let Some(same) = alike.find(|place| place.bytes() == bytes) {
            return Ok(same.clone());
        }
        let place = self.append(bytes)?;
        self.by_content.entry(key).or_default().push(place.clone());
        Ok(place)
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<Place> {
        let (segment, offset) = self.room(bytes.len())?;
        let start = self.end - segment.len() + offset;
        // Through the file and not the mapping: a full disk is an error here, and a signal there.
        self.file.seek(SeekFrom::Start(start as u64))?;
        self.file.write_all(bytes)?;
        let in_use = (offset + bytes.len()).next_multiple_of(ALIGN_BYTES);
        self.segment = Some((segment.clone(), in_use));
        Ok(Place {
            segment,
            offset,
            n_bytes: bytes.len(),
        })
    }

    /// A segment, which is the last, and an offset in it from which `n_bytes` are free.
    fn room(&mut self, n_bytes: usize) -> io::Result<(Arc<MmapRaw>, usize)> {
        if let Some((segment, in_use)) = &self.segment
            && in_use + n_bytes <= segment.len()
        {
            return Ok((segment.clone(), *in_use));
        }
        let len = n_bytes.next_multiple_of(SEGMENT_BYTES);
        let end = self.end + len;
        self.file.set_len(end as u64)?;
        let mut part = MmapOptions::new();
        let part = part.offset(self.end as u64).len(len);
        let segment = Arc::new(part.map_raw_read_only(&self.file)?);
        self.end = end;
        Ok((segment, 0))
    }
}

fn failed(output: &Path, e: &io::Error) -> Error {
    let output = output.display();
    Error::invalid(format!("{output}: a temporary file for its constants: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn spool(name: &str) -> Spool {
        let name = format!("gristmill-spool-{name}-{}", std::process::id());
        Spool::beside(&std::env::temp_dir().join(name)).unwrap()
    }

    fn numbers(n: usize, first: f32) -> Tensor {
        let values: Vec<f32> = (0..n).map(|i| first + i as f32).collect();
        Tensor::from_slice(&values, &[n]).unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn equal_bytes_are_in_the_file_once() {
        let spool = spool("once");
        let [a, b] = [1.0, 2.0].map(|first| numbers(1500, first));
        let kept = [&a, &b, &a].map(|t| spool.keep(t).unwrap());
        assert_eq!(kept[0].as_ptr(), kept[2].as_ptr());
        assert_ne!(kept[0].as_ptr(), a.as_ptr());
        assert_eq!(kept[1].as_ptr() as usize - kept[0].as_ptr() as usize, 6016);
        let other_type = a.with_bits_as(DType::I32).unwrap();
        let other_type = other_type.reshaped(&[2, 750]).unwrap();
        let other_type = spool.keep(&other_type).unwrap();
        assert_eq!(other_type.as_ptr(), kept[0].as_ptr());
        assert_eq!(
            (other_type.dtype(), other_type.shape()),
            (DType::I32, &[2, 750][..])
        );
        assert_eq!(spool.keep(&kept[1]).unwrap().as_ptr(), kept[1].as_ptr());
        let prefix = spool.keep(&numbers(1025, 1.0)).unwrap();
        assert_ne!(prefix.as_ptr(), kept[0].as_ptr());
        drop(spool);
        for (kept, made) in kept.iter().zip([&a, &b, &a]) {
            assert_eq!(kept.as_bytes(), made.as_bytes());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn small_tensors_stay_in_memory() {
        let spool = spool("small");
        for (n, stays) in [(0, true), (1023, true), (1024, false)] {
            let t = numbers(n, 0.0);
            assert_eq!(spool.keep(&t).unwrap().as_ptr() == t.as_ptr(), stays, "{n}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn tensors_of_all_sizes_are_whole_and_copied_before_a_write() {
        let spool = spool("segments");
        let mib = (1 << 20) / 4;
        let made: Vec<Tensor> = [10, 5, 2, 16, 17, 1]
            .iter()
            .map(|n| numbers(n * mib + 3, *n as f32))
            .collect();
        let kept: Vec<Tensor> = made.iter().map(|t| spool.keep(t).unwrap()).collect();
        for (kept, made) in kept.iter().zip(&made) {
            assert!(kept.as_bytes() == made.as_bytes());
            assert!(kept.as_ptr().addr().is_multiple_of(ALIGN_BYTES));
        }
        let mut written = kept[0].clone();
        written.as_mut_slice::<f32>()[0] = -1.0;
        assert!(kept[0].as_bytes() == made[0].as_bytes());
        assert_eq!(written.as_slice::<f32>()[..2], [-1.0, 11.0]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn errors_name_the_output() {
        let missing = std::env::temp_dir().join("no such folder").join("x.gmx");
        let error = Spool::beside(&missing).err().unwrap().to_string();
        assert!(error.contains("x.gmx: a temporary file"), "{error}");
    }
}
