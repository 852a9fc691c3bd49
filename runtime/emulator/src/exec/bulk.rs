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
    warp::{Issue, Warp, lanes},
};
use crate::{
    decode::program::{Address, AddressSpace, Bulk, BulkKind, NONE},
    fault::{Fault, FaultKind, Result},
    lanes::LANES,
    memory::View,
    tensor_map::{TENSOR_MAP_BYTES, TensorElement, TensorMap, permuted},
    types::Type,
};
use gristmill_runtime::gpu::Pixels;

/// The end of a copy that is outside the shared memory it fills or reads.
#[derive(Clone, Debug)]
enum Source {
    Range {
        address: u64,
        bytes: u64,
    },
    Tile {
        map: Box<TensorMap>,
        start: TileStart,
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

/// Where a tile begins, innermost axis first, and in im2col mode what is added to the places of its pixels.
#[derive(Clone, Copy, Debug, Default)]
struct TileStart {
    at: [i32; 5],
    offsets: [u16; 3],
}

/// A copy under way.
#[derive(Clone, Debug)]
pub(super) struct BulkCopy {
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
pub(super) enum DeferredWork {
    Load(BulkCopy),
    /// An arrival behind a lane's asynchronous copies.
    Arrive {
        warp: u32,
        at: Issue,
        address: Address,
    },
}

/// Stores of one warp that it has not waited for.
#[derive(Default)]
pub(super) struct Stores {
    /// Lane, the group it is of, and the copy.
    pub pending: Vec<(usize, u32, BulkCopy)>,
    pub committed: [u32; LANES],
}

impl Gang<'_> {
    pub(super) fn bulk(&mut self, warp: &mut Warp, at: Issue, bulk: &Bulk) -> Result<()> {
        for lane in lanes(at.active) {
            let at = at.of_lane(lane);
            let source = self.bulk_source(warp, at, bulk, lane)?;
            let pending = self.bulk_target(warp, at, bulk, lane, source)?;
            if matches!(bulk.kind, BulkKind::Load | BulkKind::Across) {
                self.race_bulk_load(warp, at, &pending)?;
                self.deferred.push_back(DeferredWork::Load(pending));
                continue;
            }
            let group = warp.stores.committed[lane];
            if let Some(races) = &self.races {
                let agent = races.group_agent(at.block, warp.id, Async::Bulk);
                let (block, offset) = pending.shared[0];
                let range = (block, offset, pending.source.bytes());
                self.race_async(warp, at, (agent, group + 1), range, false)?;
            }
            warp.stores.pending.push((lane, group, pending));
        }
        Ok(())
    }

    fn race_bulk_load(&mut self, warp: &Warp, at: Issue, copy: &BulkCopy) -> Result<()> {
        let bytes = copy.source.bytes();
        for ((block, offset), spot) in copy.shared.iter().zip(&copy.mbarriers) {
            if let Some(races) = &mut self.races {
                let agent = races.mbarrier_agent(spot.key());
                self.race_async(warp, at, agent, (*block, *offset, bytes), true)?;
            }
        }
        Ok(())
    }

    fn bulk_source(&self, warp: &Warp, at: Issue, bulk: &Bulk, lane: usize) -> Result<Source> {
        let address = addresses(warp, &bulk.global)[lane];
        if bulk.size == NONE {
            return self.bulk_tile(warp, at, bulk, lane);
        }
        let bytes = u64::from(warp.file.narrow(bulk.size)[lane]);
        if !bytes.is_multiple_of(16) || !address.is_multiple_of(16) {
            let what = format!(
                "a bulk copy of {bytes} bytes at {address:#x}: both must be multiples of 16"
            );
            return Err(self.fault(FaultKind::Misaligned, warp, at, what));
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

    fn bulk_tile(&self, warp: &Warp, at: Issue, bulk: &Bulk, lane: usize) -> Result<Source> {
        let address = addresses(warp, &bulk.global)[lane];
        let map = Box::new(self.tensor_map(warp, at, &bulk.global, address)?);
        if map.sizes.len() != bulk.coordinates.len() {
            let (has, given) = (map.sizes.len(), bulk.coordinates.len());
            let what = format!("a tensor map of {has} axes with {given} coordinates");
            return Err(self.misuse(warp, at, what));
        }
        if matches!(bulk.kind, BulkKind::Reduce(..)) && map.element.size_bytes() == 1 {
            return Err(self.misuse(warp, at, "a reduction of bytes".to_owned()));
        }
        let mut start = TileStart::default();
        for (to, slot) in start.at.iter_mut().zip(&bulk.coordinates) {
            *to = warp.file.narrow(*slot)[lane] as i32;
        }
        for (to, slot) in start.offsets.iter_mut().zip(&bulk.offsets) {
            *to = warp.file.narrow(*slot)[lane] as u16;
        }
        match pixel_problem(&map, bulk, &start) {
            Some(what) => Err(self.misuse(warp, at, what)),
            None => Ok(Source::Tile { map, start }),
        }
    }

    /// Reads a tensor map in parameter or global memory.
    fn tensor_map(
        &self,
        warp: &Warp,
        at: Issue,
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
        at: Issue,
        bulk: &Bulk,
        lane: usize,
        source: Source,
    ) -> Result<BulkCopy> {
        let to = addresses(warp, &bulk.shared)[lane];
        self.check_bulk_target(warp, at, bulk, to)?;
        let range = |to, bytes, kind| {
            let space = AddressSpace::Shared;
            let (block, start) = self.shared_range(warp, at, space, to, bytes, kind)?;
            Ok((block, start as u64))
        };
        let (own, start) = range(to, source.bytes(), Kind::Copy)?;
        let barrier = match &bulk.mbarrier {
            Some(address) => Some(range(addresses(warp, address)[lane], 8, Kind::Mbarrier)?),
            None => None,
        };
        let (shared, spots) = if bulk.ranks == NONE {
            (vec![own], barrier.map(|(block, _)| vec![block]))
        } else {
            let blocks = self.multicast(warp, at, warp.file.narrow(bulk.ranks)[lane])?;
            (blocks.clone(), Some(blocks))
        };
        let spot = |block| barrier.map(|(_, address)| Spot { block, address });
        Ok(BulkCopy {
            kind: bulk.kind,
            place: at.place(warp),
            source,
            shared: shared.into_iter().map(|block| (block, start)).collect(),
            mbarriers: spots.into_iter().flatten().filter_map(spot).collect(),
        })
    }

    fn check_bulk_target(&self, warp: &Warp, at: Issue, bulk: &Bulk, to: u64) -> Result<()> {
        let align = if bulk.size == NONE { 128 } else { 16 };
        if to.is_multiple_of(align) {
            return Ok(());
        }
        let what = format!("shared address {to:#x} of a bulk copy must be a multiple of {align}");
        Err(self.fault(FaultKind::Misaligned, warp, at, what))
    }

    /// Blocks of the ranks in the lower half of a mask.
    fn multicast(&self, warp: &Warp, at: Issue, ranks: u32) -> Result<Vec<usize>> {
        let own = self.blocks[at.block].index;
        lanes(ranks & 0xffff)
            .map(|rank| {
                self.block_of_rank(own, rank as u32).ok_or_else(|| {
                    let what =
                        format!("a multicast to rank {rank}, which the cluster does not have");
                    self.misuse(warp, at, what)
                })
            })
            .collect()
    }

    pub(super) fn bulk_commit(&mut self, warp: &mut Warp, at: Issue) {
        for lane in lanes(at.active) {
            warp.stores.committed[lane] += 1;
        }
    }

    /// Makes the stores of all groups but the last `left`.
    pub(super) fn bulk_wait(&mut self, warp: &mut Warp, at: Issue, left: u32) -> Result<()> {
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
            Some(DeferredWork::Load(copy)) => self.make_load(&copy)?,
            Some(DeferredWork::Arrive { warp, at, address }) => {
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
        let Some(DeferredWork::Load(copy)) = self.deferred.front() else {
            return None;
        };
        Some(report::fault(
            self,
            FaultKind::Misuse,
            copy.place,
            "the block ends before this bulk copy is complete",
        ))
    }

    fn make_load(&mut self, copy: &BulkCopy) -> Result<()> {
        let data = self.bulk_data(copy)?;
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
                    "a bulk copy completes on shared address {:#x}, which holds no mbarrier",
                    spot.address
                );
                return Err(report::fault(self, FaultKind::Misuse, copy.place, what));
            }
        }
        Ok(())
    }

    fn bulk_data(&self, copy: &BulkCopy) -> Result<Vec<u8>> {
        match &copy.source {
            Source::Range { address, bytes } => {
                let view = self.bulk_view(copy, *address, *bytes)?;
                let word = |k: u64| view.load(address + 8 * k, 8).to_le_bytes();
                Ok((0..*bytes / 8).flat_map(word).collect())
            }
            Source::Tile { map, start } => self.read_tile(copy, map, start),
            Source::Across {
                block,
                address,
                bytes,
            } => {
                let range = *address as usize..(address + bytes) as usize;
                Ok(self.blocks[*block].shared[range].to_vec())
            }
        }
    }

    fn bulk_view(&self, copy: &BulkCopy, address: u64, bytes: u64) -> Result<View> {
        let memory = self.launch.call.memory;
        memory.view(address).filter(|view| view.holds(address, bytes)).ok_or_else(|| {
            let nearest = memory.nearest(address);
            let what = format!("out of bounds: bulk copy of {bytes} bytes at global address {address:#x}{nearest}");
            report::fault(self, FaultKind::OutOfBounds, copy.place, what)
        })
    }

    /// The elements of a tile in order; those outside the tensor are filled.
    fn read_tile(&self, copy: &BulkCopy, map: &TensorMap, first: &TileStart) -> Result<Vec<u8>> {
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
        copy: &BulkCopy,
        map: &TensorMap,
        first: &TileStart,
        mut f: impl FnMut(Option<(&View, u64)>),
    ) -> Result<()> {
        let size = map.element.size_bytes() as u64;
        for place in row_places(map, first) {
            let (address, inside) = tile_row(map, &place);
            // The part of the row that is in the tensor is in one buffer.
            let start = i64::from(first.at[0]);
            let end = start + i64::from(map.tile[0]);
            let (low, high) = (start.max(0), end.min(map.sizes[0] as i64));
            let view = match inside && low < high {
                true => {
                    let bytes = (high - low) as u64 * size;
                    Some(self.bulk_view(copy, address.wrapping_add(low as u64 * size), bytes)?)
                }
                false => None,
            };
            for x in start..end {
                let here = view.as_ref().filter(|_| (low..high).contains(&x));
                f(here.map(|view| (view, address.wrapping_add(x as u64 * size))));
            }
        }
        Ok(())
    }

    fn make_store(&mut self, copy: &BulkCopy) -> Result<()> {
        let (block, start) = copy.shared[0];
        let shared = &self.blocks[block].shared;
        let word = |k: u64, size: usize| {
            (0..size as u64).fold(0u64, |word, o| {
                let at = swizzled(&copy.source, (start + k + o) & !15) + ((start + k + o) & 15);
                let byte = shared.get(at as usize).copied().unwrap_or(0);
                word | u64::from(byte) << (8 * o)
            })
        };
        match &copy.source {
            Source::Range { address, bytes } => {
                let view = self.bulk_view(copy, *address, *bytes)?;
                let ty = match copy.kind {
                    BulkKind::Reduce(_, Some(ty)) => ty,
                    _ => Type::U64,
                };
                for k in (0..*bytes).step_by(ty.size_bytes()) {
                    let value = word(k, ty.size_bytes());
                    put(&view, address + k, ty, copy.kind, value);
                }
            }
            Source::Tile { map, start: first } => {
                let (size, mut k) = (map.element.size_bytes(), 0);
                let ty = element_type(map.element);
                self.each_of_tile(copy, map, first, |element| {
                    if let Some((view, address)) = element {
                        put(view, address, ty, copy.kind, word(k, size));
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

/// Problem of a copy's mode, or of where it begins in im2col mode. A start outside of the
/// box, or between its steps, is nothing that NVIDIA documents.
fn pixel_problem(map: &TensorMap, bulk: &Bulk, start: &TileStart) -> Option<String> {
    let Some(pixels) = &map.pixels else {
        let is_im2col = !bulk.offsets.is_empty();
        return is_im2col.then(|| "a copy in im2col mode by a map of tiles".to_owned());
    };
    if bulk.offsets.is_empty() {
        return Some("a copy of a tile by a map in im2col mode".to_owned());
    }
    let most = Pixels::max_offset(pixels.steps.len())?;
    if let Some(offset) = start.offsets.iter().find(|o| u32::from(**o) > most) {
        return Some(format!("an offset of {offset}; 0 to {most} are possible"));
    }
    let ranges = pixels.ranges(&map.sizes).into_iter().zip(&pixels.steps);
    for (((low, end), step), &at) in ranges.zip(&start.at[1..]) {
        let at = i64::from(at);
        if !(low..end).contains(&at) || (at - low) % i64::from(*step) != 0 {
            return Some(format!(
                "a copy that begins at pixel {at}, which is none of {low}, in steps of {step}, to before {end}"
            ));
        }
    }
    None
}

/// Indices along all axes but the innermost of a tile's rows, in order.
fn row_places(map: &TensorMap, first: &TileStart) -> Vec<Vec<i64>> {
    let axes = map.sizes.len();
    let at: Vec<i64> = first.at[1..axes].iter().map(|&i| i.into()).collect();
    match &map.pixels {
        Some(pixels) => pixel_places(map, pixels, at, first.offsets),
        None => {
            let rows: u32 = map.tile[1..].iter().product();
            let place = |row: u32| {
                let mut rest = row;
                let sides = map.tile[1..].iter().zip(&at);
                let index = |(side, start): (&u32, &i64)| {
                    let i = i64::from(rest % side) + start;
                    rest /= side;
                    i
                };
                sides.map(index).collect()
            };
            (0..rows).map(place).collect()
        }
    }
}

/// The same in im2col mode, from the pixel `at` on.
fn pixel_places(
    map: &TensorMap,
    pixels: &Pixels,
    mut at: Vec<i64>,
    offsets: [u16; 3],
) -> Vec<Vec<i64>> {
    let ranges = pixels.ranges(&map.sizes);
    // The axis of images has none.
    let offsets: Vec<i64> = offsets[..ranges.len()]
        .iter()
        .map(|&o| i64::from(o))
        .chain([0])
        .collect();
    let mut places = Vec::with_capacity(map.tile[1] as usize);
    for _ in 0..map.tile[1] {
        places.push(at.iter().zip(&offsets).map(|(i, o)| i + o).collect());
        let mut axis = 0;
        while let Some((low, end)) = ranges.get(axis) {
            at[axis] += i64::from(pixels.steps[axis]);
            if at[axis] < *end {
                break;
            }
            at[axis] = *low;
            axis += 1;
        }
        if axis == ranges.len() {
            at[axis] += 1;
        }
    }
    places
}

/// Address of the elements with innermost index 0 of a row of a tile at such indices along the
/// other axes, and true if these are in the tensor.
fn tile_row(map: &TensorMap, place: &[i64]) -> (u64, bool) {
    let (mut address, mut inside) = (map.address, true);
    for (axis, &index) in place.iter().enumerate() {
        inside &= index >= 0 && (index as u64) < map.sizes[axis + 1];
        let offset = (index as u64).wrapping_mul(map.strides_bytes[axis]);
        address = address.wrapping_add(offset);
    }
    (address, inside)
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
