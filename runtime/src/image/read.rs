//! Reads images.

use super::codec::{Item, Memory, Reader, damaged};
use super::{
    About, CHECKSUM, ENTRY_BYTES, FORMAT, Fixed, HEAD_BYTES, Kind, MAGIC, MAX_SECTIONS, Section,
    system,
};
use crate::cpu;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::files;
use crate::program::Program;
use crate::tensor::{ALIGN_BYTES, Tensor, checked_size_bytes};
use crate::text::Text;
use gristmill_kernels::Isa;
use gristmill_kernels::LAYOUT;
use memmap2::{Advice, Mmap, MmapMut};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A program of an image, with the sizes that it is for.
#[derive(Clone, Copy)]
pub struct Variant<'i> {
    /// The sizes.
    pub fixed: &'i Fixed,
    /// The program.
    pub program: &'i Arc<Program>,
}

/// An image that is mapped, its code linked.
pub struct Image {
    about: About,
    sections: Vec<Section>,
    programs: Vec<Arc<Program>>,
    map: Arc<Mmap>,
}

impl Image {
    /// Maps a file. Constants are used in place, so that their pages are read when a run first touches them.
    ///
    /// Errors when the file is no image, is damaged, or is for another format, system or CPU than this one; the message says which.
    ///
    /// # Safety
    ///
    /// An image *is* machine code: open only what you trust as you would trust an executable. Nobody changes the file while it is open.
    pub unsafe fn open(path: &Path) -> Result<Image, Error> {
        let named = |e: Error| e.context(path.display());
        let failed = |e: std::io::Error| Error::invalid(format!("{}: {e}", path.display()));
        let file = files::open(path).map_err(failed)?;
        // SAFETY: by contract, nobody changes the file.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        // SAFETY: by contract, the image is trusted.
        unsafe { Image::of(map) }.map_err(named)
    }

    /// An image in memory, whose bytes are copied once.
    ///
    /// Errors as [`Image::open`].
    ///
    /// # Safety
    ///
    /// As for [`Image::open`].
    pub unsafe fn from_bytes(bytes: &[u8]) -> Result<Image, Error> {
        let copied = MmapMut::map_anon(bytes.len().max(1)).and_then(|mut map| {
            map[..bytes.len()].copy_from_slice(bytes);
            map.make_read_only()
        });
        let map = copied.map_err(|e| {
            let message = format!("cannot map an image of {} bytes: {e}", bytes.len());
            Error::new(ErrorKind::OutOfMemory, message)
        })?;
        // SAFETY: by contract, the image is trusted.
        unsafe { Image::of(map) }
    }

    /// # Safety
    /// As for [`Image::open`].
    unsafe fn of(map: Mmap) -> Result<Image, Error> {
        let sections = sections(&map)?;
        let about = about(&map, &sections)?;
        check_machine(&about)?;
        let map = Arc::new(map);
        let mut image = Image {
            about,
            sections,
            programs: Vec::new(),
            map,
        };
        image.programs = image.read_programs()?;
        if image.programs.len() != image.about.variants.len() {
            return Err(damaged("programs and variants differ in number"));
        }
        Ok(image)
    }

    /// The machine and the model that it is of.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Its sections, in the order of the file.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// A program for each set of input shapes. Each was validated.
    pub fn programs(&self) -> &[Arc<Program>] {
        &self.programs
    }

    /// The programs with the sizes of their dims, in order.
    pub fn variants(&self) -> impl Iterator<Item = Variant<'_>> {
        let pairs = self.about.variants.iter().zip(&self.programs);
        pairs.map(|(fixed, program)| Variant { fixed, program })
    }

    /// The program for inputs of these shapes. Errors with the shapes that there are.
    pub fn program_for(&self, shapes: &[&[usize]]) -> Result<&Arc<Program>, Error> {
        let fits = |p: &&Arc<Program>| {
            let own = p.inputs.iter().map(|i| &i.shape[..]);
            own.eq(shapes.iter().copied())
        };
        self.programs.iter().find(fits).ok_or_else(|| {
            let known: Vec<String> = self.programs.iter().map(|p| shapes_of(p)).collect();
            Error::invalid(format!(
                "there is no code for inputs of shapes {shapes:?}; the image has {}",
                known.join(" and ")
            ))
        })
    }

    /// Compares the constants with their checksum, which reads all of them.
    pub fn verify(&self) -> Result<(), Error> {
        let constants = self.sections.iter().filter(|s| s.kind == Kind::Constants);
        for section in constants {
            check(section, contents(&self.map, section))?;
        }
        Ok(())
    }

    fn read_programs(&self) -> Result<Vec<Arc<Program>>, Error> {
        let bytes = contents(&self.map, section(&self.sections, Kind::Programs)?);
        let nothing = NoMemory;
        let mut r = Reader::new(bytes, &nothing, &[]);
        let imports = Vec::<Vec<String>>::read(&mut r)?;
        let rest = r.rest();
        let texts = self.texts(imports)?;
        let constants = self.constants()?;
        let mut r = Reader::new(rest, &constants, &texts);
        let programs = Vec::<Arc<Program>>::read(&mut r)?;
        r.finish()?;
        for program in &programs {
            if let Some(problem) = program.validate().first() {
                return Err(damaged(problem));
            }
        }
        Ok(programs)
    }

    fn texts(&self, imports: Vec<Vec<String>>) -> Result<Vec<Arc<Text>>, Error> {
        let sections: Vec<&Section> = self
            .sections
            .iter()
            .filter(|s| s.kind == Kind::Text)
            .collect();
        if sections.len() != imports.len() {
            return Err(damaged("texts and their imports differ in number"));
        }
        let isa = isa_of(&self.about)?;
        let link = |(section, imports): (&&Section, Vec<String>)| {
            Text::linked(contents(&self.map, section), imports, isa)
        };
        sections.iter().zip(imports).map(link).collect()
    }

    fn constants(&self) -> Result<Constants, Error> {
        let section = section(&self.sections, Kind::Constants)?;
        let range = section.offset..section.offset + section.bytes;
        #[cfg(target_os = "linux")]
        if range.len() >= 2 << 20 {
            // A hint: without it everything works.
            let _ = self
                .map
                .advise_range(Advice::HugePage, range.start, range.len());
        }
        Ok(Constants {
            map: self.map.clone(),
            range,
        })
    }
}

/// Shapes of a program's inputs, for people.
fn shapes_of(p: &Program) -> String {
    let inputs = p.inputs.iter().map(|i| format!("{} {:?}", i.name, i.shape));
    inputs.collect::<Vec<_>>().join(", ")
}

/// Constants in the mapped file.
struct Constants {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl Memory for Constants {
    fn tensor(&self, dtype: DType, shape: &[usize], offset: usize) -> Result<Tensor, Error> {
        let all = &self.map[self.range.clone()];
        let n = checked_size_bytes(dtype, shape)
            .map_err(|_| damaged("a constant is larger than memory"))?;
        let bytes = offset
            .checked_add(n)
            .and_then(|end| all.get(offset..end))
            .ok_or_else(|| damaged("a constant lies beyond the constants"))?;
        if !offset.is_multiple_of(ALIGN_BYTES) {
            return Err(damaged("a constant is not aligned"));
        }
        if dtype == DType::Bool && bytes.iter().any(|&b| b > 1) {
            return Err(damaged("a truth value is neither 0 nor 1"));
        }
        // SAFETY: the bytes lie in the mapping, which the tensor holds and nobody writes; truth values were looked at.
        unsafe { Tensor::borrowed(dtype, shape, bytes, self.map.clone()) }
    }
}

/// No constants: none are in what comes before programs.
struct NoMemory;

impl Memory for NoMemory {
    fn tensor(&self, _: DType, _: &[usize], _: usize) -> Result<Tensor, Error> {
        Err(damaged("a constant in the wrong place"))
    }
}

/// The first section of a kind.
fn section(sections: &[Section], kind: Kind) -> Result<&Section, Error> {
    let found = sections.iter().find(|s| s.kind == kind);
    found.ok_or_else(|| damaged(&format!("it has no {}", kind.name())))
}

fn contents<'m>(map: &'m Mmap, section: &Section) -> &'m [u8] {
    &map[section.offset..section.offset + section.bytes]
}

/// Errors when the contents of a section are not those of its checksum.
fn check(section: &Section, bytes: &[u8]) -> Result<(), Error> {
    match crc32fast::hash(bytes) == section.checksum {
        true => Ok(()),
        false => Err(damaged(&format!(
            "the checksum of its {} differs",
            section.kind.name()
        ))),
    }
}

fn about(map: &Mmap, sections: &[Section]) -> Result<About, Error> {
    let bytes = contents(map, section(sections, Kind::About)?);
    let mut r = Reader::new(bytes, &NoMemory, &[]);
    let about = About::read(&mut r)?;
    r.finish()?;
    Ok(about)
}

/// Errors when code for the machine of an image does not run on this one.
fn check_machine(about: &About) -> Result<(), Error> {
    let refused = |why: String| Err(Error::new(ErrorKind::Unsupported, why));
    if about.system != system() {
        let (found, here) = (&about.system, system());
        return refused(format!("the image is for {found}, this is {here}"));
    }
    let isa = isa_of(about)?;
    if !isa.is_available() {
        return refused(format!("the image needs a CPU with {isa}"));
    }
    let mut missing = about.features.iter().filter(|f| !cpu::has_feature(f));
    match missing.next() {
        None => Ok(()),
        Some(feature) => {
            let name = feature.trim_start_matches("has_");
            refused(format!("the image needs a CPU with {name}"))
        }
    }
}

fn isa_of(about: &About) -> Result<Isa, Error> {
    Isa::from_u32(about.isa).ok_or_else(|| damaged("an unknown instruction set"))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// The sections of an image, which lie in the file and, constants aside, are as they were written.
fn sections(map: &Mmap) -> Result<Vec<Section>, Error> {
    if map.len() < HEAD_BYTES || map[..MAGIC.len()] != MAGIC {
        return Err(Error::invalid("this is no image of gristmill"));
    }
    let format = word(map, 8);
    if format != FORMAT {
        let message = format!("the image has format {format}, this runtime reads {FORMAT}");
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    let (n, total) = (word(map, 12), long(map, 16));
    if total != map.len() as u64 {
        let found = map.len();
        return Err(damaged(&format!("it has {found} bytes of {total}")));
    }
    let n_bytes = HEAD_BYTES + n.min(MAX_SECTIONS) as usize * ENTRY_BYTES;
    if n > MAX_SECTIONS || n_bytes > map.len() {
        return Err(damaged("its table of sections ends early"));
    }
    check_head(&map[..n_bytes])?;
    let entries = map[HEAD_BYTES..n_bytes].chunks_exact(ENTRY_BYTES);
    let sections: Vec<Section> = entries
        .map(|entry| section_of(entry, map.len()))
        .collect::<Result<_, _>>()?;
    let eager = sections.iter().filter(|s| s.kind != Kind::Constants);
    eager
        .into_iter()
        .try_for_each(|s| check(s, contents(map, s)))?;
    Ok(sections)
}

/// Errors when the head is not that of its checksum, or of other kernels.
fn check_head(head: &[u8]) -> Result<(), Error> {
    let mut zeroed = head.to_vec();
    zeroed[CHECKSUM].fill(0);
    if crc32fast::hash(&zeroed) != word(head, CHECKSUM.start) {
        return Err(damaged("the checksum of its head differs"));
    }
    if long(head, 24) != LAYOUT {
        let message = "the image was made for other kernels than those of this runtime";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    Ok(())
}

fn section_of(entry: &[u8], n_bytes: usize) -> Result<Section, Error> {
    let number = word(entry, 0);
    let kind = Kind::ALL.into_iter().find(|&k| k as u32 == number);
    let (offset, bytes) = (long(entry, 8), long(entry, 16));
    let end = offset.checked_add(bytes);
    let lies_within = end.is_some_and(|end| end <= n_bytes as u64);
    match kind {
        Some(kind) if lies_within && offset.is_multiple_of(ALIGN_BYTES as u64) => Ok(Section {
            kind,
            offset: offset as usize,
            bytes: bytes as usize,
            checksum: word(entry, 4),
        }),
        Some(kind) => Err(damaged(&format!("its {} lie beyond its end", kind.name()))),
        None => Err(damaged("a section of an unknown kind")),
    }
}
