//! A warp: groups of lanes at different places of the code, and the loop that runs them.
//!
//! Of the groups that can run, the one with the lowest place runs until it meets another, which it then joins. Blocks of
//! code come in an order in which that brings diverged lanes together again.

use super::{
    bulk::{Deferred, Stores},
    copies::Copies,
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
pub(super) struct At {
    /// Index of the block in its gang.
    pub block: usize,
    pub pc: u32,
    /// Lanes of the group.
    pub mask: u32,
    /// Lanes that the guard lets through.
    pub active: u32,
}

impl At {
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
        // Where the next group is.
        let meets = warp
            .groups
            .iter()
            .map(|g| g.pc)
            .filter(|other| *other > pc)
            .min()
            .unwrap_or(u32::MAX);
        let end = self.stats.warp_instructions + share;
        loop {
            let ins = &code[pc as usize];
            let active = active(warp, ins, mask);
            if active != 0 {
                self.stats.thread_instructions += u64::from(active.count_ones());
                match &ins.action {
                    Action::Lanes(run) => {
                        // SAFETY: lane functions that need CPU features are made only where `fast` found them.
                        unsafe { run(&mut warp.file, &ins.slots, active) };
                    }
                    Action::Branch(target) => {
                        self.stats.warp_instructions += 1;
                        if active == mask {
                            pc = *target;
                            if !several && self.stats.warp_instructions < end {
                                continue;
                            }
                            warp.groups[group].pc = pc;
                            return Ok(None);
                        }
                        warp.groups[group] = Group {
                            pc: pc + 1,
                            mask: mask & !active,
                            wait: Wait::Ready,
                        };
                        warp.groups.push(Group {
                            pc: *target,
                            mask: active,
                            wait: Wait::Ready,
                        });
                        return Ok(None);
                    }
                    Action::Exit => {
                        self.stats.warp_instructions += 1;
                        if let Some((lane, _, _)) =
                            warp.stores.pending.iter().find(|s| active >> s.0 & 1 != 0)
                        {
                            let at = At {
                                block,
                                pc,
                                mask,
                                active: 1 << lane,
                            };
                            let what = "the lane exits with a bulk copy from shared memory that it has not waited for";
                            return Err(self.misuse(warp, at, what.to_owned()));
                        }
                        warp.exit(group, active);
                        warp.groups[group].pc = pc + 1;
                        return Ok(None);
                    }
                    _ => match self.step(
                        warp,
                        At {
                            block,
                            pc,
                            mask,
                            active,
                        },
                        ins,
                    )? {
                        Flow::Next => {}
                        Flow::Wait(wait) => {
                            warp.groups[group] = Group { pc, mask, wait };
                            return Ok(None);
                        }
                        flow => {
                            self.stats.warp_instructions += 1;
                            let wait = if let Flow::WaitBehind(wait) = flow {
                                wait
                            } else {
                                Wait::Ready
                            };
                            warp.groups[group] = Group {
                                pc: pc + 1,
                                mask,
                                wait,
                            };
                            return Ok(match flow {
                                Flow::Yield => Some(Outcome::Share),
                                Flow::Spin => Some(Outcome::Spins),
                                _ => None,
                            });
                        }
                    },
                }
            }
            self.stats.warp_instructions += 1;
            pc += 1;
            if pc >= meets || self.stats.warp_instructions >= end {
                warp.groups[group].pc = pc;
                return Ok(None);
            }
        }
    }

    /// Everything that is neither arithmetic nor a branch.
    fn step(&mut self, warp: &mut Warp, at: At, ins: &Instruction) -> Result<Flow> {
        let (slots, active) = (&ins.slots, at.active);
        match &ins.action {
            Action::Load(access) => self.load(warp, at, access)?,
            Action::Store(access) => self.store(warp, at, access)?,
            Action::Atomic(atomic) => self.atomic(warp, at, atomic)?,
            Action::CopyLocal { from, to, bytes } => {
                let stride = self.launch.call.program.local_bytes;
                for lane in lanes(active) {
                    warp.local.copy_within(
                        lane * stride + from..lane * stride + from + bytes,
                        lane * stride + to,
                    );
                }
            }
            Action::Sync(sync) => return self.warp_sync(warp, at, sync, slots),
            Action::Barrier(barrier) => return self.barrier(warp, at, barrier, slots),
            Action::ActiveMask => warp.file.put_narrow(slots.d, active, &[active; LANES]),
            Action::Clock { wide: false } => {
                warp.file.put_narrow(
                    slots.d,
                    active,
                    &[self.stats.warp_instructions as u32; LANES],
                );
            }
            Action::Clock { wide: true } => {
                warp.file
                    .put_wide(slots.d, active, &[self.stats.warp_instructions; LANES]);
            }
            Action::Trap => {
                return Err(report::fault(
                    self,
                    FaultKind::Trap,
                    at.place(warp),
                    "the kernel executed a trap",
                ));
            }
            Action::Nothing => return Ok(Flow::Yield),
            Action::Lanes(_) | Action::Branch(_) | Action::Exit => {}
            _ => return self.asynchronous(warp, at, ins),
        }
        Ok(Flow::Next)
    }

    /// Matrices, asynchronous copies and clusters.
    fn asynchronous(&mut self, warp: &mut Warp, at: At, ins: &Instruction) -> Result<Flow> {
        match &ins.action {
            Action::LoadMatrix(access) => return self.load_matrix(warp, at, access),
            Action::StoreMatrix(access) => return self.store_matrix(warp, at, access),
            Action::Mma(mma) => return self.mma(warp, at, mma),
            Action::Copy(copy) => return self.copy(warp, at, copy),
            Action::CopyCommit => self.copy_commit(warp, at),
            Action::CopyWait(left) => self.copy_wait(warp, at, *left)?,
            Action::CopyArrive(address) => {
                self.deferred.push_back(Deferred::Arrive {
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
