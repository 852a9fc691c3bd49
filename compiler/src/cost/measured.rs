//! Measured times of clusters, and the estimates that follow from them.
//!
//! A cluster is known by its [`signature`]: its computation, regardless of position and name. Its
//! device is known by the profile that predicts it, threads included.
//!
//! - A measured cluster: the mean of its times and of [`PRIOR_RUNS`] predictions, which count as at
//!   most [`MAX_FACTOR`] away from the measured mean.
//! - Other clusters: the prediction, corrected by *similar* measured clusters. Those have the same
//!   kind and the same limiting rate (class and dtype of the arithmetic, or memory), a predicted
//!   time within [`MAX_SIZE_RATIO`], and take much longer than a launch. At least [`LEAST_SIMILAR`]
//!   must agree within [`MAX_SPREAD`], and the correction is at most [`MAX_FACTOR`]. Kernels of
//!   microseconds once corrected the convolutions of ResNet-50 to a tenth of their time.

use super::Nanos;
use super::{CostModel, DeviceProfile, signature};
use crate::ir::{Graph, Node, Op};
use std::collections::BTreeMap;

/// Weight of the prediction of a measured cluster, in runs.
pub const PRIOR_RUNS: u64 = 2;
/// Largest correction of a prediction, up or down.
pub const MAX_FACTOR: f64 = 2.0;
/// Largest ratio of predicted times of similar clusters.
pub const MAX_SIZE_RATIO: f64 = 2.0;
/// Least predicted time of similar clusters, in launches: shorter ones measure the launch.
const LEAST_LAUNCHES: u64 = 8;
/// Least number of similar clusters that correct another.
pub const LEAST_SIMILAR: usize = 3;
/// Largest ratio between the corrections that similar clusters ask for.
pub const MAX_SPREAD: f64 = 4.0;
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
    /// The kind of cluster and its limiting rate: `contraction matmul f32`.
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
    /// Clusters by device and class.
    classes: BTreeMap<(ProfileKey, String), Vec<Ratio>>,
}

/// A measured cluster: its predicted time in ns, and measured / predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio {
    analytic: u64,
    ratio: f64,
}

/// The origin of an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// Times of the cluster itself.
    Measured,
    /// Rates, corrected by times of similar clusters.
    Similar,
    /// Rates alone.
    Rates,
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
        self.classes = classes(&self.samples);
    }

    /// Adds the runs of other measurements.
    pub fn merge(&mut self, other: &Measured) {
        for (key, sample) in &other.samples {
            let empty = || Sample::new(sample.class.clone(), sample.analytic);
            let own = self.samples.entry(*key).or_insert_with(empty);
            own.merge(sample);
        }
        self.classes = classes(&self.samples);
    }

    /// Adds runs of nodes on a device: times by node. Nodes without a kernel of their own
    /// (constants, transfers, variables) are skipped.
    pub fn record<'g>(
        &mut self,
        costs: &CostModel,
        profile: &DeviceProfile,
        runs: impl IntoIterator<Item = (&'g Graph, &'g Node, Vec<Nanos>)>,
    ) {
        let key = ProfileKey::of(profile);
        for (g, node, times) in runs {
            let Some(class) = class(costs, g, node, profile) else {
                continue;
            };
            let empty = || Sample::new(class, costs.analytic_ns(g, node, profile));
            let sample = self.samples.entry((key, signature(g, node)));
            let sample = sample.or_insert_with(empty);
            times.into_iter().for_each(|t| sample.add(t));
        }
        self.samples.retain(|_, s| s.count > 0);
        self.classes = classes(&self.samples);
    }

    /// The time of a node on a device of which the model says `analytic`, and its origin.
    pub fn estimate(
        &self,
        costs: &CostModel,
        (g, node): (&Graph, &Node),
        profile: &DeviceProfile,
        analytic: Nanos,
    ) -> (Nanos, Evidence) {
        if !has_kernels(node) || !analytic.is_finite() {
            return (analytic, Evidence::Rates);
        }
        let key = ProfileKey::of(profile);
        if let Some(sample) = self.samples.get(&(key, signature(g, node))) {
            return (sample.joined_with(analytic), Evidence::Measured);
        }
        let class = class(costs, g, node, profile).filter(|_| is_cluster(node));
        let like = class.and_then(|class| self.classes.get(&(key, class)));
        match like.and_then(|like| factor(like, analytic, profile.launch)) {
            Some(factor) => (scaled(analytic, factor), Evidence::Similar),
            None => (analytic, Evidence::Rates),
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
    fn joined_with(&self, predicted: Nanos) -> Nanos {
        let mean = self.mean();
        let (low, high) = (scaled(mean, MAX_FACTOR.recip()), scaled(mean, MAX_FACTOR));
        let prior = predicted.clamp(low, high);
        let n = u128::from(PRIOR_RUNS) + u128::from(self.count);
        let sum = u128::from(PRIOR_RUNS) * u128::from(prior.0) + u128::from(self.sum.0);
        Nanos(u64::try_from((sum + n / 2) / n).unwrap_or(u64::MAX))
    }

    fn mean(&self) -> Nanos {
        Nanos(self.sum.0 / self.count.max(1))
    }
}

fn scaled(time: Nanos, factor: f64) -> Nanos {
    Nanos((time.0 as f64 * factor).round() as u64)
}

fn is_cluster(node: &Node) -> bool {
    matches!(node.op, Op::Cluster { .. })
}

/// True for a node that kernels of its own run.
fn has_kernels(node: &Node) -> bool {
    is_cluster(node) || matches!(node.op, Op::If | Op::Loop { .. } | Op::Scan { .. })
}

/// The class of a node that has kernels of its own: kind of cluster and limiting rate, or name of
/// the control flow.
pub(crate) fn class(
    costs: &CostModel,
    g: &Graph,
    node: &Node,
    profile: &DeviceProfile,
) -> Option<String> {
    match &node.op {
        Op::Cluster { kind, .. } => {
            let kind = format!("{kind:?}").to_lowercase();
            Some(format!("{kind} {}", costs.limiting_rate(g, node, profile)))
        }
        _ if has_kernels(node) => Some(node.op.name().to_owned()),
        _ => None,
    }
}

/// Measured clusters by device and class, in order of their keys, so that sums of floats are the
/// same on every run.
fn classes(
    samples: &BTreeMap<(ProfileKey, u64), Sample>,
) -> BTreeMap<(ProfileKey, String), Vec<Ratio>> {
    let mut classes: BTreeMap<(ProfileKey, String), Vec<Ratio>> = BTreeMap::new();
    for ((profile, _), s) in samples {
        let (mean, analytic) = (s.mean().0, s.analytic.0);
        if mean > 0 && analytic > 0 {
            let class = classes.entry((*profile, s.class.clone())).or_default();
            let ratio = mean as f64 / analytic as f64;
            class.push(Ratio { analytic, ratio });
        }
    }
    classes
}

/// Correction of a prediction by the similar clusters of a class; none where they are few, or
/// disagree. The prediction itself counts as [`PRIOR_RUNS`] clusters.
fn factor(class: &[Ratio], analytic: Nanos, launch: Nanos) -> Option<f64> {
    let least = launch.times(LEAST_LAUNCHES).0;
    let (low, high) = (
        scaled(analytic, MAX_SIZE_RATIO.recip()).0.max(least),
        scaled(analytic, MAX_SIZE_RATIO).0,
    );
    let is_similar = |r: &&Ratio| (low..=high).contains(&r.analytic);
    let ratios = || class.iter().filter(is_similar).map(|r| r.ratio);
    let n = ratios().count();
    let (smallest, largest) = ratios().fold((f64::INFINITY, 0.0), |(smallest, largest), r| {
        (r.min(smallest), r.max(largest))
    });
    if n < LEAST_SIMILAR || largest > smallest * MAX_SPREAD {
        return None;
    }
    let sum: f64 = ratios().map(f64::ln).sum();
    let mean = (sum / (n as f64 + PRIOR_RUNS as f64)).exp();
    Some(mean.clamp(MAX_FACTOR.recip(), MAX_FACTOR))
}
