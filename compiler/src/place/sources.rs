//! Origins of the predicted times of a placement: a reader weighs a prediction by them.

use super::{DeviceSet, Placement, RateSource};
use crate::cost::{CostModel, Evidence, Nanos};
use crate::ir::Graph;
use serde::Serialize;
use std::fmt;

/// Number of nodes whose predicted time is from each source. Nodes that take no time do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TimeSources {
    /// Measured on this device.
    pub measured: usize,
    /// By rates, corrected by measured times of similar nodes.
    pub corrected: usize,
    /// By rates that `gristmill calibrate` measured.
    pub calibrated: usize,
    /// By rates of a target file.
    pub target: usize,
    /// By assumed rates.
    pub assumed: usize,
}

impl TimeSources {
    fn count(&mut self, evidence: Evidence, rates: RateSource) {
        let number = match (evidence, rates) {
            (Evidence::Measured, _) => &mut self.measured,
            (Evidence::Similar, _) => &mut self.corrected,
            (Evidence::Rates, RateSource::Calibrated) => &mut self.calibrated,
            (Evidence::Rates, RateSource::Target) => &mut self.target,
            (Evidence::Rates, RateSource::Assumed) => &mut self.assumed,
        };
        *number += 1;
    }
}

impl fmt::Display for TimeSources {
    /// `12 measured, 3 by calibrated rates`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [
            (self.measured, "measured"),
            (self.corrected, "corrected by similar kernels"),
            (self.calibrated, "by calibrated rates"),
            (self.target, "by rates of the target file"),
            (self.assumed, "by assumed rates"),
        ];
        let some = all.iter().filter(|(n, _)| *n > 0);
        let parts: Vec<String> = some.map(|(n, what)| format!("{n} {what}")).collect();
        match parts.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&parts.join(", ")),
        }
    }
}

impl Placement {
    /// This placement of `g`, with the origins of its predicted times.
    pub(super) fn with_sources(self, g: &Graph, set: &DeviceSet, costs: &CostModel) -> Placement {
        let mut sources = TimeSources::default();
        for (id, node) in g.nodes() {
            let Some(device) = self.device_of(id).map(|d| &set.devices[d]) else {
                continue;
            };
            let (time, evidence) = costs.estimate(g, node, &device.profile);
            if time > Nanos::ZERO {
                sources.count(evidence, device.rates);
            }
        }
        Placement { sources, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_listed_in_words() {
        let mut sources = TimeSources::default();
        assert_eq!(sources.to_string(), "none");
        let assumed = RateSource::Assumed;
        for (evidence, rates) in [
            (Evidence::Measured, assumed),
            (Evidence::Measured, RateSource::Target),
            (Evidence::Similar, assumed),
            (Evidence::Rates, RateSource::Calibrated),
            (Evidence::Rates, RateSource::Target),
            (Evidence::Rates, assumed),
        ] {
            sources.count(evidence, rates);
        }
        insta::assert_snapshot!(sources, @"2 measured, 1 corrected by similar kernels, 1 by calibrated rates, 1 by rates of the target file, 1 by assumed rates");
    }
}
