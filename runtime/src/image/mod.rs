//! Images: compiled programs as a file, which is mapped and run without a compiler.
//!
//! | part | holds |
//! |---|---|
//! | head | magic, format, number of sections, size of the file, layout of descriptors, checksum; then the table of sections |
//! | about | [`About`]: the machine that the image is for, names, extents that inputs index |
//! | programs | the functions that the text calls, and a [`Program`](crate::program::Program) for each set of input shapes |
//! | text | machine code of all programs, position-independent |
//! | constants | weights, as kernels read them, each at a multiple of 64 bytes; they are used in place |
//!
//! Constants may be in a file beside the image instead, which begins with [`WEIGHTS_MAGIC`], the format, the checksum and the number of their
//! bytes, and has them 64 KiB behind its start: an executable holds at most 2 GiB in front of them.
//!
//! All numbers are little-endian, and all places offsets from the start. Every part has a checksum (CRC-32); that of the constants is
//! looked at by [`Image::verify`] only, the others always. A runtime reads the one [`FORMAT`] of its own, and descriptors of its own
//! [`LAYOUT`].

mod codec;
mod items;
mod read;
mod spool;
#[cfg(test)]
mod tests;
mod write;

pub use gristmill_kernels::LAYOUT;
pub use read::{Image, Parts, Variant};
pub use spool::Spool;
pub use write::{Contents, write};

use crate::error::Error;
use codec::{Item, Reader, Writer, record};

/// Version of the format that this runtime reads and writes.
pub const FORMAT: u32 = 4;

/// The first bytes of every image.
pub const MAGIC: [u8; 8] = *b"GMIMAGE\0";

/// The first bytes of a file of constants.
pub const WEIGHTS_MAGIC: [u8; 8] = *b"GMWEIGHT";

/// Bytes of its head.
const WEIGHTS_HEAD_BYTES: usize = 24;

/// The head of the file that holds the constants of a section.
fn weights_head(section: &Section) -> [u8; WEIGHTS_HEAD_BYTES] {
    let mut head = [0; WEIGHTS_HEAD_BYTES];
    head[..8].copy_from_slice(&WEIGHTS_MAGIC);
    head[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    head[12..16].copy_from_slice(&section.checksum.to_le_bytes());
    head[16..].copy_from_slice(&(section.bytes as u64).to_le_bytes());
    head
}

/// Bytes of the head, without the table of sections.
const HEAD_BYTES: usize = 40;
/// Bytes of an entry of that table.
const ENTRY_BYTES: usize = 24;
/// Place of the checksum in the head, which counts as 0 in it.
const CHECKSUM: std::ops::Range<usize> = 32..36;
/// Most sections of a file.
const MAX_SECTIONS: u32 = 4096;
/// Alignment of the constants in the file: pages of the largest size there are.
const CONSTANTS_ALIGN: usize = 64 << 10;

/// The machine and the model that an image is of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// Name of the model.
    pub name: String,
    /// Version of the compiler.
    pub version: String,
    /// Architecture and system, as in `x86_64-linux`.
    pub system: String,
    /// Number of the [`Isa`](gristmill_kernels::Isa) of kernels and packed weights.
    pub isa: u32,
    /// Features of the CPU that generated code uses, by Cranelift's names (`has_avx2`).
    pub features: Vec<String>,
    /// The sizes that each program is for.
    pub variants: Vec<Fixed>,
    /// Name of the file beside the image that holds the constants; empty where the image does.
    pub weights: String,
    /// Hash of the measurements of a machine that decided placement and kernels; 0 where none did.
    pub measured: u64,
}

/// Sizes that a program is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fixed {
    /// Sizes by dim.
    pub dims: Vec<(String, usize)>,
    /// Extent of the axis that each input indexes, where one is known: values at random stay below it.
    pub indexed: Vec<Option<u64>>,
}

record! {
    About { name, version, system, isa, features, variants, weights, measured }
    Fixed { dims, indexed }
}

/// Architecture and system of this process.
pub fn system() -> String {
    format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)
}

/// Kind of a section, as its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// [`About`].
    About = 1,
    /// Programs.
    Programs = 2,
    /// Machine code.
    Text = 3,
    /// Constants.
    Constants = 4,
    /// Constants in the file that [`About::weights`] names.
    Weights = 5,
}

impl Kind {
    const ALL: [Kind; 5] = [
        Kind::About,
        Kind::Programs,
        Kind::Text,
        Kind::Constants,
        Kind::Weights,
    ];

    /// Its name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::About => "about",
            Kind::Programs => "programs",
            Kind::Text => "text",
            Kind::Constants => "constants",
            Kind::Weights => "weights",
        }
    }
}

/// A section of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// Its kind.
    pub kind: Kind,
    /// Where it begins.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
    checksum: u32,
}

/// Size in bytes of a file with these sections.
pub fn total_bytes(sections: &[Section]) -> usize {
    let inside = sections.iter().filter(|s| s.kind != Kind::Weights);
    inside.map(|s| s.offset + s.bytes).max().unwrap_or(0)
}
