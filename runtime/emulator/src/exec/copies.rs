//! `cp.async`: copies that are made when their group is waited for, not before.

use super::{
    access::{Kind, Target, Want, addresses},
    gang::Gang,
    race::Async,
    warp::{At, Flow, Warp, lanes},
};
use crate::{
    decode::program::{AddressSpace, Copy, NONE},
    fault::Result,
    lanes::LANES,
};

/// A copy under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
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
    pub pending: Vec<Pending>,
    /// Groups that each lane has committed.
    pub committed: [u32; LANES],
}

impl Gang<'_> {
    pub(super) fn copy(&mut self, warp: &mut Warp, at: At, copy: &Copy) -> Result<Flow> {
        let (to, from) = (addresses(warp, &copy.to), addresses(warp, &copy.from));
        let count = u64::from(copy.bytes);
        for lane in lanes(at.active) {
            let at = At {
                active: 1 << lane,
                ..at
            };
            let (block, start) =
                self.shared_range(warp, at, AddressSpace::Shared, to[lane], count, Kind::Copy)?;
            let source_bytes = match copy.source_bytes {
                NONE => copy.bytes,
                slot => warp.file.narrow(slot)[lane].min(copy.bytes),
            };
            if source_bytes > 0 {
                // The address must be valid for the bytes that are read, and aligned for the whole.
                let want = Want {
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
            warp.copies.pending.push(Pending {
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

    pub(super) fn copy_commit(&mut self, warp: &mut Warp, at: At) {
        for lane in lanes(at.active) {
            warp.copies.committed[lane] += 1;
        }
    }

    /// Makes the copies of all groups but the last `left`; of all copies if none is given.
    pub(super) fn copy_wait(&mut self, warp: &mut Warp, at: At, left: Option<u32>) -> Result<()> {
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
    pub(super) fn copy_complete(&mut self, warp: &mut Warp, at: At) -> Result<()> {
        self.copy_wait(warp, at, None)
    }

    fn make_copy(&mut self, warp: &Warp, at: At, copy: Pending) -> Result<()> {
        let mut bytes = [0; 16];
        if copy.source_bytes > 0 {
            let at = At { pc: copy.pc, ..at };
            let count = u64::from(copy.bytes);
            let want = Want {
                lane: copy.lane,
                target: Target::Global,
                address: copy.from,
                count,
                kind: Kind::Load,
            };
            let view = self.global_part(warp, at, want, u64::from(copy.source_bytes))?;
            // The address is aligned for the whole copy; whole words first, then single bytes.
            let read = copy.source_bytes as usize;
            let words = read / 4 * 4;
            for k in (0..words).step_by(4) {
                bytes[k..k + 4]
                    .copy_from_slice(&(view.load(copy.from + k as u64, 4) as u32).to_le_bytes());
            }
            for (k, byte) in bytes.iter_mut().enumerate().take(read).skip(words) {
                *byte = view.load(copy.from + k as u64, 1) as u8;
            }
        }
        let n = copy.bytes as usize;
        self.blocks[copy.block].shared[copy.to..copy.to + n].copy_from_slice(&bytes[..n]);
        Ok(())
    }
}
