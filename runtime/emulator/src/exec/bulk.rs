//! Bulk copies: ranges and tiles between global and shared memory (TMA), and between the blocks of a cluster.
//!
//! Loads are made when no warp can go on without one, stores when their group is waited for: as late as may be.

use super::{
    access::{Kind, Target, addresses},
    atomics::{combine, update_global},
    gang::Gang,
    mbarrier::Spot,
    race::Async,
    report,
    warp::{At, Warp, lanes},
};
use crate::{
    decode::program::{Address, AddressSpace, Bulk, BulkKind, NONE},
    fault::{Fault, FaultKind, Result},
    lanes::LANES,
    memory::View,
    tensor_map::{TENSOR_MAP_BYTES, TensorElement, TensorMap, permuted},
    types::Type,
};

/// The end of a copy that is outside the shared memory it fills or reads.
#[derive(Clone, Debug)]
enum Source {
    Range {
        address: u64,
        bytes: u64,
    },
    Tile {
        map: Box<TensorMap>,
        coordinates: [i32; 5],
    },
    /// Shared memory of a block.
    Across {
        block: usize,
        address: u64,
        bytes: u64,
    },
}

impl Source {
    fn bytes(&self) -> u64 {
        match self {
            Source::Range { bytes, .. } | Source::Across { bytes, .. } => *bytes,
            Source::Tile { map, .. } => map.tile_bytes(),
        }
    }
}

/// A copy under way.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    kind: BulkKind,
    place: report::Place,
    source: Source,
    /// Shared memory: a block and an offset; several blocks for a multicast.
    shared: Vec<(usize, u64)>,
    /// Barriers that a load completes on, one per block.
    mbarriers: Vec<Spot>,
}

/// Work that is done when nothing else can go on.
#[derive(Clone, Debug)]
pub(super) enum Deferred {
    Load(Pending),
    /// An arrival behind a lane's asynchronous copies.
    Arrive {
        warp: u32,
        at: At,
        address: Address,
    },
}

/// Stores of one warp that it has not waited for.
#[derive(Default)]
pub(super) struct Stores {
    /// Lane, the group it is of, and the copy.
    pub pending: Vec<(usize, u32, Pending)>,
    pub committed: [u32; LANES],
}

impl Gang<'_> {
    pub(super) fn bulk(&mut self, warp: &mut Warp, at: At, bulk: &Bulk) -> Result<()> {
        for lane in lanes(at.active) {
            let at = At {
                active: 1 << lane,
                ..at
            };
            let source = self.bulk_source(warp, at, bulk, lane)?;
            let pending = self.bulk_target(warp, at, bulk, lane, source)?;
            let bytes = pending.source.bytes();
            if matches!(bulk.kind, BulkKind::Load | BulkKind::Across) {
                for (target, spot) in pending.shared.iter().zip(&pending.mbarriers) {
                    if let Some(races) = &mut self.races {
                        let agent = races.mbarrier_agent(spot.key());
                        self.race_async(warp, at, agent, (target.0, target.1, bytes), true)?;
                    }
                }
                self.deferred.push_back(Deferred::Load(pending));
                continue;
            }
            let group = warp.stores.committed[lane];
            if let Some(races) = &self.races {
                let agent = races.group_agent(at.block, warp.id, Async::Bulk);
                let (block, offset) = pending.shared[0];
                self.race_async(warp, at, (agent, group + 1), (block, offset, bytes), false)?;
            }
            warp.stores.pending.push((lane, group, pending));
        }
        Ok(())
    }

    fn bulk_source(&self, warp: &Warp, at: At, bulk: &Bulk, lane: usize) -> Result<Source> {
        let address = addresses(warp, &bulk.global)[lane];
        if bulk.size == NONE {
            let map = Box::new(self.tensor_map(warp, at, &bulk.global, address)?);
            if map.sizes.len() != bulk.coordinates.len() {
                let (has, given) = (map.sizes.len(), bulk.coordinates.len());
                return Err(self.misuse(
                    warp,
                    at,
                    format!("a tensor map of {has} axes with {given} coordinates"),
                ));
            }
            if matches!(bulk.kind, BulkKind::Reduce(..)) && map.element.size_bytes() == 1 {
                return Err(self.misuse(warp, at, "a reduction of bytes".to_owned()));
            }
            let mut coordinates = [0; 5];
            for (to, slot) in coordinates.iter_mut().zip(&bulk.coordinates) {
                *to = warp.file.narrow(*slot)[lane] as i32;
            }
            return Ok(Source::Tile { map, coordinates });
        }
        let bytes = u64::from(warp.file.narrow(bulk.size)[lane]);
        if !bytes.is_multiple_of(16) || !address.is_multiple_of(16) {
            let what = format!(
                "a bulk copy of {bytes} bytes at {address:#x}: both must be multiples of 16"
            );
            return Err(report::fault(
                self,
                FaultKind::Misaligned,
                at.place(warp),
                what,
            ));
        }
        if bulk.kind == BulkKind::Across {
            let (block, start) =
                self.shared_range(warp, at, AddressSpace::Shared, address, bytes, Kind::Copy)?;
            return Ok(Source::Across {
                block,
                address: start as u64,
                bytes,
            });
        }
        Ok(Source::Range { address, bytes })
    }

    /// Reads a tensor map in parameter or global memory.
    fn tensor_map(
        &self,
        warp: &Warp,
        at: At,
        operand: &Address,
        address: u64,
    ) -> Result<TensorMap> {
        let (target, address) = self.resolve(at, operand.space, address);
        let mut bytes = [0; TENSOR_MAP_BYTES];
        let found = match target {
            Target::Param => {
                let params = self.launch.call.params;
                usize::try_from(address)
                    .ok()
                    .and_then(|at| params.get(at..at.checked_add(TENSOR_MAP_BYTES)?))
                    .map(|found| {
                        bytes.copy_from_slice(found);
                    })
            }
            Target::Global => {
                let view = self.launch.call.memory.view(address);
                view.filter(|v| v.holds(address, TENSOR_MAP_BYTES as u64))
                    .map(|view| {
                        for (k, byte) in bytes.iter_mut().enumerate() {
                            *byte = view.load(address + k as u64, 1) as u8;
                        }
                    })
            }
            _ => None,
        };
        found
            .and_then(|()| TensorMap::decode(&bytes))
            .filter(|_| address.is_multiple_of(64))
            .ok_or_else(|| {
                let what = format!(
                    "no tensor map at {target:?} address {address:#x}, or not aligned to 64 bytes"
                );
                self.misuse(warp, at, what)
            })
    }

    fn bulk_target(
        &self,
        warp: &Warp,
        at: At,
        bulk: &Bulk,
        lane: usize,
        source: Source,
    ) -> Result<Pending> {
        let bytes = source.bytes();
        let to = addresses(warp, &bulk.shared)[lane];
        let align = if bulk.size == NONE { 128 } else { 16 };
        if !to.is_multiple_of(align) {
            let what =
                format!("shared address {to:#x} of a bulk copy must be a multiple of {align}");
            return Err(report::fault(
                self,
                FaultKind::Misaligned,
                at.place(warp),
                what,
            ));
        }
        let (block, start) =
            self.shared_range(warp, at, AddressSpace::Shared, to, bytes, Kind::Copy)?;
        let mut pending = Pending {
            kind: bulk.kind,
            place: at.place(warp),
            source,
            shared: vec![],
            mbarriers: vec![],
        };
        let barrier = match &bulk.mbarrier {
            Some(address) => {
                let address = addresses(warp, address)[lane];
                Some(self.shared_range(
                    warp,
                    at,
                    AddressSpace::Shared,
                    address,
                    8,
                    Kind::Mbarrier,
                )?)
            }
            None => None,
        };
        if bulk.ranks == NONE {
            pending.shared.push((block, start as u64));
            pending.mbarriers.extend(barrier.map(|(block, at)| Spot {
                block,
                address: at as u64,
            }));
            return Ok(pending);
        }
        let ranks = warp.file.narrow(bulk.ranks)[lane] & 0xffff;
        for rank in lanes(ranks) {
            let Some(block) = self.block_of_rank(self.blocks[at.block].index, rank as u32) else {
                return Err(self.misuse(
                    warp,
                    at,
                    format!("a multicast to rank {rank}, which the cluster does not have"),
                ));
            };
            pending.shared.push((block, start as u64));
            pending.mbarriers.extend(barrier.map(|(_, at)| Spot {
                block,
                address: at as u64,
            }));
        }
        Ok(pending)
    }

    pub(super) fn bulk_commit(&mut self, warp: &mut Warp, at: At) {
        for lane in lanes(at.active) {
            warp.stores.committed[lane] += 1;
        }
    }

    /// Makes the stores of all groups but the last `left`.
    pub(super) fn bulk_wait(&mut self, warp: &mut Warp, at: At, left: u32) -> Result<()> {
        let committed = warp.stores.committed;
        let end = |lane: usize| committed[lane].saturating_sub(left);
        for (lane, group, copy) in std::mem::take(&mut warp.stores.pending) {
            if at.active >> lane & 1 != 0 && group < end(lane) {
                self.make_store(&copy)?;
            } else {
                warp.stores.pending.push((lane, group, copy));
            }
        }
        if let Some(races) = &mut self.races {
            let group = lanes(at.active).map(end).max().unwrap_or(0);
            races.group_wait(at.block, warp.id, warp.id, Async::Bulk, group);
        }
        Ok(())
    }

    /// Does the oldest work that was put off; `false` if there is none.
    pub(super) fn do_deferred(&mut self) -> Result<bool> {
        match self.deferred.pop_front() {
            None => return Ok(false),
            Some(Deferred::Load(copy)) => self.make_load(&copy)?,
            Some(Deferred::Arrive { warp, at, address }) => {
                let Some(mut waiting) = self.blocks[at.block].warps[warp as usize].take() else {
                    return Ok(true);
                };
                let result = self.copy_complete(&mut waiting, at);
                let result =
                    result.and_then(|()| self.mbarrier_arrive_late(&waiting, at, &address));
                self.blocks[at.block].warps[warp as usize] = Some(waiting);
                result?;
            }
        }
        Ok(true)
    }

    /// The fault of blocks that end while copies into them are under way.
    pub(super) fn leftover(&self) -> Option<Fault> {
        let Some(Deferred::Load(copy)) = self.deferred.front() else {
            return None;
        };
        Some(report::fault(
            self,
            FaultKind::Misuse,
            copy.place,
            "the block ends before this bulk copy is complete",
        ))
    }

    fn make_load(&mut self, copy: &Pending) -> Result<()> {
        let data = match &copy.source {
            Source::Range { address, bytes } => {
                let view = self.bulk_view(copy, *address, *bytes)?;
                (0..*bytes / 8)
                    .flat_map(|k| view.load(address + 8 * k, 8).to_le_bytes())
                    .collect()
            }
            Source::Tile { map, coordinates } => self.read_tile(copy, map, coordinates)?,
            Source::Across {
                block,
                address,
                bytes,
            } => self.blocks[*block].shared[*address as usize..(address + bytes) as usize].to_vec(),
        };
        for ((block, start), spot) in copy.shared.iter().zip(&copy.mbarriers) {
            let shared = &mut self.blocks[*block].shared;
            for (k, chunk) in data.chunks_exact(16).enumerate() {
                let to = swizzled(&copy.source, start + 16 * k as u64) as usize;
                if let Some(to) = shared.get_mut(to..to + 16) {
                    to.copy_from_slice(chunk);
                }
            }
            if !self.mbarrier_complete(*spot, data.len() as u64) {
                let what = format!(
                    "a bulk copy completes on shared address {:#x}, where no mbarrier is",
                    spot.address
                );
                return Err(report::fault(self, FaultKind::Misuse, copy.place, what));
            }
        }
        Ok(())
    }

    fn bulk_view(&self, copy: &Pending, address: u64, bytes: u64) -> Result<View> {
        let memory = self.launch.call.memory;
        memory.view(address).filter(|view| view.holds(address, bytes)).ok_or_else(|| {
            let nearest = memory.nearest(address);
            let what = format!("out of bounds: bulk copy of {bytes} bytes at global address {address:#x}{nearest}");
            report::fault(self, FaultKind::OutOfBounds, copy.place, what)
        })
    }

    /// The elements of a tile in order; those outside the tensor are filled.
    fn read_tile(&self, copy: &Pending, map: &TensorMap, first: &[i32; 5]) -> Result<Vec<u8>> {
        let size = map.element.size_bytes();
        let fill = if map.fills_with_nan {
            nan(map.element)
        } else {
            0
        };
        let mut data = Vec::with_capacity(map.tile_bytes() as usize);
        self.each_of_tile(copy, map, first, |element| {
            let bits = element.map_or(fill, |(view, address)| view.load(address, size));
            data.extend_from_slice(&bits.to_le_bytes()[..size]);
        })?;
        Ok(data)
    }

    /// Calls `f` with each element's place in global memory, or nothing for those outside the tensor.
    fn each_of_tile(
        &self,
        copy: &Pending,
        map: &TensorMap,
        first: &[i32; 5],
        mut f: impl FnMut(Option<(&View, u64)>),
    ) -> Result<()> {
        let size = map.element.size_bytes() as u64;
        let rows: u32 = map.tile[1..].iter().product();
        for row in 0..rows {
            let (mut rest, mut address, mut inside) = (row, map.address, true);
            for (axis, side) in map.tile.iter().enumerate().skip(1) {
                let index = i64::from(rest % side) + i64::from(first[axis]);
                rest /= side;
                inside &= index >= 0 && (index as u64) < map.sizes[axis];
                address =
                    address.wrapping_add((index as u64).wrapping_mul(map.strides_bytes[axis - 1]));
            }
            // The part of the row that is in the tensor is in one buffer.
            let start = i64::from(first[0]);
            let (low, high) = (
                start.max(0),
                (start + i64::from(map.tile[0])).min(map.sizes[0] as i64),
            );
            let view = match inside && low < high {
                true => {
                    let bytes = (high - low) as u64 * size;
                    Some(self.bulk_view(copy, address.wrapping_add(low as u64 * size), bytes)?)
                }
                false => None,
            };
            for x in start..start + i64::from(map.tile[0]) {
                let here = view.as_ref().filter(|_| (low..high).contains(&x));
                f(here.map(|view| (view, address.wrapping_add(x as u64 * size))));
            }
        }
        Ok(())
    }

    fn make_store(&mut self, copy: &Pending) -> Result<()> {
        let (block, start) = copy.shared[0];
        let byte = |gang: &Gang, k: u64| {
            let at = swizzled(&copy.source, (start + k) & !15) + ((start + k) & 15);
            gang.blocks[block]
                .shared
                .get(at as usize)
                .copied()
                .unwrap_or(0)
        };
        let word = |gang: &Gang, k: u64, size: usize| {
            (0..size as u64).fold(0u64, |word, o| {
                word | u64::from(byte(gang, k + o)) << (8 * o)
            })
        };
        match &copy.source {
            Source::Range { address, bytes } => {
                let view = self.bulk_view(copy, *address, *bytes)?;
                let ty = if let BulkKind::Reduce(_, Some(ty)) = copy.kind {
                    ty
                } else {
                    Type::U64
                };
                for k in (0..*bytes).step_by(ty.size_bytes()) {
                    put(
                        &view,
                        address + k,
                        ty,
                        copy.kind,
                        word(self, k, ty.size_bytes()),
                    );
                }
            }
            Source::Tile { map, coordinates } => {
                let (size, mut k) = (map.element.size_bytes(), 0);
                let ty = element_type(map.element);
                self.each_of_tile(copy, map, coordinates, |element| {
                    if let Some((view, address)) = element {
                        put(view, address, ty, copy.kind, word(self, k, size));
                    }
                    k += size as u64;
                })?;
            }
            Source::Across { .. } => {}
        }
        Ok(())
    }
}

/// Where 16 bytes of a tile are in shared memory.
fn swizzled(source: &Source, address: u64) -> u64 {
    match source {
        Source::Tile { map, .. } => permuted(map.swizzle, address),
        _ => address,
    }
}

/// Stores or combines one element.
fn put(view: &View, address: u64, ty: Type, kind: BulkKind, value: u64) {
    match kind {
        BulkKind::Reduce(op, _) => {
            update_global(view, address, ty.size_bytes(), |old| {
                combine(op, ty, old, value, 0)
            });
        }
        _ => view.store(address, ty.size_bytes(), value),
    }
}

fn element_type(element: TensorElement) -> Type {
    match element {
        TensorElement::U8 => Type::U8,
        TensorElement::U16 => Type::U16,
        TensorElement::U32 => Type::U32,
        TensorElement::S32 => Type::S32,
        TensorElement::U64 => Type::U64,
        TensorElement::S64 => Type::S64,
        TensorElement::F16 => Type::F16,
        TensorElement::Bf16 => Type::BF16,
        TensorElement::F32 => Type::F32,
        TensorElement::F64 => Type::F64,
    }
}

fn nan(element: TensorElement) -> u64 {
    match element {
        TensorElement::F16 | TensorElement::Bf16 => 0x7fff,
        TensorElement::F32 => 0x7fff_ffff,
        TensorElement::F64 => 0x7fff_ffff_ffff_ffff,
        _ => 0,
    }
}
