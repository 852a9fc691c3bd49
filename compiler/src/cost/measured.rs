//! Measured times of clusters, and the estimates that follow from them.
//!
//! A cluster is known by its [`signature`]: its computation, regardless of position and name. Its
//! device is known by the profile that predicts it, threads included. The estimate of a cluster
//! joins measured times with the model's prediction, the latter corrected by how the model did on
//! other clusters of the class on that device, and worth [`PRIOR_RUNS`] runs:
//!
//! `estimate = (k0 * analytic * r + sum of measured) / (k0 + number of measured)`, `r` the
//! geometric mean of measured / analytic of the class.
//!
//! So clusters that nobody has measured gain from those that were.

use super::Nanos;
use super::{DeviceProfile, signature};
use crate::ir::{Graph, Node, Op};
use std::collections::BTreeMap;

/// As many runs is the model's own opinion worth, `k0`.
pub const PRIOR_RUNS: u64 = 2;
/// Number of the latest times that are kept one by one.
pub const MAX_RECENT: usize = 16;

/// A stable hash of the rates that predict a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProfileKey(pub u64);

impl ProfileKey {
    /// The key of a profile. Other rates or another number of threads give another key, since times
    /// and corrections learnt for them do not apply.
    pub fn of(profile: &DeviceProfile) -> ProfileKey {
        ProfileKey(super::fnv(format!("{profile:?}").as_bytes()))
    }
}

/// Measured times of one cluster on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Clusters of one class share a correction: the kind of cluster.
    pub class: String,
    /// The model's prediction without any measurement.
    pub analytic: Nanos,
    /// Number of measured runs.
    pub count: u64,
    /// Their sum.
    pub sum: Nanos,
    /// The smallest of them.
    pub min: Nanos,
    /// The latest, oldest first, at most [`MAX_RECENT`].
    pub recent: Vec<Nanos>,
}

/// Everything measured so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    samples: BTreeMap<(ProfileKey, u64), Sample>,
    /// `r` by device and class.
    ratios: BTreeMap<(ProfileKey, String), f64>,
}

impl Measured {
    /// True if nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// All samples, by device and signature.
    pub fn samples(&self) -> impl Iterator<Item = (&(ProfileKey, u64), &Sample)> {
        self.samples.iter()
    }

    /// Takes over samples unchanged; they replace samples with the same key.
    pub fn extend(&mut self, samples: impl IntoIterator<Item = ((ProfileKey, u64), Sample)>) {
        self.samples.extend(samples);
        self.ratios = ratios(&self.samples);
    }

    /// Adds the runs of other measurements.
    pub fn merge(&mut self, other: &Measured) {
        for (key, sample) in &other.samples {
            let empty = || Sample::new(sample.class.clone(), sample.analytic);
            let own = self.samples.entry(*key).or_insert_with(empty);
            own.merge(sample);
        }
        self.ratios = ratios(&self.samples);
    }

    /// Adds runs of nodes on a device: times by node. Nodes without a kernel of their own
    /// (constants, transfers, variables) are skipped.
    pub fn record<'g>(
        &mut self,
        profile: &DeviceProfile,
        runs: impl IntoIterator<Item = (&'g Graph, &'g Node, Nanos, Vec<Nanos>)>,
    ) {
        let key = ProfileKey::of(profile);
        for (g, node, analytic, times) in runs {
            let Some(class) = class(node) else { continue };
            let sample = self
                .samples
                .entry((key, signature(g, node)))
                .or_insert_with(|| Sample::new(class, analytic));
            times.into_iter().for_each(|t| sample.add(t));
        }
        self.samples.retain(|_, s| s.count > 0);
        self.ratios = ratios(&self.samples);
    }

    /// The time of a node on a device of which the model says `analytic`.
    pub fn estimate(
        &self,
        g: &Graph,
        node: &Node,
        profile: &DeviceProfile,
        analytic: Nanos,
    ) -> Nanos {
        let (Some(class), true) = (class(node), analytic.is_finite()) else {
            return analytic;
        };
        let key = ProfileKey::of(profile);
        let corrected = match self.ratios.get(&(key, class)) {
            Some(r) => Nanos((analytic.0 as f64 * r).round() as u64),
            None => analytic,
        };
        match self.samples.get(&(key, signature(g, node))) {
            Some(sample) => sample.joined_with(corrected),
            None => corrected,
        }
    }
}

impl Sample {
    /// Nothing measured yet.
    pub fn new(class: String, analytic: Nanos) -> Sample {
        Sample {
            class,
            analytic,
            count: 0,
            sum: Nanos::ZERO,
            min: Nanos::INFINITY,
            recent: Vec::new(),
        }
    }

    /// Adds a run.
    pub fn add(&mut self, time: Nanos) {
        self.merge(&Sample {
            count: 1,
            sum: time,
            min: time,
            recent: vec![time],
            ..Sample::new(String::new(), Nanos::ZERO)
        });
    }

    /// Adds later runs of the same cluster.
    fn merge(&mut self, later: &Sample) {
        self.count = self.count.saturating_add(later.count);
        self.sum += later.sum;
        self.min = self.min.min(later.min);
        self.recent.extend(&later.recent);
        let n_old = self.recent.len().saturating_sub(MAX_RECENT);
        self.recent.drain(..n_old);
    }

    /// Mean of this and [`PRIOR_RUNS`] times the model's prediction, in whole ns, rounded to the
    /// nearest.
    fn joined_with(&self, prior: Nanos) -> Nanos {
        let n = u128::from(PRIOR_RUNS) + u128::from(self.count);
        let sum = u128::from(PRIOR_RUNS) * u128::from(prior.0) + u128::from(self.sum.0);
        Nanos(u64::try_from((sum + n / 2) / n).unwrap_or(u64::MAX))
    }
}

/// The class of a node that has kernels of its own: kind of cluster, or name of the control flow.
fn class(node: &Node) -> Option<String> {
    match &node.op {
        Op::Cluster { kind, .. } => Some(format!("{kind:?}").to_lowercase()),
        Op::If | Op::Loop { .. } | Op::Scan { .. } => Some(node.op.name().to_owned()),
        _ => None,
    }
}

/// Geometric means of measured / analytic. Samples in order, so that sums of floats are the same on every run.
fn ratios(samples: &BTreeMap<(ProfileKey, u64), Sample>) -> BTreeMap<(ProfileKey, String), f64> {
    let mut logs: BTreeMap<(ProfileKey, String), (f64, u64)> = BTreeMap::new();
    for ((profile, _), s) in samples {
        let (mean, analytic) = (s.sum.0 as f64 / s.count.max(1) as f64, s.analytic.0 as f64);
        if s.count > 0 && mean > 0.0 && analytic > 0.0 {
            let (sum, n) = logs.entry((*profile, s.class.clone())).or_default();
            *sum += (mean / analytic).ln();
            *n += 1;
        }
    }
    logs.into_iter()
        .map(|(key, (sum, n))| (key, (sum / n as f64).exp()))
        .collect()
}
