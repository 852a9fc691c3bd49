//! Check of collectives: all ranks are there, and no other step can come between them.

use super::validate::Place;
use super::{AllReduce, Partition, Program, StepKind};
use std::collections::BTreeMap;

/// Ranks of each all-reduce, by its key; in order of partitions and steps.
pub(super) fn ranks(p: &Program) -> BTreeMap<&str, Vec<Place>> {
    let mut found: BTreeMap<&str, Vec<Place>> = BTreeMap::new();
    for (d, partition) in p.partitions.iter().enumerate() {
        for (i, step) in partition.steps.iter().enumerate() {
            if let StepKind::AllReduce(s) = &step.kind {
                found.entry(&s.key).or_default().push((d, i));
            }
        }
    }
    found
}

/// The steps of a partition at which its device waits for others.
fn collectives(partition: &Partition) -> impl Iterator<Item = (usize, &AllReduce)> {
    partition
        .steps
        .iter()
        .enumerate()
        .filter_map(|(i, step)| match &step.kind {
            StepKind::AllReduce(s) => Some((i, &**s)),
            _ => None,
        })
}

/// Ranks match, and each step comes before or after each of them.
pub(super) fn check_collectives(p: &Program, violations: &mut Vec<String>) {
    for (key, places) in ranks(p) {
        let rank = |&(d, i): &Place| match &p.partitions[d].steps[i].kind {
            StepKind::AllReduce(s) => Some((&**s, p.partitions[d].buffers.get(s.src.0 as usize)?)),
            _ => None,
        };
        let found: Vec<_> = places.iter().filter_map(rank).collect();
        let Some((first, buffer)) = found.first() else {
            continue;
        };
        let mut numbers: Vec<u32> = found.iter().map(|(s, _)| s.rank).collect();
        numbers.sort_unstable();
        if !numbers.into_iter().eq(0..first.devices.len() as u32) {
            violations.push(format!(
                "{key:?}: not every rank of {:?} occurs exactly once",
                first.devices
            ));
        }
        let same = |(s, b): &(&AllReduce, &super::Buffer)| {
            (&s.devices, s.kind, b.dtype, b.size_bytes())
                == (
                    &first.devices,
                    first.kind,
                    buffer.dtype,
                    buffer.size_bytes(),
                )
        };
        if !found.iter().all(same) {
            violations.push(format!(
                "{key:?}: ranks have different devices, kinds, dtypes or sizes"
            ));
        }
    }
    for partition in &p.partitions {
        for (at, s) in collectives(partition) {
            let n = partition.steps.len() - 1 - n_ordered(partition, at);
            if n > 0 {
                violations.push(format!(
                    "{}: nothing orders {n} steps and {:?}",
                    partition.device, s.key
                ));
            }
        }
    }
}

/// Number of steps that come before or after one by their dependencies.
fn n_ordered(partition: &Partition, at: usize) -> usize {
    let n = partition.steps.len();
    let deps = |i: usize| {
        partition.steps[i]
            .deps
            .iter()
            .map(|d| d.0 as usize)
            .filter(move |&d| d < i)
    };
    let (mut before, mut after) = (vec![false; n], vec![false; n]);
    (before[at], after[at]) = (true, true);
    for i in (0..=at).rev() {
        if before[i] {
            deps(i).for_each(|d| before[d] = true);
        }
    }
    for i in at + 1..n {
        after[i] = deps(i).any(|d| after[d]);
    }
    before.iter().chain(&after).filter(|&&is| is).count() - 2
}
