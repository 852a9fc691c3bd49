//! Machine code in memory: functions that run at any address, and behind them the table of the addresses that they call.
//!
//! Text has no relocations of its own: calls go through the table, whose distance from the text is known when the code is made. So the
//! same bytes are linked here by a compiler at run time, and by a loader from a file.

mod code;

pub use code::{Call, Code, FUNCTION_ALIGN, Form};

use crate::error::{Error, ErrorKind};
use crate::kernel_abi::KernelFn;
use gristmill_kernels::Isa;
use memmap2::{Mmap, MmapMut};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, LazyLock, OnceLock, Weak};

/// Ordered, because valgrind takes the memory of hash maps that live as long as the process for lost.
type Symbols = BTreeMap<&'static str, usize>;

/// Addresses of all functions that text may call, by name, for each instruction set.
static SYMBOLS: LazyLock<[Symbols; Isa::ALL.len()]> = LazyLock::new(|| {
    Isa::ALL.map(|isa| {
        let symbols = gristmill_kernels::symbols(isa)
            .chain(gristmill_kernels::scalar_math::symbols().copied())
            .chain(gristmill_kernels::sorting::symbols().copied());
        symbols.map(|s| (s.name, s.address as usize)).collect()
    })
});

/// Alignment of the table behind the text, in bytes: the largest page of the architecture, so that the two may have permissions of
/// their own in a file.
const TABLE_ALIGN: usize = if cfg!(target_arch = "x86_64") {
    4 << 10
} else {
    64 << 10
};

/// Bytes from the start of text of `n_bytes` bytes to its table.
pub const fn table_offset(n_bytes: usize) -> usize {
    n_bytes.next_multiple_of(TABLE_ALIGN)
}

/// Text that is, or will be, in memory with its table; from then on it can be executed and is never written again.
///
/// Functions are known by their offsets or numbers before, so that a program can be made of them while its text still grows.
#[derive(Default)]
pub struct Text(OnceLock<Linked>);

struct Linked {
    memory: Memory,
    /// Names of the table's functions, in order.
    imports: Vec<String>,
    /// The places that hold distances to the table, where they are known.
    calls: Option<Vec<Call>>,
    /// Offsets of the functions by number; none for text of a file.
    starts: Vec<usize>,
}

/// The memory of text that is linked.
enum Memory {
    /// Of its own: so many bytes, and the table behind them.
    Own(Mmap, usize),
    /// Of the process, which has it as long as it runs.
    Process(&'static [u8]),
}

impl Text {
    /// Copies text into memory of its own and links it to the functions of this process that its table is to hold, those of an
    /// instruction set where there is one for each.
    ///
    /// Errors with `Unsupported` for a name that this process has no function of.
    pub fn linked(text: &[u8], imports: Vec<String>, isa: Isa) -> Result<Arc<Text>, Error> {
        let made = Arc::<Text>::default();
        made.link_bytes(text, imports, None, Vec::new(), isa)?;
        Ok(made)
    }

    /// The same for code whose functions are known already; `starts` are the offsets of those known by number. Errors also when it is linked.
    pub fn link(&self, mut code: Code, starts: Vec<usize>, isa: Isa) -> Result<(), Error> {
        code.place_calls()?;
        self.link_bytes(&code.bytes, code.imports, Some(code.calls), starts, isa)
    }

    /// Links text where it lies: executable memory of the process, [`table_offset`] bytes behind whose start the table is, which is
    /// written once and then sealed.
    ///
    /// Errors as [`Text::linked`], and when the memory is no such place.
    ///
    /// # Safety
    ///
    /// The process has the text as long as it runs. The table has whole pages of its own, writable, with room for all imports, and
    /// nobody else uses them; it is linked once.
    pub unsafe fn linked_in_place(
        text: &'static [u8],
        table: *mut [u8],
        imports: Vec<String>,
        isa: Isa,
    ) -> Result<Arc<Text>, Error> {
        let addresses = addresses_of(&imports, isa)?;
        let start = table.cast::<u8>();
        if addresses.is_empty() {
            return Ok(Text::of_process(text, imports));
        }
        let expected = text.as_ptr().addr() + table_offset(text.len());
        if start.addr() != expected || table.len() < size_of_val(&addresses[..]) {
            return Err(Error::invalid("the table is not behind its text"));
        }
        // SAFETY: by contract, there is room, and the memory is ours.
        unsafe {
            let bytes = size_of_val(&addresses[..]);
            std::ptr::copy_nonoverlapping(addresses.as_ptr().cast(), start, bytes);
            seal(start, table.len())?;
        }
        Ok(Text::of_process(text, imports))
    }

    fn of_process(text: &'static [u8], imports: Vec<String>) -> Arc<Text> {
        Arc::new(Text(OnceLock::from(Linked {
            memory: Memory::Process(text),
            imports,
            calls: None,
            starts: Vec::new(),
        })))
    }

    fn link_bytes(
        &self,
        text: &[u8],
        imports: Vec<String>,
        calls: Option<Vec<Call>>,
        starts: Vec<usize>,
        isa: Isa,
    ) -> Result<(), Error> {
        let map = load(text, &addresses_of(&imports, isa)?).map_err(|e| {
            let message = format!("cannot map {} bytes of code: {e}", text.len());
            Error::new(ErrorKind::OutOfMemory, message)
        })?;
        let linked = Linked {
            memory: Memory::Own(map, text.len()),
            imports,
            calls,
            starts,
        };
        let set = self.0.set(linked);
        set.map_err(|_| Error::internal("text is linked twice"))
    }

    /// The machine code; empty before it is linked.
    pub fn bytes(&self) -> &[u8] {
        match self.0.get().map(|l| &l.memory) {
            None => &[],
            Some(Memory::Own(map, n_bytes)) => &map[..*n_bytes],
            Some(Memory::Process(bytes)) => bytes,
        }
    }

    /// Names of the functions that it calls, in the order of its table.
    pub fn imports(&self) -> &[String] {
        self.0.get().map_or(&[], |l| &l.imports)
    }

    /// The code, to be joined with other code; `None` before it is linked, and for text whose calls are not known, such as that of a file.
    pub fn code(&self) -> Option<Code> {
        let linked = self.0.get()?;
        Some(Code {
            bytes: self.bytes().to_vec(),
            imports: linked.imports.clone(),
            calls: linked.calls.clone()?,
        })
    }

    /// The function that begins at an offset.
    ///
    /// # Safety
    ///
    /// A function that keeps to the kernel ABI of [`crate::program`] begins there when the text is linked, and all addresses of the table
    /// that it calls are those of the functions that it expects.
    pub unsafe fn function(self: &Arc<Text>, offset: usize) -> Function {
        Function(Place::Text(self.clone(), At::Offset(offset)))
    }

    /// The function of a number, whose offset is known once the text is linked.
    ///
    /// # Safety
    ///
    /// As [`Text::function`], for the offset of this number in [`Text::link`].
    pub unsafe fn numbered(self: &Arc<Text>, number: usize) -> Function {
        Function(Place::Text(self.clone(), At::Number(number)))
    }

    /// The offset of a function; `None` for a number before the text is linked.
    fn offset(&self, at: At) -> Option<usize> {
        match at {
            At::Offset(offset) => Some(offset),
            At::Number(number) => self.0.get()?.starts.get(number).copied(),
        }
    }
}

/// Addresses of functions of this process.
fn addresses_of(imports: &[String], isa: Isa) -> Result<Vec<usize>, Error> {
    let symbols = &SYMBOLS[isa as usize - 1];
    let address = |name: &String| {
        let found = symbols.get(name.as_str()).copied();
        found.ok_or_else(|| {
            let message = format!("code calls {name:?}, which this runtime does not have");
            Error::new(ErrorKind::Unsupported, message)
        })
    };
    imports.iter().map(address).collect()
}

/// Makes pages unwritable for good.
///
/// # Safety
///
/// The pages are mapped, and nobody writes to them any more.
#[cfg(unix)]
unsafe fn seal(start: *mut u8, n_bytes: usize) -> Result<(), Error> {
    unsafe extern "C" {
        // Of the system's C library, as POSIX has it.
        fn mprotect(start: *mut u8, n_bytes: usize, protection: i32) -> i32;
    }
    const READ: i32 = 1;
    // SAFETY: by contract.
    match unsafe { mprotect(start, n_bytes, READ) } {
        0 => Ok(()),
        _ => {
            let e = io::Error::last_os_error();
            Err(Error::invalid(format!("cannot seal the table: {e}")))
        }
    }
}

#[cfg(not(unix))]
unsafe fn seal(_: *mut u8, _: usize) -> Result<(), Error> {
    let message = "code in the executable itself runs on POSIX systems only";
    Err(Error::new(ErrorKind::Unsupported, message))
}

/// Memory with text and its table, executable.
fn load(text: &[u8], table: &[usize]) -> io::Result<Mmap> {
    let at = table_offset(text.len());
    let mut map = MmapMut::map_anon((at + size_of_val(table)).max(1))?;
    map[..text.len()].copy_from_slice(text);
    for (slot, address) in map[at..].chunks_exact_mut(size_of::<usize>()).zip(table) {
        slot.copy_from_slice(&address.to_ne_bytes());
    }
    flush_instructions(&map[..text.len()]);
    map.make_exec()
}

/// Makes code that was written visible to instruction fetch, which x86 does by itself.
#[cfg(not(target_arch = "x86_64"))]
fn flush_instructions(code: &[u8]) {
    unsafe extern "C" {
        // Of the compiler's support library.
        fn __clear_cache(begin: *const u8, end: *const u8);
    }
    let range = code.as_ptr_range();
    // SAFETY: the range is mapped.
    unsafe { __clear_cache(range.start, range.end) };
}

#[cfg(target_arch = "x86_64")]
fn flush_instructions(_: &[u8]) {}

/// An entry point whose maker has vouched for it, with the text that it is in.
#[derive(Clone)]
pub struct Function(Place);

#[derive(Clone)]
enum Place {
    Process(KernelFn),
    Text(Arc<Text>, At),
}

/// Place of a function in its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Offset(usize),
    Number(usize),
}

impl Function {
    /// A function of this process, which is there as long as the process is.
    ///
    /// # Safety
    ///
    /// `entry` keeps to the kernel ABI of [`crate::program`]: called with the buffers (sizes, alignment) and any item range of any step that
    /// names it in the program it goes into, it reads only its inputs, writes only its outputs and workspace, within their bounds, and
    /// ranges may be run concurrently.
    pub unsafe fn of_process(entry: KernelFn) -> Function {
        Function(Place::Process(entry))
    }

    /// The address, good as long as this value lives. Errors for text that is not linked, or ends before.
    pub fn entry(&self) -> Result<KernelFn, Error> {
        match &self.0 {
            Place::Process(entry) => Ok(*entry),
            Place::Text(text, at) => {
                let rest = text
                    .offset(*at)
                    .and_then(|offset| text.bytes().get(offset..));
                let rest = rest.filter(|rest| !rest.is_empty());
                let code = rest.ok_or_else(|| Error::internal("a function has no code yet"))?;
                // SAFETY: a function of this type begins there: the promise of `Text::function`'s caller.
                Ok(unsafe { std::mem::transmute::<*const u8, KernelFn>(code.as_ptr()) })
            }
        }
    }

    /// The text that it is in and its offset there; `None` for a function of this process, and for a numbered one before its text is linked.
    pub fn place(&self) -> Option<(&Arc<Text>, usize)> {
        match &self.0 {
            Place::Process(_) => None,
            Place::Text(text, at) => Some((text, text.offset(*at)?)),
        }
    }

    /// Numbers that tell it from others.
    fn key(&self) -> (usize, At) {
        match &self.0 {
            Place::Process(entry) => (*entry as usize, At::Offset(0)),
            Place::Text(text, at) => (Arc::as_ptr(text).addr(), *at),
        }
    }
}

/// A function that is there as long as others hold its text.
#[derive(Clone)]
pub struct WeakFunction {
    text: Weak<Text>,
    at: At,
}

impl Function {
    /// The function, without a hold on its text; `None` for one of this process.
    pub fn downgrade(&self) -> Option<WeakFunction> {
        let Place::Text(text, at) = &self.0 else {
            return None;
        };
        Some(WeakFunction {
            text: Arc::downgrade(text),
            at: *at,
        })
    }
}

impl WeakFunction {
    /// The function, if its text is still there.
    pub fn upgrade(&self) -> Option<Function> {
        let text = self.text.upgrade()?;
        Some(Function(Place::Text(text, self.at)))
    }
}

impl PartialEq for Function {
    fn eq(&self, other: &Function) -> bool {
        self.key() == other.key()
    }
}

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:x?}", self.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls entry `slot` of the table: push rax; call [rip + d]; pop rcx; ret.
    #[cfg(target_arch = "x86_64")]
    fn call_of(slot: usize) -> Vec<u8> {
        let mut code = vec![0x50, 0xff, 0x15, 0, 0, 0, 0, 0x59, 0xc3];
        let distance = (table_offset(code.len()) + 8 * slot - 7) as u32;
        code[3..7].copy_from_slice(&distance.to_le_bytes());
        code
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn text_calls_through_its_table() {
        extern "C" fn seven() -> u32 {
            7
        }
        let seven: extern "C" fn() -> u32 = seven;
        let code = call_of(1);
        let text = Arc::<Text>::default();
        // SAFETY: the code, when it is there, keeps to the ABI, and calls the second address.
        let f = unsafe { text.function(0) };
        assert_eq!(f.entry().unwrap_err().kind(), ErrorKind::Internal);
        let linked = Linked {
            memory: Memory::Own(load(&code, &[0, seven as usize]).unwrap(), code.len()),
            imports: Vec::new(),
            calls: None,
            starts: vec![0],
        };
        // SAFETY: as above.
        let numbered = unsafe { text.numbered(0) };
        assert!(numbered.entry().is_err() && numbered.place().is_none());
        assert!(text.0.set(linked).is_ok());
        assert_eq!(numbered.place().map(|p| p.1), Some(0));
        // SAFETY: never called.
        let beyond = unsafe { text.function(1 << 20) };
        assert!(
            beyond.entry().is_err()
                && text
                    .link(Code::default(), Vec::new(), Isa::Portable)
                    .is_err()
        );
        drop((text, beyond, numbered));
        // SAFETY: it looks at no argument.
        assert_eq!(unsafe { (f.entry().unwrap())(std::ptr::null(), 0, 1) }, 7);
        let (text, offset) = f.place().unwrap();
        assert_eq!((text.bytes(), offset), (&code[..], 0));
        let weak = f.downgrade().unwrap();
        assert_eq!(weak.upgrade(), Some(f.clone()));
        drop(f);
        assert_eq!(weak.upgrade(), None);
    }

    #[test]
    fn unknown_functions_are_named() {
        Text::linked(&[], vec!["gm_gemm_f32".to_owned()], Isa::Portable).unwrap();
        let error = Text::linked(&[1, 2], vec!["gm_nothing".to_owned()], Isa::Portable)
            .err()
            .unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("\"gm_nothing\""), "{error}");
    }
}
