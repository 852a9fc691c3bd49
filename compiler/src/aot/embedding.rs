//! Puts an image into an executable that has room for one, without a linker.
//!
//! The room is four sections, each a segment of its own, and all of them behind the rest in addresses and in the file. Nothing else moves in
//! memory, and the table of program headers stays where it is and as long as it is. So `strip`, `objcopy` and others that rewrite
//! executables keep the image, the system maps it, and debuggers and profilers know its kernels by name.
//!
//! | part of the file | from |
//! |---|---|
//! | up to the room | the runner, with other program headers, descriptor and build id |
//! | `.gm_head`, `.gm_text`, `.gm_table`, `.gm_constants` | the image |
//! | names, symbols, debug information, section headers | the runner, moved; with the symbols of kernels |

use super::elf::{
    AARCH64, EXECUTE, Elf, LOAD, NOTE, READ, STRINGS, SYMBOL_BYTES, SYMBOLS, Section, Segment,
    WRITE, X86_64, damaged, sections_bytes, segments_bytes, set_sections, within,
};
use super::exports::rename;
use crate::cost::Fnv;
use crate::error::{Error, Result};
use gristmill_runtime::image::{FORMAT, LAYOUT};
use std::io::{self, Write};
use std::ops::Range;

/// The reserved sections in order, with their permissions.
const ROOMS: [(&str, u32); 4] = [
    (".gm_head", READ),
    (".gm_text", READ | EXECUTE),
    (".gm_table", READ | WRITE),
    (".gm_constants", READ),
];

/// The section that tells a runner where its image is: a magic, then the distance and the size of each part.
const DESCRIPTOR: &str = ".gm_descriptor";
pub(super) const MAGIC: &[u8] = b"GMDESCR1";
/// Its alignment in a file.
pub(super) const DESCRIPTOR_ALIGN: usize = 64;

/// A function of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Symbol {
    pub name: String,
    /// Place in the text.
    pub offset: usize,
    pub bytes: usize,
}

/// An image in parts.
pub(crate) struct Parts<'p> {
    /// All before the text.
    pub head: &'p [u8],
    pub text: &'p [u8],
    /// Room for the addresses that the text calls.
    pub table_bytes: usize,
    /// Size of the constants, which are written last.
    pub constants_bytes: usize,
    pub symbols: &'p [Symbol],
    /// The name that functions of a library get; none in an executable.
    pub exported: Option<&'p str>,
}

/// An executable that is ready to be written.
pub(crate) struct Filled<'p> {
    head: &'p [u8],
    text: &'p [u8],
    constants_bytes: usize,
    /// All up to the room, with its gaps.
    before: Vec<u8>,
    /// Places of the parts in the file.
    places: [Range<usize>; 4],
    /// All that is not loaded.
    after: Vec<u8>,
}

/// Fills the room of a runner. Errors for a runner that is damaged, or has no such room.
pub(crate) fn fill<'p>(runner: &[u8], parts: &Parts<'p>) -> Result<Filled<'p>> {
    let filled = Elf::parse(runner).and_then(|elf| filled(&elf, parts));
    filled.map_err(|e| e.context("the runner cannot be filled"))
}

fn filled<'p>(elf: &Elf, parts: &Parts<'p>) -> Result<Filled<'p>> {
    let rooms = rooms(elf)?;
    let start = elf.sections[rooms[0].section];
    let mut before = within(elf.bytes, 0, start.offset)?.to_vec();
    let (segments, mut sections) = (elf.segments.clone(), elf.sections.clone());
    let layout = Layout::of(elf, start, parts)?;
    let segments = layout.segments(segments, &rooms);
    layout.set_sections(&mut sections, &rooms);
    let table = segments_bytes(&segments);
    before[elf.segments_offset..elf.segments_end()].copy_from_slice(&table);
    describe(elf, &layout, &mut before)?;
    if let Some(name) = parts.exported {
        rename(elf, name, &mut before)?;
    }
    name_build(elf, parts, &mut before);
    let mut rest = Rest {
        start: layout.end().next_multiple_of(UNLOADED_ALIGN),
        bytes: Vec::new(),
    };
    let text = (rooms[1].section, layout.address[1]);
    let symbols = Symbols::of(elf, parts.symbols, text)?;
    rest.add_all(elf, &mut sections, symbols);
    let table = rest.add(&sections_bytes(&sections), UNLOADED_ALIGN);
    set_sections(&mut before, table as u64, sections.len())?;
    Ok(Filled {
        head: parts.head,
        text: parts.text,
        constants_bytes: parts.constants_bytes,
        before,
        places: layout.file,
        after: rest.bytes,
    })
}

/// A reserved section and its segment, by index.
struct Room {
    section: usize,
    segment: usize,
}

/// Finds the room. Errors unless each part has a segment of its own, and all others end before.
fn rooms(elf: &Elf) -> Result<[Room; 4]> {
    let room = |(name, flags): (&str, u32)| -> Result<Room> {
        let missing = || Error::invalid(format!("it has no section {name}"));
        let section = elf.find(name).ok_or_else(missing)?;
        let s = elf.sections[section];
        let fits = |g: &Segment| {
            let is_own = (g.offset, g.address) == (s.offset, s.address);
            g.kind == LOAD && is_own && g.flags == flags && g.memory_bytes == s.bytes
        };
        let segment = elf.segments.iter().position(fits);
        let shared = || Error::invalid(format!("its section {name} is no segment of its own"));
        Ok(Room {
            section,
            segment: segment.ok_or_else(shared)?,
        })
    };
    let [head, text, table, constants] = ROOMS.map(room);
    let rooms = [head?, text?, table?, constants?];
    check_order(elf, &rooms)?;
    Ok(rooms)
}

fn check_order(elf: &Elf, rooms: &[Room; 4]) -> Result<()> {
    let first = elf.sections[rooms[0].section];
    let is_before = |offset: u64, n: u64| offset.saturating_add(n) <= first.offset;
    let segments = elf.segments.iter().enumerate();
    let mut others = segments.filter(|(i, s)| {
        let has_place = s.memory_bytes > 0;
        has_place && rooms.iter().all(|room| room.segment != *i)
    });
    let sections = elf.sections.iter().enumerate();
    let mut other_sections = sections.filter(|(i, s)| {
        let has_place = s.is_allocated() && s.has_contents();
        has_place && rooms.iter().all(|room| room.section != *i)
    });
    let are_before = others.all(|(_, s)| {
        let end = s.address.saturating_add(s.memory_bytes);
        is_before(s.offset, s.file_bytes) && end <= first.address
    });
    let starts: Vec<u64> = rooms
        .iter()
        .map(|r| elf.sections[r.section].address)
        .collect();
    let all_before = are_before
        && other_sections.all(|(_, s)| is_before(s.offset, s.bytes))
        && is_before(elf.segments_end() as u64, 0)
        && starts.is_sorted_by(|a, b| a < b);
    match all_before {
        true => Ok(()),
        false => Err(Error::invalid("its reserved sections are not the last")),
    }
}

/// Places of the parts.
struct Layout {
    /// In the file.
    file: [Range<usize>; 4],
    /// In memory.
    address: [u64; 4],
    /// Their sizes; those of sections are 1 at least, since one without bytes would be no segment.
    bytes: [usize; 4],
    page: usize,
}

impl Layout {
    /// The table lies at the distance that the text expects, which is that of the next page.
    fn of(elf: &Elf, start: Section, parts: &Parts) -> Result<Layout> {
        let page: usize = match elf.machine {
            X86_64 => 4 << 10,
            AARCH64 => 64 << 10,
            n => return Err(Error::unsupported(format!("it is for machine {n} of ELF"))),
        };
        if !start.address.is_multiple_of(page as u64) {
            return Err(damaged("its room begins within a page"));
        }
        let mut file: [Range<usize>; 4] = Default::default();
        let mut address = [0; 4];
        let mut end = start.offset as usize;
        let mut next = start.address;
        let table = parts.table_bytes.max(1).next_multiple_of(page);
        let bytes = [
            parts.head.len(),
            parts.text.len(),
            table,
            parts.constants_bytes,
        ];
        for (i, n) in bytes.map(|n| n.max(1)).into_iter().enumerate() {
            let offset = end.next_multiple_of(page);
            end = offset + n;
            file[i] = offset..end;
            address[i] = next;
            next += n.next_multiple_of(page) as u64;
        }
        Ok(Layout {
            file,
            address,
            bytes,
            page,
        })
    }

    fn end(&self) -> usize {
        self.file[3].end
    }

    fn segments(&self, mut segments: Vec<Segment>, rooms: &[Room; 4]) -> Vec<Segment> {
        for (i, room) in rooms.iter().enumerate() {
            let bytes = self.file[i].len() as u64;
            let segment = &mut segments[room.segment];
            *segment = Segment {
                offset: self.file[i].start as u64,
                address: self.address[i],
                physical: self.address[i],
                file_bytes: bytes,
                memory_bytes: bytes,
                align: self.page as u64,
                ..*segment
            };
        }
        segments
    }

    fn set_sections(&self, sections: &mut [Section], rooms: &[Room; 4]) {
        for (i, room) in rooms.iter().enumerate() {
            let section = &mut sections[room.section];
            section.offset = self.file[i].start as u64;
            section.address = self.address[i];
            section.bytes = self.file[i].len() as u64;
            section.align = self.page as u64;
        }
    }
}

/// Writes the places of the parts into the descriptor.
fn describe(elf: &Elf, layout: &Layout, before: &mut [u8]) -> Result<()> {
    let missing = || Error::invalid("it has no descriptor of an image");
    let section = elf.sections[elf.find(DESCRIPTOR).ok_or_else(missing)?];
    if !elf.contents(&section).starts_with(MAGIC) {
        return Err(missing());
    }
    let start = section.offset as usize;
    let places = start + MAGIC.len()..start + MAGIC.len() + 4 * 16;
    let reads: Vec<u8> = [u64::from(FORMAT), LAYOUT].map(u64::to_le_bytes).concat();
    let found = elf.contents(&section).get(places.end - start..);
    if !found.is_some_and(|found| found.starts_with(&reads)) {
        return Err(Error::unsupported(
            "it is of another version than this program",
        ));
    }
    let is_inside = section.bytes as usize >= places.end - start
        && (elf.segments_end()..before.len()).contains(&places.start)
        && places.end <= before.len();
    if !is_inside {
        return Err(missing());
    }
    let entries = before[places].chunks_exact_mut(16);
    for ((entry, address), bytes) in entries.zip(layout.address).zip(layout.bytes) {
        entry[..8].copy_from_slice(&address.wrapping_sub(section.address).to_le_bytes());
        entry[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
    }
    Ok(())
}

/// Bytes of a note before its contents: sizes, kind and a name of four.
const NOTE_HEAD: usize = 16;

/// Another content, another build id: tools that cache symbols go by it. The head has the checksum of the constants.
fn name_build(elf: &Elf, parts: &Parts, before: &mut [u8]) {
    let section = elf.find(".note.gnu.build-id").map(|i| elf.sections[i]);
    let is_apart = |s: &Section| s.offset as usize >= elf.segments_end();
    let Some(section) = section.filter(|s| s.kind == NOTE && is_apart(s)) else {
        return;
    };
    let end = (section.offset + section.bytes) as usize;
    let Some(id) = before.get_mut(section.offset as usize + NOTE_HEAD..end) else {
        return;
    };
    let mut hash = Fnv::default();
    for bytes in [elf.bytes, parts.head, parts.text] {
        hash = hash.with(bytes);
    }
    let symbols = parts.symbols.iter().map(|symbol| symbol.name.as_str());
    for name in symbols.chain(parts.exported) {
        hash = hash.with(name.as_bytes());
    }
    for (i, piece) in id.chunks_mut(8).enumerate() {
        hash = hash.with(&[i as u8]);
        piece.copy_from_slice(&hash.value().to_le_bytes()[..piece.len()]);
    }
}

/// A table of symbols and their names.
struct Symbols {
    table: Vec<u8>,
    names: Vec<u8>,
    /// Sections of an earlier table and of its names.
    earlier: Option<(usize, usize)>,
}

/// Binding and kind of a function that others see.
const GLOBAL_FUNCTION: u8 = 0x12;

impl Symbols {
    /// Symbols of a runner outside of the section `text.0`, then those of functions in it, which is at the address `text.1`.
    fn of(elf: &Elf, functions: &[Symbol], text: (usize, u64)) -> Result<Symbols> {
        let earlier = elf.sections.iter().position(|s| s.kind == SYMBOLS);
        let earlier = earlier.map(|i| (i, elf.sections[i].link as usize));
        let mut symbols = Symbols {
            table: vec![0; SYMBOL_BYTES],
            names: vec![0],
            earlier,
        };
        if let Some((table, names)) = earlier {
            if names == elf.names {
                return Err(Error::unsupported(
                    "its sections and symbols share their names",
                ));
            }
            let names = elf.sections.get(names).filter(|s| s.kind == STRINGS);
            let names = names.ok_or_else(|| damaged("its symbols have no names"))?;
            if !elf.sections[table]
                .bytes
                .is_multiple_of(SYMBOL_BYTES as u64)
            {
                return Err(damaged("its table of symbols ends early"));
            }
            // Symbols of the text belong to a model that the runner had.
            let entries = elf.contents(&elf.sections[table]);
            let entries = entries.chunks_exact(SYMBOL_BYTES);
            let others = entries.filter(|e| e[6..8] != (text.0 as u16).to_le_bytes());
            symbols.table = others.flatten().copied().collect();
            symbols.names = elf.contents(names).to_vec();
        }
        for function in functions {
            symbols.add(function, text)?;
        }
        Ok(symbols)
    }

    fn add(&mut self, function: &Symbol, (section, address): (usize, u64)) -> Result<()> {
        let name = u32::try_from(self.names.len());
        let name = name.map_err(|_| Error::unsupported("names of more than 4 GiB"))?;
        let without_zeros = function.name.bytes().filter(|&b| b != 0);
        self.names.extend(without_zeros.chain([0]));
        self.table.extend(name.to_le_bytes());
        self.table.extend([GLOBAL_FUNCTION, 0]);
        self.table.extend((section as u16).to_le_bytes());
        self.table
            .extend((address + function.offset as u64).to_le_bytes());
        self.table.extend((function.bytes as u64).to_le_bytes());
        Ok(())
    }
}

/// Alignment of sections that are not loaded.
const UNLOADED_ALIGN: usize = 16;

/// The end of the file.
struct Rest {
    /// Place in the file.
    start: usize,
    bytes: Vec<u8>,
}

impl Rest {
    /// Returns the place in the file.
    fn add(&mut self, bytes: &[u8], align: usize) -> usize {
        let at = (self.start + self.bytes.len()).next_multiple_of(align);
        self.bytes.resize(at - self.start, 0);
        self.bytes.extend(bytes);
        at
    }

    /// Adds all sections that are not loaded, and those of symbols; the names of sections are the last.
    fn add_all(&mut self, elf: &Elf, sections: &mut Vec<Section>, symbols: Symbols) {
        let mut names = elf.contents(&elf.sections[elf.names]).to_vec();
        let (table, strings) = symbols.earlier.unwrap_or_else(|| {
            let table = sections.len();
            let mut named = |name: &str, section: Section| {
                let start = names.len() as u32;
                names.extend(name.bytes().chain([0]));
                sections.push(Section {
                    name: start,
                    ..section
                });
            };
            named(".symtab", symbol_section(table + 1));
            named(".strtab", string_section());
            (table, table + 1)
        });
        for (i, section) in sections.iter_mut().enumerate() {
            let is_moved = section.has_contents() && !section.is_allocated();
            let contents = match i {
                _ if !is_moved => continue,
                i if i == table => &symbols.table,
                i if i == strings => &symbols.names,
                i if i == elf.names => &names,
                _ => elf.contents(section),
            };
            let align = usize::try_from(section.align).unwrap_or(0).clamp(1, 4096);
            section.offset = self.add(contents, align) as u64;
            section.bytes = contents.len() as u64;
        }
    }
}

fn symbol_section(names: usize) -> Section {
    Section {
        kind: SYMBOLS,
        link: names as u32,
        // All but the empty one are global.
        info: 1,
        align: 8,
        entry_bytes: SYMBOL_BYTES as u64,
        ..Section::default()
    }
}

fn string_section() -> Section {
    Section {
        kind: STRINGS,
        align: 1,
        ..Section::default()
    }
}

impl Filled<'_> {
    /// Writes the file. `constants` writes theirs, of the size that was given.
    pub fn write<W: Write>(
        &self,
        to: &mut W,
        constants: impl FnOnce(&mut Counted<W>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut out = Counted { to, n: 0 };
        out.write_all(&self.before)?;
        let [head, text, table, last] = &self.places;
        out.fill(head.start)?;
        out.write_all(self.head)?;
        out.fill(text.start)?;
        out.write_all(self.text)?;
        out.fill(table.end)?;
        out.fill(last.start)?;
        constants(&mut out)?;
        if out.n != last.start + self.constants_bytes {
            return Err(io::Error::other("constants of another size"));
        }
        out.fill(self.end_of_parts())?;
        out.write_all(&self.after)
    }

    /// Size of the file in bytes.
    pub fn bytes(&self) -> usize {
        self.end_of_parts() + self.after.len()
    }

    fn end_of_parts(&self) -> usize {
        self.places[3].end.next_multiple_of(UNLOADED_ALIGN)
    }
}

/// Counts the bytes that go through it.
pub(crate) struct Counted<'w, W> {
    to: &'w mut W,
    n: usize,
}

impl<W: Write> Counted<'_, W> {
    /// Zeros up to a place.
    fn fill(&mut self, end: usize) -> io::Result<()> {
        let zeros = [0; 4096];
        while self.n < end {
            let now = (end - self.n).min(zeros.len());
            self.write_all(&zeros[..now])?;
        }
        Ok(())
    }
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.n += written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests;
