//! Times of repeated runs.

use crate::args::Args;
use crate::json::Json;
use crate::print_json;
use crate::run::{Ready, explain};
use gristmill_runtime::command::output;
use gristmill_runtime::command::times::{Times, Until, peak_rss_bytes};
use gristmill_runtime::units::{size, time_ns};
use gristmill_runtime::{Error, Tensor};
use std::time::{Duration, Instant};

/// Time to measure, after a warm-up of a tenth of it.
const DURATION: Duration = Duration::from_secs(2);

/// Times repeated runs, one after the other.
pub fn bench(args: &Args) -> Result<(), Error> {
    let ready = Ready::of(args)?;
    let mut outputs = ready.run()?;
    measured(&ready, &mut outputs, DURATION / 10)?;
    let times = measured(&ready, &mut outputs, DURATION)?;
    let rss = peak_rss_bytes();
    if args.json {
        print_json("bench", to_json(&ready, &times, rss));
        return Ok(());
    }
    output::text(&format!("opened in {}", time_ns(ready.open_ns)));
    output::text(&times.text());
    let rss = rss.map_or("unknown".into(), size);
    output::text(&format!("peak memory {rss}"));
    Ok(())
}

fn measured(ready: &Ready, outputs: &mut [Tensor], duration: Duration) -> Result<Times, Error> {
    let started = Instant::now();
    let until = Until::elapsed(duration);
    let mut sorted = Vec::new();
    while until.begins_another() {
        let started = Instant::now();
        let ran = ready.executor.run_into(&ready.inputs, outputs);
        ran.map_err(explain)?;
        sorted.push(started.elapsed().as_nanos() as u64);
    }
    let total = started.elapsed().as_nanos() as u64;
    sorted.sort_unstable();
    Ok(Times { sorted, total })
}

fn to_json(ready: &Ready, times: &Times, rss: Option<u64>) -> Vec<(String, Json)> {
    let members = [
        ("p50_ns", Json::from(times.quantile(0.5))),
        ("p90_ns", times.quantile(0.9).into()),
        ("p99_ns", times.quantile(0.99).into()),
        ("min_ns", times.sorted[0].into()),
        ("iters", times.sorted.len().into()),
        ("in_flight", 1usize.into()),
        ("inferences_per_s", times.per_second().into()),
        ("period_ns", times.period().into()),
        ("load_ns", ready.open_ns.into()),
        ("peak_rss_bytes", rss.into()),
    ];
    members.map(|(name, value)| (name.to_owned(), value)).into()
}
