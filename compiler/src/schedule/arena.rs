//! Offsets in the arena, and which steps touch which of its bytes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A run of bytes that is in use during steps `start..=end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes, a multiple of the alignment.
    pub size: usize,
    /// First step of use.
    pub start: usize,
    /// Last step of use.
    pub end: usize,
    /// Offset of the first byte.
    pub offset: usize,
}

/// Assigns offsets and returns the size of the arena: the smaller result of two orders of Pisarchyk and Lee (arXiv:2001.03288), "Greedy by
/// Size" and "Greedy by Breadth". Each block goes to the smallest gap that holds it among the blocks in use at the same time. O(n^2).
pub fn assign_offsets(blocks: &mut [Block]) -> usize {
    let size = assign_in_order(blocks, &by_size(blocks));
    if size == peak_live(blocks) {
        return size;
    }
    let mut other = blocks.to_vec();
    let breadth = assign_in_order(&mut other, &by_breadth(blocks));
    if breadth < size {
        blocks.clone_from_slice(&other);
    }
    size.min(breadth)
}

fn by_size(blocks: &[Block]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..blocks.len()).filter(|&b| blocks[b].size > 0).collect();
    order.sort_by_key(|&b| (Reverse(blocks[b].size), blocks[b].start, b));
    order
}

/// Blocks by the busiest step at which they are in use, the largest first within a step.
fn by_breadth(blocks: &[Block]) -> Vec<usize> {
    let live = live_bytes(blocks);
    let widest = |b: &Block| live[b.start..=b.end].iter().copied().max().unwrap_or(0);
    let mut order = by_size(blocks);
    order.sort_by_cached_key(|&b| Reverse(widest(&blocks[b])));
    order
}

fn assign_in_order(blocks: &mut [Block], order: &[usize]) -> usize {
    let mut placed: Vec<usize> = Vec::new();
    let mut arena = 0;
    for &b in order {
        let offset = best_gap(&blocks[b], placed.iter().map(|&p| &blocks[p]));
        blocks[b].offset = offset;
        arena = arena.max(offset + blocks[b].size);
        let at = placed.partition_point(|&p| blocks[p].offset <= offset);
        placed.insert(at, b);
    }
    arena
}

/// Offset of the smallest gap for `block`, or of the end. `placed` is sorted by offset.
fn best_gap<'a>(block: &Block, placed: impl Iterator<Item = &'a Block>) -> usize {
    let mut best: Option<(usize, usize)> = None;
    let mut top = 0;
    for other in placed.filter(|o| o.start <= block.end && block.start <= o.end) {
        if other.offset > top {
            let gap = other.offset - top;
            if gap >= block.size && best.is_none_or(|(size, _)| gap < size) {
                best = Some((gap, top));
            }
        }
        top = top.max(other.offset + other.size);
    }
    best.map_or(top, |(_, offset)| offset)
}

/// Most bytes in use at one step.
pub fn peak_live(blocks: &[Block]) -> usize {
    live_bytes(blocks).into_iter().max().unwrap_or(0)
}

/// Bytes in use at each step.
fn live_bytes(blocks: &[Block]) -> Vec<usize> {
    let n_steps = blocks.iter().map(|b| b.end + 1).max().unwrap_or(0);
    let mut change = vec![(0usize, 0usize); n_steps + 1];
    for b in blocks {
        change[b.start].0 += b.size;
        change[b.end + 1].1 += b.size;
    }
    let mut live = 0;
    let live_at = |(born, died): (usize, usize)| {
        live = live + born - died;
        live
    };
    change.into_iter().map(live_at).collect()
}

/// Steps that touched a byte: the last writer, and its readers since.
#[derive(Clone, Default)]
struct Uses {
    writer: Option<u32>,
    readers: Vec<u32>,
}

/// Uses of all bytes of the arena by the steps so far, in segments keyed by their first byte.
#[derive(Default)]
pub struct History(BTreeMap<usize, Uses>);

impl History {
    fn segments(&mut self, bytes: Range<usize>) -> impl Iterator<Item = &mut Uses> {
        for at in [bytes.start, bytes.end] {
            let uses = self
                .0
                .range(..=at)
                .next_back()
                .map(|(_, u)| u.clone())
                .unwrap_or_default();
            self.0.entry(at).or_insert(uses);
        }
        self.0.range_mut(bytes).map(|(_, uses)| uses)
    }

    /// `step` reads bytes: it comes after their writer.
    pub fn read(&mut self, bytes: Range<usize>, step: u32, deps: &mut BTreeSet<u32>) {
        if bytes.is_empty() {
            return;
        }
        for uses in self.segments(bytes) {
            deps.extend(uses.writer);
            uses.readers.push(step);
        }
    }

    /// `step` overwrites bytes: it comes after their writer and all their readers.
    pub fn write(&mut self, bytes: Range<usize>, step: u32, deps: &mut BTreeSet<u32>) {
        if bytes.is_empty() {
            return;
        }
        for uses in self.segments(bytes) {
            // Readers come after the writer already.
            match uses.readers.is_empty() {
                true => deps.extend(uses.writer),
                false => deps.extend(uses.readers.drain(..)),
            }
            uses.writer = Some(step);
        }
    }
}
