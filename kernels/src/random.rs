//! Random bits by position: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).
//!
//! The element of position `i` is word `i % 4` of the block of number `i / 4`, whose counter is that number and the stream, low words
//! first: it depends on seed, stream and position alone. `y: u32[n]` has the positions from `first` on; item `i` is its elements from
//! `i * `[`PER_ITEM`] on.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{LHS, OK, OUT, UNSUPPORTED_ISA};
use std::ops::Range;

/// Rounds of Philox.
pub const ROUNDS: usize = 10;
/// Multipliers of the first and the third word of a counter.
pub const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Words of a block.
pub const WORDS: usize = 4;
/// Elements of an item of the kernel.
pub const PER_ITEM: usize = 64 * WORDS;
/// Blocks that are computed together.
const LANES: usize = 16;

/// The low and the high half.
pub fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// The key of each round.
#[inline(always)]
pub fn round_keys(key: [u32; 2]) -> [[u32; 2]; ROUNDS] {
    let of_round = |i: usize, k: usize| key[k].wrapping_add(WEYL[k].wrapping_mul(i as u32));
    std::array::from_fn(|i| [of_round(i, 0), of_round(i, 1)])
}

/// Philox4x32-10: four random words of a counter and a key.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    rounds(counter.map(|word| [word]), &round_keys(key)).map(|[word]| word)
}

/// The words of a block of a seed and a stream.
pub fn block(seed: u64, stream: u64, number: u64) -> [u32; WORDS] {
    let [[a, b], [c, d]] = [number, stream].map(halves);
    philox([a, b, c, d], halves(seed))
}

/// The word of a position.
pub fn word(seed: u64, stream: u64, position: u64) -> u32 {
    let n = WORDS as u64;
    block(seed, stream, position / n)[(position % n) as usize]
}

/// Words of several counters: word `i` of counter `k` is `words[i][k]`.
#[inline(always)]
fn rounds<const N: usize>(mut words: [[u32; N]; 4], keys: &[[u32; 2]; ROUNDS]) -> [[u32; N]; 4] {
    for key in keys {
        let [a, b, c, d] = words;
        for i in 0..N {
            let [low, high] = [(a[i], MULTIPLIERS[0]), (c[i], MULTIPLIERS[1])]
                .map(|(x, m)| u64::from(x) * u64::from(m));
            words[0][i] = (high >> 32) as u32 ^ b[i] ^ key[0];
            words[1][i] = high as u32;
            words[2][i] = (low >> 32) as u32 ^ d[i] ^ key[1];
            words[3][i] = low as u32;
        }
    }
    words
}

/// Random bits of a seed.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomBitsDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// Halves of the seed, the low one first.
    pub key: [u32; 2],
    /// Zero.
    pub reserved: u32,
    /// Position of the first element.
    pub first: usize,
    /// Number of elements.
    pub n: usize,
}

descriptor!(RandomBitsDesc {
    isa,
    key,
    reserved,
    first,
    n
});

impl RandomBitsDesc {
    /// Bits of a seed from a position on, for an instruction set.
    pub fn new(isa: Isa, seed: u64, first: u64, n: usize) -> RandomBitsDesc {
        RandomBitsDesc {
            isa: isa as u32,
            key: halves(seed),
            reserved: 0,
            first: first as usize,
            n,
        }
    }

    /// Items of all elements.
    pub fn n_items(&self) -> usize {
        self.n.div_ceil(PER_ITEM)
    }
}

/// Computes items `begin..end` of a [`RandomBitsDesc`]: `ptrs[LHS]` is the stream, an `i64`, and `ptrs[OUT]` is `y`.
///
/// Returns `OK` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the stream and the descriptor's elements; no other thread writes these items' part of `y`.
pub unsafe extern "C" fn gm_random_bits(
    desc: *const RandomBitsDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let bound = |item: usize| item.saturating_mul(PER_ITEM).min(desc.n);
    let elements = bound(begin)..bound(end);
    // SAFETY: the pointers cover the stream and these elements.
    unsafe {
        let bits = Bits {
            stream: halves((*ptrs.add(LHS)).cast::<u64>().read()),
            keys: round_keys(desc.key),
            y: (*ptrs.add(OUT)).cast(),
            first: desc.first as u64,
            elements,
        };
        dispatch(isa, bits);
    }
    OK
}

/// A run of elements.
struct Bits {
    stream: [u32; 2],
    keys: [[u32; 2]; ROUNDS],
    y: *mut u32,
    /// Position of element 0.
    first: u64,
    elements: Range<usize>,
}

impl Task for Bits {
    type Out = ();

    /// Safety: `y` covers the elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, _: S) {
        let mut start = self.elements.start;
        if !self.position(start).is_multiple_of(WORDS as u64) {
            // SAFETY: the elements are covered.
            start += unsafe { self.words(start) };
        }
        while self.elements.end - start >= LANES * WORDS {
            let words = self.blocks::<LANES>(self.position(start) / WORDS as u64);
            let y = self.y.wrapping_add(start).cast::<[u32; WORDS]>();
            for i in 0..LANES {
                // SAFETY: the elements are covered, as many as the blocks have.
                unsafe { y.add(i).write(words.map(|word| word[i])) };
            }
            start += LANES * WORDS;
        }
        while start < self.elements.end {
            // SAFETY: the elements are covered.
            start += unsafe { self.words(start) };
        }
    }
}

impl Bits {
    fn position(&self, element: usize) -> u64 {
        self.first.wrapping_add(element as u64)
    }

    /// Writes the elements from one on up to the end of its block. Gives their number.
    ///
    /// # Safety
    /// `y` covers them.
    #[inline(always)]
    unsafe fn words(&self, start: usize) -> usize {
        let n_words = WORDS as u64;
        let position = self.position(start);
        let words = self.blocks::<1>(position / n_words);
        let before = (position % n_words) as usize;
        let own = words.iter().skip(before).take(self.elements.end - start);
        for (i, word) in own.enumerate() {
            // SAFETY: the element is covered.
            unsafe { self.y.add(start + i).write(word[0]) };
        }
        (WORDS - before).min(self.elements.end - start)
    }

    /// Words of `N` blocks.
    #[inline(always)]
    fn blocks<const N: usize>(&self, first: u64) -> [[u32; N]; WORDS] {
        let half = |k: usize| std::array::from_fn(|i| halves(first.wrapping_add(i as u64))[k]);
        let stream = self.stream.map(|half| [half; N]);
        rounds([half(0), half(1), stream[0], stream[1]], &self.keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn philox_has_the_words_that_its_authors_publish() {
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                pi,
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, words) in cases {
            assert_eq!(philox(counter, key), words);
        }
    }

    #[test]
    fn bits_are_those_of_the_blocks() {
        let mut rng = Rng(5);
        for isa in Isa::available() {
            for n in [0, 1, 3, 4, 63, 64, 65, 255, 256, 257, 1000, 5003] {
                let (seed, stream) = (rng.next(), rng.next());
                let first = [0, rng.next() % 7, rng.next() >> 1][rng.below(3)];
                let desc = RandomBitsDesc::new(isa, seed, first, n);
                let mut y = vec![0u32; n];
                let ptrs = [
                    (&raw const stream) as *mut u8,
                    std::ptr::null_mut(),
                    y.as_mut_ptr().cast(),
                ];
                let mut begin = 0;
                while begin < desc.n_items() {
                    let end = begin + 1 + rng.below(desc.n_items());
                    // SAFETY: the buffers have the sizes that the descriptor describes.
                    let status = unsafe { gm_random_bits(&desc, ptrs.as_ptr(), begin, end) };
                    assert_eq!(status, OK);
                    begin = end;
                }
                let want = |i: usize| word(seed, stream, first + i as u64);
                assert!(
                    y.iter().enumerate().all(|(i, &y)| y == want(i)),
                    "{isa} {n}"
                );
            }
        }
    }

    #[test]
    fn an_item_writes_its_own_blocks() {
        let desc = RandomBitsDesc::new(Isa::current(), 7, 0, 1000);
        let (stream, mut y) = (1i64, vec![0u32; 1000]);
        let ptrs = [
            (&raw const stream) as *mut u8,
            std::ptr::null_mut(),
            y.as_mut_ptr().cast(),
        ];
        // SAFETY: the buffers have the sizes that the descriptor describes.
        assert_eq!(unsafe { gm_random_bits(&desc, ptrs.as_ptr(), 1, 2) }, OK);
        assert!(y[..256].iter().chain(&y[512..]).all(|&y| y == 0));
        assert!(y[256..512].iter().all(|&y| y != 0));
    }
}
