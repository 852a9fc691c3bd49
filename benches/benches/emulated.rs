//! Predicted against measured makespan on emulated devices: the placer's simulator against the real executor and rendezvous.
//!
//! `cargo bench -p gristmill-benches --bench emulated -- [PLACEMENTS [RUNS [DIVISOR]]]`: random
//! placements per graph (12), runs of each (9), and a divisor of all times (1).
//!
//! A machine that is busy with other work wakes kernels too late, so that they overrun their known
//! lengths. Placements take turns, so that a busy moment does not hit all runs of one. Of the runs of
//! each, only the third with the smallest overrun counts, whatever their makespans; the median of
//! these is the measured makespan. The table shows the overrun that is left on the most disturbed
//! device, in percent of the makespan.

use gristmill::cost::Nanos;
use gristmill::testing::Rng;
use gristmill::testing::emulate::Emulator;
use gristmill_benches::placed::{problem, random_placement, structures};
use gristmill_solver::schedule::ranks::{keys_of, placed_tails};
use gristmill_solver::{LinkOrder, Problem, Timeline, simulate};

/// Extent of the measurements.
struct Effort {
    placements: usize,
    runs: usize,
    divisor: u64,
}

/// A placement with its runs.
struct Case<'p> {
    p: &'p Problem,
    emulator: Emulator,
    timeline: Timeline,
    /// Makespan for links that take the most urgent tensor first, as the placer has it.
    urgent: Nanos,
    /// Overrun and makespan of each run.
    runs: Vec<(Nanos, Nanos)>,
}

/// Makespans of a placement.
struct Row {
    predicted: Nanos,
    /// See [`Case::urgent`].
    urgent: Nanos,
    /// Median of the least disturbed runs.
    measured: Nanos,
    /// Mean overrun of kernels in these.
    overrun: Nanos,
    n_transfers: usize,
}

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let in_earnest = std::env::args().any(|a| a == "--bench");
    let defaults = if in_earnest { [12, 9, 1] } else { [1, 1, 10] };
    let number = |i: usize| numbers.get(i).copied().unwrap_or(defaults[i]).max(1);
    study(&Effort {
        placements: number(0),
        runs: number(1),
        divisor: number(2) as u64,
    });
}

fn study(effort: &Effort) {
    let mut rng = Rng(1);
    let structures = structures(&mut rng);
    let problems: Vec<(String, Problem)> = structures
        .into_iter()
        .enumerate()
        .map(|(i, (name, n_tasks, edges))| {
            let n_devices = 2 + i % 3;
            let p = problem(&mut rng, n_tasks, &edges, n_devices, effort.divisor);
            (format!("{name} | {n_tasks} | {n_devices}"), p)
        })
        .collect();
    let mut cases: Vec<Vec<Case<'_>>> = problems
        .iter()
        .map(|(_, p)| {
            (0..effort.placements)
                .map(|_| Case::new(p, &random_placement(&mut rng, p)))
                .collect()
        })
        .collect();
    for _ in 0..effort.runs {
        cases.iter_mut().flatten().for_each(Case::run);
    }
    println!(
        "| graph | tasks | devices | placements | transfers | ms | overrun % | mean abs. error % | bias % | greatest % | Spearman | urgent links: error % | Spearman |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let rows: Vec<Vec<Row>> = cases
        .into_iter()
        .map(|c| c.into_iter().map(Case::row).collect())
        .collect();
    problems
        .iter()
        .zip(&rows)
        .for_each(|((label, _), rows)| report(label, rows));
    report("all | |", &rows.into_iter().flatten().collect::<Vec<_>>());
}

impl<'p> Case<'p> {
    fn new(p: &'p Problem, device: &[u32]) -> Case<'p> {
        let keys = keys_of(p, &placed_tails(p, device));
        let timeline = simulate(p, device, &keys, LinkOrder::Fifo);
        let urgent = simulate(p, device, &keys, LinkOrder::Urgent).makespan;
        let emulator =
            Emulator::new(p, &timeline).expect("a timeline of the simulator is a program");
        Case {
            p,
            emulator,
            timeline,
            urgent,
            runs: Vec::new(),
        }
    }

    fn run(&mut self) {
        let run = self.emulator.run().expect("waiting does not fail");
        self.runs.push((overrun(self.p, &run), run.makespan));
    }

    fn row(mut self) -> Row {
        self.runs.sort_unstable();
        self.runs.truncate(self.runs.len().div_ceil(3));
        let overrun = Nanos(self.runs.iter().map(|r| r.0.0).sum::<u64>() / self.runs.len() as u64);
        let mut makespans: Vec<Nanos> = self.runs.iter().map(|r| r.1).collect();
        makespans.sort_unstable();
        let (predicted, n_transfers) = (self.timeline.makespan, self.timeline.transfers.len());
        Row {
            predicted,
            urgent: self.urgent,
            measured: makespans[makespans.len() / 2],
            overrun,
            n_transfers,
        }
    }
}

/// Overrun of kernels over the lengths of their tasks, on the device where it is largest.
fn overrun(p: &Problem, run: &Timeline) -> Nanos {
    let mut by_device = vec![Nanos::ZERO; p.n_devices()];
    for t in 0..p.n_tasks() {
        let length = run.end[t].saturating_sub(run.start[t]);
        by_device[run.device[t] as usize] +=
            length.saturating_sub(p.cost(t, run.device[t] as usize));
    }
    by_device.into_iter().max().unwrap_or_default()
}

fn report(label: &str, rows: &[Row]) {
    let placer = Fidelity::of(rows, |r| r.predicted);
    let urgent = Fidelity::of(rows, |r| r.urgent);
    let measured = rows.iter().map(|r| r.measured);
    let (shortest, longest) = (measured.clone().min(), measured.max());
    let ms = |t: Option<Nanos>| t.unwrap_or_default().0 as f64 / 1e6;
    let range = format!("{:.1} to {:.1}", ms(shortest), ms(longest));
    let n_transfers = rows.iter().map(|r| r.n_transfers).sum::<usize>() / rows.len();
    let bias = mean_percent(rows, |r| r.measured.0 as f64 - r.predicted.0 as f64);
    let overrun = mean_percent(rows, |r| r.overrun.0 as f64);
    println!(
        "| {label} | {} | {n_transfers} | {range} | {overrun:.2} | {:.2} | {bias:+.2} | {:.2} | {:.3} | {:.2} | {:.3} |",
        rows.len(),
        placer.mean_error,
        placer.largest_error,
        placer.spearman,
        urgent.mean_error,
        urgent.spearman
    );
}

/// Mean of times in percent of the measured makespan.
fn mean_percent(rows: &[Row], of: impl Fn(&Row) -> f64) -> f64 {
    let percent = |r: &Row| 100.0 * of(r) / r.measured.0 as f64;
    rows.iter().map(percent).sum::<f64>() / rows.len() as f64
}

/// Predicted against measured makespans; errors in percent of the measured ones.
struct Fidelity {
    mean_error: f64,
    largest_error: f64,
    spearman: f64,
}

impl Fidelity {
    fn of(rows: &[Row], predicted: fn(&Row) -> Nanos) -> Fidelity {
        let measured: Vec<f64> = rows.iter().map(|r| r.measured.0 as f64).collect();
        let predicted: Vec<f64> = rows.iter().map(|r| predicted(r).0 as f64).collect();
        let pairs = predicted.iter().zip(&measured);
        let errors: Vec<f64> = pairs.map(|(p, m)| 100.0 * (p - m).abs() / m).collect();
        Fidelity {
            mean_error: errors.iter().sum::<f64>() / errors.len() as f64,
            largest_error: errors.iter().copied().fold(0.0, f64::max),
            spearman: pearson(&ranks(&predicted), &ranks(&measured)),
        }
    }
}

/// Rank of each value; equal ones share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let rank = |v: &f64| {
        let (below, equal) = (
            values.iter().filter(|w| *w < v).count(),
            values.iter().filter(|w| *w == v).count(),
        );
        below as f64 + (equal - 1) as f64 / 2.0
    };
    values.iter().map(rank).collect()
}

/// Correlation; 1 when either side is constant.
fn pearson(a: &[f64], b: &[f64]) -> f64 {
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let sum = |f: &dyn Fn(f64, f64) -> f64| {
        a.iter()
            .zip(b)
            .map(|(x, y)| f(x - mean_a, y - mean_b))
            .sum::<f64>()
    };
    let norm = (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt();
    if norm == 0.0 {
        1.0
    } else {
        sum(&|x, y| x * y) / norm
    }
}
