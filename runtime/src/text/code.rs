//! Machine code with the places where it calls through its table: code of several makers can be joined until it is linked.

use super::table_offset;
use crate::error::Error;
use std::collections::HashMap;

/// Alignment of functions in bytes: a line of the cache, and the largest that their constants need.
pub const FUNCTION_ALIGN: usize = 64;

/// Position-independent machine code, and the names of the functions in its table.
#[derive(Clone, Debug, Default)]
pub struct Code {
    /// The instructions.
    pub bytes: Vec<u8>,
    /// Names of the functions that it calls, in the order of the table.
    pub imports: Vec<String>,
    /// The places that hold distances to the table.
    pub calls: Vec<Call>,
}

/// A place in code that holds its distance from an entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Offset of the instruction's word.
    pub at: usize,
    /// Encoding of the distance in the word.
    pub form: Form,
    /// Index of the function among the imports.
    pub import: u32,
}

/// The way in which an instruction holds a distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A word that counts from its own place plus an addend, negated: x86-64's displacements count from the end of the instruction.
    X86 {
        /// Added to the distance.
        addend: i32,
    },
    /// ADRP: pages between the instruction and the entry (Arm Architecture Reference Manual, C6.2).
    Aarch64Page,
    /// LDR (immediate) of 8 bytes: the entry's place within its page.
    Aarch64Low,
}

impl Code {
    /// Appends other code; gives the offset at which it begins. Functions that both call are in the table once.
    pub fn append(&mut self, other: &Code) -> usize {
        let start = self.bytes.len().next_multiple_of(FUNCTION_ALIGN);
        self.bytes.resize(start, 0);
        self.bytes.extend_from_slice(&other.bytes);
        let known = self.imports.iter().cloned().zip(0..);
        let mut indices: HashMap<String, u32> = known.collect();
        let mut index_of = |name: &String| {
            let next = indices.len() as u32;
            *indices.entry(name.clone()).or_insert_with(|| {
                self.imports.push(name.clone());
                next
            })
        };
        let new: Vec<u32> = other.imports.iter().map(&mut index_of).collect();
        let moved = other.calls.iter().map(|call| Call {
            at: start + call.at,
            import: new[call.import as usize],
            ..*call
        });
        self.calls.extend(moved);
        start
    }

    /// Writes the distances, for the table behind the code; writing them again changes nothing.
    ///
    /// Errors with `Internal` for code of over 2 GiB, and for calls outside the code.
    pub fn place_calls(&mut self) -> Result<(), Error> {
        let table = table_offset(self.bytes.len());
        let Code { bytes, calls, .. } = self;
        calls.iter().try_for_each(|call| call.place(bytes, table))
    }
}

impl Call {
    fn place(&self, code: &mut [u8], table: usize) -> Result<(), Error> {
        let outside = || Error::internal("a call lies outside its code");
        let place = code.get_mut(self.at..).ok_or_else(outside)?;
        let place: &mut [u8; 4] = place.first_chunk_mut().ok_or_else(outside)?;
        let (at, slot) = (
            self.at as i64,
            (table + self.import as usize * size_of::<usize>()) as i64,
        );
        let word = u32::from_le_bytes(*place);
        let written = match self.form {
            Form::X86 { addend } => {
                let distance = i32::try_from(slot + i64::from(addend) - at);
                distance.map_err(|_| Error::internal("text of over 2 GiB"))? as u32
            }
            Form::Aarch64Page => {
                let pages = (slot >> 12) - (at >> 12);
                let (low, high) = ((pages & 3) as u32, ((pages >> 2) & 0x7_ffff) as u32);
                word & !(3 << 29 | 0x7_ffff << 5) | low << 29 | high << 5
            }
            Form::Aarch64Low => word & !(0xfff << 10) | (((slot & 0xfff) >> 3) as u32) << 10,
        };
        *place = written.to_le_bytes();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `n` bytes that call import `import` at offset 3.
    fn code(n: usize, imports: &[&str], import: u32) -> Code {
        Code {
            bytes: vec![0x90; n],
            imports: imports.iter().map(|&name| name.to_owned()).collect(),
            calls: vec![Call {
                at: 3,
                form: Form::X86 { addend: -4 },
                import,
            }],
        }
    }

    #[test]
    fn joined_code_calls_through_one_table() {
        let mut joined = Code::default();
        assert_eq!(joined.append(&code(100, &["a", "b"], 1)), 0);
        assert_eq!(joined.append(&code(8, &["c", "b"], 1)), 128);
        assert_eq!(joined.append(&code(8, &["c", "b"], 0)), 192);
        assert_eq!(joined.imports, ["a", "b", "c"]);
        joined.place_calls().unwrap();
        let entry = |at: usize| {
            let word = joined.bytes[at..at + 4].try_into().unwrap();
            let target = at as i64 + 4 + i64::from(i32::from_le_bytes(word));
            (target as usize - table_offset(joined.bytes.len())) / 8
        };
        assert_eq!([3, 131, 195].map(entry), [1, 1, 2]);
        let again = joined.clone();
        joined.place_calls().unwrap();
        assert_eq!(joined.bytes, again.bytes);
        joined.calls[0].at = joined.bytes.len() - 2;
        assert!(joined.place_calls().is_err());
    }

    #[test]
    fn words_of_aarch64_are_written_again_without_a_trace() {
        let place = |form, table| {
            let mut code = vec![0xff; 8];
            let call = Call {
                at: 4,
                form,
                import: 2,
            };
            call.place(&mut code, 0x7654_3000).unwrap();
            call.place(&mut code, table).unwrap();
            u32::from_le_bytes(code[4..].try_into().unwrap())
        };
        // The words of `adrp xzr, #0x3000` and `ldr xzr, [xzr, #16]`, but for the bits that no immediate holds, which stay set.
        let page = place(Form::Aarch64Page, 0x3000);
        assert_eq!(page >> 29 & 3 | (page >> 5 & 0x7_ffff) << 2, 3);
        assert_eq!(place(Form::Aarch64Low, 0x3000) >> 10 & 0xfff, 2);
    }
}
