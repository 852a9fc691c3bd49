//! `cp.async`: copies that are made when their group is waited for, not before.

use super::{
    access::{Kind, LaneAccess, Target, addresses},
    gang::Gang,
    race::Async,
    warp::{Flow, Issue, Warp, lanes},
};
use crate::{
    decode::program::{AddressSpace, Copy, NONE},
    fault::Result,
    lanes::LANES,
    memory::View,
};

/// A copy under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneCopy {
    lane: usize,
    /// Groups that the lane had committed when it issued the copy.
    group: u32,
    block: usize,
    to: usize,
    from: u64,
    bytes: u32,
    source_bytes: u32,
    pc: u32,
}

/// The copies of one warp.
#[derive(Default)]
pub(super) struct Copies {
    pub pending: Vec<LaneCopy>,
    /// Groups that each lane has committed.
    pub committed: [u32; LANES],
}

/// Reads global memory, aligned for the whole copy: whole words first, then single bytes.
fn fill(bytes: &mut [u8], view: &View, from: u64) {
    let words = bytes.len() / 4 * 4;
    for k in (0..words).step_by(4) {
        let word = view.load(from + k as u64, 4) as u32;
        bytes[k..k + 4].copy_from_slice(&word.to_le_bytes());
    }
    for (k, byte) in bytes.iter_mut().enumerate().skip(words) {
        *byte = view.load(from + k as u64, 1) as u8;
    }
}

impl Gang<'_> {
    pub(super) fn copy(&mut self, warp: &mut Warp, at: Issue, copy: &Copy) -> Result<Flow> {
        let (to, from) = (addresses(warp, &copy.to), addresses(warp, &copy.from));
        let count = u64::from(copy.bytes);
        for lane in lanes(at.active) {
            let at = at.of_lane(lane);
            let (block, start) =
                self.shared_range(warp, at, AddressSpace::Shared, to[lane], count, Kind::Copy)?;
            let source_bytes = match copy.source_bytes {
                NONE => copy.bytes,
                slot => warp.file.narrow(slot)[lane].min(copy.bytes),
            };
            if source_bytes > 0 {
                // The address must be valid for the bytes that are read, and aligned for the whole.
                let want = LaneAccess {
                    lane,
                    target: Target::Global,
                    address: from[lane],
                    count,
                    kind: Kind::Load,
                };
                self.global_part(warp, at, want, u64::from(source_bytes))?;
            }
            let group = warp.copies.committed[lane];
            if let Some(races) = &self.races {
                let agent = races.group_agent(at.block, warp.id, Async::Copy);
                self.race_async(
                    warp,
                    at,
                    (agent, group + 1),
                    (block, start as u64, count),
                    true,
                )?;
            }
            let (from, bytes) = (from[lane], copy.bytes);
            warp.copies.pending.push(LaneCopy {
                lane,
                group,
                block,
                to: start,
                from,
                bytes,
                source_bytes,
                pc: at.pc,
            });
        }
        Ok(Flow::Next)
    }

    pub(super) fn copy_commit(&mut self, warp: &mut Warp, at: Issue) {
        for lane in lanes(at.active) {
            warp.copies.committed[lane] += 1;
        }
    }

    /// Makes the copies of all groups but the last `left`; of all copies if none is given.
    pub(super) fn copy_wait(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        left: Option<u32>,
    ) -> Result<()> {
        let committed = warp.copies.committed;
        let end = |lane: usize| left.map_or(u32::MAX, |left| committed[lane].saturating_sub(left));
        let pending = std::mem::take(&mut warp.copies.pending);
        for copy in pending {
            if at.active >> copy.lane & 1 != 0 && copy.group < end(copy.lane) {
                self.make_copy(warp, at, copy)?;
            } else {
                warp.copies.pending.push(copy);
            }
        }
        let group = lanes(at.active)
            .map(|lane| end(lane).min(committed[lane] + 1))
            .min()
            .unwrap_or(0);
        if let Some(races) = &mut self.races {
            races.group_wait(at.block, warp.id, warp.id, Async::Copy, group);
        }
        Ok(())
    }

    /// Makes all copies of the lanes, committed or not.
    pub(super) fn copy_complete(&mut self, warp: &mut Warp, at: Issue) -> Result<()> {
        self.copy_wait(warp, at, None)
    }

    fn make_copy(&mut self, warp: &Warp, at: Issue, copy: LaneCopy) -> Result<()> {
        let mut bytes = [0; 16];
        let read = copy.source_bytes as usize;
        if read > 0 {
            let at = Issue { pc: copy.pc, ..at };
            let want = LaneAccess {
                lane: copy.lane,
                target: Target::Global,
                address: copy.from,
                count: u64::from(copy.bytes),
                kind: Kind::Load,
            };
            let view = self.global_part(warp, at, want, read as u64)?;
            fill(&mut bytes[..read], &view, copy.from);
        }
        let n = copy.bytes as usize;
        self.blocks[copy.block].shared[copy.to..copy.to + n].copy_from_slice(&bytes[..n]);
        Ok(())
    }
}
