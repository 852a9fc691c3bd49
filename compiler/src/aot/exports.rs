//! Names of a library's own for the functions that it exports, so that one process can have several models.
//!
//! A template exports its functions under a name with room for that of a model. The new names are written over it, and the table by which
//! a loader looks names up is written anew: in the GNU form, as one bucket, whose order is that of the symbols.

use super::elf::{Elf, SYMBOL_BYTES, Section, damaged, within};
use crate::error::{Error, Result};
use std::ops::Range;

/// The start of all names in a template: room for a model's name, and the line before the function's.
const RESERVED: &[u8] = b"gristmill_room_for_the_name_of_a_compiled_model_";

/// Most letters of a model's name.
pub(crate) const MOST_LETTERS: usize = RESERVED.len() - 1;

/// Gives the functions of a template the names of a model, in the bytes up to its room.
pub(super) fn rename(elf: &Elf, name: &str, before: &mut [u8]) -> Result<()> {
    let strings = section(elf, ".dynstr", before.len())?;
    let n = rename_strings(&mut before[strings.clone()], name);
    if n == 0 {
        return Err(Error::invalid(
            "it has no names that are reserved for a model",
        ));
    }
    let symbols = section(elf, ".dynsym", before.len())?;
    let strings = before[strings].to_vec();
    let names = names(&before[symbols], &strings)?;
    let table = section(elf, ".gnu.hash", before.len())?;
    hash_anew(&mut before[table], &names)
}

fn section(elf: &Elf, name: &str, end: usize) -> Result<Range<usize>> {
    let missing = || Error::invalid(format!("it has no section {name}"));
    let Section { offset, bytes, .. } = elf.sections[elf.find(name).ok_or_else(missing)?];
    within(elf.bytes, offset, bytes)?;
    let range = offset as usize..(offset + bytes) as usize;
    match range.end <= end {
        true => Ok(range),
        false => Err(damaged("names behind its room")),
    }
}

/// Writes new names over those that begin as reserved ones; gives their number.
fn rename_strings(strings: &mut [u8], name: &str) -> usize {
    let (mut at, mut n) = (0, 0);
    while let Some(found) = find(&strings[at..], RESERVED) {
        let start = at + found;
        let rest = &strings[start + RESERVED.len()..];
        let length = rest.iter().position(|&b| b == 0).unwrap_or(rest.len());
        let function = rest[..length].to_vec();
        let old = &mut strings[start..start + RESERVED.len() + length];
        let new = [name.as_bytes(), b"_", &function].concat();
        old.fill(0);
        old[..new.len()].copy_from_slice(&new);
        at = start + new.len();
        n += 1;
    }
    n
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|w| w == wanted)
}

/// The names of all symbols, in order.
fn names<'s>(symbols: &[u8], strings: &'s [u8]) -> Result<Vec<&'s [u8]>> {
    let name = |symbol: &[u8]| {
        let at = u32::from_le_bytes([symbol[0], symbol[1], symbol[2], symbol[3]]) as usize;
        let rest = strings
            .get(at..)
            .ok_or_else(|| damaged("a name beyond its strings"))?;
        let length = rest.iter().position(|&b| b == 0);
        Ok(&rest[..length.ok_or_else(|| damaged("a name without an end"))?])
    };
    symbols.chunks_exact(SYMBOL_BYTES).map(name).collect()
}

/// Bytes of a hash table's head: buckets, first symbol, words of the filter, shift.
const HEAD: usize = 16;

/// Writes the table of names as one bucket; it takes no more room than one of several.
fn hash_anew(table: &mut [u8], names: &[&[u8]]) -> Result<()> {
    let [_, first, n_filter, shift] = head(table)?;
    let hashes = names.get(first..).unwrap_or_default().iter();
    let hashes: Vec<u32> = hashes.map(|name| hash(name)).collect();
    let filter_end = n_filter.saturating_mul(8).saturating_add(HEAD);
    let end = filter_end.saturating_add(4 + 4 * hashes.len());
    if n_filter == 0 || shift > 31 || hashes.is_empty() || end > table.len() {
        return Err(damaged("its table of names"));
    }
    table[..4].copy_from_slice(&1u32.to_le_bytes());
    table[HEAD..].fill(0);
    table[HEAD..filter_end].copy_from_slice(&filter(&hashes, n_filter, shift));
    table[filter_end..end].copy_from_slice(&chain(&hashes, first as u32));
    Ok(())
}

/// The words of a table's head.
fn head(table: &[u8]) -> Result<[usize; 4]> {
    let bytes = table
        .get(..HEAD)
        .ok_or_else(|| damaged("its table of names"))?;
    let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
    Ok([0, 4, 8, 12].map(|i| word(i) as usize))
}

/// A filter that has two bits for each name.
fn filter(hashes: &[u32], n_words: usize, shift: usize) -> Vec<u8> {
    let mut words = vec![0u64; n_words];
    for &hash in hashes {
        let bits = 1 << (hash % 64) | 1u64 << ((hash >> shift) % 64);
        words[hash as usize / 64 % n_words] |= bits;
    }
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// The bucket, which begins with the first symbol, and the hashes of its symbols; the last has the lowest bit.
fn chain(hashes: &[u32], first: u32) -> Vec<u8> {
    let (last, others) = hashes.split_last().unwrap_or((&0, &[]));
    let others = others.iter().map(|h| h & !1);
    let words = std::iter::once(first).chain(others).chain([last | 1]);
    words.flat_map(u32::to_le_bytes).collect()
}

/// Bernstein's hash, as the GNU form has it.
fn hash(name: &[u8]) -> u32 {
    name.iter()
        .fold(5381, |h: u32, &b| h.wrapping_mul(33).wrapping_add(b.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_names_become_those_of_a_model() {
        let mut strings = [b"\0other\0", RESERVED, b"open\0", RESERVED, b"close\0"].concat();
        let n_bytes = strings.len();
        assert_eq!(rename_strings(&mut strings, "digits"), 2);
        assert_eq!(strings.len(), n_bytes);
        assert!(find(&strings, b"\0digits_open\0").is_some());
        assert!(find(&strings, b"\0digits_close\0").is_some());
        assert!(find(&strings, b"\0other\0").is_some());
        let long = "m".repeat(MOST_LETTERS);
        let mut strings = [b"\0", RESERVED, b"open\0"].concat();
        rename_strings(&mut strings, &long);
        assert!(find(&strings, format!("\0{long}_open\0").as_bytes()).is_some());
    }

    #[test]
    fn the_table_of_names_finds_each() {
        let names: [&[u8]; 4] = [b"", b"imported", b"digits_open", b"digits_close"];
        let (first, n_filter, shift) = (2u32, 2usize, 26u32);
        let mut table = vec![0xee; HEAD + 8 * n_filter + 4 * (3 + 2)];
        for (i, word) in [3, first, n_filter as u32, shift].into_iter().enumerate() {
            table[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
        }
        hash_anew(&mut table, &names).unwrap();
        let word = |at: usize| u32::from_le_bytes(table[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
        // The steps of a loader.
        let finds = |name: &[u8]| {
            let h = hash(name);
            let filter = long(HEAD + 8 * (h as usize / 64 % n_filter));
            if filter >> (h % 64) & filter >> ((h >> shift) % 64) & 1 == 0 {
                return None;
            }
            let buckets = HEAD + 8 * n_filter;
            let mut i = word(buckets + 4 * (h % word(0)) as usize);
            loop {
                let entry = word(buckets + 4 * (word(0) + i - first) as usize);
                if entry | 1 == h | 1 && names[i as usize] == name {
                    return Some(i);
                }
                if entry & 1 == 1 {
                    return None;
                }
                i += 1;
            }
        };
        assert_eq!(finds(b"digits_open"), Some(2));
        assert_eq!(finds(b"digits_close"), Some(3));
        assert_eq!(finds(b"digits_run"), None);
        assert!(hash_anew(&mut table[..20], &names).is_err());
    }
}
