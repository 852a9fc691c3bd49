//! Barriers of a block: `bar.sync`, `bar.arrive`, `bar.red`, by number and with or without a count of threads.

use super::{
    gang::{Block, Gang},
    warp::{Flow, Issue, Wait, Warp},
};
use crate::{
    decode::program::{Barrier, BarrierKind, NONE, Vote},
    fault::{FaultKind, Result},
    lanes::{LANES, Slots},
};

/// Barriers per block.
const BARRIERS: usize = 16;

/// All barriers of a block.
#[derive(Default)]
pub(super) struct Barriers {
    states: [State; BARRIERS],
    /// Barriers that somebody has arrived at: nothing to settle otherwise.
    in_use: u32,
}

/// One barrier between two completions.
#[derive(Clone, Default)]
struct State {
    /// Warps and which of their lanes have arrived.
    arrived: Vec<(u32, u32)>,
    /// Threads that must arrive; none stands for all of the block.
    expected: Option<u32>,
    /// Lanes that have arrived with a true predicate, and with a false one.
    votes: [u32; 2],
    /// Where the result of a reduction goes: warp, lanes, registers, operation.
    results: Vec<(u32, u32, Slots, Vote)>,
}

impl State {
    /// Threads that have arrived: a warp counts as a whole when all its live lanes have.
    fn count(&self, block: &[Option<Box<Warp>>]) -> u32 {
        let threads = |(warp, lanes): &(u32, u32)| {
            let live = block[*warp as usize].as_ref().map_or(0, |w| w.live);
            if live & !lanes == 0 {
                LANES as u32
            } else {
                lanes.count_ones()
            }
        };
        self.arrived.iter().map(threads).sum()
    }

    fn is_complete(&self, block: &[Option<Box<Warp>>]) -> bool {
        if let Some(expected) = self.expected {
            return self.count(block) >= expected;
        }
        let has_come = |warp: &Warp| {
            let lanes = self
                .arrived
                .iter()
                .find(|(w, _)| *w == warp.id)
                .map_or(0, |(_, lanes)| *lanes);
            warp.live & !lanes == 0
        };
        block.iter().flatten().all(|warp| has_come(warp))
    }

    fn vote(&mut self, bits: u32, active: u32) {
        self.votes[0] += bits.count_ones();
        self.votes[1] += (active & !bits).count_ones();
    }

    fn result(&self, op: Vote) -> u32 {
        match op {
            Vote::All => u32::from(self.votes[1] == 0),
            Vote::Any => u32::from(self.votes[0] > 0),
            _ => self.votes[0],
        }
    }

    /// Counts lanes of a warp. Errors with the rule of barriers that this breaks.
    fn arrive(
        &mut self,
        id: u32,
        expected: Option<u32>,
        warp: u32,
        active: u32,
    ) -> std::result::Result<(), String> {
        if !self.arrived.is_empty() && self.expected != expected {
            let first = self.expected;
            return Err(format!(
                "warps disagree on the threads of barrier {id}: {first:?} and {expected:?}"
            ));
        }
        self.expected = expected;
        match self.arrived.iter_mut().find(|(w, _)| *w == warp) {
            Some((_, lanes)) if *lanes & active != 0 => {
                return Err(format!(
                    "arrives at barrier {id} again before it is complete"
                ));
            }
            Some((_, lanes)) => *lanes |= active,
            None => self.arrived.push((warp, active)),
        }
        Ok(())
    }
}

impl Barriers {
    /// Progress of barrier `id`, for reports.
    pub fn describe(&self, id: u32) -> String {
        let state = &self.states[id as usize];
        let arrived: u32 = state
            .arrived
            .iter()
            .map(|(_, lanes)| lanes.count_ones())
            .sum();
        match state.expected {
            Some(expected) => format!("{arrived} of {expected} threads have arrived"),
            None => format!("{arrived} threads have arrived, all of the block must"),
        }
    }
}

impl Gang<'_> {
    pub(super) fn barrier(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        barrier: &Barrier,
        slots: &Slots,
    ) -> Result<Flow> {
        let (id, expected) = self.barrier_operands(warp, at, barrier)?;
        if barrier.is_aligned && at.active != warp.live {
            return self.wait_for_lanes(warp, at, warp.live);
        }
        let state = &mut self.blocks[at.block].barriers.states[id as usize];
        if let Err(what) = state.arrive(id, expected, warp.id, at.active) {
            return Err(self.misuse(warp, at, what));
        }
        if let BarrierKind::Reduce { op, flip } = barrier.kind {
            let bits = (warp.file.predicates[slots.r as usize] ^ flip) & at.active;
            state.vote(bits, at.active);
            state.results.push((warp.id, at.active, *slots, op));
        }
        self.blocks[at.block].barriers.in_use |= 1 << id;
        if let Some(races) = &mut self.races {
            races.arrive(at.block, warp.id, id);
        }
        Ok(match barrier.kind {
            BarrierKind::Arrive => Flow::Next,
            _ => Flow::WaitBehind(Wait::Barrier(id)),
        })
    }

    /// Number of the barrier, and of its threads if the instruction has one.
    fn barrier_operands(
        &self,
        warp: &Warp,
        at: Issue,
        barrier: &Barrier,
    ) -> Result<(u32, Option<u32>)> {
        let lane = at.active.trailing_zeros() as usize;
        let id = warp.file.narrow(barrier.id)[lane];
        if id as usize >= BARRIERS {
            let what = format!("barrier {id}; there are {BARRIERS}");
            return Err(self.misuse(warp, at, what));
        }
        let expected = (barrier.threads != NONE).then(|| warp.file.narrow(barrier.threads)[lane]);
        if let Some(n) = expected.filter(|n| *n == 0 || !n.is_multiple_of(LANES as u32)) {
            let what = format!("a barrier of {n} threads, not a multiple of the warp size");
            return Err(self.misuse(warp, at, what));
        }
        Ok((id, expected))
    }

    /// Opens the barriers of a block that are complete; true if there was one.
    pub(super) fn settle_barriers(&mut self, block: usize) -> bool {
        if self.blocks[block].barriers.in_use == 0 {
            return false;
        }
        let opened = self.blocks[block].settle_barriers();
        if let Some(races) = &mut self.races {
            for (id, warps) in &opened {
                races.release(block, *id, warps);
            }
        }
        !opened.is_empty()
    }

    /// Waits until the group has all lanes of `need`; they must not be kept away by a guard.
    pub(super) fn wait_for_lanes(&mut self, warp: &Warp, at: Issue, need: u32) -> Result<Flow> {
        let guarded = need & warp.live & at.mask & !at.active;
        if guarded != 0 {
            let what = format!(
                "diverged at a synchronising instruction: its guard keeps lanes {guarded:#010x} away"
            );
            return Err(self.fault(FaultKind::Divergence, warp, at, what));
        }
        Ok(Flow::Wait(Wait::Lanes(need)))
    }
}

impl Block {
    /// Opens barriers that are complete: their numbers, and the warps that waited.
    fn settle_barriers(&mut self) -> Vec<(u32, Vec<u32>)> {
        let mut opened = Vec::new();
        for id in 0..BARRIERS as u32 {
            if self.barriers.in_use >> id & 1 == 0
                || !self.barriers.states[id as usize].is_complete(&self.warps)
            {
                continue;
            }
            let state = std::mem::take(&mut self.barriers.states[id as usize]);
            self.barriers.in_use &= !(1 << id);
            self.store_votes(&state);
            let mut warps = Vec::new();
            for warp in self.warps.iter_mut().flatten() {
                let groups = warp.groups.iter_mut();
                for group in groups.filter(|g| g.wait == Wait::Barrier(id)) {
                    group.wait = Wait::Ready;
                    warps.push(warp.id);
                }
            }
            opened.push((id, warps));
        }
        opened
    }

    fn store_votes(&mut self, state: &State) {
        for (warp, lanes, slots, op) in &state.results {
            let result = state.result(*op);
            let Some(warp) = &mut self.warps[*warp as usize] else {
                continue;
            };
            match op {
                Vote::Count => warp.file.put_narrow(slots.d, *lanes, &[result; LANES]),
                _ => warp
                    .file
                    .put_predicate(slots.p, *lanes, result.wrapping_neg()),
            }
        }
    }
}
