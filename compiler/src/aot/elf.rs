//! Executables of the format ELF, 64 bits, little-endian: headers as tables, and bytes by checked offsets.

use crate::error::{Error, Result};

/// Kinds and flags that are named here; all others pass through.
pub const LOAD: u32 = 1;
pub const SYMBOLS: u32 = 2;
pub const STRINGS: u32 = 3;
pub const NOTE: u32 = 7;
const EMPTY: u32 = 0;
const NO_BITS: u32 = 8;
const ALLOCATED: u64 = 2;

/// Permissions of a segment.
pub const EXECUTE: u32 = 1;
pub const WRITE: u32 = 2;
pub const READ: u32 = 4;

pub const X86_64: u16 = 62;
pub const AARCH64: u16 = 183;

/// The first bytes of a file.
pub const ELF_MAGIC: [u8; 4] = *b"\x7fELF";

const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
const SECTION_BYTES: usize = 64;
/// Bytes of a symbol.
pub const SYMBOL_BYTES: usize = 24;

/// An entry of the table of program headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub kind: u32,
    pub flags: u32,
    pub offset: u64,
    pub address: u64,
    pub physical: u64,
    pub file_bytes: u64,
    pub memory_bytes: u64,
    pub align: u64,
}

/// An entry of the table of section headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// Place of its name in the section of names.
    pub name: u32,
    pub kind: u32,
    pub flags: u64,
    pub address: u64,
    pub offset: u64,
    pub bytes: u64,
    pub link: u32,
    pub info: u32,
    pub align: u64,
    pub entry_bytes: u64,
}

impl Section {
    /// True when it is a part of memory.
    pub fn is_allocated(&self) -> bool {
        self.flags & ALLOCATED != 0
    }

    /// True when it has bytes in the file.
    pub fn has_contents(&self) -> bool {
        self.kind != EMPTY && self.kind != NO_BITS
    }
}

/// A file with its tables. Sections and segments with contents lie within it.
pub struct Elf<'t> {
    pub bytes: &'t [u8],
    pub machine: u16,
    pub segments: Vec<Segment>,
    /// Place of their table.
    pub segments_offset: usize,
    pub sections: Vec<Section>,
    /// Index of the section of names.
    pub names: usize,
}

impl<'t> Elf<'t> {
    /// Errors with a sentence for all that is no such file, or is damaged.
    pub fn parse(bytes: &'t [u8]) -> Result<Elf<'t>> {
        if !bytes.starts_with(&ELF_MAGIC) {
            return Err(Error::invalid("it is no ELF file"));
        }
        if bytes.get(4..7) != Some(&[2, 1, 1]) {
            return Err(Error::invalid("it is not of 64 bits, little-endian"));
        }
        let (kind, machine) = (half(bytes, 16)?, half(bytes, 18)?);
        if ![2, 3].contains(&kind) {
            return Err(Error::invalid("it is no executable"));
        }
        let sizes = (half(bytes, 54)?, half(bytes, 58)?);
        if sizes != (SEGMENT_BYTES as u16, SECTION_BYTES as u16) {
            return Err(damaged("headers of another size"));
        }
        let (segments_offset, sections_offset) = (long(bytes, 32)?, long(bytes, 40)?);
        let segments = table(bytes, segments_offset, half(bytes, 56)?, SEGMENT_BYTES)?;
        let sections = table(bytes, sections_offset, half(bytes, 60)?, SECTION_BYTES)?;
        let elf = Elf {
            bytes,
            machine,
            segments: segments.map(segment).collect::<Result<_>>()?,
            segments_offset: segments_offset as usize,
            sections: sections.map(section).collect::<Result<_>>()?,
            names: half(bytes, 62)?.into(),
        };
        elf.check()?;
        Ok(elf)
    }

    fn check(&self) -> Result<()> {
        let with_contents = self.sections.iter().filter(|s| s.has_contents());
        for section in with_contents {
            within(self.bytes, section.offset, section.bytes)?;
        }
        for s in &self.segments {
            within(self.bytes, s.offset, s.file_bytes)?;
            let end = s.address.checked_add(s.memory_bytes);
            if end.is_none_or(|end| end > MAX_ADDRESS) || s.file_bytes > s.memory_bytes {
                return Err(damaged("a segment of an impossible size"));
            }
        }
        if self.segments_offset < HEADER_BYTES {
            return Err(damaged("its headers overlap"));
        }
        let names = self.sections.get(self.names);
        match names.is_some_and(Section::has_contents) {
            true => Ok(()),
            false => Err(damaged("it has no names of sections")),
        }
    }

    /// Bytes of a section; none of one without contents.
    pub fn contents(&self, section: &Section) -> &'t [u8] {
        let start = section.offset as usize;
        match section.has_contents() {
            true => &self.bytes[start..start + section.bytes as usize],
            false => &[],
        }
    }

    /// Index of the first section of a name.
    pub fn find(&self, name: &str) -> Option<usize> {
        let names = self.contents(&self.sections[self.names]);
        let has_name = |s: &Section| {
            let rest = names.get(s.name as usize..).unwrap_or_default();
            rest.strip_prefix(name.as_bytes())
                .is_some_and(|rest| rest.first() == Some(&0))
        };
        self.sections.iter().position(has_name)
    }

    /// End of the table of program headers.
    pub fn segments_end(&self) -> usize {
        self.segments_offset + self.segments.len() * SEGMENT_BYTES
    }
}

/// No user space is larger.
const MAX_ADDRESS: u64 = 1 << 47;

pub fn damaged(why: &str) -> Error {
    Error::invalid(format!("it is damaged: {why}"))
}

/// A range of a file.
pub fn within(bytes: &[u8], offset: u64, n: u64) -> Result<&[u8]> {
    let end = offset.saturating_add(n);
    let range = bytes.get(offset as usize..end as usize);
    range.ok_or_else(|| damaged("it ends early"))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let mut array = [0; N];
    array.copy_from_slice(within(bytes, at as u64, N as u64)?);
    Ok(array)
}

fn half(bytes: &[u8], at: usize) -> Result<u16> {
    Ok(u16::from_le_bytes(array(bytes, at)?))
}

fn word(bytes: &[u8], at: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(array(bytes, at)?))
}

fn long(bytes: &[u8], at: usize) -> Result<u64> {
    Ok(u64::from_le_bytes(array(bytes, at)?))
}

/// The entries of a table.
fn table(
    bytes: &[u8],
    offset: u64,
    n: u16,
    entry_bytes: usize,
) -> Result<std::slice::ChunksExact<'_, u8>> {
    let all = within(bytes, offset, u64::from(n) * entry_bytes as u64)?;
    Ok(all.chunks_exact(entry_bytes))
}

fn segment(e: &[u8]) -> Result<Segment> {
    Ok(Segment {
        kind: word(e, 0)?,
        flags: word(e, 4)?,
        offset: long(e, 8)?,
        address: long(e, 16)?,
        physical: long(e, 24)?,
        file_bytes: long(e, 32)?,
        memory_bytes: long(e, 40)?,
        align: long(e, 48)?,
    })
}

fn section(e: &[u8]) -> Result<Section> {
    Ok(Section {
        name: word(e, 0)?,
        kind: word(e, 4)?,
        flags: long(e, 8)?,
        address: long(e, 16)?,
        offset: long(e, 24)?,
        bytes: long(e, 32)?,
        link: word(e, 40)?,
        info: word(e, 44)?,
        align: long(e, 48)?,
        entry_bytes: long(e, 56)?,
    })
}

/// The table of program headers, to stand where it was.
pub fn segments_bytes(segments: &[Segment]) -> Vec<u8> {
    let mut out = Vec::new();
    for s in segments {
        out.extend([s.kind, s.flags].map(u32::to_le_bytes).as_flattened());
        let sizes = [s.file_bytes, s.memory_bytes, s.align];
        for n in [s.offset, s.address, s.physical].into_iter().chain(sizes) {
            out.extend(n.to_le_bytes());
        }
    }
    out
}

/// The table of section headers.
pub fn sections_bytes(sections: &[Section]) -> Vec<u8> {
    let mut out = Vec::new();
    for s in sections {
        out.extend([s.name, s.kind].map(u32::to_le_bytes).as_flattened());
        let place = [s.flags, s.address, s.offset, s.bytes];
        out.extend(place.map(u64::to_le_bytes).as_flattened());
        out.extend([s.link, s.info].map(u32::to_le_bytes).as_flattened());
        let entries = [s.align, s.entry_bytes];
        out.extend(entries.map(u64::to_le_bytes).as_flattened());
    }
    out
}

/// Names the place and the length of the table of section headers in the header of a file.
pub fn set_sections(header: &mut [u8], offset: u64, n: usize) -> Result<()> {
    let n = u16::try_from(n).map_err(|_| damaged("it has too many sections"))?;
    if header.len() < HEADER_BYTES {
        return Err(damaged("it ends early"));
    }
    header[40..48].copy_from_slice(&offset.to_le_bytes());
    header[60..62].copy_from_slice(&n.to_le_bytes());
    Ok(())
}
