//! Reads images.

use super::codec::{Item, Memory, Reader, damaged};
use super::{
    About, CHECKSUM, ENTRY_BYTES, FORMAT, Fixed, HEAD_BYTES, Kind, MAGIC, MAX_SECTIONS, Section,
    WEIGHTS_HEAD_BYTES, system, weights_head,
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
use std::any::Any;
use std::path::{Path, PathBuf};
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
    source: Source,
}

/// The parts of an image that the system's loader has mapped with an executable or a library, as memory of different protection.
pub struct Parts {
    /// All that comes before the text.
    pub head: &'static [u8],
    /// The text, executable.
    pub text: &'static [u8],
    /// Room for the table of the text, behind it as [`Text::linked_in_place`] asks.
    pub table: *mut [u8],
    /// The constants; empty where they are in a file.
    pub constants: &'static [u8],
    /// The folder of the executable or library, where such a file is.
    pub folder: Option<PathBuf>,
}

/// Memory that holds an image.
struct Source {
    place: Place,
    /// The file beside it that holds the constants.
    weights: Option<Arc<Mmap>>,
}

enum Place {
    Mapped(Arc<Mmap>),
    Embedded {
        head: &'static [u8],
        text: &'static [u8],
        constants: &'static [u8],
    },
}

impl Source {
    /// The first bytes, the table of sections among them.
    fn head(&self) -> &[u8] {
        match &self.place {
            Place::Mapped(map) => map,
            Place::Embedded { head, .. } => head,
        }
    }

    fn contents(&self, section: &Section) -> Result<&[u8], Error> {
        let range = section.offset..section.offset + section.bytes;
        let found = match (&self.place, section.kind) {
            (_, Kind::Weights) => self.weights.as_ref().and_then(|map| map.get(range)),
            (Place::Mapped(map), _) => map.get(range),
            (Place::Embedded { text, .. }, Kind::Text) => text.get(..section.bytes),
            (Place::Embedded { constants, .. }, Kind::Constants) => constants.get(..section.bytes),
            (Place::Embedded { head, .. }, _) => head.get(range),
        };
        found.ok_or_else(|| damaged(&format!("its {} end early", section.kind.name())))
    }

    /// Links the text to the functions of this process.
    fn link(
        &self,
        text: &[u8],
        imports: Vec<String>,
        isa: Isa,
        table: Option<*mut [u8]>,
    ) -> Result<Arc<Text>, Error> {
        match (&self.place, table) {
            // SAFETY: whoever opened the image has vouched for its parts.
            (Place::Embedded { text, .. }, Some(table)) => unsafe {
                Text::linked_in_place(text, table, imports, isa)
            },
            _ => Text::linked(text, imports, isa),
        }
    }

    /// The mapping that the constants are in, and its owner.
    fn owner(&self) -> (Option<&Mmap>, Arc<dyn Any + Send + Sync>) {
        match (&self.weights, &self.place) {
            (Some(map), _) | (None, Place::Mapped(map)) => (Some(map), map.clone()),
            (None, Place::Embedded { .. }) => (None, Arc::new(())),
        }
    }

    /// Maps the file of the constants, if the image has one, in the folder of the image.
    ///
    /// # Safety
    /// As for [`Image::open`].
    unsafe fn map_weights(
        &mut self,
        about: &About,
        section: &Section,
        folder: Option<&Path>,
    ) -> Result<(), Error> {
        if section.kind != Kind::Weights {
            return Ok(());
        }
        let name = Path::new(&about.weights);
        let folder = folder.ok_or_else(|| {
            Error::invalid("the weights are in a file beside the image: it is opened by its path")
        })?;
        if name.file_name() != Some(name.as_os_str()) {
            return Err(damaged("the weights are in another folder"));
        }
        let path = folder.join(name);
        let failed = |e: std::io::Error| {
            Error::invalid(format!("the weights of the image: {}: {e}", path.display()))
        };
        let file = files::open(&path).map_err(failed)?;
        // SAFETY: by contract, nobody changes the file.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        if map.get(..WEIGHTS_HEAD_BYTES) != Some(&weights_head(section)) {
            let message = format!("{} does not hold the weights of this image", path.display());
            return Err(Error::invalid(message));
        }
        self.weights = Some(Arc::new(map));
        Ok(())
    }
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
        unsafe { Image::of(map, path.parent()) }.map_err(named)
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
        unsafe { Image::of(map, None) }
    }

    /// An image that is a part of this process's executable, or of a library that stays loaded: text and constants are used in place.
    ///
    /// Errors as [`Image::open`].
    ///
    /// # Safety
    ///
    /// As for [`Image::open`] and [`Text::linked_in_place`]: the parts are opened once.
    pub unsafe fn embedded(parts: Parts) -> Result<Image, Error> {
        let Parts {
            head,
            text,
            table,
            constants,
            folder,
        } = parts;
        let place = Place::Embedded {
            head,
            text,
            constants,
        };
        // SAFETY: by contract, the image is trusted.
        unsafe { Image::of_place(place, Some(table), folder.as_deref()) }
    }

    /// # Safety
    /// As for [`Image::open`].
    unsafe fn of(map: Mmap, folder: Option<&Path>) -> Result<Image, Error> {
        let n_bytes = map.len() as u64;
        match total_bytes(&map)? {
            total if total == n_bytes => {}
            total => return Err(damaged(&format!("it has {n_bytes} bytes of {total}"))),
        }
        // SAFETY: by contract.
        unsafe { Image::of_place(Place::Mapped(Arc::new(map)), None, folder) }
    }

    /// # Safety
    /// As for [`Image::open`]; with a table, as for [`Image::embedded`].
    unsafe fn of_place(
        place: Place,
        table: Option<*mut [u8]>,
        folder: Option<&Path>,
    ) -> Result<Image, Error> {
        let mut source = Source {
            place,
            weights: None,
        };
        let sections = sections(&source)?;
        let about = about(&source, &sections)?;
        check_machine(&about)?;
        // SAFETY: by contract.
        unsafe { source.map_weights(&about, constants_among(&sections)?, folder)? };
        let mut image = Image {
            about,
            sections,
            programs: Vec::new(),
            source,
        };
        image.programs = image.read_programs(table)?;
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
        let section = constants_among(&self.sections)?;
        check(section, self.source.contents(section)?)
    }

    fn read_programs(&self, table: Option<*mut [u8]>) -> Result<Vec<Arc<Program>>, Error> {
        let section = |kind| self.source.contents(section(&self.sections, kind)?);
        let (nothing, no_text) = (NoMemory, Arc::default());
        let mut r = Reader::new(section(Kind::Programs)?, &nothing, &no_text);
        let imports = Vec::<String>::read(&mut r)?;
        let rest = r.rest();
        let isa = isa_of(&self.about)?;
        let text = self
            .source
            .link(section(Kind::Text)?, imports, isa, table)?;
        let constants = self.constants()?;
        let mut r = Reader::new(rest, &constants, &text);
        let programs = Vec::<Arc<Program>>::read(&mut r)?;
        r.finish()?;
        for program in &programs {
            if let Some(problem) = program.validate().first() {
                return Err(damaged(problem));
            }
        }
        Ok(programs)
    }

    fn constants(&self) -> Result<Constants, Error> {
        let section = constants_among(&self.sections)?;
        let bytes: *const [u8] = self.source.contents(section)?;
        let (map, owner) = self.source.owner();
        #[cfg(target_os = "linux")]
        if let Some(map) = map
            && section.bytes >= 2 << 20
        {
            // A hint: without it everything works.
            let _ = map.advise_range(Advice::HugePage, section.offset, section.bytes);
        }
        Ok(Constants { owner, bytes })
    }
}

/// Shapes of a program's inputs, for people.
fn shapes_of(p: &Program) -> String {
    let inputs = p.inputs.iter().map(|i| format!("{} {:?}", i.name, i.shape));
    inputs.collect::<Vec<_>>().join(", ")
}

/// Constants in the memory of an image.
struct Constants {
    owner: Arc<dyn Any + Send + Sync>,
    /// There as long as the owner is.
    bytes: *const [u8],
}

impl Memory for Constants {
    fn tensor(&self, dtype: DType, shape: &[usize], offset: usize) -> Result<Tensor, Error> {
        // SAFETY: the owner is held.
        let all = unsafe { &*self.bytes };
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
        // SAFETY: the bytes lie in memory whose owner the tensor holds, and nobody writes them; truth values were looked at.
        unsafe { Tensor::borrowed(dtype, shape, bytes, self.owner.clone()) }
    }
}

/// No constants: none are in what comes before programs.
struct NoMemory;

impl Memory for NoMemory {
    fn tensor(&self, _: DType, _: &[usize], _: usize) -> Result<Tensor, Error> {
        Err(damaged("a constant in the wrong place"))
    }
}

/// The section of the constants, in the image or in a file beside it.
fn constants_among(sections: &[Section]) -> Result<&Section, Error> {
    let weights = sections.iter().find(|s| s.kind == Kind::Weights);
    weights.map_or_else(|| section(sections, Kind::Constants), Ok)
}

/// The first section of a kind.
fn section(sections: &[Section], kind: Kind) -> Result<&Section, Error> {
    let found = sections.iter().find(|s| s.kind == kind);
    found.ok_or_else(|| damaged(&format!("it has no {}", kind.name())))
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

fn about(source: &Source, sections: &[Section]) -> Result<About, Error> {
    let bytes = source.contents(section(sections, Kind::About)?)?;
    let no_text = Arc::default();
    let mut r = Reader::new(bytes, &NoMemory, &no_text);
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

/// The size of an image of this format.
fn total_bytes(head: &[u8]) -> Result<u64, Error> {
    if head.len() < HEAD_BYTES || head[..MAGIC.len()] != MAGIC {
        return Err(Error::invalid("this is no image of gristmill"));
    }
    let format = word(head, 8);
    if format != FORMAT {
        let message = format!("the image has format {format}, this runtime reads {FORMAT}");
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    Ok(long(head, 16))
}

/// The sections of an image, which, constants aside, are as they were written.
fn sections(source: &Source) -> Result<Vec<Section>, Error> {
    let head = source.head();
    let (total, n) = (total_bytes(head)?, word(head, 12));
    let n_bytes = HEAD_BYTES + n.min(MAX_SECTIONS) as usize * ENTRY_BYTES;
    if n > MAX_SECTIONS || n_bytes > head.len() {
        return Err(damaged("its table of sections ends early"));
    }
    check_head(&head[..n_bytes])?;
    let entries = head[HEAD_BYTES..n_bytes].chunks_exact(ENTRY_BYTES);
    let sections: Vec<Section> = entries
        .map(|entry| section_of(entry, total))
        .collect::<Result<_, _>>()?;
    let is_eager = |s: &&Section| ![Kind::Constants, Kind::Weights].contains(&s.kind);
    let mut eager = sections.iter().filter(is_eager);
    eager.try_for_each(|s| check(s, source.contents(s)?))?;
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

fn section_of(entry: &[u8], n_bytes: u64) -> Result<Section, Error> {
    let number = word(entry, 0);
    let kind = Kind::ALL.into_iter().find(|&k| k as u32 == number);
    let (offset, bytes) = (long(entry, 8), long(entry, 16));
    let end = offset.checked_add(bytes);
    let is_apart = kind == Some(Kind::Weights);
    let lies_within = end.is_some_and(|end| end <= n_bytes || is_apart);
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
