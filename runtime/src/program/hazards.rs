//! Memory hazards within a partition: reading before writing, and steps on the same bytes that nothing orders.

use super::{Buffer, BufferId, Loc, Partition, VariableSpec};
use std::collections::BTreeMap;
use std::ops::Range;

/// Memory that steps of one partition share.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Space {
    Arena,
    Output(u32),
    Variable(u32),
    Assigned(u32),
}

impl Space {
    /// True when its bytes are there before the first step.
    fn begins_written(self) -> bool {
        matches!(self, Space::Variable(_))
    }
}

/// Bytes of a buffer in a space that is written during a run; `None` for inputs, constants and empty buffers.
fn place(variables: &[VariableSpec], b: &Buffer) -> Option<(Space, Range<usize>)> {
    let size = b.size_bytes();
    match b.loc {
        _ if size == 0 => None,
        Loc::Arena { offset_bytes } => Some((
            Space::Arena,
            offset_bytes..offset_bytes.saturating_add(size),
        )),
        Loc::Output(i) => Some((Space::Output(i), 0..size)),
        Loc::Assigned(i) if !variables.get(i as usize).is_some_and(|v| v.in_place) => {
            Some((Space::Assigned(i), 0..size))
        }
        Loc::Variable(i) | Loc::Assigned(i) => Some((Space::Variable(i), 0..size)),
        Loc::Constant(_) | Loc::Input(_) => None,
    }
}

/// `None` for disjoint buffers; otherwise true when both are exactly the same bytes.
pub(super) fn overlap(variables: &[VariableSpec], a: &Buffer, b: &Buffer) -> Option<bool> {
    let ((space_a, a), (space_b, b)) = (place(variables, a)?, place(variables, b)?);
    (space_a == space_b && a.start < b.end && b.start < a.end).then_some(a == b)
}

/// Uses of a run of bytes so far: its last writer and who has read that since.
#[derive(Clone, Default)]
struct Uses {
    writer: Option<usize>,
    readers: Vec<usize>,
}

/// A space cut into segments with the same uses, keyed by their first byte; each ends where the next begins.
struct Segments(BTreeMap<usize, Uses>);

impl Segments {
    fn new() -> Segments {
        Segments(BTreeMap::from([(0, Uses::default())]))
    }

    fn cut(&mut self, at: usize) {
        let (_, uses) = self
            .0
            .range(..=at)
            .next_back()
            .expect("a segment starts at 0");
        let uses = uses.clone();
        self.0.entry(at).or_insert(uses);
    }

    fn uses(&mut self, bytes: Range<usize>) -> impl Iterator<Item = &mut Uses> {
        self.cut(bytes.start);
        self.cut(bytes.end);
        self.0.range_mut(bytes).map(|(_, uses)| uses)
    }
}

/// Pairs of steps that must be ordered, the earlier one first. Only neighbours in the history of a byte are listed: order of the others
/// follows from theirs.
type Pairs = Vec<(usize, usize)>;

/// Appends the hazards of a partition whose ids are all in range.
pub(super) fn check_hazards(
    partition: &Partition,
    variables: &[VariableSpec],
    violations: &mut Vec<String>,
) {
    let mut spaces: BTreeMap<Space, Segments> = BTreeMap::new();
    let mut pairs = Pairs::new();
    for (i, step) in partition.steps.iter().enumerate() {
        let (reads, writes) = step.kind.accesses();
        let place_of = |id: &BufferId| place(variables, &partition.buffers[id.0 as usize]);
        for id in &reads {
            let Some((space, bytes)) = place_of(id) else {
                continue;
            };
            let mut unwritten = false;
            for uses in spaces
                .entry(space)
                .or_insert_with(Segments::new)
                .uses(bytes)
            {
                unwritten |= uses.writer.is_none() && !space.begins_written();
                pairs.extend(uses.writer.map(|w| (w, i)));
                uses.readers.push(i);
            }
            if unwritten {
                let name = &partition.buffers[id.0 as usize].name;
                violations.push(format!(
                    "{}: step {i} ({}) reads {name:?} before it is written",
                    partition.device, step.origin
                ));
            }
        }
        for (space, bytes) in writes.iter().filter_map(place_of) {
            for uses in spaces
                .entry(space)
                .or_insert_with(Segments::new)
                .uses(bytes)
            {
                let earlier = uses.writer.into_iter().chain(uses.readers.drain(..));
                pairs.extend(earlier.filter(|&e| e != i).map(|e| (e, i)));
                uses.writer = Some(i);
            }
        }
    }
    pairs.sort_unstable();
    pairs.dedup();
    check_order(partition, &pairs, violations);
}

/// Sources whose descendants are found in one sweep over the steps: bounds memory to `n_steps * BLOCK / 8` bytes.
const BLOCK: usize = 1024;

/// Checks that each pair is connected by dependencies. `pairs` is sorted.
fn check_order(partition: &Partition, pairs: &[(usize, usize)], violations: &mut Vec<String>) {
    let n = partition.steps.len();
    let mut left = pairs;
    for begin in (0..n).step_by(BLOCK) {
        let (now, later) = left.split_at(left.partition_point(|&(from, _)| from < begin + BLOCK));
        left = later;
        if now.is_empty() {
            continue;
        }
        // reach[i] has bit s set when step i is, or comes after, step `begin + s`.
        let mut reach = vec![[0u64; BLOCK / 64]; n];
        for i in begin..n {
            let mut row = [0u64; BLOCK / 64];
            for dep in &partition.steps[i].deps {
                row.iter_mut()
                    .zip(&reach[dep.0 as usize])
                    .for_each(|(r, d)| *r |= d);
            }
            if i < begin + BLOCK {
                row[(i - begin) / 64] |= 1 << (i % 64);
            }
            reach[i] = row;
        }
        for &(from, to) in now {
            if reach[to][(from - begin) / 64] & (1 << (from % 64)) == 0 {
                let (device, a, b) = (
                    &partition.device,
                    &partition.steps[from].origin,
                    &partition.steps[to].origin,
                );
                violations.push(format!(
                    "{device}: steps {from} ({a}) and {to} ({b}) touch the same bytes, but nothing orders them"
                ));
            }
        }
    }
}
