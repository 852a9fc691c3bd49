//! Exchanges between the lanes of a warp: shuffles, votes, matches, reductions.

use super::{
    atomics::combine,
    gang::Gang,
    report,
    warp::{At, Flow, Warp, lanes},
};
use crate::{
    decode::program::{NONE, Shuffle, Vote, WarpOp, WarpSync},
    fault::{FaultKind, Result},
    lanes::{LANES, Slots},
};

impl Gang<'_> {
    /// Runs the instruction for each set of lanes that name the same members, once all are there.
    pub(super) fn warp_sync(
        &mut self,
        warp: &mut Warp,
        at: At,
        sync: &WarpSync,
        slots: &Slots,
    ) -> Result<Flow> {
        let masks = match sync.members {
            NONE => [warp.live; LANES],
            slot => *warp.file.narrow(slot),
        };
        let mut need = 0;
        for lane in lanes(at.active) {
            need |= masks[lane];
            if masks[lane] >> lane & 1 == 0 {
                let place = report::Place {
                    lanes: 1 << lane,
                    ..at.place(warp)
                };
                let what = format!(
                    "the lane is not in its own member mask {:#010x}",
                    masks[lane]
                );
                return Err(report::fault(self, FaultKind::Divergence, place, what));
            }
        }
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
            self.exchange(warp, At { active: set, ..at }, sync.op, slots)?;
        }
        Ok(Flow::Next)
    }

    fn exchange(&mut self, warp: &mut Warp, at: At, op: WarpOp, slots: &Slots) -> Result<()> {
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
                let holds = match op {
                    Vote::All => bits == set,
                    Vote::Any => bits != 0,
                    _ => bits == set || bits == 0,
                };
                warp.file.put_narrow(slots.d, set, &[bits; LANES]);
                warp.file
                    .put_predicate(slots.p, set, u32::from(holds).wrapping_neg());
            }
            WarpOp::Match { all, wide } => {
                let values: [u64; LANES] = if wide {
                    *warp.file.wide(slots.a)
                } else {
                    warp.file.narrow(slots.a).map(u64::from)
                };
                let same = |lane: usize| {
                    lanes(set)
                        .filter(|k| values[*k] == values[lane])
                        .fold(0, |mask, k| mask | 1u32 << k)
                };
                let first = same(set.trailing_zeros() as usize);
                let is_all = first == set;
                let result = match (all, is_all) {
                    (true, true) => [set; LANES],
                    (true, false) => [0; LANES],
                    (false, _) => std::array::from_fn(same),
                };
                warp.file.put_narrow(slots.d, set, &result);
                warp.file
                    .put_predicate(slots.p, set, u32::from(is_all).wrapping_neg());
            }
            WarpOp::Reduce { op, ty } => {
                let values = *warp.file.narrow(slots.a);
                let all = lanes(set).map(|lane| u64::from(values[lane]));
                let result = all.reduce(|x, y| combine(op, ty, x, y, 0)).unwrap_or(0);
                warp.file.put_narrow(slots.d, set, &[result as u32; LANES]);
            }
            WarpOp::Elect => {
                let leader = set.trailing_zeros();
                warp.file.put_narrow(slots.d, set, &[leader; LANES]);
                warp.file.put_predicate(slots.p, set, 1 << leader);
            }
        }
        Ok(())
    }

    /// PTX ISA, `shfl.sync`: `c` holds the clamp in bits 0 to 4 and the mask of segments in bits 8 to 12.
    fn shuffle(&mut self, warp: &mut Warp, at: At, mode: Shuffle, slots: &Slots) -> Result<()> {
        let [a, b, c] = [slots.a, slots.b, slots.c].map(|slot| *warp.file.narrow(slot));
        let (mut result, mut in_range) = ([0; LANES], 0);
        for lane in lanes(at.active) {
            let (clamp, segment) = (c[lane] & 31, c[lane] >> 8 & 31);
            let (own, by) = (lane as u32, b[lane] & 31);
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
            let from = if valid { from } else { own };
            if at.active >> from & 1 == 0 {
                let place = report::Place {
                    lanes: 1 << lane,
                    ..at.place(warp)
                };
                let what = format!(
                    "a shuffle reads lane {from}, which does not take part ({:#010x} do)",
                    at.active
                );
                return Err(report::fault(self, FaultKind::Divergence, place, what));
            }
            result[lane] = a[from as usize];
            in_range |= u32::from(valid) << lane;
        }
        warp.file.put_narrow(slots.d, at.active, &result);
        warp.file.put_predicate(slots.p, at.active, in_range);
        Ok(())
    }
}
