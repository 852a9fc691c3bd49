//! A gang: blocks that run at the same time on one thread of the host, a cluster or all blocks of a cooperative launch.
//!
//! Warps run in turn, each until it must wait or has used its share. When none can go on, the kernel has a deadlock.

use std::{collections::VecDeque, sync::atomic::Ordering::Relaxed};

use super::{
    Launch, Stats,
    barrier::Barriers,
    bulk::DeferredWork,
    race::Races,
    report,
    warp::{Outcome, Wait, Warp},
};
use crate::{
    decode::program::Constant,
    fault::{Fault, FaultKind, Result},
    lanes::LANES,
    memory::{FRESH, View},
    special::Special,
};

/// Warp instructions that a warp may run before another one has its turn.
const SHARE: u64 = 1 << 14;
/// Turns in which all warps only asked mbarriers in vain, before that is a deadlock.
const MAX_SPINS: u32 = 1000;

/// One block.
pub(super) struct Block {
    /// In the grid, by axis.
    pub index: [u32; 3],
    /// In its cluster.
    pub rank: u32,
    pub shared: Vec<u8>,
    /// Taken out while a warp runs.
    pub warps: Vec<Option<Box<Warp>>>,
    pub barriers: Barriers,
    /// Warps that have arrived at the barrier of the cluster, and how often it has opened.
    pub cluster_arrived: Vec<u32>,
    pub cluster_generation: u64,
}

pub(super) struct Gang<'a> {
    pub launch: &'a Launch<'a>,
    pub blocks: Vec<Block>,
    /// The buffer of each instruction's last access: a hint.
    pub views: Vec<View>,
    pub stats: Stats,
    /// The race check, if it is asked for.
    pub races: Option<Races>,
    /// Work that is done when nothing else can go on.
    pub deferred: VecDeque<DeferredWork>,
}

/// Outcome of a turn of every warp.
#[derive(Default)]
struct Round {
    /// A warp has more to do.
    alive: bool,
    progress: bool,
    /// A warp asks an mbarrier in vain.
    spinning: bool,
}

impl<'a> Gang<'a> {
    /// Blocks without work yet; they are used for one gang after another.
    pub fn new(launch: &'a Launch<'a>, size: usize) -> Gang<'a> {
        let program = launch.call.program;
        let warps = launch.threads_per_block.div_ceil(LANES);
        let block = |rank: usize| Block {
            index: [0; 3],
            rank: rank as u32,
            shared: vec![FRESH; launch.shared_bytes],
            warps: (0..warps)
                .map(|_| Some(Box::new(Warp::new(program))))
                .collect(),
            barriers: Barriers::default(),
            cluster_arrived: vec![],
            cluster_generation: 0,
        };
        let blocks = (0..size).map(block).collect();
        let check = || Races::new(program.shared_grain, size, warps, launch.shared_bytes);
        let races = launch.call.checks.races.then(check);
        Gang {
            launch,
            blocks,
            views: vec![View::EMPTY; program.code.len()],
            stats: Stats::default(),
            races,
            deferred: VecDeque::new(),
        }
    }

    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Runs the gang of this index from start to end.
    pub fn run(&mut self, index: u64) -> Result<()> {
        self.start(index);
        let mut spins = 0;
        loop {
            let round = self.round()?;
            if !round.alive {
                return self.leftover().map_or(Ok(()), Err);
            }
            if self.launch.first_fault.load(Relaxed) < index {
                // An earlier gang has the fault that will be reported.
                return Ok(());
            }
            if round.progress || self.do_deferred()? {
                spins = 0;
            } else if round.spinning && spins < MAX_SPINS {
                spins += 1;
            } else {
                return Err(report::stuck(self));
            }
        }
    }

    /// Gives each warp a turn.
    fn round(&mut self) -> Result<Round> {
        let mut round = Round::default();
        for b in 0..self.blocks.len() {
            for w in 0..self.blocks[b].warps.len() {
                let Some(mut warp) = self.blocks[b].warps[w].take() else {
                    continue;
                };
                self.wake(&mut warp, b);
                let outcome = if warp.is_done() {
                    Ok(Outcome::Waits { progress: false })
                } else {
                    self.turn(&mut warp, b)
                };
                round.alive |= !warp.is_done();
                self.blocks[b].warps[w] = Some(warp);
                match outcome? {
                    Outcome::Waits { progress } => round.progress |= progress,
                    Outcome::Share => round.progress = true,
                    Outcome::Spins => round.spinning = true,
                }
            }
            round.progress |= self.settle_barriers(b);
        }
        round.progress |= self.settle_clusters();
        Ok(round)
    }

    /// Lets groups go on whose mbarrier or cluster barrier is complete.
    fn wake(&self, warp: &mut Warp, block: usize) {
        for group in &mut warp.groups {
            if self.is_over(block, group.wait) {
                group.wait = Wait::Ready;
            }
        }
    }

    /// Gives a warp its share, and counts.
    fn turn(&mut self, warp: &mut Warp, block: usize) -> Result<Outcome> {
        let before = self.stats.warp_instructions;
        let outcome = self.run_warp(warp, block, SHARE)?;
        let spent = self.stats.warp_instructions - before;
        let budget = &self.launch.budget;
        if budget
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(spent))
            .is_err()
        {
            let message = format!(
                "the launch has used up its budget of instructions{}",
                report::warps(self, Some(warp))
            );
            return Err(Fault::new(FaultKind::Budget, message));
        }
        Ok(outcome)
    }

    /// Sets all registers and memory to their initial contents for a block.
    fn start(&mut self, index: u64) {
        let launch = self.launch;
        self.deferred.clear();
        let size = self.blocks.len() as u64;
        if let Some(races) = &mut self.races {
            races.start();
        }
        for (k, block) in self.blocks.iter_mut().enumerate() {
            (block.index, block.rank) = if launch.call.config.cooperative {
                place_in_grid(launch, index * size + k as u64)
            } else {
                place_in_cluster(launch, index, k as u32)
            };
            block.shared.fill(FRESH);
            block.barriers = Barriers::default();
            block.cluster_arrived.clear();
            block.cluster_generation = 0;
            let (index, rank) = (block.index, block.rank);
            for (w, warp) in block.warps.iter_mut().enumerate() {
                let warp = warp.as_mut().expect("no warp runs yet");
                warp.start(w as u32, launch.threads_per_block);
                for (slot, constant) in &launch.call.program.constants {
                    set_constant(launch, warp, *slot, constant, index, rank);
                }
            }
        }
    }
}

/// Index and cluster rank of a block by its linear index.
fn place_in_grid(launch: &Launch, linear: u64) -> ([u32; 3], u32) {
    let grid = launch.call.config.grid.map(u64::from);
    let index = [
        linear % grid[0],
        linear / grid[0] % grid[1],
        linear / grid[0] / grid[1],
    ]
    .map(|n| n as u32);
    let cluster = launch.cluster;
    let rank = index[0] % cluster[0]
        + cluster[0] * (index[1] % cluster[1] + cluster[1] * (index[2] % cluster[2]));
    (index, rank)
}

/// The same by cluster and rank in it.
fn place_in_cluster(launch: &Launch, gang: u64, rank: u32) -> ([u32; 3], u32) {
    let (grid, cluster) = (launch.call.config.grid, launch.cluster);
    let clusters = [0, 1, 2].map(|k| u64::from(grid[k] / cluster[k]));
    let first = [
        gang % clusters[0],
        gang / clusters[0] % clusters[1],
        gang / clusters[0] / clusters[1],
    ];
    let inside = [
        rank % cluster[0],
        rank / cluster[0] % cluster[1],
        rank / cluster[0] / cluster[1],
    ];
    (
        [0, 1, 2].map(|k| first[k] as u32 * cluster[k] + inside[k]),
        rank,
    )
}

fn set_constant(
    launch: &Launch,
    warp: &mut Warp,
    slot: u32,
    constant: &Constant,
    block: [u32; 3],
    rank: u32,
) {
    match constant {
        Constant::Narrow(value) => warp.file.narrow_mut(slot).fill(*value),
        Constant::Wide(value) => warp.file.wide_mut(slot).fill(*value),
        Constant::Predicate(value) => {
            warp.file.predicates[slot as usize] = if *value { u32::MAX } else { 0 };
        }
        Constant::Address(name, addend) => {
            let address = launch.call.globals.get(name).copied().unwrap_or(0);
            warp.file
                .wide_mut(slot)
                .fill(address.wrapping_add_signed(*addend));
        }
        Constant::Special(special) => {
            let id = warp.id;
            let values = std::array::from_fn(|lane| {
                special_value(launch, *special, id, lane as u32, block, rank)
            });
            *warp.file.narrow_mut(slot) = values;
        }
    }
}

fn special_value(
    launch: &Launch,
    special: Special,
    warp: u32,
    lane: u32,
    block: [u32; 3],
    rank: u32,
) -> u32 {
    let config = launch.call.config;
    let thread = warp * LANES as u32 + lane;
    match special {
        Special::Tid(0) => thread % config.block[0],
        Special::Tid(1) => thread / config.block[0] % config.block[1],
        Special::Tid(_) => thread / config.block[0] / config.block[1],
        Special::Ntid(axis) => config.block[axis],
        Special::Ctaid(axis) => block[axis],
        Special::Nctaid(axis) => config.grid[axis],
        Special::WarpId => warp,
        Special::WarpsPerBlock => launch.threads_per_block.div_ceil(LANES) as u32,
        Special::ClusterRank => rank,
        Special::DynamicShared => config.dynamic_shared_bytes as u32,
        Special::TotalShared => launch.shared_bytes as u32,
        // One multiprocessor, as far as a kernel can tell.
        Special::SmId | Special::GridId => 0,
        Special::SmCount => 1,
        Special::WarpSize => LANES as u32,
        Special::ClusterCtaid(_)
        | Special::ClusterNctaid(_)
        | Special::ClusterId(_)
        | Special::Nclusterid(_)
        | Special::ClusterSize
        | Special::IsCluster => cluster_value(launch, special, block),
        Special::LaneId
        | Special::LanesEq
        | Special::LanesLt
        | Special::LanesLe
        | Special::LanesGe
        | Special::LanesGt => lane_value(special, lane),
    }
}

/// Special registers that depend on the shape of clusters.
fn cluster_value(launch: &Launch, special: Special, block: [u32; 3]) -> u32 {
    let cluster = launch.cluster;
    match special {
        Special::ClusterCtaid(axis) => block[axis] % cluster[axis],
        Special::ClusterNctaid(axis) => cluster[axis],
        Special::ClusterId(axis) => block[axis] / cluster[axis],
        Special::Nclusterid(axis) => launch.call.config.grid[axis] / cluster[axis],
        Special::ClusterSize => cluster.iter().product(),
        _ => u32::from(cluster != [1; 3]),
    }
}

/// Special registers that depend on the lane alone.
fn lane_value(special: Special, lane: u32) -> u32 {
    let bit = 1u32 << lane;
    match special {
        Special::LanesEq => bit,
        Special::LanesLt => bit - 1,
        Special::LanesLe => bit | (bit - 1),
        Special::LanesGe => !(bit - 1),
        Special::LanesGt => !(bit | (bit - 1)),
        _ => lane,
    }
}
