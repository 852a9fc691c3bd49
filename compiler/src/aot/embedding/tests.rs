//! A small runner, whole and damaged.

use super::super::elf::{Elf, sections_bytes, segments_bytes, set_sections};
use super::*;

const PAGE: usize = 4096;
const NAMES: &[u8] = b"\0.gm_head\0.gm_text\0.gm_table\0.gm_constants\0.gm_descriptor\0.note.gnu.build-id\0.shstrtab\0";

fn name(of: &str) -> u32 {
    let zero_ended = [of.as_bytes(), &[0]].concat();
    let found = NAMES
        .windows(zero_ended.len())
        .position(|w| w == zero_ended);
    found.unwrap() as u32
}

fn section(name_of: &str, kind: u32, flags: u64, offset: usize, bytes: usize) -> Section {
    Section {
        name: name(name_of),
        kind,
        flags,
        address: if flags == 0 { 0 } else { offset as u64 },
        offset: offset as u64,
        bytes: bytes as u64,
        align: 1,
        ..Section::default()
    }
}

fn segment(flags: u32, offset: usize, bytes: usize) -> Segment {
    Segment {
        kind: LOAD,
        flags,
        offset: offset as u64,
        address: offset as u64,
        physical: offset as u64,
        file_bytes: bytes as u64,
        memory_bytes: bytes as u64,
        align: PAGE as u64,
    }
}

/// One page with header, program headers, descriptor and build id; a page for each room; names and section headers.
fn runner() -> Vec<u8> {
    const CODE: u32 = 1;
    let mut bytes = vec![0; 5 * PAGE];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    for (at, half) in [(16, 3), (18, X86_64), (54, 56), (56, 5), (58, 64), (62, 7)] {
        bytes[at..at + 2].copy_from_slice(&u16::to_le_bytes(half));
    }
    bytes[32] = 64;
    let mut segments = vec![segment(READ, 0, 1024)];
    let mut sections = vec![Section::default()];
    for (i, (name, flags)) in ROOMS.into_iter().enumerate() {
        let offset = (i + 1) * PAGE;
        segments.push(segment(flags, offset, PAGE));
        sections.push(section(name, CODE, 2, offset, PAGE));
    }
    let table = segments_bytes(&segments);
    bytes[64..64 + table.len()].copy_from_slice(&table);
    bytes[512..520].copy_from_slice(MAGIC);
    let reads = [u64::from(FORMAT), LAYOUT].map(u64::to_le_bytes).concat();
    bytes[584..600].copy_from_slice(&reads);
    sections.push(section(DESCRIPTOR, CODE, 2, 512, 128));
    sections.push(section(".note.gnu.build-id", NOTE, 2, 640, 36));
    sections.push(section(".shstrtab", STRINGS, 0, bytes.len(), NAMES.len()));
    bytes.extend(NAMES);
    let (at, n) = (bytes.len() as u64, sections.len());
    bytes.extend(sections_bytes(&sections));
    set_sections(&mut bytes, at, n).unwrap();
    bytes
}

fn filled_with(runner: &[u8], constants: &[u8]) -> Result<Vec<u8>> {
    let symbols = [Symbol {
        name: "kernel\0_1".to_owned(),
        offset: 64,
        bytes: 8,
    }];
    let parts = Parts {
        head: &[7; PAGE + 1],
        text: &[0xc3; 100],
        table_bytes: 16,
        constants_bytes: constants.len(),
        symbols: &symbols,
        exported: None,
    };
    let filled = fill(runner, &parts)?;
    let mut out = Vec::new();
    filled
        .write(&mut out, |out| out.write_all(constants))
        .unwrap();
    Ok(out)
}

#[test]
fn parts_have_places_and_kernels_have_symbols() {
    let out = filled_with(&runner(), &[5; 3]).unwrap();
    let elf = Elf::parse(&out).unwrap();
    let places = ROOMS.map(|(name, _)| {
        let section = elf.sections[elf.find(name).unwrap()];
        (section.address, elf.contents(&section))
    });
    let page = PAGE as u64;
    assert_eq!(places.map(|p| p.0), [1, 3, 4, 5].map(|n| n * page));
    assert_eq!(places[0].1, [7; PAGE + 1]);
    assert_eq!(places[1].1, [0xc3; 100]);
    assert_eq!(places[2].1, [0; PAGE]);
    assert_eq!(places[3].1, [5; 3]);
    let descriptor = out[520..584].chunks(8).map(|n| n[..4].try_into().unwrap());
    let descriptor: Vec<u32> = descriptor.map(u32::from_le_bytes).collect();
    let to = |n: u32| n * PAGE as u32 - 512;
    let sizes = [PAGE as u32 + 1, 100, PAGE as u32, 3];
    let expected = [
        to(1),
        sizes[0],
        to(3),
        sizes[1],
        to(4),
        sizes[2],
        to(5),
        sizes[3],
    ];
    assert_eq!(descriptor, expected);
    let symbols = elf.contents(&elf.sections[elf.find(".symtab").unwrap()]);
    let names = elf.contents(&elf.sections[elf.find(".strtab").unwrap()]);
    assert_eq!(names, b"\0kernel_1\0");
    assert_eq!(symbols.len(), 2 * SYMBOL_BYTES);
    assert_eq!(symbols[SYMBOL_BYTES..][..8], [1, 0, 0, 0, 0x12, 0, 2, 0]);
    assert_eq!(
        symbols[SYMBOL_BYTES + 8..][..8],
        (3 * page + 64).to_le_bytes()
    );
}

#[test]
fn filled_runners_can_be_filled_once_more() {
    let once = filled_with(&runner(), &[5; 3]).unwrap();
    let twice = filled_with(&once, &[6; 5]).unwrap();
    let elf = Elf::parse(&twice).unwrap();
    let names = elf.contents(&elf.sections[elf.find(".strtab").unwrap()]);
    assert_eq!(names, b"\0kernel_1\0kernel_1\0");
    let symbols = elf.contents(&elf.sections[elf.find(".symtab").unwrap()]);
    assert_eq!(symbols.len(), 2 * SYMBOL_BYTES, "only those of the second");
    assert_ne!(once[656..676], twice[656..676], "build ids differ");
}

#[test]
fn images_without_constants_have_their_segments_too() {
    let out = filled_with(&runner(), &[]).unwrap();
    let elf = Elf::parse(&out).unwrap();
    assert!(elf.segments.iter().all(|s| s.file_bytes > 0));
    assert_eq!(out[576..584], [0; 8]);
}

#[test]
fn constants_of_another_size_are_an_error() {
    let runner = runner();
    let parts = Parts {
        head: &[1],
        text: &[2],
        table_bytes: 0,
        constants_bytes: 4,
        symbols: &[],
        exported: None,
    };
    let filled = fill(&runner, &parts).unwrap();
    for n in [3, 5] {
        let written = filled.write(&mut Vec::new(), |out| out.write_all(&vec![0; n]));
        assert!(written.is_err());
    }
}

#[test]
fn other_machines_and_runners_without_room_are_named() {
    let error = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = runner();
        change(&mut bytes);
        filled_with(&bytes, &[]).unwrap_err().to_string()
    };
    let about = |text: &str| format!("the runner cannot be filled: {text}");
    assert_eq!(error(&|b| b[18] = 40), about("it is for machine 40 of ELF"));
    assert_eq!(error(&|b| b[0] = 0), about("it is no ELF file"));
    assert_eq!(
        error(&|b| b[4] = 1),
        about("it is not of 64 bits, little-endian")
    );
    let names = 5 * PAGE;
    assert_eq!(
        error(&|b| b[names + 2] = b'x'),
        about("it has no section .gm_head")
    );
    // The flags of the segment of text: write, too.
    assert_eq!(
        error(&|b| b[64 + 2 * 56 + 4] = 7),
        about("its section .gm_text is no segment of its own")
    );
    assert_eq!(
        error(&|b| b[512] = 0),
        about("it has no descriptor of an image")
    );
    // The address of the first segment: it ends behind the room.
    assert_eq!(
        error(&|b| b[64 + 16 + 2] = 1),
        about("its reserved sections are not the last")
    );
    assert_eq!(
        error(&|b| b.truncate(9000)),
        about("it is damaged: it ends early")
    );
}

/// Never a panic, and every file that is written is whole.
#[test]
fn damaged_runners_are_errors_or_give_whole_files() {
    let good = runner();
    let check = |bytes: &[u8]| {
        if let Ok(out) = filled_with(bytes, &[1]) {
            Elf::parse(&out).unwrap();
        }
    };
    for n in (0..good.len()).filter(|n| *n < 1024 || *n > 5 * PAGE || n % 97 == 0) {
        check(&good[..n]);
    }
    let tables = (0..1024).chain(5 * PAGE..good.len());
    for at in tables {
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            check(&bytes);
        }
    }
}
