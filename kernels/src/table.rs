//! Functions of bytes by a table of all 256 results: `y[i] = table[x[i]]`.
//!
//! Bytes are looked up by their bits, so that those of signed ones follow the others: an index from
//! the end for a negative one. Item `i` is the elements from `i * `[`PER_ITEM`] on.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::{LHS, OK, OUT, RHS, UNSUPPORTED_ISA};

/// Elements of an item.
pub const PER_ITEM: usize = 1 << 13;
/// Entries of a table.
pub const ENTRIES: usize = 256;

/// A function of bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TableDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// Unused, zero.
    pub reserved: u32,
    /// Elements.
    pub n: usize,
}

descriptor!(TableDesc { isa, reserved, n });

impl TableDesc {
    /// For an instruction set and a number of elements.
    pub fn new(isa: Isa, n: usize) -> TableDesc {
        TableDesc {
            isa: isa as u32,
            reserved: 0,
            n,
        }
    }

    /// Items of the whole tensor.
    pub fn n_items(&self) -> usize {
        self.n.div_ceil(PER_ITEM)
    }
}

/// Computes items `begin..end` of a [`TableDesc`].
///
/// `ptrs[LHS]` is `x`, `ptrs[RHS]` the table, `ptrs[OUT]` is `y`, all bytes. Returns `OK` or
/// `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands, the table has [`ENTRIES`]; no other thread writes
/// these items' part of `y`.
pub unsafe extern "C" fn gm_table_bytes(
    desc: *const TableDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let (first, last) = (begin * PER_ITEM, (end * PER_ITEM).min(desc.n));
    if first >= last {
        return OK;
    }
    // SAFETY: the pointers cover the operands.
    unsafe {
        let x = (*ptrs.add(LHS)).add(first).cast_const();
        let table = &*(*ptrs.add(RHS)).cast::<[u8; ENTRIES]>();
        look_up(isa, x, (*ptrs.add(OUT)).add(first), last - first, table);
    }
    OK
}

/// # Safety
/// `n` bytes are readable and writable.
unsafe fn look_up(isa: Isa, x: *const u8, y: *mut u8, n: usize, table: &[u8; ENTRIES]) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 && is_x86_feature_detected!("avx512vbmi") {
        // SAFETY: by contract; the instructions are available.
        return unsafe { x86::look_up(x, y, n, table) };
    }
    let _ = isa;
    for i in 0..n {
        // SAFETY: by contract.
        unsafe { *y.add(i) = table[*x.add(i) as usize] };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::ENTRIES;
    use std::arch::x86_64::{
        _mm512_loadu_si512, _mm512_mask_blend_epi8, _mm512_mask_storeu_epi8,
        _mm512_maskz_loadu_epi8, _mm512_movepi8_mask, _mm512_permutex2var_epi8,
    };

    /// Bytes of a vector.
    const LANES: usize = 64;

    /// Each half of the table is two registers, which a permutation reads by seven bits; the eighth
    /// chooses the half.
    ///
    /// # Safety
    /// As for `look_up`; AVX-512 VBMI and BW are available.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub(super) unsafe fn look_up(x: *const u8, y: *mut u8, n: usize, table: &[u8; ENTRIES]) {
        // SAFETY: the table has four vectors; masks keep to `n` bytes.
        unsafe {
            let part = |i: usize| table.as_ptr().add(i * LANES).cast();
            let [a, b] = [_mm512_loadu_si512(part(0)), _mm512_loadu_si512(part(1))];
            let [c, d] = [_mm512_loadu_si512(part(2)), _mm512_loadu_si512(part(3))];
            for i in (0..n).step_by(LANES) {
                let mask = u64::MAX >> (LANES - (n - i).min(LANES));
                let at = _mm512_maskz_loadu_epi8(mask, x.add(i).cast());
                let low = _mm512_permutex2var_epi8(a, at, b);
                let high = _mm512_permutex2var_epi8(c, at, d);
                let found = _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
                _mm512_mask_storeu_epi8(y.add(i).cast(), mask, found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn every_byte_is_looked_up() {
        let mut rng = Rng(31);
        for isa in Isa::available() {
            for n in [0, 1, 63, 64, 65, 256, PER_ITEM, 2 * PER_ITEM + 77] {
                let table: [u8; ENTRIES] = std::array::from_fn(|_| rng.below(256) as u8);
                let x: Vec<u8> = (0..n).map(|i| i as u8 ^ rng.below(3) as u8).collect();
                let mut y = vec![7; n + 1];
                let ptrs = [
                    x.as_ptr().cast_mut(),
                    table.as_ptr().cast_mut(),
                    y.as_mut_ptr(),
                ];
                let desc = TableDesc::new(isa, n);
                let split = desc.n_items() / 2;
                for (begin, end) in [(split, desc.n_items()), (0, split)] {
                    // SAFETY: the buffers have the sizes that the descriptor describes.
                    let status = unsafe { gm_table_bytes(&desc, ptrs.as_ptr(), begin, end) };
                    assert_eq!(status, OK);
                }
                let mut want: Vec<u8> = x.iter().map(|&x| table[x as usize]).collect();
                want.push(7);
                assert!(y == want, "{isa} {n}");
            }
        }
    }
}
