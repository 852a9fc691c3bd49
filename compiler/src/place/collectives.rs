//! The way of an all-reduce over several devices, by the predicted time of its transfers.

use super::device::DeviceSet;
use super::gpus::nccl_joins;
use crate::cost::LinkProfile;
use crate::error::{Error, Result};
use crate::ir::Requested;
use crate::options::AllReduce;
use gristmill_runtime::cuda;

/// A link is fast beside the slowest one of the devices from this ratio of bandwidths on.
const FAST: f64 = 1.5;

/// The way of an all-reduce. Devices are numbers of distinct places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a library.
    Library,
    /// Each device reduces a share for all; of small tensors, each reduces the whole for itself.
    Exchange,
    /// One device reduces for all.
    OneDevice(usize),
    /// Within groups of devices with fast links, then between the groups.
    Hierarchical(Vec<Vec<usize>>),
}

/// An all-reduce to be made.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Distinct places.
    pub places: &'a [Requested],
    /// Bytes of an operand.
    pub bytes: usize,
    /// True if a library gives the right sums, and saves time.
    pub is_for_library: bool,
    /// True if each device would reduce a share, and not the whole.
    pub is_in_shares: bool,
}

/// The devices of a session, and the wish of its user.
#[derive(Clone, Copy)]
pub struct Collectives<'a> {
    /// The devices and their links.
    pub set: &'a DeviceSet,
    /// The driver's numbers of GPUs.
    pub gpus: &'a [u32],
    /// The wish.
    pub kind: AllReduce,
}

impl Collectives<'_> {
    /// The way for an all-reduce: as wished, or the fastest.
    ///
    /// Errors with `InvalidInput` when the devices do not have it.
    pub fn way(&self, asked: Asked) -> Result<Way> {
        match (self.kind, asked.places.len()) {
            (AllReduce::Exchange, _) | (_, 0..=1) => Ok(Way::Exchange),
            (AllReduce::Nccl, _) => self.by_nccl(asked),
            (AllReduce::OneDevice, _) => Ok(self.on_one_device(asked).0),
            (AllReduce::Hierarchical, _) => self.in_groups(asked),
            (AllReduce::Auto, _) => Ok(self.fastest(asked)),
        }
    }

    fn by_nccl(&self, asked: Asked) -> Result<Way> {
        if !nccl_joins(asked.places, self.set, self.gpus) {
            let library = cuda::nccl_version();
            let why = match &library {
                Err(e) => e.to_string(),
                Ok(_) => "it joins GPUs, each of them once".to_owned(),
            };
            let message = format!("all-reduce by NCCL between {}: {why}", names(asked.places));
            return Err(Error::invalid(message).hint("--all-reduce auto"));
        }
        Ok(match asked.is_for_library {
            true => Way::Library,
            false => Way::Exchange,
        })
    }

    /// Small tensors, and devices of one group, have no second level.
    fn in_groups(&self, asked: Asked) -> Result<Way> {
        let fail = |why: &str| {
            let message = format!(
                "hierarchical all-reduce between {}: {why}",
                names(asked.places)
            );
            let e = Error::invalid(message);
            Err(e.hint("--all-reduce auto, or a --target file with the links"))
        };
        let Some(devices) = self.devices(asked.places) else {
            return fail("a place has several devices, expected one");
        };
        let kinds: Vec<_> = devices
            .iter()
            .map(|&d| self.set.devices[d].name.kind)
            .collect();
        let is_alike = |d: &usize| kinds.contains(&self.set.devices[*d].name.kind);
        let alike: Vec<usize> = (0..self.set.devices.len()).filter(is_alike).collect();
        if self.groups(&alike).is_none() {
            return fail("the devices' links make no groups, as fast ones beside slow ones do");
        }
        let groups = self.groups(&devices).filter(|_| asked.is_in_shares);
        Ok(groups.map_or(Way::Exchange, Way::Hierarchical))
    }

    fn fastest(&self, asked: Asked) -> Way {
        if asked.is_for_library && nccl_joins(asked.places, self.set, self.gpus) {
            return Way::Library;
        }
        let Some(devices) = self.devices(asked.places) else {
            return Way::Exchange;
        };
        let mut best = (self.exchange_ns(&devices, asked), Way::Exchange);
        let groups = self.groups(&devices).map(|groups| {
            let ns = self.groups_ns(&devices, &groups, asked.bytes);
            (ns, Way::Hierarchical(groups))
        });
        let (way, ns) = self.on_one_device(asked);
        for (ns, way) in groups.into_iter().chain([(ns, way)]) {
            if ns < best.0 {
                best = (ns, way);
            }
        }
        best.1
    }

    /// The best device to reduce for all, and the time in ns.
    fn on_one_device(&self, asked: Asked) -> (Way, f64) {
        let Some(devices) = self.devices(asked.places) else {
            return (Way::OneDevice(0), f64::INFINITY);
        };
        let through = |&to: &usize| {
            let others = || devices.iter().filter(move |&&d| d != to);
            let there = others().map(|&d| self.transfer_ns(d, to, asked.bytes));
            let back = others().map(|&d| self.transfer_ns(to, d, asked.bytes));
            there.fold(0.0, f64::max) + back.fold(0.0, f64::max)
        };
        let times = devices.iter().map(through).enumerate();
        let best = times.min_by(|(_, a), (_, b)| a.total_cmp(b));
        best.map_or((Way::OneDevice(0), f64::INFINITY), |(i, ns)| {
            (Way::OneDevice(i), ns)
        })
    }

    /// The only device of each place; `None` if a place has several.
    fn devices(&self, places: &[Requested]) -> Option<Vec<usize>> {
        let device = |place: &Requested| match place.as_ref() {
            Some(asked) if asked.groups.is_empty() => match self.set.matching(&asked.spec)[..] {
                [only] => Some(only),
                _ => None,
            },
            _ => None,
        };
        places.iter().map(device).collect()
    }

    fn link(&self, from: usize, to: usize) -> LinkProfile {
        let own = self.set.links.get(&(from, to));
        own.copied().unwrap_or(self.set.link)
    }

    fn transfer_ns(&self, from: usize, to: usize, bytes: usize) -> f64 {
        let link = self.link(from, to);
        link.latency.0 as f64 + bytes as f64 * 1e9 / link.bytes_per_second.max(1) as f64
    }

    /// The slowest of the transfers between all pairs of devices, in ns.
    fn pairs_ns(&self, devices: &[usize], bytes: usize) -> f64 {
        let pairs = devices
            .iter()
            .flat_map(|&a| devices.iter().map(move |&b| (a, b)))
            .filter(|(a, b)| a != b);
        pairs
            .map(|(a, b)| self.transfer_ns(a, b, bytes))
            .fold(0.0, f64::max)
    }

    fn exchange_ns(&self, devices: &[usize], asked: Asked) -> f64 {
        match asked.is_in_shares {
            true => 2.0 * self.pairs_ns(devices, asked.bytes / devices.len()),
            false => self.pairs_ns(devices, asked.bytes),
        }
    }

    /// Shares within each group, each share between the groups, and the shares within each group again.
    fn groups_ns(&self, devices: &[usize], groups: &[Vec<usize>], bytes: usize) -> f64 {
        let n_shares = groups.iter().map(Vec::len).min().unwrap_or(1);
        let share = bytes / n_shares;
        let of_group = |group: &Vec<usize>| {
            let own: Vec<usize> = group.iter().map(|&i| devices[i]).collect();
            self.pairs_ns(&own, share)
        };
        let within = groups.iter().map(of_group).fold(0.0, f64::max);
        let between = (0..n_shares).map(|k| {
            let peers: Vec<usize> = groups.iter().map(|group| devices[group[k]]).collect();
            self.pairs_ns(&peers, share)
        });
        2.0 * within + between.fold(0.0, f64::max)
    }

    /// Groups of devices with fast links beside the slowest one, by their numbers in a list; `None` for one group, or for groups of one.
    fn groups(&self, devices: &[usize]) -> Option<Vec<Vec<usize>>> {
        let n = devices.len();
        let speed = |i: usize, j: usize| {
            let both = [(i, j), (j, i)].map(|(i, j)| self.link(devices[i], devices[j]));
            let of_link = both.map(|link| link.bytes_per_second as f64);
            of_link[0].min(of_link[1])
        };
        let pairs = || (0..n).flat_map(|i| (0..i).map(move |j| (i, j)));
        let slowest = pairs()
            .map(|(i, j)| speed(i, j))
            .fold(f64::INFINITY, f64::min);
        let mut group: Vec<usize> = (0..n).collect();
        for (i, j) in pairs().filter(|&(i, j)| speed(i, j) > FAST * slowest) {
            let (from, to) = (group[i].max(group[j]), group[i].min(group[j]));
            group
                .iter_mut()
                .filter(|g| **g == from)
                .for_each(|g| *g = to);
        }
        let members = |g| (0..n).filter(|&i| group[i] == g).collect::<Vec<_>>();
        let groups: Vec<Vec<usize>> = (0..n).map(members).filter(|m| !m.is_empty()).collect();
        (1 < groups.len() && groups.len() < n).then_some(groups)
    }
}

fn names(places: &[Requested]) -> String {
    let name = |place: &Requested| match place {
        Some(asked) => asked.spec.to_string(),
        None => "any device".to_owned(),
    };
    places.iter().map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Nanos;
    use crate::ir::DeviceRequest;

    fn link(latency: u64, bytes_per_second: u64) -> LinkProfile {
        LinkProfile {
            latency: Nanos(latency),
            bytes_per_second,
        }
    }

    /// Two boards of two devices: links within a board are 20 times as fast.
    fn boards() -> DeviceSet {
        let mut set = DeviceSet::parse("cpu:4", 4).unwrap();
        set.link = link(1_000, 1_000_000_000);
        for pair in [(0, 1), (1, 0), (2, 3), (3, 2)] {
            set.links.insert(pair, link(1_000, 20_000_000_000));
        }
        set
    }

    fn places(set: &DeviceSet) -> Vec<Requested> {
        let request = |d: &super::super::Device| DeviceRequest::from(&d.name).into_requested();
        set.devices.iter().map(request).collect()
    }

    fn way(set: &DeviceSet, kind: AllReduce, bytes: usize) -> Result<Way> {
        let collectives = Collectives {
            set,
            gpus: &[],
            kind,
        };
        collectives.way(Asked {
            places: &places(set),
            bytes,
            is_for_library: true,
            is_in_shares: bytes >= 64 << 10,
        })
    }

    #[test]
    fn groups_are_devices_with_fast_links() {
        let found = way(&boards(), AllReduce::Hierarchical, 1 << 20).unwrap();
        assert_eq!(found, Way::Hierarchical(vec![vec![0, 1], vec![2, 3]]));
        let mut set = boards();
        set.links.clear();
        let e = way(&set, AllReduce::Hierarchical, 1 << 20).unwrap_err();
        insta::assert_snapshot!(e, @r#"
hierarchical all-reduce between /device:CPU:0, /device:CPU:1, /device:CPU:2, /device:CPU:3: the devices' links make no groups, as fast ones beside slow ones do (try: --all-reduce auto, or a --target file with the links)
"#);
        // Small tensors, and devices of one board, take one step.
        let small = way(&boards(), AllReduce::Hierarchical, 1_000);
        assert_eq!(small.unwrap(), Way::Exchange);
        let set = boards();
        let collectives = Collectives {
            set: &set,
            gpus: &[],
            kind: AllReduce::Hierarchical,
        };
        let one_board = collectives.way(Asked {
            places: &places(&set)[..2],
            bytes: 1 << 20,
            is_for_library: false,
            is_in_shares: true,
        });
        assert_eq!(one_board.unwrap(), Way::Exchange);
    }

    #[test]
    fn nccl_joins_gpus() {
        let e = way(&boards(), AllReduce::Nccl, 1 << 20).unwrap_err();
        let message = e.to_string();
        assert!(
            message.contains("all-reduce by NCCL between /device:CPU:0"),
            "{message}"
        );
    }

    /// Four devices exchange quarters over slow links twice, and two groups halves once; with small tensors the steps count.
    #[test]
    fn the_way_with_the_shortest_transfers_is_taken() {
        assert_eq!(
            way(&boards(), AllReduce::Auto, 4_000).unwrap(),
            Way::Exchange
        );
        let mut set = boards();
        assert_eq!(way(&set, AllReduce::Auto, 1 << 24).unwrap(), Way::Exchange);
        // One way between boards alone is slow, and a device on the first has fast links to all.
        for (a, b) in [(0, 2), (0, 3)] {
            set.links.insert((a, b), link(1_000, 20_000_000_000));
            set.links.insert((b, a), link(1_000, 20_000_000_000));
        }
        assert_eq!(
            way(&set, AllReduce::Auto, 1 << 24).unwrap(),
            Way::OneDevice(0)
        );
        assert_eq!(
            way(&set, AllReduce::Exchange, 1 << 24).unwrap(),
            Way::Exchange
        );
        // Where each step over slow links takes long, two groups take one, and an exchange two.
        let mut set = boards();
        set.link = link(500_000, 1_000_000_000);
        assert_eq!(
            way(&set, AllReduce::Auto, 1 << 20).unwrap(),
            Way::Hierarchical(vec![vec![0, 1], vec![2, 3]])
        );
        assert_eq!(
            way(&set, AllReduce::OneDevice, 1 << 20).unwrap(),
            Way::OneDevice(0)
        );
    }
}
