//! Writes images.

use super::codec::{Constants, Item, Texts, Writer};
use super::{
    About, CHECKSUM, CONSTANTS_ALIGN, ENTRY_BYTES, FORMAT, HEAD_BYTES, Kind, MAGIC, Section,
    total_bytes, weights_head,
};
use crate::error::Error;
use crate::files;
use crate::program::Program;
use crate::tensor::ALIGN_BYTES;
use crate::text::Function;
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
/// Errors for programs of other devices than CPUs, for kernels that are not in a [`Text`](crate::text::Text), and with
/// `Internal` for a program that opening would refuse.
pub fn write(path: &Path, about: &About, programs: &[Arc<Program>]) -> Result<Vec<Section>, Error> {
    let contents = Contents::of(about, programs)?;
    contents.write_weights(path)?;
    replace(path, |file| contents.write(file))?;
    Ok(contents.sections)
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

/// An image that is not in a file yet.
pub struct Contents {
    about: Vec<u8>,
    programs: Vec<u8>,
    text: Vec<u8>,
    /// Number of functions in the table of the text.
    n_imports: usize,
    /// The texts that were joined.
    texts: Texts,
    constants: Constants,
    /// Name of the file of the constants; empty where they are in the image.
    weights: String,
    sections: Vec<Section>,
}

impl Contents {
    /// The image of programs of one model, for different shapes of its inputs.
    ///
    /// Errors as [`write`](write()).
    pub fn of(about: &About, programs: &[Arc<Program>]) -> Result<Contents, Error> {
        for program in programs {
            program.check()?;
        }
        let mut head = Writer::default();
        about.write(&mut head)?;
        let mut w = Writer::default();
        programs.to_vec().write(&mut w)?;
        let (text, imports) = w.texts.joined()?;
        let mut all = Writer::default();
        imports.write(&mut all)?;
        all.bytes.append(&mut w.bytes);
        let mut made = Contents {
            about: head.bytes,
            programs: all.bytes,
            text,
            n_imports: imports.len(),
            texts: w.texts,
            constants: w.constants,
            weights: about.weights.clone(),
            sections: Vec::new(),
        };
        made.sections = made.sections_in_order();
        Ok(made)
    }

    /// The sections in the order of the file.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// The machine code.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Number of functions in the table of the text.
    pub fn n_imports(&self) -> usize {
        self.n_imports
    }

    /// The place of a function in the text; `None` for one of another program.
    pub fn place_of(&self, function: &Function) -> Option<usize> {
        let (text, offset) = function.place()?;
        Some(self.texts.known(text)? + offset)
    }

    /// All bytes before the text.
    pub fn head(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let written = self.write_head(&mut bytes);
        debug_assert!(written.is_ok(), "memory takes all bytes");
        bytes
    }

    /// Size of the constants in the image in bytes.
    pub fn constants_bytes(&self) -> usize {
        match self.weights.is_empty() {
            true => self.constants.n_bytes,
            false => 0,
        }
    }

    /// Writes the constants of the image.
    pub fn write_constants(&self, file: &mut impl Write) -> io::Result<()> {
        match self.weights.is_empty() {
            true => self.constants.visit(|bytes| file.write_all(bytes)),
            false => Ok(()),
        }
    }

    /// Writes the file of the constants, where they have one, beside the file that the image is for.
    pub fn write_weights(&self, path: &Path) -> Result<(), Error> {
        let Some(section) = self.sections.iter().find(|s| s.kind == Kind::Weights) else {
            return Ok(());
        };
        replace(&path.with_file_name(&self.weights), |file| {
            let head = weights_head(section);
            file.write_all(&head)?;
            zeros(file, section.offset - head.len())?;
            self.constants.visit(|bytes| file.write_all(bytes))
        })
    }

    fn sections_in_order(&self) -> Vec<Section> {
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
        let (kind, offset) = match self.weights.is_empty() {
            true => (Kind::Constants, end.next_multiple_of(CONSTANTS_ALIGN)),
            false => (Kind::Weights, CONSTANTS_ALIGN),
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

    /// Writes the sections before the text, and the zeros in front of it; gives the offset reached.
    fn write_head(&self, file: &mut impl Write) -> io::Result<usize> {
        let head = head(&self.sections);
        file.write_all(&head)?;
        let mut at = head.len();
        for (section, bytes) in self.sections.iter().zip([&self.about, &self.programs]) {
            zeros(file, section.offset - at)?;
            file.write_all(bytes)?;
            at = section.offset + bytes.len();
        }
        let text = &self.sections[2];
        zeros(file, text.offset - at)?;
        Ok(text.offset)
    }

    fn write(&self, file: &mut impl Write) -> io::Result<()> {
        let at = self.write_head(file)? + self.text.len();
        file.write_all(&self.text)?;
        let constants = self.sections.iter().find(|s| s.kind == Kind::Constants);
        zeros(file, constants.map_or(0, |s| s.offset - at))?;
        self.write_constants(file)
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
