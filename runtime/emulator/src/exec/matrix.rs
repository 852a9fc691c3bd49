//! Matrix instructions of one warp: `ldmatrix`, `stmatrix`, `mma.sync`, and the arithmetic that `wgmma` shares.
//!
//! Products of narrow floats are exact in single precision; sums are rounded after each term, in order. Hardware
//! rounds differently inside a product, so results agree within a tolerance only.

use super::{
    access::{Kind, addresses},
    gang::Gang,
    warp::{Flow, Issue, Warp},
};
use crate::{
    decode::program::{MatrixAccess, Mma, NONE, Shape},
    fault::{FaultKind, Result},
    lanes::{LANES, fast},
    numeric::format::{Bf16, F16, Format, Half},
    types::Type,
};

impl Gang<'_> {
    /// Waits for all 32 lanes; a warp that has lost some for good cannot execute the instruction.
    pub(super) fn need_all_lanes(&mut self, warp: &Warp, at: Issue) -> Result<Option<Flow>> {
        if at.active == u32::MAX {
            return Ok(None);
        }
        if warp.live != u32::MAX {
            let what = format!(
                "all 32 lanes must execute this, but only {:#010x} are left",
                warp.live
            );
            return Err(self.fault(FaultKind::Divergence, warp, at, what));
        }
        self.wait_for_lanes(warp, at, u32::MAX).map(Some)
    }

    pub(super) fn load_matrix(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        access: &MatrixAccess,
    ) -> Result<Flow> {
        if let Some(flow) = self.need_all_lanes(warp, at)? {
            return Ok(flow);
        }
        let from = addresses(warp, &access.address);
        for (k, register) in access.registers.iter().enumerate() {
            let mut rows = [[0u16; 8]; 8];
            for (r, row) in rows.iter_mut().enumerate() {
                let lane = 8 * k + r;
                let (block, start) =
                    self.matrix_row(warp, at, access, from[lane], lane, Kind::Load)?;
                let bytes = &self.blocks[block].shared[start..start + 16];
                for (e, element) in row.iter_mut().enumerate() {
                    *element = u16::from_le_bytes([bytes[2 * e], bytes[2 * e + 1]]);
                }
            }
            let values = matrix_register(&rows, access.transposed);
            warp.file.put_narrow(*register, u32::MAX, &values);
        }
        Ok(Flow::Next)
    }

    pub(super) fn store_matrix(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        access: &MatrixAccess,
    ) -> Result<Flow> {
        if let Some(flow) = self.need_all_lanes(warp, at)? {
            return Ok(flow);
        }
        let to = addresses(warp, &access.address);
        for (k, register) in access.registers.iter().enumerate() {
            let values = *warp.file.narrow(*register);
            for r in 0..8 {
                let (block, start) =
                    self.matrix_row(warp, at, access, to[8 * k + r], 8 * k + r, Kind::Store)?;
                for e in 0..8 {
                    let (row, column) = if access.transposed { (e, r) } else { (r, e) };
                    let half = (values[4 * row + column / 2] >> (16 * (column % 2))) as u16;
                    let bytes = &mut self.blocks[block].shared;
                    bytes[start + 2 * e..start + 2 * e + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
        }
        Ok(Flow::Next)
    }

    /// Block and offset of a row of 16 bytes, checked.
    fn matrix_row(
        &mut self,
        warp: &Warp,
        at: Issue,
        access: &MatrixAccess,
        address: u64,
        lane: usize,
        kind: Kind,
    ) -> Result<(usize, usize)> {
        let at = at.of_lane(lane);
        let (block, start) =
            self.shared_range(warp, at, access.address.space, address, 16, kind)?;
        self.race_warp(warp, at, (block, start as u64, 16), kind)?;
        Ok((block, start))
    }

    pub(super) fn mma(&mut self, warp: &mut Warp, at: Issue, mma: &Mma) -> Result<Flow> {
        if let Some(flow) = self.need_all_lanes(warp, at)? {
            return Ok(flow);
        }
        match mma.accumulator {
            Type::F64 => mma_f64(warp, mma),
            Type::S32 => mma_integer(warp, mma),
            _ => mma_float(warp, mma),
        }
        Ok(Flow::Next)
    }
}

/// Register of a matrix of 8 by 8 elements, two for each lane.
fn matrix_register(rows: &[[u16; 8]; 8], transposed: bool) -> [u32; LANES] {
    let pick = |row: usize, column: usize| {
        u32::from(if transposed {
            rows[column][row]
        } else {
            rows[row][column]
        })
    };
    std::array::from_fn(|i| pick(i / 4, i % 4 * 2) | pick(i / 4, i % 4 * 2 + 1) << 16)
}

/// Place of element `j` of register `r` of lane `lane` in operand `a`: row and column (PTX ISA, "Matrix fragments").
pub(super) fn place_a(lane: usize, r: usize, j: usize, per_register: usize) -> (usize, usize) {
    let column = lane % 4 * per_register + j + (r >> 1) * 4 * per_register;
    (lane / 4 + (r & 1) * 8, column)
}

/// The same for operands with 8 rows.
fn place_a_short(lane: usize, r: usize, j: usize, per_register: usize) -> (usize, usize) {
    (lane / 4, lane % 4 * per_register + j + r * 4 * per_register)
}

fn place_of(shape: Shape) -> fn(usize, usize, usize, usize) -> (usize, usize) {
    if shape.m == 8 { place_a_short } else { place_a }
}

/// Index of element `j` of register `r` of lane `lane` in operand `b` of `n` columns.
fn place_b(lane: usize, r: usize, j: usize, per_register: usize, n: usize) -> usize {
    (lane % 4 * per_register + j + r * 4 * per_register) * n + lane / 4
}

/// Row and column of accumulator register `r`, with one element per register.
fn place_c(lane: usize, r: usize) -> (usize, usize) {
    (lane / 4 + (r >> 1) * 8, lane % 4 * 2 + (r & 1))
}

/// Row and column of element `j` of accumulator register `r`, with two elements per register.
fn place_c_packed(lane: usize, r: usize, j: usize) -> (usize, usize) {
    (lane / 4 + r * 8, lane % 4 * 2 + j)
}

fn mma_float(warp: &mut Warp, mma: &Mma) {
    let Shape { m, n, k } = mma.shape;
    let (mut a, mut b, mut c) = ([0f32; 16 * 32], [0f32; 32 * 8], [0f32; 16 * 8]);
    let [fa, fb, fc] = &mma.fragments;
    each_element(warp, fa, mma.a, |lane, r, j, per, bits| {
        let (row, column) = place_of(mma.shape)(lane, r, j, per);
        a[row * k + column] = to_f32(mma.a, bits);
    });
    each_element(warp, fb, mma.b, |lane, r, j, per, bits| {
        b[place_b(lane, r, j, per, n)] = to_f32(mma.b, bits);
    });
    let packed = mma.accumulator == Type::F16;
    each_element(warp, fc, mma.accumulator, |lane, r, j, _, bits| {
        let (row, column) = if packed {
            place_c_packed(lane, r, j)
        } else {
            place_c(lane, r)
        };
        c[row * n + column] = to_f32(mma.accumulator, bits);
    });
    accumulate(&a[..m * k], &b[..k * n], &mut c[..m * n], k, n);
    if packed {
        store_halves(warp, mma, &c);
    } else {
        store_singles(warp, mma, &c);
    }
}

fn store_singles(warp: &mut Warp, mma: &Mma, c: &[f32]) {
    for (r, register) in mma.d.iter().enumerate() {
        let values = std::array::from_fn(|lane| {
            let (row, column) = place_c(lane, r);
            c[row * mma.shape.n + column].to_bits()
        });
        warp.file.put_narrow(*register, u32::MAX, &values);
    }
}

fn store_halves(warp: &mut Warp, mma: &Mma, c: &[f32]) {
    for (r, register) in mma.d.iter().enumerate() {
        let half = |lane, j| {
            let (row, column) = place_c_packed(lane, r, j);
            u32::from(F16::from_f32(c[row * mma.shape.n + column]).0)
        };
        let values = std::array::from_fn(|lane| half(lane, 0) | half(lane, 1) << 16);
        warp.file.put_narrow(*register, u32::MAX, &values);
    }
}

fn mma_integer(warp: &mut Warp, mma: &Mma) {
    let Shape { m, n, k } = mma.shape;
    let (mut a, mut b) = ([0i64; 16 * 32], [0i64; 32 * 8]);
    let [fa, fb, fc] = &mma.fragments;
    each_element(warp, fa, mma.a, |lane, r, j, per, bits| {
        let (row, column) = place_of(mma.shape)(lane, r, j, per);
        a[row * k + column] = to_integer(mma.a, bits);
    });
    each_element(warp, fb, mma.b, |lane, r, j, per, bits| {
        b[place_b(lane, r, j, per, n)] = to_integer(mma.b, bits);
    });
    debug_assert!(m <= 16);
    for (r, (register, from)) in mma.d.iter().zip(fc).enumerate() {
        let before = *warp.file.narrow(*from);
        let values = std::array::from_fn(|lane| {
            let (row, column) = place_c(lane, r);
            let sum: i64 = (0..k).map(|q| a[row * k + q] * b[q * n + column]).sum();
            let sum = sum + i64::from(before[lane] as i32);
            if mma.saturates {
                sum.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u32
            } else {
                sum as u32
            }
        });
        warp.file.put_narrow(*register, u32::MAX, &values);
    }
}

fn mma_f64(warp: &mut Warp, mma: &Mma) {
    let Shape { n, k, .. } = mma.shape;
    let (mut a, mut b) = ([0f64; 16 * 16], [0f64; 16 * 8]);
    let [fa, fb, fc] = &mma.fragments;
    for (r, register) in fa.iter().enumerate() {
        for (lane, bits) in warp.file.wide(*register).iter().enumerate() {
            let (row, column) = place_of(mma.shape)(lane, r, 0, 1);
            a[row * k + column] = f64::from_bits(*bits);
        }
    }
    for (r, register) in fb.iter().enumerate() {
        for (lane, bits) in warp.file.wide(*register).iter().enumerate() {
            b[(lane % 4 + 4 * r) * n + lane / 4] = f64::from_bits(*bits);
        }
    }
    for (r, (register, from)) in mma.d.iter().zip(fc).enumerate() {
        let before = *warp.file.wide(*from);
        let values = std::array::from_fn(|lane| {
            let (row, column) = place_c(lane, r);
            let start = f64::from_bits(before[lane]);
            (0..k)
                .fold(start, |sum, q| {
                    a[row * k + q].mul_add(b[q * n + column], sum)
                })
                .to_bits()
        });
        warp.file.put_wide(*register, u32::MAX, &values);
    }
}

/// Calls `f(lane, register, element, elements per register, bits)` for each element of a fragment.
#[inline(always)]
pub(super) fn each_element(
    warp: &Warp,
    registers: &[u32],
    ty: Type,
    f: impl FnMut(usize, usize, usize, usize, u32),
) {
    match ty.size_bytes() {
        1 => each_sized::<4>(warp, registers, f),
        2 => each_sized::<2>(warp, registers, f),
        _ => each_sized::<1>(warp, registers, f),
    }
}

#[inline(always)]
fn each_sized<const PER: usize>(
    warp: &Warp,
    registers: &[u32],
    mut f: impl FnMut(usize, usize, usize, usize, u32),
) {
    let bits = 32 / PER;
    let mask = u32::MAX >> (32 - bits);
    for (r, register) in registers
        .iter()
        .enumerate()
        .filter(|(_, register)| **register != NONE)
    {
        for (lane, value) in warp.file.narrow(*register).iter().enumerate() {
            for j in 0..PER {
                f(lane, r, j, PER, value >> (bits * j) & mask);
            }
        }
    }
}

/// The value of an element of a floating-point operand.
#[inline(always)]
pub(super) fn to_f32(ty: Type, bits: u32) -> f32 {
    match ty {
        Type::F16 => F16(bits as u16).to_f32(),
        Type::BF16 => Bf16(bits as u16).to_f32(),
        // The hardware ignores the bits that tf32 does not have.
        Type::TF32 => f32::from_bits(bits & 0xffff_e000),
        Type::E4M3 => Format::E4M3.to_f64(u64::from(bits)) as f32,
        Type::E5M2 => Format::E5M2.to_f64(u64::from(bits)) as f32,
        _ => f32::from_bits(bits),
    }
}

pub(super) fn to_integer(ty: Type, bits: u32) -> i64 {
    if ty == Type::S8 {
        i64::from(bits as i8)
    } else {
        i64::from(bits as u8)
    }
}

/// `c += a b`, row-major, `a` with `k` columns and `b` with `n`.
pub(super) fn accumulate(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
    #[inline(always)]
    fn body(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
        for (row, c) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
            for (x, b) in row.iter().zip(b.chunks_exact(n)) {
                for (c, b) in c.iter_mut().zip(b) {
                    *c += x * b;
                }
            }
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn vector(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
        body(a, b, c, k, n);
    }
    #[cfg(target_arch = "x86_64")]
    if fast() {
        // SAFETY: `fast` has found AVX2 and FMA.
        return unsafe { vector(a, b, c, k, n) };
    }
    body(a, b, c, k, n);
}
