//! Values of flags: pairs, sizes of memory and of dims, times, numbers.

use gristmill::ir::MAX_DIM_SIZE;
use gristmill::{DimRange, Precision};
use gristmill::{Error, Result};
use std::num::IntErrorKind;
use std::time::Duration;

/// Splits at the last `=`, since regular expressions may contain one.
pub fn pair<'a>(text: &'a str, flag: &str, form: &str) -> Result<(&'a str, &'a str)> {
    text.rsplit_once('=')
        .filter(|(a, b)| !a.is_empty() && !b.is_empty())
        .ok_or_else(|| Error::invalid(format!("{flag} {text:?}: expected {form}")))
}

/// A size of a dim.
pub fn dim_size(text: &str) -> Result<usize> {
    match text.parse::<usize>() {
        Ok(size) if size <= MAX_DIM_SIZE => Ok(size),
        Err(e) if *e.kind() != IntErrorKind::PosOverflow => {
            Err(Error::invalid(format!("{text:?} is not a size"))
                .hint("a whole number, as in batch=8"))
        }
        _ => Err(Error::invalid(format!(
            "{text} is too large, sizes go up to {MAX_DIM_SIZE}"
        ))),
    }
}

/// `1..64`.
pub fn dim_range((min, max): (&str, &str)) -> Result<DimRange> {
    Ok(DimRange {
        min: dim_size(min)?,
        max: dim_size(max)?,
    })
}

/// Far more than any device has, and few enough to be exact as a floating-point number.
const MAX_BYTES: f64 = (1u64 << 52) as f64;

/// `512MiB`, `1.5GiB`, `1000000`.
pub fn bytes(text: &str) -> Result<u64> {
    let (number, unit) = number_and_unit(text);
    let factor = match unit.trim() {
        "" | "B" => Some(1),
        "KiB" | "K" => Some(1 << 10),
        "MiB" | "M" => Some(1 << 20),
        "GiB" | "G" => Some(1 << 30),
        _ => None,
    };
    factor
        .and_then(|factor| whole_bytes(number, factor).or_else(|| part_bytes(number, factor)))
        .ok_or_else(|| {
            Error::invalid(format!(
                "size {text:?}: expected a form like 512MiB, 1.5GiB or a number of bytes"
            ))
        })
}

fn whole_bytes(number: &str, factor: u64) -> Option<u64> {
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Parts of a unit, rounded down to whole bytes. There are no parts of a byte.
fn part_bytes(number: &str, factor: u64) -> Option<u64> {
    let bytes = number.parse::<f64>().ok()? * factor as f64;
    (factor > 1 && bytes < MAX_BYTES).then_some(bytes as u64)
}

/// `40%`, as 0.4. `None` without a percent sign.
pub fn share(text: &str) -> Option<Result<f64>> {
    let percent = text.strip_suffix('%')?.trim().parse::<f64>().ok();
    let valid = percent.filter(|p| *p > 0.0 && *p <= 100.0);
    Some(valid.map(|p| p / 100.0).ok_or_else(|| {
        Error::invalid(format!(
            "{text:?} is not a share; expected more than 0% and at most 100%"
        ))
    }))
}

/// `10s`, `1.5s`, `250ms`, `2m`.
pub fn time(text: &str) -> Result<Duration> {
    let (number, unit) = number_and_unit(text);
    let seconds = match unit {
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        "m" | "min" => Some(60.0),
        _ => None,
    };
    let total = number.parse::<f64>().ok().zip(seconds);
    total
        .and_then(|(n, s)| Duration::try_from_secs_f64(n * s).ok())
        .ok_or_else(|| {
            Error::invalid(format!(
                "{text:?} is not a time; expected a form like 10s, 250ms or 2m"
            ))
        })
}

/// Digits with their point, and the rest.
fn number_and_unit(text: &str) -> (&str, &str) {
    let is_digit = |c: char| c.is_ascii_digit() || c == '.';
    text.split_at(text.find(|c| !is_digit(c)).unwrap_or(text.len()))
}

/// `--precision`.
pub fn precision(text: &str) -> Result<Precision> {
    let found = Precision::NAMES.iter().find(|(name, _)| *name == text);
    found.map(|(_, precision)| *precision).ok_or_else(|| {
        let names = Precision::NAMES.map(|(name, _)| name).join(", ");
        Error::invalid(format!("--precision {text:?}: expected one of {names}"))
    })
}

/// `--rtol` and `--atol`.
pub fn tolerance(text: &str) -> Result<f64, String> {
    finite(text)
        .filter(|v| *v >= 0.0)
        .ok_or_else(|| "expected a finite number, at least 0".to_owned())
}

/// Longest `--duration`: times of all runs are held in memory.
const MAX_SECONDS: f64 = 3600.0;

/// `--duration`, in seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    finite(text)
        .filter(|v| (0.0..=MAX_SECONDS).contains(v))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("expected seconds from 0 to {MAX_SECONDS}"))
}

fn finite(text: &str) -> Option<f64> {
    text.parse::<f64>().ok().filter(|v| v.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memory() {
        assert_eq!(bytes("4GiB").unwrap(), 4 << 30);
        assert_eq!(bytes("1.5KiB").unwrap(), 1536);
        let wrong = [
            "1.5",
            "1.2.3GiB",
            ".",
            "1e3GiB",
            "-1GiB",
            "1.5B",
            "9999999999.5GiB",
            "40%",
            "",
            "99999999999999GiB",
        ];
        for text in wrong {
            assert!(bytes(text).is_err(), "{text}");
        }
        assert_eq!(share("40%").unwrap().unwrap(), 0.4);
        assert!(share("40").is_none() && share("0%").unwrap().is_err());
        assert!(share("nan%").unwrap().is_err() && share("101%").unwrap().is_err());
    }

    #[test]
    fn times() {
        assert_eq!(time("1.5s").unwrap(), Duration::from_millis(1500));
        assert_eq!(time("250ms").unwrap(), Duration::from_millis(250));
        for wrong in ["", "s", "10", "10 s", "-1s", "1e99s", "1.2.3s", "10h"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn pairs_split_at_the_last_equals_sign() {
        assert_eq!(pair("a=b=cpu:0", "--pin", "").unwrap(), ("a=b", "cpu:0"));
        assert!(pair("cpu:0", "--pin", "").is_err());
    }

    #[test]
    fn sizes_of_dims_are_bounded() {
        assert_eq!(dim_size("8").unwrap(), 8);
        assert_eq!(dim_size(&MAX_DIM_SIZE.to_string()).unwrap(), MAX_DIM_SIZE);
        for large in [u64::MAX.to_string(), format!("{}0", u64::MAX)] {
            let e = dim_size(&large).unwrap_err().to_string();
            assert!(e.contains("too large"), "{e}");
        }
        for wrong in ["", "-1", "1.5", "many"] {
            let e = dim_size(wrong).unwrap_err().to_string();
            assert!(e.contains("is not a size"), "{e}");
        }
    }

    #[test]
    fn tolerances_and_durations_are_finite_and_not_negative() {
        assert_eq!(tolerance("1e-3"), Ok(1e-3));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["nan", "-1e-3", "inf", "1e400", "x"] {
            assert!(
                tolerance(wrong).is_err() && seconds(wrong).is_err(),
                "{wrong}"
            );
        }
    }
}
