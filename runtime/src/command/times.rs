//! Times of repeated runs.

use crate::units::{plural, time_ns};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Times of runs in ns.
pub struct Times {
    /// Time of each run, shortest first. There is at least one.
    pub sorted: Vec<u64>,
    /// From the start of the first run to the end of the last.
    pub total: u64,
}

impl Times {
    /// The time that a part `q` of the runs does not exceed.
    pub fn quantile(&self, q: f64) -> u64 {
        self.sorted[((self.sorted.len() - 1) as f64 * q).round() as usize]
    }

    /// Inferences per second.
    pub fn per_second(&self) -> f64 {
        self.sorted.len() as f64 * 1e9 / self.total.max(1) as f64
    }

    /// Time between the ends of two runs.
    pub fn period(&self) -> u64 {
        self.total / self.sorted.len() as u64
    }

    /// `p50 1.20 ms  p90 1.31 ms  p99 1.42 ms  min 1.18 ms  (1660 runs)`.
    pub fn text(&self) -> String {
        let [p50, p90, p99, min] = [0.5, 0.9, 0.99, 0.0].map(|q| time_ns(self.quantile(q)));
        let n_runs = plural(self.sorted.len(), "run");
        format!("p50 {p50}  p90 {p90}  p99 {p99}  min {min}  ({n_runs})")
    }
}

/// The end of a measurement, which its threads share.
pub struct Until {
    started: Instant,
    duration: Duration,
    /// Runs to make, whatever the time.
    count: Option<u64>,
    n_begun: AtomicU64,
}

impl Until {
    /// After a number of runs.
    pub fn count(n: u64) -> Until {
        Until {
            count: Some(n),
            ..Until::elapsed(Duration::ZERO)
        }
    }

    /// After a time.
    pub fn elapsed(duration: Duration) -> Until {
        Until {
            started: Instant::now(),
            duration,
            count: None,
            n_begun: AtomicU64::new(0),
        }
    }

    /// True when another run is to begin. The first is made even if the duration is zero.
    pub fn begins_another(&self) -> bool {
        let n_earlier = self.n_begun.fetch_add(1, Ordering::Relaxed);
        match self.count {
            Some(n) => n_earlier < n,
            None => n_earlier == 0 || self.started.elapsed() < self.duration,
        }
    }
}

/// Largest resident size of this process so far, where the system tells.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
