//! A warp: groups of lanes at different places of the code, and the loop that runs them.
//!
//! Of the groups that can run, the one with the lowest place runs until it meets another, which it then joins. Blocks of
//! code come in an order in which that brings diverged lanes together again.

use super::{
    async_copies::Copies,
    bulk::{DeferredWork, Stores},
    gang::Gang,
    mbarrier::Spot,
    report,
    wgmma::Products,
};
use crate::{
    decode::program::{Action, Instruction, NONE, Program},
    fault::{FaultKind, Result},
    lanes::{File, LANES},
    memory::FRESH,
};

/// Reason for which a group waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing.
    Ready,
    /// Lanes of this mask to arrive where it is.
    Lanes(u32),
    /// A barrier of the block, by number.
    Barrier(u32),
    /// The phase of an mbarrier to be complete.
    Mbarrier { spot: Spot, phase: u32 },
    /// The barrier of the cluster to open another time.
    Cluster(u64),
    /// The other warps of the warp group to commit as many groups of products.
    WarpGroup { warp: u32, group: u32 },
}

/// Lanes that are at the same place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub pc: u32,
    pub mask: u32,
    pub wait: Wait,
}

/// An instruction that is being executed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Issue {
    /// Index of the block in its gang.
    pub block: usize,
    pub pc: u32,
    /// Lanes of the group.
    pub mask: u32,
    /// Lanes that the guard lets through.
    pub active: u32,
}

impl Issue {
    /// For one lane of the group.
    pub fn of_lane(self, lane: usize) -> Issue {
        Issue {
            active: 1 << lane,
            ..self
        }
    }

    /// For reports.
    pub fn place(self, warp: &Warp) -> report::Place {
        report::Place {
            block: self.block,
            warp: warp.id,
            pc: self.pc,
            lanes: self.active,
        }
    }
}

/// Why a warp's turn has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All its groups wait, or it is done.
    Waits { progress: bool },
    /// It has used its share.
    Share,
    /// It has asked an mbarrier in vain.
    Spins,
}

/// Control flow after an instruction.
pub(super) enum Flow {
    Next,
    /// The group waits here, and executes the instruction again.
    Wait(Wait),
    /// The group waits, and goes on behind the instruction.
    WaitBehind(Wait),
    /// Give other warps a turn.
    Yield,
    /// The same, and nothing will change without them.
    Spin,
}

pub(super) struct Warp {
    /// In its block.
    pub id: u32,
    pub file: File,
    pub groups: Vec<Group>,
    /// Lanes that have not exited.
    pub live: u32,
    /// Local memory, lane by lane.
    pub local: Vec<u8>,
    pub copies: Copies,
    pub stores: Stores,
    pub products: Products,
    /// Openings of the cluster's barrier when it last arrived there.
    pub cluster_generation: u64,
}

impl Warp {
    pub fn new(program: &Program) -> Warp {
        Warp {
            id: 0,
            file: File::new(program.units, program.predicates),
            groups: Vec::new(),
            live: 0,
            local: vec![FRESH; program.local_bytes * LANES],
            copies: Copies::default(),
            stores: Stores::default(),
            products: Products::default(),
            cluster_generation: 0,
        }
    }

    /// Lowest place of the groups behind `pc`.
    fn next_group(&self, pc: u32) -> u32 {
        let places = self.groups.iter().map(|g| g.pc);
        places.filter(|other| *other > pc).min().unwrap_or(u32::MAX)
    }

    /// Splits a group: the active lanes go to `target`, the others on.
    fn diverge(&mut self, group: usize, at: Issue, target: u32) {
        self.groups[group] = Group {
            pc: at.pc + 1,
            mask: at.mask & !at.active,
            wait: Wait::Ready,
        };
        self.groups.push(Group {
            pc: target,
            mask: at.active,
            wait: Wait::Ready,
        });
    }

    /// The state at the start of a block.
    pub fn start(&mut self, id: u32, threads_per_block: usize) {
        let threads = (threads_per_block - id as usize * LANES).min(LANES);
        self.id = id;
        self.live = if threads == LANES {
            u32::MAX
        } else {
            (1 << threads) - 1
        };
        self.groups.clear();
        self.copies = Copies::default();
        self.stores = Stores::default();
        self.products = Products::default();
        self.groups.push(Group {
            pc: 0,
            mask: self.live,
            wait: Wait::Ready,
        });
    }

    pub fn is_done(&self) -> bool {
        self.live == 0
    }

    /// Joins groups at the same place, wakes those whose lanes have come, and picks the lowest that can run.
    fn pick(&mut self) -> Option<usize> {
        if self.groups.len() > 1 {
            self.groups.sort_unstable_by_key(|g| g.pc);
            let mut k = 1;
            while k < self.groups.len() {
                let (a, b) = (self.groups[k - 1], self.groups[k]);
                // Groups that wait for a barrier have arrived at it already: no other group joins them.
                let settled = |g: Group| matches!(g.wait, Wait::Barrier(_));
                // (Others execute their instruction again.)
                if a.pc == b.pc && !settled(a) && !settled(b) {
                    self.groups[k - 1].mask |= b.mask;
                    self.groups[k - 1].wait = Wait::Ready;
                    self.groups.remove(k);
                } else {
                    k += 1;
                }
            }
        }
        let live = self.live;
        for group in &mut self.groups {
            if let Wait::Lanes(need) = group.wait
                && need & live & !group.mask == 0
            {
                group.wait = Wait::Ready;
            }
        }
        self.groups.iter().position(|g| g.wait == Wait::Ready)
    }

    /// Takes lanes out of the warp.
    fn exit(&mut self, group: usize, lanes: u32) {
        self.live &= !lanes;
        self.groups[group].mask &= !lanes;
    }
}

impl Gang<'_> {
    /// Runs a warp until all its groups wait or `share` instructions are done.
    pub(super) fn run_warp(
        &mut self,
        warp: &mut Warp,
        block: usize,
        share: u64,
    ) -> Result<Outcome> {
        let start = self.stats.warp_instructions;
        let mut progress = false;
        while let Some(group) = warp.pick() {
            let used = self.stats.warp_instructions - start;
            if used >= share {
                return Ok(Outcome::Share);
            }
            let end = self.run_group(warp, block, group, share - used)?;
            warp.groups.retain(|g| g.mask != 0);
            // An instruction that only waits again is no progress.
            progress |= self.stats.warp_instructions - start > used;
            if let Some(outcome) = end {
                return Ok(outcome);
            }
        }
        Ok(Outcome::Waits { progress })
    }

    /// Runs one group until it waits, splits, meets another, or has used its share; returns the outcome if the warp's turn ends.
    fn run_group(
        &mut self,
        warp: &mut Warp,
        block: usize,
        group: usize,
        share: u64,
    ) -> Result<Option<Outcome>> {
        let code: &[Instruction] = &self.launch.call.program.code;
        let Group { mut pc, mask, .. } = warp.groups[group];
        let several = warp.groups.len() > 1;
        let meets = warp.next_group(pc);
        let end = self.stats.warp_instructions + share;
        loop {
            let ins = &code[pc as usize];
            let active = active(warp, ins, mask);
            if active != 0 {
                self.stats.thread_instructions += u64::from(active.count_ones());
                let at = Issue {
                    block,
                    pc,
                    mask,
                    active,
                };
                match &ins.action {
                    Action::Lanes(run) => {
                        // SAFETY: lane functions that need CPU features are made only where `fast` found them.
                        unsafe { run(&mut warp.file, &ins.slots, active) };
                    }
                    Action::Branch(target) => {
                        self.stats.warp_instructions += 1;
                        if active != mask {
                            warp.diverge(group, at, *target);
                            return Ok(None);
                        }
                        pc = *target;
                        if several || self.stats.warp_instructions >= end {
                            break;
                        }
                        continue;
                    }
                    Action::Exit => return self.exit(warp, group, at),
                    _ => match self.step(warp, at, ins)? {
                        Flow::Next => {}
                        flow => return Ok(self.stop_group(warp, group, at, flow)),
                    },
                }
            }
            self.stats.warp_instructions += 1;
            pc += 1;
            if pc >= meets || self.stats.warp_instructions >= end {
                break;
            }
        }
        warp.groups[group].pc = pc;
        Ok(None)
    }

    /// Ends the active lanes. Their bulk copies from shared memory must have been waited for.
    fn exit(&mut self, warp: &mut Warp, group: usize, at: Issue) -> Result<Option<Outcome>> {
        self.stats.warp_instructions += 1;
        let mut pending = warp.stores.pending.iter();
        if let Some((lane, _, _)) = pending.find(|s| at.active >> s.0 & 1 != 0) {
            let what =
                "the lane exits with a bulk copy from shared memory that it has not waited for";
            return Err(self.misuse(warp, at.of_lane(*lane), what.to_owned()));
        }
        warp.exit(group, at.active);
        warp.groups[group].pc = at.pc + 1;
        Ok(None)
    }

    /// Leaves a group that does not simply go on, at this instruction or behind it.
    fn stop_group(
        &mut self,
        warp: &mut Warp,
        group: usize,
        at: Issue,
        flow: Flow,
    ) -> Option<Outcome> {
        let (pc, mask) = (at.pc, at.mask);
        if let Flow::Wait(wait) = flow {
            warp.groups[group] = Group { pc, mask, wait };
            return None;
        }
        self.stats.warp_instructions += 1;
        let (wait, outcome) = match flow {
            Flow::WaitBehind(wait) => (wait, None),
            Flow::Yield => (Wait::Ready, Some(Outcome::Share)),
            Flow::Spin => (Wait::Ready, Some(Outcome::Spins)),
            Flow::Next | Flow::Wait(_) => (Wait::Ready, None),
        };
        let pc = pc + 1;
        warp.groups[group] = Group { pc, mask, wait };
        outcome
    }

    /// Everything that is neither arithmetic nor a branch.
    fn step(&mut self, warp: &mut Warp, at: Issue, ins: &Instruction) -> Result<Flow> {
        let (slots, active) = (&ins.slots, at.active);
        match &ins.action {
            Action::Load(access) => self.load(warp, at, access)?,
            Action::Store(access) => self.store(warp, at, access)?,
            Action::Atomic(atomic) => self.atomic(warp, at, atomic)?,
            Action::CopyLocal { from, to, bytes } => {
                let stride = self.launch.call.program.local_bytes;
                for lane in lanes(active) {
                    let from = lane * stride + from;
                    let to = lane * stride + to;
                    warp.local.copy_within(from..from + bytes, to);
                }
            }
            Action::Sync(sync) => return self.warp_sync(warp, at, sync, slots),
            Action::Barrier(barrier) => return self.barrier(warp, at, barrier, slots),
            Action::ActiveMask => warp.file.put_narrow(slots.d, active, &[active; LANES]),
            Action::Clock { wide } => self.clock(warp, at, slots.d, *wide),
            Action::Trap => {
                let what = "the kernel executed a trap";
                return Err(self.fault(FaultKind::Trap, warp, at, what));
            }
            Action::Nothing => return Ok(Flow::Yield),
            Action::Lanes(_) | Action::Branch(_) | Action::Exit => {}
            _ => return self.asynchronous(warp, at, ins),
        }
        Ok(Flow::Next)
    }

    fn clock(&mut self, warp: &mut Warp, at: Issue, d: u32, wide: bool) {
        let now = self.stats.warp_instructions;
        if wide {
            warp.file.put_wide(d, at.active, &[now; LANES]);
        } else {
            warp.file.put_narrow(d, at.active, &[now as u32; LANES]);
        }
    }

    /// Matrices, asynchronous copies and clusters.
    fn asynchronous(&mut self, warp: &mut Warp, at: Issue, ins: &Instruction) -> Result<Flow> {
        match &ins.action {
            Action::LoadMatrix(access) => return self.load_matrix(warp, at, access),
            Action::StoreMatrix(access) => return self.store_matrix(warp, at, access),
            Action::Mma(mma) => return self.mma(warp, at, mma),
            Action::Copy(copy) => return self.copy(warp, at, copy),
            Action::CopyCommit => self.copy_commit(warp, at),
            Action::CopyWait(left) => self.copy_wait(warp, at, *left)?,
            Action::CopyArrive(address) => {
                self.deferred.push_back(DeferredWork::Arrive {
                    warp: warp.id,
                    at,
                    address: *address,
                });
            }
            Action::Mbarrier(mbarrier) => return self.mbarrier(warp, at, mbarrier),
            Action::Bulk(bulk) => self.bulk(warp, at, bulk)?,
            Action::BulkCommit => self.bulk_commit(warp, at),
            Action::BulkWait(left) => self.bulk_wait(warp, at, *left)?,
            Action::Wgmma(wgmma) => return self.wgmma(warp, at, wgmma),
            Action::WgmmaCommit => warp.products.committed += 1,
            Action::WgmmaWait(left) => return self.wgmma_wait(warp, at, *left),
            Action::ProxyFence => {
                if let Some(races) = &mut self.races {
                    races.fence(at.block, warp.id);
                }
            }
            _ => return self.cluster(warp, at, ins),
        }
        Ok(Flow::Next)
    }

    fn cluster(&mut self, warp: &mut Warp, at: Issue, ins: &Instruction) -> Result<Flow> {
        match &ins.action {
            Action::ClusterArrive => return self.cluster_arrive(warp, at),
            Action::ClusterWait => return self.cluster_wait(warp, at),
            Action::MapRank { wide } => self.map_rank(warp, at, &ins.slots, *wide)?,
            Action::RankOf { wide } => self.rank_of(warp, at, &ins.slots, *wide),
            _ => {}
        }
        Ok(Flow::Next)
    }
}

/// Lanes of `mask` that an instruction's guard lets through.
#[inline(always)]
fn active(warp: &Warp, ins: &Instruction, mask: u32) -> u32 {
    match ins.guard.predicate {
        NONE => mask,
        predicate => mask & (warp.file.predicates[predicate as usize] ^ ins.guard.flip),
    }
}

/// Indices of the set bits.
pub(super) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let lane = mask.trailing_zeros();
        mask &= mask - 1;
        Some(lane as usize)
    })
}
