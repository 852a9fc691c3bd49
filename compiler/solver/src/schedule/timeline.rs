//! A timeline: where and when each task runs, and every transfer.

use crate::problem::Problem;
use crate::{Bytes, Nanos};

/// A tensor on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Index of the tensor in the problem.
    pub tensor: u32,
    /// Source device.
    pub from: u32,
    /// Destination device.
    pub to: u32,
    /// When it enters the link.
    pub start: Nanos,
    /// When it is there.
    pub end: Nanos,
}

/// Devices and times of all tasks, and the transfers between them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Timeline {
    /// Device of each task.
    pub device: Vec<u32>,
    /// Start of each task.
    pub start: Vec<Nanos>,
    /// End of each task.
    pub end: Vec<Nanos>,
    /// All transfers, by start.
    pub transfers: Vec<Transfer>,
    /// End of the last task.
    pub makespan: Nanos,
}

impl Timeline {
    /// Puts transfers in order of their starts.
    pub(crate) fn sort_transfers(&mut self) {
        self.transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
    }

    /// Number of devices that run something.
    pub fn n_devices_used(&self) -> usize {
        let mut used: Vec<u32> = self.device.clone();
        used.sort_unstable();
        used.dedup();
        used.len()
    }

    /// Bytes that cross links.
    pub fn bytes_moved(&self, p: &Problem) -> Bytes {
        self.transfers
            .iter()
            .map(|t| p.tensors[t.tensor as usize].bytes())
            .sum()
    }

    /// Peak memory of each device: resident bytes, results from the start of their task to the last
    /// local use or the end of the last transfer away, copies from the start of their transfer to
    /// the last local use.
    pub fn peak_bytes(&self, p: &Problem) -> Vec<Bytes> {
        let mut changes = self.memory_changes(p);
        let resident = self.resident_bytes(p);
        changes
            .iter_mut()
            .zip(resident)
            .map(|(changes, resident)| resident + highest(changes))
            .collect()
    }

    /// Bytes that each device holds for the whole step.
    pub fn resident_bytes(&self, p: &Problem) -> Vec<Bytes> {
        let mut held = vec![Bytes::ZERO; p.n_devices()];
        let mut constants: Vec<(u32, u32)> = Vec::new();
        for (t, &d) in self.device.iter().enumerate() {
            held[d as usize] += p.resident[t];
            constants.extend(p.constants_of.row(t).iter().map(|&c| (d, c)));
        }
        constants.sort_unstable();
        constants.dedup();
        constants
            .iter()
            .for_each(|&(d, c)| held[d as usize] += p.constants[c as usize]);
        held
    }

    /// Bytes that each device takes (positive) and releases, by time.
    fn memory_changes(&self, p: &Problem) -> Vec<Vec<(Nanos, i128)>> {
        let mut changes: Vec<Vec<(Nanos, i128)>> = vec![Vec::new(); p.n_devices()];
        for (d, from, to, bytes) in self.holds(p) {
            changes[d as usize].push((from, i128::from(bytes.0)));
            changes[d as usize].push((to, -i128::from(bytes.0)));
        }
        changes
    }

    /// End of the last task on a device that uses a tensor; zero if none does.
    pub fn last_use(&self, p: &Problem, tensor: u32, device: u32) -> Nanos {
        let consumers = p.consumers.row(tensor as usize).iter();
        let local = consumers.filter(|&&c| self.device[c as usize] == device);
        let ends = local.map(|&c| self.end[c as usize]);
        ends.max().unwrap_or_default()
    }

    /// Bytes that devices hold for a while: device, from, to, bytes; nothing that is held for no
    /// time.
    pub fn holds(&self, p: &Problem) -> Vec<(u32, Nanos, Nanos, Bytes)> {
        let mut holds = Vec::new();
        let mut left: Vec<Nanos> = vec![Nanos::ZERO; p.tensors.len()];
        for t in &self.transfers {
            left[t.tensor as usize] = left[t.tensor as usize].max(t.end);
            holds.push((
                t.to,
                t.start,
                self.last_use(p, t.tensor, t.to),
                p.tensors[t.tensor as usize].bytes(),
            ));
        }
        for t in 0..p.n_tasks() {
            let (d, start, end) = (self.device[t], self.start[t], self.end[t]);
            for &x in p.outputs.row(t) {
                let until = end.max(self.last_use(p, x, d)).max(left[x as usize]);
                holds.push((d, start, until, p.tensors[x as usize].bytes()));
            }
            holds.push((d, start, end, p.scratch[t]));
        }
        holds.retain(|h| h.3 > Bytes::ZERO && h.2 > h.1);
        holds
    }
}

/// Highest sum of a prefix of changes in time order, releases first.
fn highest(changes: &mut [(Nanos, i128)]) -> Bytes {
    changes.sort_unstable();
    let (mut held, mut peak) = (0i128, 0i128);
    for &(_, change) in changes.iter() {
        held += change;
        peak = peak.max(held);
    }
    Bytes(u64::try_from(peak).unwrap_or(u64::MAX))
}
