//! Room in this executable that a compiler fills with an image, and the descriptor by which it is found.
//!
//! | section | permissions | holds |
//! |---|---|---|
//! | `.gm_head` | read | the image up to its text |
//! | `.gm_text` | read, execute | machine code |
//! | `.gm_table` | read, write until it is bound | addresses of the functions that the code calls |
//! | `.gm_constants` | read | weights |
//!
//! They are the last segments in addresses and in the file, so that other contents need no further program header, and tools that rewrite
//! executables, such as `strip`, keep them. The system maps them.

use gristmill_runtime::image::{FORMAT, LAYOUT};

/// Bytes at an address of this process.
#[derive(Clone, Copy)]
pub struct Range {
    /// The first.
    pub start: *const u8,
    /// Their number.
    pub bytes: usize,
}

/// The parts of an image, each in a segment of its own.
pub struct Parts {
    /// All before the text.
    pub head: Range,
    /// Machine code.
    pub text: Range,
    /// Room for the addresses that it calls, in pages that are writable.
    pub table: Range,
    /// Constants.
    pub constants: Range,
}

/// Distance of a part from the descriptor, and its size.
#[repr(C)]
#[derive(Clone, Copy)]
struct Place {
    distance: i64,
    bytes: u64,
}

/// A compiler writes the places of head, text, table and constants, in this order, behind the magic.
#[repr(C, align(64))]
struct Descriptor {
    magic: [u8; 8],
    places: [Place; 4],
    /// Version of the format, and layout of descriptors, that the runtime in this executable reads.
    reads: [u64; 2],
}

#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".gm_descriptor"))]
static DESCRIPTOR: Descriptor = Descriptor {
    magic: *b"GMDESCR1",
    places: [Place {
        distance: 0,
        bytes: 0,
    }; 4],
    reads: [FORMAT as u64, LAYOUT],
};

// A page of each: sections without contents would be no segments.
#[cfg(target_os = "linux")]
std::arch::global_asm!(
    ".section .gm_head,\"a\",@progbits",
    ".skip {page}",
    ".section .gm_text,\"ax\",@progbits",
    ".skip {page}",
    ".section .gm_table,\"aw\",@progbits",
    ".skip {page}",
    ".section .gm_constants,\"a\",@progbits",
    ".skip {page}",
    ".text",
    page = const if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 },
);

/// The image in this executable, if it was filled.
pub fn embedded() -> Option<Parts> {
    let descriptor = &raw const DESCRIPTOR;
    // SAFETY: it is initialised. Volatile, since its contents change after linking: an optimiser would see that it is empty.
    let Descriptor { places, .. } = unsafe { descriptor.read_volatile() };
    let [head, text, table, constants] = places.map(|place| Range {
        start: descriptor
            .cast::<u8>()
            .wrapping_offset(place.distance as isize),
        bytes: place.bytes as usize,
    });
    (places[0].bytes > 0).then_some(Parts {
        head,
        text,
        table,
        constants,
    })
}
