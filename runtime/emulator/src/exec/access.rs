//! Loads and stores in every state space, checked for bounds and alignment.

use super::{
    gang::Gang,
    warp::{Issue, Warp, lanes},
};
use crate::{
    decode::program::{Access, Address, AddressSpace, Base, Extend, NONE},
    fault::{Fault, FaultKind, Result},
    lanes::LANES,
    memory::{View, window},
};

/// Memory that an access goes to, once the generic space is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Global,
    /// Shared memory of a block of the gang.
    Shared(usize),
    Local,
    Param,
}

/// Kind of an access, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Load,
    Store,
    Atomic,
    Copy,
    Mbarrier,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Load => "load",
            Kind::Store => "store",
            Kind::Atomic => "atomic",
            Kind::Copy => "asynchronous copy",
            Kind::Mbarrier => "mbarrier operation",
        }
    }
}

/// Access of one lane to memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneAccess {
    pub lane: usize,
    pub target: Target,
    pub address: u64,
    /// Bytes.
    pub count: u64,
    pub kind: Kind,
}

/// Blocks of a cluster see each other's shared memory at multiples of this, the first one being their own.
pub(super) const CLUSTER_STRIDE: u64 = 1 << 24;

/// Addresses of all lanes; those of inactive lanes mean nothing.
pub(super) fn addresses(warp: &Warp, address: &Address) -> [u64; LANES] {
    let offset = address.offset as u64;
    match address.base {
        Base::Zero => [offset; LANES],
        Base::Narrow(slot) => warp
            .file
            .narrow(slot)
            .map(|a| u64::from(a.wrapping_add(offset as u32))),
        Base::Wide(slot) => warp.file.wide(slot).map(|a| a.wrapping_add(offset)),
    }
}

impl Gang<'_> {
    pub(super) fn load(&mut self, warp: &mut Warp, at: Issue, access: &Access) -> Result<()> {
        let from = addresses(warp, &access.address);
        let is_done = match access.address.space {
            AddressSpace::Param => self.quick_param(warp, at, access),
            _ => self.quick_load(warp, at, access, &from)?,
        };
        if is_done {
            return Ok(());
        }
        for lane in lanes(at.active) {
            let (target, address) = self.resolve(at, access.address.space, from[lane]);
            let want = LaneAccess {
                lane,
                target,
                address,
                count: access.total_bytes(),
                kind: Kind::Load,
            };
            if target == Target::Global {
                let view = self.global(warp, at, want)?;
                for (k, part) in access.parts.iter().enumerate() {
                    load_element(warp, lane, *part, access, |o, n| {
                        view.load(address + (k * access.size_bytes + o) as u64, n)
                    });
                }
            } else {
                self.load_local(warp, at, access, want)?;
            }
        }
        Ok(())
    }

    /// Loads from shared, local or parameter memory.
    fn load_local(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        access: &Access,
        want: LaneAccess,
    ) -> Result<()> {
        let size = access.size_bytes;
        let start = self.local_range(warp, at, want)?;
        self.race_access(warp, at, want, access.is_strong)?;
        for (k, part) in access.parts.iter().enumerate() {
            let bytes = match want.target {
                Target::Shared(block) => &self.blocks[block].shared,
                Target::Param => self.launch.call.params,
                _ => &warp.local,
            };
            let first = start + k * size;
            let mut value = [0; 16];
            value[..size].copy_from_slice(&bytes[first..first + size]);
            load_element(warp, want.lane, *part, access, |o, n| {
                little_endian(&value[o..o + n])
            });
        }
        Ok(())
    }

    pub(super) fn store(&mut self, warp: &mut Warp, at: Issue, access: &Access) -> Result<()> {
        let to = addresses(warp, &access.address);
        if self.quick_store(warp, at, access, &to)? {
            return Ok(());
        }
        let size = access.size_bytes;
        for lane in lanes(at.active) {
            let (target, address) = self.resolve(at, access.address.space, to[lane]);
            let want = LaneAccess {
                lane,
                target,
                address,
                count: access.total_bytes(),
                kind: Kind::Store,
            };
            if target == Target::Global {
                let view = self.global(warp, at, want)?;
                for (k, part) in access.parts.iter().enumerate() {
                    for o in (0..size).step_by(8) {
                        let value = element(warp, lane, *part, o);
                        view.store(address + (k * size + o) as u64, size.min(8), value);
                    }
                }
            } else {
                self.store_local(warp, at, access, want)?;
            }
        }
        Ok(())
    }

    /// Stores to shared or local memory.
    fn store_local(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        access: &Access,
        want: LaneAccess,
    ) -> Result<()> {
        if want.target == Target::Param {
            let what = "parameters are read-only".to_owned();
            return Err(self.fault(FaultKind::Misuse, warp, at.of_lane(want.lane), what));
        }
        let size = access.size_bytes;
        let start = self.local_range(warp, at, want)?;
        self.race_access(warp, at, want, access.is_strong)?;
        for (k, part) in access.parts.iter().enumerate() {
            for o in (0..size).step_by(8) {
                let value = element(warp, want.lane, *part, o).to_le_bytes();
                let bytes = match want.target {
                    Target::Shared(block) => &mut self.blocks[block].shared,
                    _ => &mut warp.local,
                };
                let first = start + k * size + o;
                let n = size.min(8);
                bytes[first..first + n].copy_from_slice(&value[..n]);
            }
        }
        Ok(())
    }

    /// Where an address leads, and the address there.
    #[inline(always)]
    pub(super) fn resolve(&self, at: Issue, space: AddressSpace, address: u64) -> (Target, u64) {
        match space {
            AddressSpace::Global => (Target::Global, address),
            AddressSpace::Shared => self.resolve_shared(at, address),
            AddressSpace::Local => (Target::Local, address),
            AddressSpace::Param => (Target::Param, address),
            AddressSpace::Generic => match address & !(window::SIZE - 1) {
                _ if address >= window::GLOBAL => (Target::Global, address),
                window::SHARED => self.resolve_shared(at, address - window::SHARED),
                window::LOCAL => (Target::Local, address - window::LOCAL),
                window::PARAM => (Target::Param, address - window::PARAM),
                _ => (Target::Global, address),
            },
        }
    }

    /// A shared address: the block's own, or of a block of the cluster as `mapa` made it.
    fn resolve_shared(&self, at: Issue, address: u64) -> (Target, u64) {
        if address < CLUSTER_STRIDE {
            return (Target::Shared(at.block), address);
        }
        let rank = (address / CLUSTER_STRIDE - 1) as u32;
        let own = &self.blocks[at.block];
        match self.block_of_rank(own.index, rank) {
            Some(block) => (Target::Shared(block), address % CLUSTER_STRIDE),
            // Out of bounds, as an access will find.
            None => (Target::Shared(at.block), address),
        }
    }

    /// Index in the gang of the block with `rank` in the cluster of the block at `index`.
    pub(super) fn block_of_rank(&self, index: [u32; 3], rank: u32) -> Option<usize> {
        let cluster = self.launch.cluster;
        let same = |other: [u32; 3]| (0..3).all(|k| other[k] / cluster[k] == index[k] / cluster[k]);
        self.blocks
            .iter()
            .position(|b| b.rank == rank && same(b.index))
    }

    /// The buffer that the bytes are in, checked for alignment too.
    #[inline(always)]
    pub(super) fn global(&mut self, warp: &Warp, at: Issue, want: LaneAccess) -> Result<View> {
        let LaneAccess { address, count, .. } = want;
        let hint = &self.views[at.pc as usize];
        if hint.holds(address, count)
            && address & (count - 1) == 0
            && (want.kind == Kind::Load || !hint.is_constant)
        {
            return Ok(*hint);
        }
        self.global_slow(warp, at, want)
    }

    #[cold]
    fn global_slow(&mut self, warp: &Warp, at: Issue, want: LaneAccess) -> Result<View> {
        let LaneAccess { address, count, .. } = want;
        let memory = self.launch.call.memory;
        let fault = |kind, problem| Err(self.global_fault(warp, at, want, kind, problem));
        let Some(view) = memory
            .view(address)
            .filter(|view| view.holds(address, count))
        else {
            return fault(FaultKind::OutOfBounds, "out of bounds:");
        };
        if !address.is_multiple_of(count.next_power_of_two()) {
            return fault(FaultKind::Misaligned, "misaligned:");
        }
        if view.is_constant && want.kind != Kind::Load {
            return fault(FaultKind::Misuse, "constant memory is read-only:");
        }
        self.views[at.pc as usize] = view;
        Ok(view)
    }

    fn global_fault(
        &self,
        warp: &Warp,
        at: Issue,
        want: LaneAccess,
        kind: FaultKind,
        problem: &str,
    ) -> Fault {
        let LaneAccess { address, count, .. } = want;
        let nearest = self.launch.call.memory.nearest(address);
        let what = format!(
            "{problem} {count}-byte {} at global address {address:#x}{nearest}",
            want.kind.name()
        );
        self.fault(kind, warp, at.of_lane(want.lane), what)
    }

    /// The buffer of an access of which only the first `part` bytes are read.
    pub(super) fn global_part(
        &mut self,
        warp: &Warp,
        at: Issue,
        want: LaneAccess,
        part: u64,
    ) -> Result<View> {
        if part == want.count || !want.address.is_multiple_of(want.count) {
            return self.global(warp, at, want);
        }
        let memory = self.launch.call.memory;
        match memory
            .view(want.address)
            .filter(|view| view.holds(want.address, part))
        {
            Some(view) => Ok(view),
            None => self.global_slow(warp, at, want),
        }
    }

    /// Block and offset of `count` bytes at a shared address of the one active lane, checked. Alignment is checked for
    /// up to 16 bytes.
    pub(super) fn shared_range(
        &self,
        warp: &Warp,
        at: Issue,
        space: AddressSpace,
        address: u64,
        count: u64,
        kind: Kind,
    ) -> Result<(usize, usize)> {
        let lane = at.active.trailing_zeros() as usize;
        let (target, address) = self.resolve(at, space, address);
        let Target::Shared(block) = target else {
            let what = format!(
                "{} at {address:#x}, which is not a shared address",
                kind.name()
            );
            return Err(self.fault(FaultKind::OutOfBounds, warp, at, what));
        };
        let size = self.blocks[block].shared.len() as u64;
        if address < size && count <= size - address && address.is_multiple_of(count.clamp(1, 16)) {
            return Ok((block, address as usize));
        }
        Err(self.range_fault(
            warp,
            at,
            LaneAccess {
                lane,
                target,
                address,
                count,
                kind,
            },
        ))
    }

    /// Bytes that a lane has of shared, local or parameter memory, and where its part starts.
    #[inline(always)]
    fn extent(&self, want: LaneAccess) -> (u64, usize) {
        match want.target {
            Target::Shared(block) => (self.blocks[block].shared.len() as u64, 0),
            Target::Local => {
                let size = self.launch.call.program.local_bytes;
                (size as u64, want.lane * size)
            }
            Target::Param | Target::Global => (self.launch.call.params.len() as u64, 0),
        }
    }

    /// Offset of the bytes in shared, local or parameter memory, checked for bounds and alignment.
    #[inline(always)]
    pub(super) fn local_range(&self, warp: &Warp, at: Issue, want: LaneAccess) -> Result<usize> {
        let LaneAccess { address, count, .. } = want;
        let (size, base) = self.extent(want);
        if address < size && count <= size - address && address & (count - 1) == 0 {
            return Ok(base + address as usize);
        }
        Err(self.range_fault(warp, at, want))
    }

    #[cold]
    fn range_fault(&self, warp: &Warp, at: Issue, want: LaneAccess) -> Fault {
        let LaneAccess { address, count, .. } = want;
        let size = self.extent(want).0;
        let space = match want.target {
            Target::Shared(_) => "shared",
            Target::Local => "local",
            Target::Param => "parameter",
            Target::Global => "global",
        };
        let is_inside = address < size && count <= size - address;
        let (kind, problem) = if is_inside {
            (FaultKind::Misaligned, "misaligned:")
        } else {
            (FaultKind::OutOfBounds, "out of bounds:")
        };
        let what = format!(
            "{problem} {count}-byte {} at {space} address {address:#x}, of {size:#x} bytes",
            want.kind.name()
        );
        self.fault(kind, warp, at.of_lane(want.lane), what)
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

/// Puts one element into its register; `read(offset, count)` gives its bytes.
#[inline(always)]
fn load_element(
    warp: &mut Warp,
    lane: usize,
    part: (u32, bool),
    access: &Access,
    read: impl Fn(usize, usize) -> u64,
) {
    let (slot, wide) = part;
    if slot == NONE {
        return;
    }
    let size = access.size_bytes;
    if size == 16 {
        warp.file.wide_mut(slot)[lane] = read(0, 8);
        warp.file.wide_mut(slot + 2)[lane] = read(8, 8);
        return;
    }
    let bits = read(0, size);
    let value = match (access.extend, size) {
        (Extend::Sign, 1) => bits as i8 as u64,
        (Extend::Sign, 2) => bits as i16 as u64,
        (Extend::Sign, 4) => bits as i32 as u64,
        _ => bits,
    };
    if wide {
        warp.file.wide_mut(slot)[lane] = value;
    } else {
        warp.file.narrow_mut(slot)[lane] = value as u32;
    }
}

/// The bits of one element from byte `offset` on.
#[inline(always)]
fn element(warp: &Warp, lane: usize, part: (u32, bool), offset: usize) -> u64 {
    let (slot, wide) = part;
    match (slot, wide) {
        (NONE, _) => 0,
        (_, true) => warp.file.wide(slot)[lane],
        (_, false) if offset > 0 => warp.file.wide(slot + 2)[lane],
        (_, false) => u64::from(warp.file.narrow(slot)[lane]),
    }
}
