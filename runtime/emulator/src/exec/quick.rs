//! Loads and stores of whole warps that stay inside one buffer: checked once, then a loop per register.
//!
//! Everything else, and every fault, goes the long way of `access`.

use super::{
    access::Kind,
    gang::Gang,
    warp::{Issue, Warp},
};
use crate::{
    decode::program::{Access, AddressSpace, Base, Extend, NONE},
    fault::Result,
    lanes::LANES,
    memory::{View, window},
};

/// Least and largest address of the active lanes, and all address bits that are set in any.
struct Span {
    least: u64,
    most: u64,
    bits: u64,
}

fn span(addresses: &[u64; LANES], active: u32) -> Span {
    let first = addresses[active.trailing_zeros() as usize % LANES];
    let mut span = Span {
        least: first,
        most: first,
        bits: 0,
    };
    for (lane, address) in addresses.iter().enumerate() {
        let address = if active >> lane & 1 != 0 {
            *address
        } else {
            first
        };
        span.least = span.least.min(address);
        span.most = span.most.max(address);
        span.bits |= address;
    }
    span
}

impl Gang<'_> {
    /// False when the access is not of a kind that is done here.
    pub(super) fn quick_load(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        access: &Access,
        from: &[u64; LANES],
    ) -> Result<bool> {
        match self.quick_target(at, access, from, true) {
            Some(Quick::Global(view)) => {
                load_lanes(warp, at.active, access, from, |a, size| view.load(a, size))
            }
            Some(Quick::Shared) => {
                self.race_lanes(warp, at, access, from, Kind::Load)?;
                let shared = &self.blocks[at.block].shared;
                load_lanes(warp, at.active, access, from, |a, size| {
                    let bytes = &shared[a as usize..a as usize + size];
                    let mut all = [0; 8];
                    all[..size].copy_from_slice(bytes);
                    u64::from_le_bytes(all)
                });
            }
            None => return Ok(false),
        }
        Ok(true)
    }

    /// False when the access is not of a kind that is done here.
    pub(super) fn quick_store(
        &mut self,
        warp: &Warp,
        at: Issue,
        access: &Access,
        to: &[u64; LANES],
    ) -> Result<bool> {
        match self.quick_target(at, access, to, false) {
            Some(Quick::Global(view)) => {
                store_lanes(warp, at.active, access, to, |a, size, bits| {
                    view.store(a, size, bits)
                })
            }
            Some(Quick::Shared) => {
                self.race_lanes(warp, at, access, to, Kind::Store)?;
                let shared = &mut self.blocks[at.block].shared;
                store_lanes(warp, at.active, access, to, |a, size, bits| {
                    shared[a as usize..a as usize + size]
                        .copy_from_slice(&bits.to_le_bytes()[..size]);
                });
            }
            None => return Ok(false),
        }
        Ok(true)
    }

    /// Where all active lanes go, if that is one buffer or the block's own shared memory, and aligned.
    fn quick_target(
        &self,
        at: Issue,
        access: &Access,
        addresses: &[u64; LANES],
        is_load: bool,
    ) -> Option<Quick> {
        let count = (access.size_bytes * access.parts.len()) as u64;
        if access.size_bytes > 8 || !count.is_power_of_two() {
            return None;
        }
        let Span { least, most, bits } = span(addresses, at.active);
        if bits & (count - 1) != 0 {
            return None;
        }
        match access.address.space {
            AddressSpace::Shared => {
                let size = self.blocks[at.block].shared.len() as u64;
                (most < size && count <= size - most).then_some(Quick::Shared)
            }
            AddressSpace::Global | AddressSpace::Generic if least >= window::GLOBAL => {
                let view = self.views[at.pc as usize];
                let inside = least >= view.start
                    && view.holds(most, count)
                    && (is_load || !view.is_constant);
                inside.then_some(Quick::Global(view))
            }
            _ => None,
        }
    }

    /// Parameters at a fixed place: one value for all lanes. Whether it could be done here.
    pub(super) fn quick_param(&self, warp: &mut Warp, at: Issue, access: &Access) -> bool {
        let (Base::Zero, [(slot, wide)], 1..=8) =
            (access.address.base, &access.parts[..], access.size_bytes)
        else {
            return false;
        };
        let size = access.size_bytes;
        let start = access.address.offset as usize;
        let Some(bytes) = self
            .launch
            .call
            .params
            .get(start..start.saturating_add(size))
        else {
            return false;
        };
        if !start.is_multiple_of(size) {
            return false;
        }
        let mut all = [0; 8];
        all[..size].copy_from_slice(bytes);
        let bits = extended(u64::from_le_bytes(all), access.extend, size);
        if *wide {
            warp.file.put_wide(*slot, at.active, &[bits; LANES]);
        } else {
            warp.file
                .put_narrow(*slot, at.active, &[bits as u32; LANES]);
        }
        true
    }
}

enum Quick {
    Global(View),
    Shared,
}

/// An element as its register holds it.
#[inline(always)]
fn extended(bits: u64, extend: Extend, size: usize) -> u64 {
    match (extend, size) {
        (Extend::Sign, 1) => bits as i8 as u64,
        (Extend::Sign, 2) => bits as i16 as u64,
        (Extend::Sign, 4) => bits as i32 as u64,
        _ => bits,
    }
}

#[inline(always)]
fn load_lanes(
    warp: &mut Warp,
    active: u32,
    access: &Access,
    from: &[u64; LANES],
    read: impl Fn(u64, usize) -> u64,
) {
    // The size is a constant inside each branch.
    match access.size_bytes {
        1 => load_sized::<1>(warp, active, access, from, read),
        2 => load_sized::<2>(warp, active, access, from, read),
        4 => load_sized::<4>(warp, active, access, from, read),
        _ => load_sized::<8>(warp, active, access, from, read),
    }
}

#[inline(always)]
fn load_sized<const SIZE: usize>(
    warp: &mut Warp,
    active: u32,
    access: &Access,
    from: &[u64; LANES],
    read: impl Fn(u64, usize) -> u64,
) {
    for (k, (slot, wide)) in access
        .parts
        .iter()
        .enumerate()
        .filter(|(_, (slot, _))| *slot != NONE)
    {
        let offset = (k * SIZE) as u64;
        let value = |lane: usize| extended(read(from[lane] + offset, SIZE), access.extend, SIZE);
        if *wide {
            let to = warp.file.wide_mut(*slot);
            for (lane, to) in to.iter_mut().enumerate() {
                if active >> lane & 1 != 0 {
                    *to = value(lane);
                }
            }
        } else {
            let to = warp.file.narrow_mut(*slot);
            for (lane, to) in to.iter_mut().enumerate() {
                if active >> lane & 1 != 0 {
                    *to = value(lane) as u32;
                }
            }
        }
    }
}

#[inline(always)]
fn store_lanes(
    warp: &Warp,
    active: u32,
    access: &Access,
    to: &[u64; LANES],
    write: impl FnMut(u64, usize, u64),
) {
    match access.size_bytes {
        1 => store_sized::<1>(warp, active, access, to, write),
        2 => store_sized::<2>(warp, active, access, to, write),
        4 => store_sized::<4>(warp, active, access, to, write),
        _ => store_sized::<8>(warp, active, access, to, write),
    }
}

#[inline(always)]
fn store_sized<const SIZE: usize>(
    warp: &Warp,
    active: u32,
    access: &Access,
    to: &[u64; LANES],
    mut write: impl FnMut(u64, usize, u64),
) {
    for (k, (slot, wide)) in access
        .parts
        .iter()
        .enumerate()
        .filter(|(_, (slot, _))| *slot != NONE)
    {
        let offset = (k * SIZE) as u64;
        for lane in (0..LANES).filter(|lane| active >> lane & 1 != 0) {
            let bits = if *wide {
                warp.file.wide(*slot)[lane]
            } else {
                u64::from(warp.file.narrow(*slot)[lane])
            };
            write(to[lane] + offset, SIZE, bits);
        }
    }
}
