//! Idle times of a device or link, for schedules that fill gaps.

use crate::Nanos;

/// Gaps of one chunk, in time order, with the longest of them.
#[derive(Clone, Debug)]
struct Chunk {
    longest: u64,
    gaps: Vec<(u64, u64)>,
}

const CHUNK: usize = 64;

/// The idle times of a resource; the last never ends. Chunked, so that a search skips chunks that
/// are too short and an insertion moves little.
#[derive(Clone, Debug)]
pub struct Gaps {
    /// Empty while nothing is taken: of the links between many devices few are ever used.
    chunks: Vec<Chunk>,
    /// Start of the last gap.
    last: u64,
    /// Shorter gaps are of no use and forgotten.
    shortest: u64,
}

impl Gaps {
    /// All time is idle. Gaps below `shortest` are not kept.
    pub fn new(shortest: Nanos) -> Gaps {
        Gaps {
            chunks: Vec::new(),
            last: 0,
            shortest: shortest.0.max(1),
        }
    }

    /// Start of the last gap: when the resource is idle for good.
    pub fn last(&self) -> Nanos {
        Nanos(self.last)
    }

    /// Earliest start, at `ready` or later, of an idle time of `length`.
    pub fn earliest(&self, ready: Nanos, length: Nanos) -> Nanos {
        if ready.0 >= self.last {
            return ready;
        }
        let first = self
            .chunks
            .partition_point(|c| c.gaps.last().is_some_and(|g| g.1 <= ready.0));
        for (i, chunk) in self.chunks[first..].iter().enumerate() {
            if chunk.longest < length.0 {
                continue;
            }
            let past = if i == 0 {
                chunk.gaps.partition_point(|g| g.1 <= ready.0)
            } else {
                0
            };
            for &(from, to) in &chunk.gaps[past..] {
                let start = from.max(ready.0);
                if start.checked_add(length.0).is_some_and(|end| end <= to) && (start < to) {
                    return Nanos(start);
                }
            }
        }
        self.last().max(ready)
    }

    /// Latest start of an idle time of `length` that is at `ready` or later and ends by `deadline`;
    /// `None` if there is none.
    pub fn latest(&self, ready: Nanos, deadline: Nanos, length: Nanos) -> Option<Nanos> {
        let last = deadline.0.checked_sub(length.0)?;
        if self.chunks.is_empty() {
            return (last >= ready.0).then_some(Nanos(last));
        }
        for chunk in self.chunks.iter().rev() {
            for &(from, to) in chunk.gaps.iter().rev() {
                if to <= ready.0 {
                    return None;
                }
                let start = last.min(to.saturating_sub(length.0));
                if start >= from.max(ready.0) {
                    return Some(Nanos(start));
                }
            }
        }
        None
    }

    /// Takes `[start, start + length)`, which lies in one gap, or begins where a forgotten one was.
    /// Of no length, it still divides the gap: nothing may be under way at that time.
    pub fn take(&mut self, start: Nanos, length: Nanos) {
        let (start, end) = (start.0, start.0.saturating_add(length.0));
        if self.chunks.is_empty() {
            self.chunks.push(Chunk {
                longest: u64::MAX,
                gaps: vec![(0, u64::MAX)],
            });
        }
        let at = self
            .chunks
            .partition_point(|c| c.gaps.last().is_some_and(|g| g.1 <= start));
        let Some(chunk) = self.chunks.get_mut(at) else {
            return;
        };
        let i = chunk.gaps.partition_point(|g| g.1 <= start);
        let (from, to) = chunk.gaps[i];
        if start == end && start <= from {
            return;
        }
        debug_assert!(
            from <= start && end <= to,
            "[{start}, {end}) is not in the gap [{from}, {to})"
        );
        if to == u64::MAX {
            self.last = end;
        }
        let rest = [(from, start), (end, to)]
            .into_iter()
            .filter(|g| g.1.saturating_sub(g.0) >= self.shortest);
        chunk.gaps.splice(i..=i, rest);
        chunk.longest = chunk.gaps.iter().map(|g| g.1 - g.0).max().unwrap_or(0);
        if chunk.gaps.is_empty() {
            self.chunks.remove(at);
        } else if chunk.gaps.len() > CHUNK {
            let gaps = chunk.gaps.split_off(CHUNK / 2);
            chunk.longest = chunk.gaps.iter().map(|g| g.1 - g.0).max().unwrap_or(0);
            let longest = gaps.iter().map(|g| g.1 - g.0).max().unwrap_or(0);
            self.chunks.insert(at + 1, Chunk { longest, gaps });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn gaps_fill_from_the_front() {
        let mut g = Gaps::new(Nanos(1));
        g.take(Nanos(10), Nanos(5));
        g.take(Nanos(20), Nanos(5));
        assert_eq!(g.earliest(Nanos(0), Nanos(10)), Nanos(0));
        assert_eq!(g.earliest(Nanos(0), Nanos(11)), Nanos(25));
        assert_eq!(g.earliest(Nanos(12), Nanos(5)), Nanos(15));
        assert_eq!(g.earliest(Nanos(12), Nanos(0)), Nanos(15));
        g.take(Nanos(15), Nanos(5));
        assert_eq!(g.earliest(Nanos(9), Nanos(2)), Nanos(25));
        assert_eq!(g.last(), Nanos(25));
    }

    #[test]
    fn what_takes_no_time_has_its_turn_all_the_same() {
        let mut g = Gaps::new(Nanos(1));
        g.take(Nanos(6), Nanos(0));
        assert_eq!(g.earliest(Nanos(4), Nanos(2)), Nanos(4));
        assert_eq!(g.earliest(Nanos(4), Nanos(3)), Nanos(6));
        assert_eq!(g.earliest(Nanos(6), Nanos(0)), Nanos(6));
        assert_eq!(g.last(), Nanos(6));
    }

    #[test]
    fn the_latest_gap_before_a_deadline_is_found() {
        let mut g = Gaps::new(Nanos(1));
        g.take(Nanos(10), Nanos(5));
        g.take(Nanos(20), Nanos(5));
        assert_eq!(g.latest(Nanos(0), Nanos(30), Nanos(5)), Some(Nanos(25)));
        assert_eq!(g.latest(Nanos(0), Nanos(29), Nanos(5)), Some(Nanos(15)));
        assert_eq!(g.latest(Nanos(0), Nanos(19), Nanos(5)), Some(Nanos(5)));
        assert_eq!(g.latest(Nanos(6), Nanos(19), Nanos(5)), None);
    }

    #[test]
    fn chunks_agree_with_a_plain_list() {
        let mut g = Gaps::new(Nanos(1));
        let mut busy = vec![false; 40_000];
        let mut rng = Rng(7);
        for _ in 0..3_000 {
            let (ready, length) = (rng.below(20_000), 1 + rng.below(9));
            let expected = (ready..)
                .find(|&s| busy[s..s + length].iter().all(|b| !b))
                .unwrap();
            let found = g.earliest(Nanos(ready as u64), Nanos(length as u64));
            assert_eq!(found.0 as usize, expected);
            g.take(found, Nanos(length as u64));
            busy[expected..expected + length].fill(true);
        }
    }
}
