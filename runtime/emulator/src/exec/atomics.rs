//! Atomics and reductions, in global memory across blocks and in shared memory.

use super::{
    access::{Kind, LaneAccess, Target, addresses},
    gang::Gang,
    warp::{Issue, Warp, lanes},
};
use crate::{
    decode::program::{Atomic, AtomicOp, NONE},
    fault::Result,
    numeric::{
        approximate::canonical,
        format::{Bf16, F16, Half},
    },
    types::Type,
};

impl Gang<'_> {
    pub(super) fn atomic(&mut self, warp: &mut Warp, at: Issue, atomic: &Atomic) -> Result<()> {
        let to = addresses(warp, &atomic.address);
        let size = atomic.ty.size_bytes();
        for lane in lanes(at.active) {
            let (target, address) = self.resolve(at, atomic.address.space, to[lane]);
            let want = LaneAccess {
                lane,
                target,
                address,
                count: (size * atomic.b.len()) as u64,
                kind: Kind::Atomic,
            };
            for (k, slot) in atomic.b.iter().enumerate() {
                let b = read(warp, *slot, size, lane);
                let c = if atomic.c == NONE {
                    0
                } else {
                    read(warp, atomic.c, size, lane)
                };
                let new = |old| combine(atomic.op, atomic.ty, old, b, c);
                let old = self.update_element(warp, at, want, (k * size, size), new)?;
                match atomic.d.get(k).filter(|d| **d != NONE) {
                    Some(d) if size == 8 => warp.file.wide_mut(*d)[lane] = old,
                    Some(d) => warp.file.narrow_mut(*d)[lane] = old as u32,
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// Replaces the element at this offset and of this size; returns the old one.
    fn update_element(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        want: LaneAccess,
        (offset, size): (usize, usize),
        new: impl Fn(u64) -> u64,
    ) -> Result<u64> {
        if want.target == Target::Global {
            let view = self.global(warp, at, want)?;
            return Ok(update_global(
                &view,
                want.address + offset as u64,
                size,
                new,
            ));
        }
        let start = self.local_range(warp, at, want)? + offset;
        self.race_access(warp, at, want, true)?;
        let bytes = match want.target {
            Target::Shared(block) => &mut self.blocks[block].shared,
            _ => &mut warp.local,
        };
        Ok(update_bytes(&mut bytes[start..start + size], new))
    }
}

fn read(warp: &Warp, slot: u32, size: usize, lane: usize) -> u64 {
    match size {
        8 => warp.file.wide(slot)[lane],
        2 => u64::from(warp.file.narrow(slot)[lane] & 0xffff),
        _ => u64::from(warp.file.narrow(slot)[lane]),
    }
}

/// Replaces an element of at most 8 bytes, which only the running warp sees; returns the old one.
fn update_bytes(bytes: &mut [u8], new: impl Fn(u64) -> u64) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    let old = u64::from_le_bytes(all);
    bytes.copy_from_slice(&new(old).to_le_bytes()[..bytes.len()]);
    old
}

/// Atomically replaces an element; 16-bit ones as part of the 32-bit word around them.
pub(super) fn update_global(
    view: &crate::memory::View,
    address: u64,
    size: usize,
    f: impl Fn(u64) -> u64,
) -> u64 {
    if size != 2 {
        return view.update(address, size, f);
    }
    let shift = 8 * (address & 2);
    let word = view.update(address & !3, 4, |word| {
        word & !(0xffff << shift) | (f(word >> shift & 0xffff) & 0xffff) << shift
    });
    word >> shift & 0xffff
}

/// The new value of an atomic: `old`, operands `b` and `c`.
pub(super) fn combine(op: AtomicOp, ty: Type, old: u64, b: u64, c: u64) -> u64 {
    match op {
        AtomicOp::And => old & b,
        AtomicOp::Or => old | b,
        AtomicOp::Xor => old ^ b,
        AtomicOp::Exchange => b,
        AtomicOp::CompareAndSwap if old == b => c,
        AtomicOp::CompareAndSwap => old,
        AtomicOp::Increment if old as u32 >= b as u32 => 0,
        AtomicOp::Increment => old + 1,
        AtomicOp::Decrement if old == 0 || old as u32 > b as u32 => b,
        AtomicOp::Decrement => old - 1,
        AtomicOp::Add | AtomicOp::Min | AtomicOp::Max => arithmetic(op, ty, old, b),
    }
}

/// Sum, least or most, by type.
pub(super) fn arithmetic(op: AtomicOp, ty: Type, a: u64, b: u64) -> u64 {
    match ty {
        Type::F32 => u64::from(
            canonical(float(
                op,
                f32::from_bits(a as u32),
                f32::from_bits(b as u32),
            ))
            .to_bits(),
        ),
        Type::F64 => float_f64(op, f64::from_bits(a), f64::from_bits(b)).to_bits(),
        Type::F16 => u64::from(half::<F16>(op, a as u16, b as u16)),
        Type::BF16 => u64::from(half::<Bf16>(op, a as u16, b as u16)),
        Type::F16x2 => halves::<F16>(op, a, b),
        Type::BF16x2 => halves::<Bf16>(op, a, b),
        _ => integer(op, ty, a, b),
    }
}

fn integer(op: AtomicOp, ty: Type, a: u64, b: u64) -> u64 {
    match (op, ty) {
        (AtomicOp::Add, _) if ty.size_bytes() == 8 => a.wrapping_add(b),
        (AtomicOp::Add, _) => u64::from((a as u32).wrapping_add(b as u32)),
        (AtomicOp::Min, Type::S32) => u64::from((a as i32).min(b as i32) as u32),
        (AtomicOp::Min, Type::S64) => (a as i64).min(b as i64) as u64,
        (AtomicOp::Min, _) => a.min(b),
        (_, Type::S32) => u64::from((a as i32).max(b as i32) as u32),
        (_, Type::S64) => (a as i64).max(b as i64) as u64,
        _ => a.max(b),
    }
}

fn float(op: AtomicOp, a: f32, b: f32) -> f32 {
    match op {
        AtomicOp::Min => a.min(b),
        AtomicOp::Max => a.max(b),
        _ => a + b,
    }
}

fn float_f64(op: AtomicOp, a: f64, b: f64) -> f64 {
    match op {
        AtomicOp::Min => a.min(b),
        AtomicOp::Max => a.max(b),
        _ => a + b,
    }
}

fn half<H: Half>(op: AtomicOp, a: u16, b: u16) -> u16 {
    H::from_f32(float(
        op,
        H::from_bits(a).to_f32(),
        H::from_bits(b).to_f32(),
    ))
    .bits()
}

fn halves<H: Half>(op: AtomicOp, a: u64, b: u64) -> u64 {
    let low = half::<H>(op, a as u16, b as u16);
    let high = half::<H>(op, (a >> 16) as u16, (b >> 16) as u16);
    u64::from(low) | u64::from(high) << 16
}
