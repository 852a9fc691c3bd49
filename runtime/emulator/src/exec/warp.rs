//! A warp: groups of lanes at different places of the code, and the loop that runs them.
//!
//! Of the groups that can run, the one with the lowest place runs until it meets another, which it then joins. Blocks of
//! code come in an order in which that brings diverged lanes together again.

use super::{gang::Gang, report};
use crate::{
    decode::program::{Action, Instruction, NONE, Program},
    fault::{FaultKind, Result},
    lanes::{File, LANES},
};

/// What a group waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing.
    Ready,
    /// Lanes of this mask to arrive where it is.
    Lanes(u32),
    /// A barrier of the block, by number.
    Barrier(u32),
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
    /// Those that the guard lets through.
    pub active: u32,
}

impl At {
    /// For reports.
    pub fn place(self, warp: &Warp) -> report::Place {
        report::Place { block: self.block, warp: warp.id, pc: self.pc, lanes: self.active }
    }
}

/// Why a warp's turn has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All its groups wait, or it is done.
    Waits { progress: bool },
    /// It has used its share.
    Share,
}

/// What an instruction asks of the loop.
pub(super) enum Flow {
    Next,
    /// The group waits here, and executes the instruction again.
    Wait(Wait),
    /// The group waits, and goes on behind the instruction.
    WaitBehind(Wait),
    /// Give other warps a turn.
    Yield,
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
}

impl Warp {
    pub fn new(program: &Program) -> Warp {
        Warp {
            id: 0,
            file: File::new(program.units, program.predicates),
            groups: Vec::new(),
            live: 0,
            local: vec![0; program.local_bytes * LANES],
        }
    }

    /// The state at the start of a block.
    pub fn start(&mut self, id: u32, threads_per_block: usize) {
        let threads = (threads_per_block - id as usize * LANES).min(LANES);
        self.id = id;
        self.live = if threads == LANES { u32::MAX } else { (1 << threads) - 1 };
        self.groups.clear();
        self.groups.push(Group { pc: 0, mask: self.live, wait: Wait::Ready });
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
                // Those that wait for a barrier have arrived at it already: nobody joins them.
                let settled = |g: Group| matches!(g.wait, Wait::Barrier(_));
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
    pub(super) fn run_warp(&mut self, warp: &mut Warp, block: usize, share: u64) -> Result<Outcome> {
        let start = self.stats.warp_instructions;
        let mut progress = false;
        while let Some(group) = warp.pick() {
            let used = self.stats.warp_instructions - start;
            if used >= share {
                return Ok(Outcome::Share);
            }
            let yields = self.run_group(warp, block, group, share - used)?;
            warp.groups.retain(|g| g.mask != 0);
            // An instruction that only waits again is no progress.
            progress |= self.stats.warp_instructions - start > used;
            if yields {
                return Ok(Outcome::Share);
            }
        }
        Ok(Outcome::Waits { progress })
    }

    /// Runs one group until it waits, splits, meets another, or has used its share; whether it yields.
    fn run_group(&mut self, warp: &mut Warp, block: usize, group: usize, share: u64) -> Result<bool> {
        let code: &[Instruction] = &self.launch.call.program.code;
        let Group { mut pc, mask, .. } = warp.groups[group];
        let several = warp.groups.len() > 1;
        // Where the next group is.
        let meets = warp.groups.iter().map(|g| g.pc).filter(|other| *other > pc).min().unwrap_or(u32::MAX);
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
                            return Ok(false);
                        }
                        warp.groups[group] = Group { pc: pc + 1, mask: mask & !active, wait: Wait::Ready };
                        warp.groups.push(Group { pc: *target, mask: active, wait: Wait::Ready });
                        return Ok(false);
                    }
                    Action::Exit => {
                        self.stats.warp_instructions += 1;
                        warp.exit(group, active);
                        warp.groups[group].pc = pc + 1;
                        return Ok(false);
                    }
                    _ => match self.step(warp, At { block, pc, mask, active }, ins)? {
                        Flow::Next => {}
                        Flow::Wait(wait) => {
                            warp.groups[group] = Group { pc, mask, wait };
                            return Ok(false);
                        }
                        flow => {
                            self.stats.warp_instructions += 1;
                            let wait = if let Flow::WaitBehind(wait) = flow { wait } else { Wait::Ready };
                            warp.groups[group] = Group { pc: pc + 1, mask, wait };
                            return Ok(matches!(flow, Flow::Yield));
                        }
                    },
                }
            }
            self.stats.warp_instructions += 1;
            pc += 1;
            if pc >= meets || self.stats.warp_instructions >= end {
                warp.groups[group].pc = pc;
                return Ok(false);
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
                    warp.local.copy_within(lane * stride + from..lane * stride + from + bytes, lane * stride + to);
                }
            }
            Action::Sync(sync) => return self.warp_sync(warp, at, sync, slots),
            Action::Barrier(barrier) => return self.barrier(warp, at, barrier, slots),
            Action::ActiveMask => warp.file.put_narrow(slots.d, active, &[active; LANES]),
            Action::Clock { wide: false } => {
                warp.file.put_narrow(slots.d, active, &[self.stats.warp_instructions as u32; LANES]);
            }
            Action::Clock { wide: true } => {
                warp.file.put_wide(slots.d, active, &[self.stats.warp_instructions; LANES]);
            }
            Action::Trap => {
                return Err(report::fault(self, FaultKind::Trap, at.place(warp), "the kernel executed a trap"));
            }
            Action::Nothing => return Ok(Flow::Yield),
            Action::Lanes(_) | Action::Branch(_) | Action::Exit => {}
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
