//! Devices that are interchangeable: with equal times, limits and links, so that renaming them
//! changes no schedule but its names.
//!
//! A group of tasks is on one device, so no schedule uses more devices than there are groups. Of a
//! class of interchangeable devices as many as groups are enough: the others are left out of the
//! problem before it is searched, and every answer for the rest is one for the whole.

use crate::Problem;
use crate::schedule::timeline::Timeline;

/// One device of each sort: of devices with equal times for all tasks and equal limits the first.
pub fn distinct_devices(p: &Problem) -> Vec<u32> {
    let same = |a: usize, b: usize| {
        p.devices[a] == p.devices[b] && (0..p.n_tasks()).all(|t| p.cost(t, a) == p.cost(t, b))
    };
    let mut distinct: Vec<u32> = Vec::new();
    for d in 0..p.n_devices() {
        if !distinct.iter().any(|&e| same(e as usize, d)) {
            distinct.push(d as u32);
        }
    }
    distinct
}

/// Class of each device; classes are numbered in the order of their first devices.
pub fn classes(p: &Problem) -> Vec<u32> {
    let mut firsts: Vec<usize> = Vec::new();
    let class = |d: usize| {
        let known = firsts.iter().position(|&f| interchangeable(p, f, d));
        known.unwrap_or_else(|| {
            firsts.push(d);
            firsts.len() - 1
        }) as u32
    };
    (0..p.n_devices()).map(class).collect()
}

/// True when exchanging two devices leaves the problem as it is.
fn interchangeable(p: &Problem, a: usize, b: usize) -> bool {
    let same_link =
        |d: usize| p.links.get(a, d) == p.links.get(b, d) && p.links.get(d, a) == p.links.get(d, b);
    p.devices[a] == p.devices[b]
        && p.links.get(a, b) == p.links.get(b, a)
        && (0..p.n_devices()).all(|d| d == a || d == b || same_link(d))
        && (0..p.n_tasks()).all(|t| p.cost(t, a) == p.cost(t, b))
}

/// A problem without the devices that no schedule needs.
pub struct Reduced {
    /// The smaller problem.
    pub problem: Problem,
    /// Its devices, as the whole has them, in rising order.
    pub devices: Vec<usize>,
    /// Number of devices of the whole.
    pub n_devices_of_whole: usize,
}

/// The problem without the devices that no schedule needs; `None` where all may be needed. Devices
/// in `wanted` are kept rather than others of their class.
pub fn reduced(p: &Problem, wanted: &[u32]) -> Option<Reduced> {
    let most = p.n_groups().max(1);
    if p.n_devices() <= most {
        return None;
    }
    let class = classes(p);
    let mut first: Vec<usize> = (0..p.n_devices()).collect();
    first.sort_by_key(|&d| !wanted.contains(&(d as u32)));
    let mut n_kept = vec![0; p.n_devices()];
    let mut devices: Vec<usize> = Vec::new();
    for d in first {
        let n = &mut n_kept[class[d] as usize];
        if *n < most {
            *n += 1;
            devices.push(d);
        }
    }
    devices.sort_unstable();
    if devices.len() == p.n_devices() {
        return None;
    }
    let problem = p.only(&devices).ok()?;
    Some(Reduced {
        problem,
        devices,
        n_devices_of_whole: p.n_devices(),
    })
}

impl Reduced {
    /// The same timeline with devices as the whole problem has them.
    pub fn expand(&self, mut timeline: Timeline) -> Timeline {
        let whole = |d: &mut u32| *d = self.devices[*d as usize] as u32;
        timeline.device.iter_mut().for_each(whole);
        for t in &mut timeline.transfers {
            whole(&mut t.from);
            whole(&mut t.to);
        }
        timeline.sort_transfers();
        timeline
    }

    /// The same timeline with devices as the reduced problem has them; `None` where one of them is
    /// left out.
    pub fn contract(&self, timeline: &Timeline) -> Option<Timeline> {
        let mut timeline = timeline.clone();
        for d in &mut timeline.device {
            *d = self.index_of(*d)?;
        }
        for t in &mut timeline.transfers {
            (t.from, t.to) = (self.index_of(t.from)?, self.index_of(t.to)?);
        }
        timeline.sort_transfers();
        Some(timeline)
    }

    /// The index in the reduced problem of a device of the whole.
    pub fn index_of(&self, device: u32) -> Option<u32> {
        let at = self.devices.binary_search(&(device as usize));
        at.ok().map(|at| at as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::samples::{Shape, parts};
    use crate::{LinkProfile, Links, Nanos};

    /// Three tasks on `n` equal devices.
    fn equal(n: usize) -> Problem {
        let mut parts = parts(&mut Rng(1), Shape::small(3, n));
        for task in &mut parts.tasks {
            task.cost = vec![task.cost[0]; n];
        }
        let link = LinkProfile {
            latency: Nanos(1),
            bytes_per_second: 1_000_000_000,
        };
        parts.links = Links::uniform(n, link);
        Problem::new(parts).unwrap()
    }

    #[test]
    fn as_many_equal_devices_are_kept_as_there_are_groups() {
        assert_eq!(reduced(&equal(5), &[]).unwrap().devices, [0, 1, 2]);
        assert_eq!(reduced(&equal(5), &[4, 1]).unwrap().devices, [0, 1, 4]);
        assert!(reduced(&equal(3), &[]).is_none());
    }

    #[test]
    fn one_slow_link_makes_two_classes() {
        let mut p = equal(5);
        let slow = LinkProfile {
            latency: Nanos(9),
            ..p.links.get(0, 1)
        };
        p.links.set(0, 3, slow);
        assert_eq!(classes(&p), [0, 1, 1, 2, 1]);
        p.links.set(3, 0, slow);
        assert_eq!(classes(&p), [0, 1, 1, 0, 1]);
    }
}
