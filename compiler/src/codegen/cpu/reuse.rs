//! Machine code that the programs of one session have in common.
//!
//! Programs of other shapes are made of functions that are alike but for integer constants: extents,
//! strides and offsets. The first program has its constants in its code, as if it were alone. A
//! later one whose function differs from an earlier one in some constants gets a function that reads
//! these from memory, and so do all after it, without compilation. Nothing has to be known of
//! shapes for that: a function with constants read is by construction the function with these
//! constants written in.

use cranelift_codegen::ir::{
    Function, Inst, InstBuilder, InstructionData, MemFlagsData, Opcode, Value,
};
use gristmill_runtime::text::{Function as Linked, WeakFunction};
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Functions of the programs of one session. It holds none itself: code is there as long as a program
/// has it.
#[derive(Default)]
pub struct CodeStore(Mutex<HashMap<Skeleton, Vec<Stored>>>);

/// A function that some program has.
struct Stored {
    form: Form,
    function: WeakFunction,
}

/// Hash of a function without its integer constants, of 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Skeleton([u64; 2]);

/// The integer constants of a function in the order of its code, and those of them that it reads
/// from memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Form {
    constants: Vec<i64>,
    is_read: Vec<bool>,
}

impl Form {
    /// A function with its constants in the code.
    pub(super) fn written(constants: &[i64]) -> Form {
        Form {
            constants: constants.to_vec(),
            is_read: vec![false; constants.len()],
        }
    }

    /// True when a function of this form, given the constants that it reads, computes the same as
    /// one with `constants`.
    pub(super) fn fits(&self, constants: &[i64]) -> bool {
        self.different(constants).all(|i| self.is_read[i])
    }

    /// Positions of other constants than the form's.
    fn different<'a>(&'a self, constants: &'a [i64]) -> impl Iterator<Item = usize> + 'a {
        let pairs = self.constants.iter().zip(constants).enumerate();
        pairs.filter(|(_, (a, b))| a != b).map(|(i, _)| i)
    }

    /// The form that also reads the constants in which this one and `constants` differ.
    fn widened(&self, constants: &[i64]) -> Form {
        let mut wider = self.clone();
        self.different(constants)
            .for_each(|i| wider.is_read[i] = true);
        wider
    }

    /// Those of `constants` that the function reads, in order.
    pub(super) fn read(&self, constants: &[i64]) -> Vec<i64> {
        let pairs = constants.iter().zip(&self.is_read);
        pairs
            .filter(|(_, is_read)| **is_read)
            .map(|(&c, _)| c)
            .collect()
    }
}

/// The form that also serves `constants` and is widened by the fewest; `None` of none.
pub(super) fn most_similar<'a>(
    forms: impl Iterator<Item = &'a Form>,
    constants: &[i64],
) -> Option<Form> {
    let n_new = |form: &&Form| {
        form.different(constants)
            .filter(|&i| !form.is_read[i])
            .count()
    };
    forms.min_by_key(n_new).map(|form| form.widened(constants))
}

/// A function of another program.
pub(super) struct Found {
    pub(super) form: Form,
    pub(super) function: Linked,
}

impl CodeStore {
    fn lock(&self) -> MutexGuard<'_, HashMap<Skeleton, Vec<Stored>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A function that can stand for one with these constants.
    pub(super) fn find(&self, skeleton: Skeleton, constants: &[i64]) -> Option<Found> {
        let functions = self.lock();
        let alike = functions.get(&skeleton)?;
        let mut found = alike.iter().filter(|s| s.form.fits(constants));
        found.find_map(|stored| {
            let function = stored.function.upgrade()?;
            Some(Found {
                form: stored.form.clone(),
                function,
            })
        })
    }

    /// The form of a function that can stand for one with these constants and for one that is
    /// there, the most similar one; `None` where there is none of its kind.
    pub(super) fn common_form(&self, skeleton: Skeleton, constants: &[i64]) -> Option<Form> {
        let functions = self.lock();
        most_similar(functions.get(&skeleton)?.iter().map(|s| &s.form), constants)
    }

    /// Adds a function, unless one of its form is there.
    pub(super) fn add(&self, skeleton: Skeleton, form: Form, function: &Linked) {
        let Some(function) = function.downgrade() else {
            return;
        };
        let mut functions = self.lock();
        let alike = functions.entry(skeleton).or_default();
        alike.retain(|s| s.function.upgrade().is_some());
        if !alike.iter().any(|s| s.form == form) {
            alike.push(Stored { form, function });
        }
    }
}

impl std::fmt::Debug for CodeStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "functions of {} kinds", self.lock().len())
    }
}

/// The integer constants of a function in the order of its code, and where they are.
pub(super) struct Constants {
    pub(super) values: Vec<i64>,
    places: Vec<Inst>,
}

impl Constants {
    pub(super) fn of(function: &Function) -> Constants {
        let blocks = function.layout.blocks();
        let instructions = blocks.flat_map(|b| function.layout.block_insts(b));
        let (mut values, mut places) = (Vec::new(), Vec::new());
        for inst in instructions {
            if let InstructionData::UnaryImm {
                opcode: Opcode::Iconst,
                imm,
            } = function.dfg.insts[inst]
            {
                values.push(imm.bits());
                places.push(inst);
            }
        }
        Constants { values, places }
    }

    /// The function without the constants, with what else decides its code: the CPU, the functions that it
    /// calls, and whether it has an argument for constants.
    pub(super) fn skeleton(&self, function: &mut Function, rest: impl Hash) -> Skeleton {
        self.write(function, |_| 0);
        let mut hasher = WideHasher::default();
        (&function.stencil, rest).hash(&mut hasher);
        self.write(function, |i| self.values[i]);
        Skeleton(hasher.0)
    }

    fn write(&self, function: &mut Function, value: impl Fn(usize) -> i64) {
        for (i, &inst) in self.places.iter().enumerate() {
            if let InstructionData::UnaryImm { imm, .. } = &mut function.dfg.insts[inst] {
                *imm = value(i).into();
            }
        }
    }

    /// Replaces the constants that a form reads by loads from the array at `base`.
    pub(super) fn read_from(&self, function: &mut Function, form: &Form, base: Value) {
        let places = self.places.iter().zip(&form.is_read);
        let read = places.filter(|(_, is_read)| **is_read);
        for (i, (&inst, _)) in read.enumerate() {
            let ty = function.dfg.value_type(function.dfg.first_result(inst));
            let flags = MemFlagsData::trusted().with_readonly().with_can_move();
            let offset = (i * size_of::<i64>()) as i32;
            function.replace(inst).load(ty, flags, base, offset);
        }
    }
}

/// A hash of 128 bits: two of 64 bits by multiplication to 128 bits whose halves are joined, as in
/// wyhash.
struct WideHasher([u64; 2]);

/// Odd numbers with as many ones as zeros: fractions of the golden ratio and of pi.
const MULTIPLIERS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0x243f_6a88_85a3_08d3];

impl Default for WideHasher {
    fn default() -> WideHasher {
        WideHasher(MULTIPLIERS)
    }
}

impl Hasher for WideHasher {
    fn finish(&self) -> u64 {
        self.0[0]
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
        self.write_u64(bytes.len() as u64);
    }

    fn write_u8(&mut self, i: u8) {
        self.write_u64(i.into());
    }

    fn write_u16(&mut self, i: u16) {
        self.write_u64(i.into());
    }

    fn write_u32(&mut self, i: u32) {
        self.write_u64(i.into());
    }

    fn write_usize(&mut self, i: usize) {
        self.write_u64(i as u64);
    }

    fn write_u64(&mut self, word: u64) {
        for (state, multiplier) in self.0.iter_mut().zip(MULTIPLIERS) {
            let product = u128::from(*state ^ word) * u128::from(multiplier);
            *state = (product as u64 ^ (product >> 64) as u64).rotate_left(23);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_reads_the_constants_that_have_differed() {
        let first = Form::written(&[4, 23, 768, 23]);
        assert!(first.fits(&[4, 23, 768, 23]) && !first.fits(&[4, 29, 768, 29]));
        let second = first.widened(&[4, 29, 768, 29]);
        assert!(second.fits(&[4, 31, 768, 17]) && !second.fits(&[8, 31, 768, 17]));
        assert_eq!(second.read(&[4, 31, 768, 17]), [31, 17]);
        assert_eq!(
            second.widened(&[8, 1, 768, 1]).read(&[8, 1, 768, 1]),
            [8, 1, 1]
        );
    }

    #[test]
    fn hashes_of_similar_words_differ_in_both_halves() {
        let hash = |words: [u64; 3]| {
            let mut hasher = WideHasher::default();
            words.hash(&mut hasher);
            hasher.0
        };
        let mut seen = std::collections::BTreeSet::new();
        let mut halves = [(); 2].map(|()| std::collections::BTreeSet::new());
        for i in 0..40u64 {
            for j in 0..40 {
                let [a, b] = hash([i, 1 << j, i ^ j]);
                seen.insert([a, b]);
                halves[0].insert(a);
                halves[1].insert(b);
            }
        }
        assert_eq!([seen.len(), halves[0].len(), halves[1].len()], [1600; 3]);
    }
}
