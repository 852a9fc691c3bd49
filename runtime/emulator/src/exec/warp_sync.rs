//! Exchanges between the lanes of a warp: shuffles, votes, matches, reductions.

use super::{
    atomics::combine,
    gang::Gang,
    warp::{Flow, Issue, Warp, lanes},
};
use crate::{
    decode::program::{NONE, Shuffle, Vote, WarpOp, WarpSync},
    fault::{FaultKind, Result},
    lanes::{LANES, Slots},
};

fn vote(op: Vote, bits: u32, set: u32) -> bool {
    match op {
        Vote::All => bits == set,
        Vote::Any => bits != 0,
        _ => bits == set || bits == 0,
    }
}

fn wide_values(warp: &Warp, slot: u32, wide: bool) -> [u64; LANES] {
    if wide {
        *warp.file.wide(slot)
    } else {
        warp.file.narrow(slot).map(u64::from)
    }
}

/// Stores the results of an exchange: register `d` and predicate `p`.
fn give(warp: &mut Warp, set: u32, slots: &Slots, result: &[u32; LANES], holds: u32) {
    warp.file.put_narrow(slots.d, set, result);
    warp.file.put_predicate(slots.p, set, holds);
}

/// All lanes or none.
fn mask_of(holds: bool) -> u32 {
    u32::from(holds).wrapping_neg()
}

/// `match.sync`: for each lane of the set those with the same value, or with `all` the set if its values are equal. Second, true if they are.
fn equal_lanes(set: u32, values: &[u64; LANES], all: bool) -> ([u32; LANES], bool) {
    let same = |lane: usize| {
        lanes(set)
            .filter(|k| values[*k] == values[lane])
            .fold(0, |mask, k| mask | 1u32 << k)
    };
    let is_all = same(set.trailing_zeros() as usize) == set;
    let result = match (all, is_all) {
        (true, true) => [set; LANES],
        (true, false) => [0; LANES],
        (false, _) => std::array::from_fn(same),
    };
    (result, is_all)
}

/// Lane that lane `own` reads; `None` if it is out of its segment.
fn shuffle_source(mode: Shuffle, own: u32, by: u32, c: u32) -> Option<u32> {
    let (clamp, segment) = (c & 31, c >> 8 & 31);
    let highest = own & segment | clamp & !segment;
    let (from, valid) = match mode {
        Shuffle::Up => (
            own.wrapping_sub(by),
            own as i32 - by as i32 >= highest as i32,
        ),
        Shuffle::Down => (own + by, own + by <= highest),
        Shuffle::Butterfly => (own ^ by, own ^ by <= highest),
        Shuffle::Index => {
            let from = own & segment | by & !segment;
            (from, from <= highest)
        }
    };
    valid.then_some(from)
}

impl Gang<'_> {
    /// Runs the instruction for each set of lanes that name the same members, once all are there.
    pub(super) fn warp_sync(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        sync: &WarpSync,
        slots: &Slots,
    ) -> Result<Flow> {
        let masks = self.member_masks(warp, at, sync)?;
        let need = lanes(at.active).fold(0, |need, lane| need | masks[lane]);
        if need & warp.live & !at.active != 0 {
            return self.wait_for_lanes(warp, at, need);
        }
        let mut left = at.active;
        while left != 0 {
            let members = masks[left.trailing_zeros() as usize];
            let set = lanes(left)
                .filter(|lane| masks[*lane] == members)
                .fold(0, |set, lane| set | 1u32 << lane);
            left &= !set;
            self.exchange(warp, Issue { active: set, ..at }, sync.op, slots)?;
        }
        Ok(Flow::Next)
    }

    /// Masks of the lanes that each lane waits for, which must have the lane itself.
    fn member_masks(&self, warp: &Warp, at: Issue, sync: &WarpSync) -> Result<[u32; LANES]> {
        let masks = match sync.members {
            NONE => [warp.live; LANES],
            slot => *warp.file.narrow(slot),
        };
        match lanes(at.active).find(|lane| masks[*lane] >> lane & 1 == 0) {
            None => Ok(masks),
            Some(lane) => {
                let what = format!(
                    "the lane is not in its own member mask {:#010x}",
                    masks[lane]
                );
                Err(self.fault(FaultKind::Divergence, warp, at.of_lane(lane), what))
            }
        }
    }

    fn exchange(&mut self, warp: &mut Warp, at: Issue, op: WarpOp, slots: &Slots) -> Result<()> {
        let set = at.active;
        match op {
            WarpOp::Barrier => {
                if let Some(races) = &mut self.races {
                    races.warp_barrier(at.block, warp.id);
                }
            }
            WarpOp::Shuffle { mode } => self.shuffle(warp, at, mode, slots)?,
            WarpOp::Vote { op, flip } => {
                let bits = (warp.file.predicates[slots.r as usize] ^ flip) & set;
                let holds = mask_of(vote(op, bits, set));
                give(warp, set, slots, &[bits; LANES], holds);
            }
            WarpOp::Match { all, wide } => {
                let (result, is_all) = equal_lanes(set, &wide_values(warp, slots.a, wide), all);
                give(warp, set, slots, &result, mask_of(is_all));
            }
            WarpOp::Reduce { op, ty } => {
                let values = wide_values(warp, slots.a, false);
                let all = lanes(set).map(|lane| values[lane]);
                let result = all.reduce(|x, y| combine(op, ty, x, y, 0)).unwrap_or(0);
                warp.file.put_narrow(slots.d, set, &[result as u32; LANES]);
            }
            WarpOp::Elect => {
                let leader = set.trailing_zeros();
                give(warp, set, slots, &[leader; LANES], 1 << leader);
            }
        }
        Ok(())
    }

    /// PTX ISA, `shfl.sync`: `c` holds the clamp in bits 0 to 4 and the mask of segments in bits 8 to 12.
    fn shuffle(&mut self, warp: &mut Warp, at: Issue, mode: Shuffle, slots: &Slots) -> Result<()> {
        let [a, b, c] = [slots.a, slots.b, slots.c].map(|slot| *warp.file.narrow(slot));
        let (mut result, mut in_range) = ([0; LANES], 0);
        for lane in lanes(at.active) {
            let from = shuffle_source(mode, lane as u32, b[lane] & 31, c[lane]);
            in_range |= u32::from(from.is_some()) << lane;
            let from = from.unwrap_or(lane as u32);
            if at.active >> from & 1 == 0 {
                let what = format!(
                    "a shuffle reads lane {from}, which does not take part ({:#010x} do)",
                    at.active
                );
                return Err(self.fault(FaultKind::Divergence, warp, at.of_lane(lane), what));
            }
            result[lane] = a[from as usize];
        }
        warp.file.put_narrow(slots.d, at.active, &result);
        warp.file.put_predicate(slots.p, at.active, in_range);
        Ok(())
    }
}
