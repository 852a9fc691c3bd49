//! Writes images.

use super::codec::{Constants, Item, Writer};
use super::{
    About, CHECKSUM, CONSTANTS_ALIGN, ENTRY_BYTES, FORMAT, HEAD_BYTES, Kind, MAGIC, Section,
    total_bytes, weights_head,
};
use crate::error::Error;
use crate::files;
use crate::program::Program;
use crate::tensor::ALIGN_BYTES;
use crc32fast::Hasher;
use gristmill_kernels::LAYOUT;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

/// Writes programs of one model, for different shapes of its inputs, to a file that is replaced as a whole. Constants of the same bytes are
/// there once. The same programs give the same bytes. Where [`About::weights`] names a file, it gets the constants, in the folder of the
/// image and before it.
///
/// Errors for programs of other devices than CPUs, and for kernels that are not in a [`Text`](crate::text::Text).
pub fn write(path: &Path, about: &About, programs: &[Arc<Program>]) -> Result<Vec<Section>, Error> {
    let parts = Parts::of(about, programs)?;
    let sections = parts.sections();
    if let Some(section) = sections.iter().find(|s| s.kind == Kind::Weights) {
        let weights = path.with_file_name(&about.weights);
        replace(&weights, |file| parts.write_weights(section, file))?;
    }
    replace(path, |file| parts.write(&sections, file))?;
    Ok(sections)
}

/// Replaces a file as a whole.
fn replace(
    path: &Path,
    put: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), Error> {
    let written = files::replace(path, |file| {
        put(file)?;
        file.flush()?;
        // Pipes and devices have nothing to sync.
        match file.get_ref().metadata()?.is_file() {
            true => file.get_ref().sync_all(),
            false => Ok(()),
        }
    });
    written.map_err(|e| Error::invalid(format!("{}: {e}", path.display())))
}

/// Contents of the sections.
struct Parts {
    about: Vec<u8>,
    programs: Vec<u8>,
    text: Vec<u8>,
    constants: Constants,
    /// True when the constants are in a file of their own.
    is_apart: bool,
}

impl Parts {
    fn of(about: &About, programs: &[Arc<Program>]) -> Result<Parts, Error> {
        let mut head = Writer::default();
        about.write(&mut head)?;
        let mut w = Writer::default();
        programs.to_vec().write(&mut w)?;
        let (text, imports) = w.texts.joined()?;
        let mut all = Writer::default();
        imports.write(&mut all)?;
        all.bytes.append(&mut w.bytes);
        Ok(Parts {
            about: head.bytes,
            programs: all.bytes,
            text,
            is_apart: !about.weights.is_empty(),
            constants: w.constants,
        })
    }

    /// The sections in the order of the file.
    fn sections(&self) -> Vec<Section> {
        let all = [
            (Kind::About, &self.about),
            (Kind::Programs, &self.programs),
            (Kind::Text, &self.text),
        ];
        let mut end = HEAD_BYTES + (all.len() + 1) * ENTRY_BYTES;
        let mut sections = Vec::new();
        for (kind, bytes) in all {
            let offset = end.next_multiple_of(ALIGN_BYTES);
            sections.push(Section {
                kind,
                offset,
                bytes: bytes.len(),
                checksum: crc32fast::hash(bytes),
            });
            end = offset + bytes.len();
        }
        let (kind, offset) = match self.is_apart {
            true => (Kind::Weights, CONSTANTS_ALIGN),
            false => (Kind::Constants, end.next_multiple_of(CONSTANTS_ALIGN)),
        };
        sections.push(Section {
            kind,
            offset,
            bytes: self.constants.n_bytes,
            checksum: self.checksum_of_constants(),
        });
        sections
    }

    fn checksum_of_constants(&self) -> u32 {
        let mut hasher = Hasher::new();
        let visited = self.constants.visit(|bytes| {
            hasher.update(bytes);
            Ok(())
        });
        visited.map_or(0, |()| hasher.finalize())
    }

    fn write(&self, sections: &[Section], file: &mut impl Write) -> io::Result<()> {
        let mut at = 0;
        let mut put = |offset: usize, bytes: &[u8]| -> io::Result<()> {
            zeros(file, offset - at)?;
            at = offset + bytes.len();
            file.write_all(bytes)
        };
        put(0, &head(sections))?;
        let contents = [&self.about, &self.programs, &self.text];
        for (section, bytes) in sections.iter().zip(contents) {
            put(section.offset, bytes)?;
        }
        let constants = sections.iter().find(|s| s.kind == Kind::Constants);
        let Some(constants) = constants else {
            return Ok(());
        };
        put(constants.offset, &[])?;
        self.constants.visit(|bytes| file.write_all(bytes))
    }

    fn write_weights(&self, section: &Section, file: &mut impl Write) -> io::Result<()> {
        let head = weights_head(section);
        file.write_all(&head)?;
        zeros(file, section.offset - head.len())?;
        self.constants.visit(|bytes| file.write_all(bytes))
    }
}

impl Constants {
    /// Gives all bytes of the section, in order.
    fn visit(&self, mut put: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let padding = [0; ALIGN_BYTES];
        for (_, tensor) in &self.tensors {
            let bytes = tensor.as_bytes();
            put(bytes)?;
            put(&padding[..bytes.len().next_multiple_of(ALIGN_BYTES) - bytes.len()])?;
        }
        Ok(())
    }
}

fn zeros(file: &mut impl Write, mut n: usize) -> io::Result<()> {
    let block = [0; 4096];
    while n > 0 {
        let now = n.min(block.len());
        file.write_all(&block[..now])?;
        n -= now;
    }
    Ok(())
}

/// The head with the table of sections.
fn head(sections: &[Section]) -> Vec<u8> {
    let total = total_bytes(sections);
    let mut head = MAGIC.to_vec();
    head.extend(FORMAT.to_le_bytes());
    head.extend((sections.len() as u32).to_le_bytes());
    head.extend((total as u64).to_le_bytes());
    head.extend(LAYOUT.to_le_bytes());
    head.extend([0; 8]);
    for s in sections {
        head.extend((s.kind as u32).to_le_bytes());
        head.extend(s.checksum.to_le_bytes());
        head.extend((s.offset as u64).to_le_bytes());
        head.extend((s.bytes as u64).to_le_bytes());
    }
    let checksum = crc32fast::hash(&head);
    head[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
    head
}
