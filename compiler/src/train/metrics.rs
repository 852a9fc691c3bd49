//! Means of losses and metrics.

use std::fmt;

/// Means over examples by name: `loss`, then the metrics of an [`Objective`](super::Objective).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    sums: Vec<(String, f64)>,
    n: u64,
}

impl Metrics {
    /// From sums over `n` examples.
    pub(super) fn of_sums(sums: Vec<(String, f64)>, n: u64) -> Metrics {
        Metrics { sums, n }
    }

    /// Sums over the examples.
    pub(super) fn sums(&self) -> &[(String, f64)] {
        &self.sums
    }

    /// Adds the means of a batch of `n` examples.
    pub(super) fn add<'a>(&mut self, n: usize, means: impl Iterator<Item = (&'a str, f64)>) {
        for (name, mean) in means {
            let sum = mean * n as f64;
            match self.sums.iter_mut().find(|(own, _)| own == name) {
                Some((_, own)) => *own += sum,
                None => self.sums.push((name.to_owned(), sum)),
            }
        }
        self.n += n as u64;
    }

    /// Number of examples.
    pub fn n_examples(&self) -> u64 {
        self.n
    }

    /// The mean loss; NaN without examples.
    pub fn loss(&self) -> f64 {
        self.get("loss").unwrap_or(f64::NAN)
    }

    /// The mean of a name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.iter().find(|(own, _)| *own == name).map(|(_, m)| m)
    }

    /// Names and means: the loss first.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        let n = self.n.max(1) as f64;
        let sums = self.sums.iter();
        sums.map(move |(name, sum)| (name.as_str(), sum / n))
    }
}

/// `loss 0.4321, accuracy 0.9120`.
impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, mean)) in self.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{name} {mean:.4}")?;
        }
        Ok(())
    }
}
