//! The work of others on this machine while it is measured, and rates that no machine has.

use super::Calibration;
use crate::error::{Error, Result};
use std::fs;

/// Share of the machine's cores that others may take while it is measured.
const MOST_LOAD: f64 = 0.1;
/// Largest gain of all threads per thread: caches and clocks may add something.
const MOST_GAIN: f64 = 1.3;
/// Least speed of all threads beside one.
const LEAST_GAIN: f64 = 0.8;
/// Longest start of a kernel, in nanoseconds: a hundred times that of idle machines.
const LONGEST_LAUNCH: u64 = 50_000;

/// Processor time so far, in ticks of the system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ticks {
    /// Of this process.
    own: u64,
    /// Of all processes, and the time that a hypervisor kept from this machine.
    busy: u64,
    /// Of all cores, idle ones included.
    all: u64,
}

impl Ticks {
    /// The ticks so far; `None` where the system does not tell.
    pub fn now() -> Option<Ticks> {
        let read = |path: &str| fs::read_to_string(path).ok();
        Ticks::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
    }

    /// From the texts of `/proc/stat` and `/proc/self/stat` (proc_stat(5), proc_pid_stat(5)).
    fn parse(machine: &str, process: &str) -> Option<Ticks> {
        let mut fields = machine.lines().next()?.split_ascii_whitespace();
        let ticks = fields
            .by_ref()
            .skip_while(|&f| f != "cpu")
            .skip(1)
            .map(|f| f.parse::<u64>().ok());
        // user nice system idle iowait irq softirq steal; the rest is part of user and nice.
        let [user, nice, system, idle, iowait, irq, softirq, steal] =
            ticks.take(8).collect::<Option<Vec<_>>>()?.try_into().ok()?;
        let busy = user + nice + system + irq + softirq + steal;
        // The name, in parentheses, may hold anything; user and system time are the 12th and 13th fields behind it.
        let (_, behind) = process.rsplit_once(')')?;
        let mut times = behind.split_ascii_whitespace().skip(11).map(str::parse);
        let mut time = || -> Option<u64> { times.next()?.ok() };
        Some(Ticks {
            own: time()? + time()?,
            busy,
            all: busy + idle + iowait,
        })
    }

    /// Share of the machine's cores that others took since.
    fn others_since(self, earlier: Ticks) -> f64 {
        let since = |f: fn(&Ticks) -> u64| f(&self).saturating_sub(f(&earlier));
        let others = since(|t| t.busy).saturating_sub(since(|t| t.own));
        others as f64 / since(|t| t.all).max(1) as f64
    }
}

/// Errors when others took much of the machine's cores since `earlier`. Systems that do not tell count as idle.
pub fn check_idle(earlier: Option<Ticks>) -> Result<()> {
    let others = match (Ticks::now(), earlier) {
        (Some(now), Some(earlier)) => now.others_since(earlier),
        _ => 0.0,
    };
    if others <= MOST_LOAD {
        return Ok(());
    }
    Err(refused(format!(
        "other work took {:.0} % of the cores while this machine was measured, at most {:.0} % are allowed",
        others * 100.0,
        MOST_LOAD * 100.0
    )))
}

/// Measurements before one that contradicts itself is refused.
const ATTEMPTS: usize = 3;

/// The first measurement without a contradiction ([`Calibration::check`]).
///
/// Errors of `measure` end it; the contradiction of the last of [`ATTEMPTS`] measurements is its
/// error. A thread that the system moves between cores spoils one measurement of several on idle
/// machines as well.
pub fn consistent(mut measure: impl FnMut() -> Result<Calibration>) -> Result<Calibration> {
    for _ in 1..ATTEMPTS {
        let made = measure()?;
        if made.check().is_ok() {
            return Ok(made);
        }
    }
    let last = measure()?;
    last.check()?;
    Ok(last)
}

impl Calibration {
    /// Errors for rates that no machine has, the sign of disturbed measurements.
    pub fn check(&self) -> Result<()> {
        let (one, all) = (&self.one, &self.all);
        for (n, p) in [(one.n_threads, one), (all.n_threads, all)] {
            let (cache, memory) = (p.cache_bandwidth, p.memory_bandwidth);
            if cache < memory * LEAST_GAIN {
                let rates = format!("{:.1} GB/s and memory {:.1}", cache / 1e9, memory / 1e9);
                return Err(refused(format!("on {n} threads caches gave {rates}")));
            }
            if p.launch.0 > LONGEST_LAUNCH {
                let micros = p.launch.0 / 1000;
                return Err(refused(format!(
                    "on {n} threads a kernel took {micros} us to start"
                )));
            }
        }
        let per_thread = all.n_threads as f64 / one.n_threads.max(1) as f64;
        let gain = all.flops_f32 / one.flops_f32;
        if (LEAST_GAIN..=MOST_GAIN * per_thread).contains(&gain) {
            return Ok(());
        }
        Err(refused(format!(
            "{} threads multiplied {gain:.2} times as fast as {}",
            all.n_threads, one.n_threads
        )))
    }
}

fn refused(why: String) -> Error {
    Error::invalid(format!("{why}: nothing is kept"))
        .hint("calibrate again when the machine is idle")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{DeviceProfile, LinkProfile, Nanos};
    use gristmill_kernels::Isa;

    const PROCESS: &str = "7 (a) name) S 1 7 7 0 -1 4194560 1 0 0 0 30 12 0 0 20 0 1 0 9";

    #[test]
    fn the_work_of_others_is_seen() {
        let at = |machine: &str, process: &str| Ticks::parse(machine, process).unwrap();
        let earlier = at("cpu  100 0 10 400 0 0 0 5 0 0\ncpu0 1", PROCESS);
        assert_eq!(
            earlier,
            Ticks {
                own: 42,
                busy: 115,
                all: 515
            }
        );
        let process = PROCESS.replace("30 12", "110 32");
        let idle = at("cpu  180 0 30 500 0 0 0 5 0 0", &process);
        assert_eq!(idle.others_since(earlier), 0.0);
        let stolen = at("cpu  180 0 30 440 0 0 0 65 0 0", &process);
        assert_eq!(stolen.others_since(earlier), 60.0 / 200.0);
        for broken in ["", "cpu 1 2 3", "cpu a b c d e f g h"] {
            assert_eq!(Ticks::parse(broken, PROCESS), None);
        }
        assert_eq!(Ticks::parse("cpu  100 0 10 400 0 0 0 5 0 0", "7 (a"), None);
        if cfg!(target_os = "linux") {
            assert!(Ticks::now().is_some());
        }
    }

    fn good() -> Calibration {
        Calibration {
            name: String::new(),
            one: DeviceProfile::cpu(Isa::Avx2, 1),
            all: DeviceProfile::cpu(Isa::Avx2, 4),
            link: LinkProfile::IN_PROCESS,
        }
    }

    #[test]
    fn measurements_that_contradict_themselves_are_repeated() {
        let mut bad = good();
        bad.all.launch = Nanos(80_000);
        let measured = |n_bad: usize| {
            let mut n = 0;
            let result = consistent(|| {
                n += 1;
                Ok(if n <= n_bad { bad.clone() } else { good() })
            });
            (n, result.map_err(|e| e.to_string().contains("80 us")))
        };
        assert_eq!(measured(0), (1, Ok(good())));
        assert_eq!(measured(2), (3, Ok(good())));
        assert_eq!(measured(3), (3, Err(true)));
    }

    #[test]
    fn rates_that_no_machine_has_are_refused() {
        let good = good();
        good.check().unwrap();
        let mut bad = [good.clone(), good.clone(), good.clone(), good.clone()];
        bad[0].all.flops_f32 = good.one.flops_f32 * 0.5;
        bad[1].all.flops_f32 = good.one.flops_f32 * 9.0;
        bad[2].one.cache_bandwidth = good.one.memory_bandwidth * 0.5;
        bad[3].all.launch = Nanos(80_000);
        for (b, part) in bad
            .iter()
            .zip(["0.50 times", "9.00 times", "caches gave", "80 us"])
        {
            let message = b.check().unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
