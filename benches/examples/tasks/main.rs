//! Tasks of a cluster, each a process of this machine.
//!
//! - `tasks [N]`: tensors and steps between two tasks, beside plain TCP and beside two devices of one process; medians of N rounds (15), without
//!   keys and with them, in turn.
//! - `tasks steps [N]`: an empty step over 1 to 16 tasks, beside as many devices of one process; medians of N rounds (15).
//! - `tasks bert [N]`: BERT-base over two tasks, its first call and that of a second session, beside two devices of one process; medians of
//!   N rounds (3).

mod bert;
mod cluster;
mod rates;
mod steps;

use gristmill::Result;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let n = |i: usize, default| {
        let word = words.get(i);
        word.map_or(default, |n| n.parse().expect("a number of rounds"))
    };
    let done = match words.first().map(String::as_str) {
        Some("serve") => cluster::serve(&words[1..]),
        Some("steps") => steps::measure(n(1, 15)),
        Some("bert") if words.get(1).is_some_and(|word| word == "alone") => bert::alone(),
        Some("bert") => bert::measure(n(1, 3)),
        _ => rates::measure(n(0, 15)),
    };
    if let Err(e) = done {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

/// The middle value.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Ends the program at a failure of the machine, not of what is measured.
fn here<T>(done: std::io::Result<T>) -> Result<T> {
    done.map_err(|e| gristmill::Error::invalid(e.to_string()))
}
