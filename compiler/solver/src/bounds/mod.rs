//! Lower bounds: makespans below which no valid schedule of a problem ends.
//!
//! A valid schedule runs each task once, on a feasible device, without interruption; a device runs
//! one task at a time and a link moves one tensor at a time; a tensor goes from the device of its
//! producer straight to each device where it is needed, once. Tasks and transfers may wait, in any
//! order. Each bound drops some of these rules; none takes more than the rules give, so the largest
//! of them is a bound too.

mod area;
mod energetic;
mod intervals;
mod join;
mod memory;
pub mod one_machine;
mod windows;

use crate::Nanos;
use crate::problem::Problem;
use crate::schedule::timeline::Timeline;

pub(crate) use intervals::{cut_out, tensors_of};
pub use windows::Windows;

/// A makespan below which no valid schedule ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Name of the relaxation.
    pub name: &'static str,
    /// The makespan.
    pub value: Nanos,
}

/// Each bound that needs no search, in a fixed order. About O(n log n) in tasks and consumers.
///
/// On one device a schedule ends after the work of all tasks, which no bound can exceed: those after
/// the area are left out.
pub fn all(p: &Problem) -> Vec<Bound> {
    let joined = join::joined(p);
    let mut bounds = vec![
        Bound {
            name: "critical-path",
            value: windows::critical_path(p, &joined),
        },
        Bound {
            name: "area",
            value: area::area(p),
        },
    ];
    if p.devices.len() > 1 {
        bounds.extend(of_several_devices(p, &joined, &bounds));
    }
    let unit = unit(p);
    bounds
        .iter_mut()
        .for_each(|b| b.value = whole(b.value, unit));
    bounds
}

fn of_several_devices(p: &Problem, joined: &Windows, others: &[Bound]) -> [Bound; 3] {
    let memory = area::area_within_memory(p).max(memory::forced_crossing(p, joined));
    let link = one_machine::busiest_link(p, joined);
    let others = others.iter().map(|b| b.value).chain([memory, link]);
    let least = others.max().unwrap_or_default();
    let energetic = energetic::energetic(p, energetic::of_windows(p, joined), least);
    [("memory", memory), ("link", link), ("energetic", energetic)]
        .map(|(name, value)| Bound { name, value })
}

/// The largest of the bounds that are linear in the problem, for problems too large for the others.
pub fn quick(p: &Problem) -> Bound {
    let path = Bound {
        name: "critical-path",
        value: windows::critical_path(p, &Windows::new(p)),
    };
    let area = Bound {
        name: "area",
        value: area::area(p),
    };
    if area.value > path.value { area } else { path }
}

/// The bounds by the parts between forks and joins, each solved by itself with `budget` nodes of
/// search for all of them: the longest path over them, and the work in stretches of time, with the
/// heads and tails that these paths leave to each task.
pub fn blocks(p: &Problem, budget: u64) -> [Bound; 2] {
    let leaps = intervals::leaps(p, budget);
    let longest = leaps.longest();
    let work = energetic::energetic(p, energetic::of_leaps(p, &leaps), longest);
    let unit = unit(p);
    [("series-blocks", longest), ("energetic", work)].map(|(name, value)| Bound {
        name,
        value: whole(value, unit),
    })
}

/// The largest bound; of equal ones the one that comes first. `budget` counts nodes of search for
/// [`blocks`]; with none they are left out.
pub fn best(p: &Problem, budget: u64) -> Bound {
    let mut bounds = all(p);
    if budget > 0 {
        bounds.extend(blocks(p, budget));
    }
    let greatest = bounds.iter().map(|b| b.value).max().unwrap_or_default();
    let first = bounds.into_iter().find(|b| b.value == greatest);
    first.unwrap_or(Bound {
        name: "critical-path",
        value: Nanos::ZERO,
    })
}

/// True when no device holds more than it may at any time.
pub fn fits(p: &Problem, timeline: &Timeline) -> bool {
    let peaks = timeline.peak_bytes(p);
    p.devices
        .iter()
        .zip(peaks)
        .all(|(d, peak)| d.memory.is_none_or(|m| peak <= m))
}

/// A time of which all task and transfer times are multiples. So are then all times of some best
/// schedule: each start waits for the end of something, or for nothing.
pub(crate) fn unit(p: &Problem) -> u64 {
    let n = p.n_devices();
    let mut unit = 0;
    for t in 0..p.n_tasks() {
        for cost in p.costs(t).iter().filter(|c| c.is_finite()) {
            unit = greatest_common_divisor(cost.0, unit);
        }
        if unit == 1 {
            return 1;
        }
    }
    for x in (0..p.tensors.len()).filter(|&x| !p.consumers.row(x).is_empty()) {
        for (from, to) in (0..n).flat_map(|a| (0..n).map(move |b| (a, b))) {
            unit = greatest_common_divisor(p.transfer(x, from, to).0, unit);
        }
        if unit == 1 {
            return 1;
        }
    }
    unit.max(1)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// The next multiple of `unit`.
pub(crate) fn whole(value: Nanos, unit: u64) -> Nanos {
    if value.is_finite() {
        Nanos(value.0.div_ceil(unit).saturating_mul(unit))
    } else {
        value
    }
}
