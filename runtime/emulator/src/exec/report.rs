//! Faults of running kernels: where they happened, and the state of every warp.

use super::{
    gang::{Block, Gang},
    mbarrier::Spot,
    warp::{Group, Issue, Wait, Warp},
};
use crate::fault::{Fault, FaultKind};

/// Warps that a report lists, at most.
const MAX_WARPS: usize = 64;

/// Where a warp is when something goes wrong.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Index in the gang.
    pub block: usize,
    pub warp: u32,
    pub pc: u32,
    /// Lanes that are concerned.
    pub lanes: u32,
}

/// A fault at an instruction: PTX line, CUDA line, and who executed it.
pub(super) fn fault(gang: &Gang, kind: FaultKind, at: Place, what: impl AsRef<str>) -> Fault {
    let program = gang.launch.call.program;
    let block = &gang.blocks[at.block];
    let ins = &program.code[at.pc as usize];
    let lanes = match at.lanes.count_ones() {
        1 => format!("lane {}", at.lanes.trailing_zeros()),
        _ => format!("lanes {:#010x}", at.lanes),
    };
    let message = format!(
        "{} (kernel `{}`, block {:?}, warp {}, {lanes}{})",
        what.as_ref(),
        program.name,
        block.index,
        at.warp,
        cuda_line(gang, at.pc)
    );
    Fault::at(kind, ins.line, message)
}

impl Gang<'_> {
    /// A fault at the instruction that a warp executes.
    pub(super) fn fault(
        &self,
        kind: FaultKind,
        warp: &Warp,
        at: Issue,
        what: impl AsRef<str>,
    ) -> Fault {
        fault(self, kind, at.place(warp), what)
    }

    pub(super) fn misuse(&self, warp: &Warp, at: Issue, what: String) -> Fault {
        self.fault(FaultKind::Misuse, warp, at, what)
    }
}

/// `, CUDA kernel.cu:12`, or nothing.
fn cuda_line(gang: &Gang, pc: u32) -> String {
    match gang.launch.call.program.code[pc as usize].loc {
        Some((file, line)) if line > 0 => {
            let name = gang.launch.files.get(&file).map_or("?", String::as_str);
            format!(", CUDA {}:{line}", name.rsplit('/').next().unwrap_or(name))
        }
        _ => String::new(),
    }
}

/// The fault of a gang in which no warp can go on.
pub(super) fn stuck(gang: &Gang) -> Fault {
    let diverged = gang.blocks.iter().enumerate().find_map(|(b, block)| {
        let of_warp = |warp: &Warp| {
            let group = warp
                .groups
                .iter()
                .find(|g| matches!(g.wait, Wait::Lanes(_)))?;
            let Wait::Lanes(need) = group.wait else {
                return None;
            };
            Some((
                Place {
                    block: b,
                    warp: warp.id,
                    pc: group.pc,
                    lanes: group.mask,
                },
                need & warp.live & !group.mask,
            ))
        };
        block.warps.iter().flatten().find_map(|warp| of_warp(warp))
    });
    if let Some((place, missing)) = diverged {
        let what = format!(
            "diverged at a synchronising instruction: lanes {missing:#010x} do not come{}",
            warps(gang, None)
        );
        return fault(gang, FaultKind::Divergence, place, what);
    }
    let message = format!("deadlock: no warp can go on{}", warps(gang, None));
    Fault::new(FaultKind::Deadlock, message)
}

/// A line per group of each warp that is not done: its line and the reason of its wait. `running` is a warp that is out
/// of its block.
pub(super) fn warps(gang: &Gang, running: Option<&Warp>) -> String {
    let mut lines = Vec::new();
    for block in &gang.blocks {
        for warp in block.warps.iter().map(|w| w.as_deref().or(running)) {
            let Some(warp) = warp.filter(|w| !w.is_done()) else {
                continue;
            };
            for group in &warp.groups {
                let ins = &gang.launch.call.program.code[group.pc as usize];
                lines.push(format!(
                    "\n  block {:?} warp {} lanes {:#010x} at PTX line {}{}: {}",
                    block.index,
                    warp.id,
                    group.mask,
                    ins.line,
                    cuda_line(gang, group.pc),
                    wait_reason(gang, block, warp, group)
                ));
            }
        }
    }
    let more = lines.len().saturating_sub(MAX_WARPS);
    lines.truncate(MAX_WARPS);
    if more > 0 {
        lines.push(format!("\n  and {more} more"));
    }
    lines.concat()
}

fn wait_reason(gang: &Gang, block: &Block, warp: &Warp, group: &Group) -> String {
    match group.wait {
        Wait::Ready => "can run".to_owned(),
        Wait::Lanes(need) => {
            format!("waits for lanes {:#010x}", need & warp.live & !group.mask)
        }
        Wait::Mbarrier { spot, phase } => format!(
            "waits for phase {phase} of the mbarrier at {:#x}, {}",
            spot.address,
            mbarrier_progress(gang, spot)
        ),
        Wait::WarpGroup { group, .. } => {
            format!("waits for its warp group to commit {group} groups of products")
        }
        Wait::Cluster(_) => {
            format!(
                "waits for its cluster, {} warps of the block have arrived",
                block.cluster_arrived.len()
            )
        }
        Wait::Barrier(id) => {
            format!("waits for barrier {id}, {}", block.barriers.describe(id))
        }
    }
}

fn mbarrier_progress(gang: &Gang, spot: Spot) -> String {
    match gang.mbarrier_state(spot) {
        None => "which is not initialised".to_owned(),
        Some(s) => format!(
            "{} of {} arrivals and {} bytes are missing",
            s.pending, s.expected, s.bytes
        ),
    }
}
