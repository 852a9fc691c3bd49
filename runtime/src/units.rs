//! Numbers and names for people: times with units, sizes in binary units, names that stay on their line.

pub use crate::printable::printable;

/// `3.81 ms`, `412 ns`, `1.20 s`.
pub fn time_ns(ns: u64) -> String {
    scaled(ns as f64, 1000.0, &["ns", "us", "ms", "s"])
}

/// `97.8 MiB`, `512 B`.
pub fn size(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Three significant digits and the largest unit that leaves at least 1.
fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {}", units[unit])
}

/// `1 node`, `2 nodes`.
pub fn plural(n: usize, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {noun}{s}")
}

/// `25,557,032`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let times: Vec<String> = [412, 3_810_000, 1_200_000_000, 15_300]
            .map(time_ns)
            .to_vec();
        assert_eq!(times, ["412 ns", "3.81 ms", "1.20 s", "15.3 us"]);
        assert_eq!(size(102_550_000), "97.8 MiB");
        assert_eq!(
            (count(25_557_032), count(7)),
            ("25,557,032".into(), "7".into())
        );
    }
}
