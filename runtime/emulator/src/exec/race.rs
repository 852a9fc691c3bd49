//! The race check of shared memory: vector clocks, after FastTrack (Flanagan and Freund, PLDI 2009).
//!
//! Agents are the warps of a gang and, for asynchronous work, its completion mechanisms: the `cp.async` groups, product groups
//! and bulk groups of each warp, and every mbarrier. An access is stamped with its agent's clock; two accesses are ordered
//! if the later agent has seen that clock, through a barrier it has passed or a wait it has made. Lanes of one warp
//! are ordered by `bar.warp.sync` and by barriers only, not by running in step. Asynchronous reads of bytes that
//! ordinary stores have written need a `fence.proxy.async` in between.

use std::collections::HashMap;

use super::{
    access::{Kind, LaneAccess, Target},
    gang::Gang,
    report,
    warp::{Issue, Warp},
};
use crate::{
    decode::program::Access,
    fault::{Fault, FaultKind, Result},
    lanes::LANES,
};

/// Any lane: an access that concerns the whole warp.
const ALL_LANES: u8 = 255;
/// No agent.
const NOBODY: u32 = u32::MAX;

/// A time per agent; those beyond the end are 0.
type Times = Vec<u32>;

/// Vector clock of an agent.
#[derive(Clone, Default)]
struct Clock {
    seen: Times,
    /// Times that were seen before a `fence.proxy.async`, its own or one that it has seen: asynchronous reads see the
    /// ordinary writes until then.
    fenced: Times,
}

fn time(times: &Times, agent: u32) -> u32 {
    times.get(agent as usize).copied().unwrap_or(0)
}

fn seen(clock: &Clock, agent: u32) -> u32 {
    time(&clock.seen, agent)
}

fn see(times: &mut Times, agent: u32, time: u32) {
    if times.len() <= agent as usize {
        times.resize(agent as usize + 1, 0);
    }
    times[agent as usize] = times[agent as usize].max(time);
}

fn join_times(times: &mut Times, other: &Times) {
    for (agent, time) in other.iter().enumerate() {
        see(times, agent as u32, *time);
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    join_times(&mut clock.seen, &other.seen);
    join_times(&mut clock.fenced, &other.fenced);
}

/// One access.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    agent: u32,
    time: u32,
    pc: u32,
    lane: u8,
    is_atomic: bool,
}

const NO_STAMP: Stamp = Stamp {
    agent: NOBODY,
    time: 0,
    pc: 0,
    lane: 0,
    is_atomic: false,
};

/// History of one grain of memory: the last write, and the last read if all reads since are ordered.
#[derive(Clone, Copy)]
struct Cell {
    /// Block that it is of: others start afresh.
    run: u32,
    write: Stamp,
    read: Stamp,
    /// Where in [`Races::reads`] more reads are, or [`NOBODY`]; kept from then on.
    more: u32,
}

const FRESH: Cell = Cell {
    run: 0,
    write: NO_STAMP,
    read: NO_STAMP,
    more: NOBODY,
};

/// Kinds of asynchronous work that a warp waits for by groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Async {
    Copy = 1,
    Product = 2,
    Bulk = 3,
}

/// The state of the check for one gang.
pub(super) struct Races {
    /// Bytes per cell.
    grain: usize,
    /// Warps of the gang.
    warps: u32,
    warps_per_block: u32,
    run: u32,
    cells: Vec<Vec<Cell>>,
    /// Reads that are not ordered with each other, one per agent.
    reads: Vec<Vec<Stamp>>,
    clocks: Vec<Clock>,
    /// Joined clocks of the arrivals at a barrier, by block and number.
    barriers: HashMap<(usize, u32), Clock>,
    /// Agents of mbarriers, by block and address.
    mbarriers: HashMap<(usize, u64), u32>,
    /// Joined clocks of the arrivals at each mbarrier in this phase and in the one before, and the number of complete phases.
    phases: HashMap<(usize, u64), ([Clock; 2], u32)>,
}

impl Races {
    pub fn new(grain: usize, blocks: usize, warps_per_block: usize, shared_bytes: usize) -> Races {
        Races {
            grain,
            warps: (blocks * warps_per_block) as u32,
            warps_per_block: warps_per_block as u32,
            run: 0,
            cells: vec![vec![FRESH; shared_bytes.div_ceil(grain)]; blocks],
            reads: vec![],
            clocks: vec![],
            barriers: HashMap::new(),
            mbarriers: HashMap::new(),
            phases: HashMap::new(),
        }
    }

    /// Forgets everything, for the next blocks.
    pub fn start(&mut self) {
        self.run += 1;
        let clock = |w: u32| Clock {
            seen: (0..=w).map(|k| u32::from(k == w)).collect(),
            fenced: vec![],
        };
        self.clocks = (0..self.warps).map(clock).collect();
        self.barriers.clear();
        self.mbarriers.clear();
        self.phases.clear();
    }

    fn agent(&self, block: usize, warp: u32) -> u32 {
        block as u32 * self.warps_per_block + warp
    }

    /// Stamp of an access of a warp now, by lane 0.
    fn stamp(&self, warp: &Warp, at: Issue, is_atomic: bool) -> Stamp {
        let agent = self.agent(at.block, warp.id);
        Stamp {
            agent,
            time: seen(&self.clocks[agent as usize], agent),
            pc: at.pc,
            lane: 0,
            is_atomic,
        }
    }

    fn tick(&mut self, agent: u32) {
        self.clocks[agent as usize].seen[agent as usize] += 1;
    }

    /// A warp executes `fence.proxy.async`.
    pub fn fence(&mut self, block: usize, warp: u32) {
        let agent = self.agent(block, warp);
        let Clock { seen, fenced } = &mut self.clocks[agent as usize];
        join_times(fenced, seen);
        self.tick(agent);
    }

    /// A warp arrives at barrier `id`.
    pub fn arrive(&mut self, block: usize, warp: u32, id: u32) {
        let agent = self.agent(block, warp);
        join(
            self.barriers.entry((block, id)).or_default(),
            &self.clocks[agent as usize],
        );
        self.tick(agent);
    }

    /// Barrier `id` opens for these warps.
    pub fn release(&mut self, block: usize, id: u32, warps: &[u32]) {
        let clock = self.barriers.remove(&(block, id)).unwrap_or_default();
        for warp in warps {
            let agent = self.agent(block, *warp);
            join(&mut self.clocks[agent as usize], &clock);
            self.tick(agent);
        }
    }

    /// The lanes of a warp have met in `bar.warp.sync`.
    pub fn warp_barrier(&mut self, block: usize, warp: u32) {
        let agent = self.agent(block, warp);
        self.tick(agent);
    }

    /// A warp arrives at an mbarrier.
    pub fn mbarrier_arrive(&mut self, block: usize, warp: u32, at: (usize, u64)) {
        let agent = self.agent(block, warp);
        join(
            &mut self.phases.entry(at).or_default().0[0],
            &self.clocks[agent as usize],
        );
        self.tick(agent);
    }

    /// The phase of an mbarrier is complete.
    pub fn mbarrier_flip(&mut self, at: (usize, u64)) {
        let (phases, completed) = self.phases.entry(at).or_default();
        phases[1] = std::mem::take(&mut phases[0]);
        *completed += 1;
    }

    /// A warp has seen that a phase of an mbarrier is complete.
    pub fn mbarrier_pass(&mut self, block: usize, warp: u32, at: (usize, u64)) {
        let agent = self.agent(block, warp) as usize;
        let Some((phases, completed)) = self.phases.get(&at) else {
            return;
        };
        join(&mut self.clocks[agent], &phases[1]);
        if let Some(mbarrier) = self.mbarriers.get(&at) {
            see(&mut self.clocks[agent].seen, *mbarrier, *completed);
        }
    }

    /// The agent of work that completes on an mbarrier, and the time of its phase.
    pub fn mbarrier_agent(&mut self, at: (usize, u64)) -> (u32, u32) {
        let next = 4 * self.warps + self.mbarriers.len() as u32;
        let agent = *self.mbarriers.entry(at).or_insert(next);
        (
            agent,
            self.phases.get(&at).map_or(0, |(_, completed)| *completed) + 1,
        )
    }

    /// The agent of a warp's groups.
    pub fn group_agent(&self, block: usize, warp: u32, kind: Async) -> u32 {
        kind as u32 * self.warps + self.agent(block, warp)
    }

    /// A warp has waited until `group` groups of warp `of` are complete.
    pub fn group_wait(&mut self, block: usize, warp: u32, of: u32, kind: Async, group: u32) {
        let (agent, of) = (self.agent(block, warp), self.group_agent(block, of, kind));
        see(&mut self.clocks[agent as usize].seen, of, group);
    }

    /// Records an access to `count` bytes of the shared memory of `block`; the other access if there is a race.
    fn access(
        &mut self,
        block: usize,
        range: (u64, u64),
        by: Stamp,
        issuer: u32,
        is_write: bool,
    ) -> Option<Conflict> {
        let (first, last) = (
            range.0 as usize / self.grain,
            (range.0 + range.1 - 1) as usize / self.grain,
        );
        for index in first..=last {
            let cell = self.cells[block].get_mut(index)?;
            if cell.run != self.run {
                let more = cell.more;
                *cell = Cell {
                    run: self.run,
                    more,
                    ..FRESH
                };
                if let Some(reads) = self.reads.get_mut(more as usize) {
                    reads.clear();
                }
            }
            let before = *cell;
            let found = if is_write {
                cell.write = by;
                cell.read = NO_STAMP;
                let found = self.conflict_of_write(&before, &by, issuer);
                if let Some(reads) = self.reads.get_mut(before.more as usize) {
                    reads.clear();
                }
                found
            } else {
                self.record_read(block, index, by, issuer);
                self.conflict_of_read(&before, &by, issuer)
            };
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The earlier write or read that a write is not ordered with.
    fn conflict_of_write(&self, cell: &Cell, by: &Stamp, issuer: u32) -> Option<Conflict> {
        let clock = &self.clocks[issuer as usize];
        let conflict = |other: &Stamp| conflicts(other, by, issuer, clock);
        if conflict(&cell.write) {
            return Some(Conflict::with_write(cell.write));
        }
        let more = self.reads.get(cell.more as usize).into_iter().flatten();
        let mut reads = std::iter::once(&cell.read).chain(more);
        reads.find(|r| conflict(r)).map(|read| Conflict {
            other: *read,
            other_writes: false,
            unfenced: false,
        })
    }

    /// The earlier write that a read is not ordered with, or not fenced from.
    fn conflict_of_read(&self, cell: &Cell, by: &Stamp, issuer: u32) -> Option<Conflict> {
        let clock = &self.clocks[issuer as usize];
        let write = Conflict::with_write(cell.write);
        if conflicts(&cell.write, by, issuer, clock) {
            return Some(write);
        }
        let is_fenced = by.agent == issuer
            || cell.write.agent >= self.warps
            || time(&clock.fenced, cell.write.agent) >= cell.write.time;
        (!is_fenced).then_some(Conflict {
            unfenced: true,
            ..write
        })
    }

    fn record_read(&mut self, block: usize, index: usize, by: Stamp, issuer: u32) {
        let clock = &self.clocks[issuer as usize];
        let cell = &mut self.cells[block][index];
        if cell.read.agent == by.agent && cell.read.time == by.time {
            // The same agent reads again: its lane does not matter if they differ.
            if cell.read.lane != by.lane {
                cell.read.lane = ALL_LANES;
            }
        } else if cell.read.agent == NOBODY || seen(clock, cell.read.agent) >= cell.read.time {
            cell.read = by;
        } else {
            if cell.more == NOBODY {
                cell.more = self.reads.len() as u32;
                self.reads.push(vec![]);
            }
            let reads = &mut self.reads[cell.more as usize];
            match reads.iter_mut().find(|r| r.agent == by.agent) {
                Some(read) if read.time == by.time && read.lane != by.lane => read.lane = ALL_LANES,
                Some(read) => *read = by,
                None => reads.push(by),
            }
        }
    }
}

/// True when `other` is unordered with an access `by` an agent on behalf of warp `issuer`, which has seen `clock`.
fn conflicts(other: &Stamp, by: &Stamp, issuer: u32, clock: &Clock) -> bool {
    if other.agent == NOBODY || other.is_atomic && by.is_atomic {
        return false;
    }
    if other.agent != issuer {
        // Work of one group or phase is of one piece.
        return seen(clock, other.agent) < other.time
            && !(other.agent == by.agent && other.pc == by.pc);
    }
    // Lanes of one warp: another lane, another instruction, and no meeting in between.
    let other_lane = other.lane != by.lane || other.lane == ALL_LANES;
    other_lane && other.pc != by.pc && other.time == seen(clock, issuer) && by.agent == issuer
}

/// The earlier access of a race.
#[derive(Clone, Copy)]
struct Conflict {
    other: Stamp,
    other_writes: bool,
    /// They are ordered, but no `fence.proxy.async` is between them.
    unfenced: bool,
}

impl Conflict {
    fn with_write(other: Stamp) -> Conflict {
        Conflict {
            other,
            other_writes: true,
            unfenced: false,
        }
    }
}

impl Gang<'_> {
    /// Checks an access of one lane to shared memory.
    #[inline(always)]
    pub(super) fn race_access(
        &mut self,
        warp: &Warp,
        at: Issue,
        want: LaneAccess,
        is_strong: bool,
    ) -> Result<()> {
        match (self.races.is_some(), want.target) {
            (true, Target::Shared(block)) => self.race_lane(warp, at, want, block, is_strong),
            _ => Ok(()),
        }
    }

    fn race_lane(
        &mut self,
        warp: &Warp,
        at: Issue,
        want: LaneAccess,
        block: usize,
        is_strong: bool,
    ) -> Result<()> {
        let Some(races) = &mut self.races else {
            return Ok(());
        };
        let stamp = Stamp {
            lane: want.lane as u8,
            ..races.stamp(warp, at, is_strong)
        };
        let is_write = want.kind != Kind::Load;
        let range = (want.address, want.count);
        let conflict = races.access(block, range, stamp, stamp.agent, is_write);
        let place = at.of_lane(want.lane % 32).place(warp);
        conflict.map_or(Ok(()), |c| {
            Err(self.race_fault(place, want.address, is_write, &c))
        })
    }

    /// Checks the accesses of all active lanes to the block's own shared memory, neighbours at one address once.
    pub(super) fn race_lanes(
        &mut self,
        warp: &Warp,
        at: Issue,
        access: &Access,
        addresses: &[u64; LANES],
        kind: Kind,
    ) -> Result<()> {
        let Some(races) = &mut self.races else {
            return Ok(());
        };
        let count = access.total_bytes();
        let mut stamp = races.stamp(warp, at, access.is_strong);
        let is_write = kind == Kind::Store;
        let mut left = at.active;
        while left != 0 {
            let first = left.trailing_zeros();
            let address = addresses[first as usize];
            stamp.lane = first as u8;
            left &= left - 1;
            while !is_write && left != 0 && addresses[left.trailing_zeros() as usize] == address {
                left &= left - 1;
                stamp.lane = ALL_LANES;
            }
            let range = (address, count);
            if let Some(conflict) = races.access(at.block, range, stamp, stamp.agent, is_write) {
                let place = at.of_lane(first as usize).place(warp);
                return Err(self.race_fault(place, address, is_write, &conflict));
            }
        }
        Ok(())
    }

    /// Checks an access of all lanes together, such as `ldmatrix`.
    pub(super) fn race_warp(
        &mut self,
        warp: &Warp,
        at: Issue,
        (block, address, count): (usize, u64, u64),
        kind: Kind,
    ) -> Result<()> {
        let want = LaneAccess {
            lane: usize::from(ALL_LANES),
            target: Target::Shared(block),
            address,
            count,
            kind,
        };
        self.race_access(warp, at, want, false)
    }

    /// Checks an access that `agent` makes at its time `time`, later, on behalf of `warp`, which issues it now.
    pub(super) fn race_async(
        &mut self,
        warp: &Warp,
        at: Issue,
        (agent, time): (u32, u32),
        (block, address, count): (usize, u64, u64),
        is_write: bool,
    ) -> Result<()> {
        let Some(races) = &mut self.races else {
            return Ok(());
        };
        if count == 0 {
            return Ok(());
        }
        let issuer = races.agent(at.block, warp.id);
        let stamp = Stamp {
            agent,
            time,
            pc: at.pc,
            lane: ALL_LANES,
            is_atomic: false,
        };
        let conflict = races.access(block, (address, count), stamp, issuer, is_write);
        conflict.map_or(Ok(()), |c| {
            Err(self.race_fault(at.place(warp), address, is_write, &c))
        })
    }

    fn race_fault(
        &self,
        place: report::Place,
        address: u64,
        is_write: bool,
        conflict: &Conflict,
    ) -> Fault {
        let verb = |writes| if writes { "write" } else { "read" };
        let other = &conflict.other;
        let line = self.launch.call.program.code[other.pc as usize].line;
        let warps = self.races.as_ref().map_or(1, |r| r.warps);
        let per_block = self.races.as_ref().map_or(1, |r| r.warps_per_block);
        let warp = other.agent % warps % per_block;
        let who = match (other.agent / warps, other.lane) {
            (0, ALL_LANES) => format!("by warp {warp}"),
            (0, lane) => format!("by warp {warp} lane {lane}"),
            (1, _) => format!("by a cp.async of warp {warp}"),
            (2, _) => format!("by a wgmma of warp {warp}"),
            (3, _) => format!("by a bulk copy of warp {warp}"),
            _ => "by a copy that completes on an mbarrier".to_owned(),
        };
        let what = format!(
            "race: {} of shared memory at {address:#x}, {} the {} {who} at PTX line {line}",
            verb(is_write),
            if conflict.unfenced {
                "without a fence.proxy.async after"
            } else {
                "unordered with"
            },
            verb(conflict.other_writes),
        );
        report::fault(self, FaultKind::Race, place, what)
    }
}
