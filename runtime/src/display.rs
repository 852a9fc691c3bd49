//! Tensors as text, as `print(array)` of NumPy shows them: aligned columns, at most 8 digits after the point, three items at either end of
//! long axes once there are more than 1000 elements, lines of at most 75 characters.

use crate::dtype::DType;
use crate::float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};
use crate::tensor::Tensor;
use std::fmt;

/// Tensors with more elements are shortened.
const THRESHOLD: usize = 1000;
/// Items kept at either end of a shortened axis.
const EDGE_ITEMS: usize = 3;
/// Longest line.
const LINE_WIDTH: usize = 75;
/// Most digits after the point.
const PRECISION: usize = 8;

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("[]");
        }
        let shown = shown_indices(self.shape(), self.len() > THRESHOLD);
        let words = words(self, &shown);
        if self.shape().is_empty() {
            return f.write_str(&words[0]);
        }
        let mut layout = Layout {
            words: words.into_iter(),
            shortened: self.len() > THRESHOLD,
        };
        f.write_str(&layout.axis(self.shape(), 1, LINE_WIDTH))
    }
}

/// Row-major positions of the elements that are shown.
fn shown_indices(shape: &[usize], shortened: bool) -> Vec<usize> {
    shape.iter().fold(vec![0], |outer, &n| {
        let visible: Vec<usize> = (0..n)
            .filter(|i| {
                !shortened || n <= 2 * EDGE_ITEMS || *i < EDGE_ITEMS || *i + EDGE_ITEMS >= n
            })
            .collect();
        outer
            .iter()
            .flat_map(|o| visible.iter().map(move |i| o * n + i))
            .collect()
    })
}

/// Text of each shown element, all of one width.
fn words(tensor: &Tensor, shown: &[usize]) -> Vec<String> {
    macro_rules! integers {
        ($($variant:ident $ty:ty),*) => {
            match tensor.dtype() {
                $(DType::$variant => pad_left(shown.iter().map(|&i| tensor.as_slice::<$ty>()[i].to_string()).collect()),)*
                DType::Bool => {
                    let text = |&i: &usize| if tensor.as_slice::<bool>()[i] { "True" } else { "False" };
                    let width = if tensor.shape().is_empty() { 0 } else { 5 };
                    shown.iter().map(|i| format!("{:>width$}", text(i))).collect()
                }
                _ => {
                    let numbers: Vec<Number> = shown.iter().map(|&i| Number::of(tensor, i)).collect();
                    if tensor.shape().is_empty() { vec![numbers[0].alone()] } else { columns(&numbers) }
                }
            }
        };
    }
    integers!(I8 i8, I16 i16, I32 i32, I64 i64, U8 u8, U16 u16, U32 u32, U64 u64)
}

fn pad_left(words: Vec<String>) -> Vec<String> {
    let width = words.iter().map(String::len).max().unwrap_or(0);
    words.into_iter().map(|w| format!("{w:>width$}")).collect()
}

/// A float with its shortest decimal digits `d1 d2 d3 ..`, meaning `d1.d2d3.. * 10^exponent`.
struct Number {
    value: f64,
    digits: String,
    exponent: i32,
}

impl Number {
    fn of(tensor: &Tensor, i: usize) -> Number {
        macro_rules! narrow {
            ($($variant:ident $ty:ty),*) => {
                match tensor.dtype() {
                    DType::F64 => (tensor.as_slice::<f64>()[i], format!("{:e}", tensor.as_slice::<f64>()[i].abs())),
                    $(DType::$variant => {
                        let x = tensor.as_slice::<$ty>()[i].to_f64();
                        (x, shortest(x, |y| <$ty>::from_f64(y).to_f64()))
                    })*
                    _ => (tensor.as_slice::<f32>()[i] as f64, format!("{:e}", tensor.as_slice::<f32>()[i].abs())),
                }
            };
        }
        let (value, text) = narrow!(
            F16 half::f16, BF16 half::bf16, F8E4M3FN F8E4M3FN, F8E4M3FNUZ F8E4M3FNUZ, F8E5M2 F8E5M2, F8E5M2FNUZ F8E5M2FNUZ
        );
        let (mantissa, exponent) = text.split_once('e').unwrap_or(("0", "0"));
        Number {
            value,
            digits: mantissa.replace('.', ""),
            exponent: exponent.parse().unwrap_or(0),
        }
    }

    fn sign(&self) -> &'static str {
        if self.value.is_sign_negative() && !self.value.is_nan() {
            "-"
        } else {
            ""
        }
    }

    fn special(&self) -> Option<String> {
        let text = if self.value.is_nan() { "nan" } else { "inf" };
        (!self.value.is_finite()).then(|| format!("{}{text}", self.sign()))
    }

    /// Integer and fraction part, the fraction rounded to [`PRECISION`] digits and without trailing zeros.
    fn positional(&self) -> (String, String) {
        let point = self.exponent + 1;
        let zeros = "0".repeat(point.min(0).unsigned_abs() as usize);
        let digits = format!(
            "{zeros}{}{}",
            self.digits,
            "0".repeat((point - self.digits.len() as i32).max(0) as usize)
        );
        let (integer, fraction) = digits.split_at(point.max(0) as usize);
        let (carry, fraction) = round(fraction, PRECISION);
        let integer = if carry {
            increment(integer)
        } else {
            integer.to_owned()
        };
        let integer = if integer.is_empty() {
            "0".to_owned()
        } else {
            integer
        };
        (format!("{}{integer}", self.sign()), fraction)
    }

    /// Fraction digits and exponent digits that scientific notation takes, trailing zeros dropped.
    fn scientific(&self) -> (String, String) {
        let (carry, fraction) = round(&self.digits[1..], PRECISION);
        let exponent = self.exponent + (carry && self.digits.starts_with('9')) as i32;
        (fraction, format!("{:02}", exponent.unsigned_abs()))
    }

    /// Scientific notation with `n_digits` digits of the exact value after the point.
    fn scientific_with(&self, n_digits: usize, n_exponent: usize) -> String {
        let text = format!("{:.n_digits$e}", self.value);
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let point = if n_digits == 0 { "." } else { "" };
        let sign = if exponent.starts_with('-') { '-' } else { '+' };
        format!(
            "{mantissa}{point}e{sign}{:0>n_exponent$}",
            exponent.trim_start_matches('-')
        )
    }

    /// Text of a rank-0 tensor.
    fn alone(&self) -> String {
        self.special().unwrap_or_else(|| {
            let magnitude = self.value.abs();
            if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
                let (sign, exponent) = (self.sign(), self.exponent);
                let fraction = if self.digits.len() > 1 {
                    format!(".{}", &self.digits[1..])
                } else {
                    String::new()
                };
                let exponent_sign = if exponent < 0 { '-' } else { '+' };
                return format!(
                    "{sign}{}{fraction}e{exponent_sign}{:02}",
                    &self.digits[..1],
                    exponent.unsigned_abs()
                );
            }
            let zeros = "0".repeat((-self.exponent).max(0) as usize);
            let trailing =
                "0".repeat((self.exponent + 1 - self.digits.len() as i32).max(0) as usize);
            let digits = format!("{zeros}{}{trailing}", self.digits);
            let (integer, fraction) = digits.split_at(self.exponent.max(0) as usize + 1);
            format!(
                "{}{integer}.{}",
                self.sign(),
                if fraction.is_empty() { "0" } else { fraction }
            )
        })
    }
}

/// Shortest digits that round back to `x` under `narrow`, as `{:e}` prints them.
fn shortest(x: f64, narrow: impl Fn(f64) -> f64) -> String {
    let candidates = (0..=17).map(|digits| format!("{:.digits$e}", x.abs()));
    let exact = |text: &String| text.parse().is_ok_and(|y: f64| narrow(y) == x.abs());
    candidates
        .into_iter()
        .find(exact)
        .unwrap_or_else(|| format!("{:e}", x.abs()))
}

/// Rounds a digit string to `n` digits, half away from zero, and drops trailing zeros; first, whether it carried out of the front.
fn round(digits: &str, n: usize) -> (bool, String) {
    let mut kept = digits.as_bytes()[..digits.len().min(n)].to_vec();
    let mut carry = digits.as_bytes().get(n).is_some_and(|&d| d >= b'5');
    for d in kept.iter_mut().rev() {
        if carry {
            carry = *d == b'9';
            *d = if carry { b'0' } else { *d + 1 };
        }
    }
    let text: String = kept.into_iter().map(char::from).collect();
    (carry, text.trim_end_matches('0').to_owned())
}

/// Adds one to a decimal digit string; the empty one counts as zero.
fn increment(digits: &str) -> String {
    let digits = if digits.is_empty() { "0" } else { digits };
    let kept = digits.trim_end_matches('9');
    let nines = "0".repeat(digits.len() - kept.len());
    match kept.split_at_checked(kept.len().wrapping_sub(1)) {
        None => format!("1{nines}"),
        Some((head, last)) => format!("{head}{}{nines}", char::from(last.as_bytes()[0] + 1)),
    }
}

/// Floats in one column format: positional, or scientific where the values are very large, very small or far apart.
fn columns(numbers: &[Number]) -> Vec<String> {
    let magnitudes = || {
        numbers
            .iter()
            .map(|n| n.value.abs())
            .filter(|m| m.is_finite() && *m > 0.0)
    };
    let (min, max) = magnitudes().fold((f64::INFINITY, 0.0f64), |(lo, hi), m| {
        (lo.min(m), hi.max(m))
    });
    let is_scientific = max > 0.0 && (max >= 1e8 || min < 1e-4 || max / min > 1000.0);
    pad_left(if is_scientific {
        scientific_column(numbers)
    } else {
        positional_column(numbers)
    })
}

/// Mantissas and exponents of one length.
fn scientific_column(numbers: &[Number]) -> Vec<String> {
    let finite = || {
        numbers
            .iter()
            .filter(|n| n.special().is_none())
            .map(Number::scientific)
    };
    let n_digits = finite().map(|p| p.0.len()).max().unwrap_or(0);
    let n_exponent = finite().map(|p| p.1.len()).max().unwrap_or(0);
    let word = |n: &Number| {
        n.special()
            .unwrap_or_else(|| n.scientific_with(n_digits, n_exponent))
    };
    numbers.iter().map(word).collect()
}

/// Fractions of one length.
fn positional_column(numbers: &[Number]) -> Vec<String> {
    let parts: Vec<_> = numbers
        .iter()
        .map(|n| n.special().map_or_else(|| Ok(n.positional()), Err))
        .collect();
    let n_digits = parts.iter().flatten().map(|p| p.1.len()).max().unwrap_or(0);
    let word = |p: Result<(String, String), String>| {
        p.map_or_else(|s| s, |(i, f)| format!("{i}.{f:<n_digits$}"))
    };
    parts.into_iter().map(word).collect()
}

/// Arranges words in nested brackets.
struct Layout {
    words: std::vec::IntoIter<String>,
    shortened: bool,
}

impl Layout {
    /// Number of items shown of an axis of extent `n`, and before which of them the gap is.
    fn shown(&self, n: usize) -> (usize, Option<usize>) {
        if self.shortened && n > 2 * EDGE_ITEMS {
            (2 * EDGE_ITEMS, Some(EDGE_ITEMS))
        } else {
            (n, None)
        }
    }

    /// Text of the next sub-tensor of `shape`; its continuation lines are indented by `indent`.
    fn axis(&mut self, shape: &[usize], indent: usize, width: usize) -> String {
        let [n, inner @ ..] = shape else {
            return self.words.next().unwrap_or_default();
        };
        if inner.is_empty() {
            return self.row(*n, indent, width);
        }
        let (n_shown, gap) = self.shown(*n);
        let mut items = Vec::new();
        for i in 0..n_shown {
            items.extend((gap == Some(i)).then(|| "...".to_owned()));
            items.push(self.axis(inner, indent + 1, width - 1));
        }
        let separator = format!("{}{}", "\n".repeat(inner.len()), " ".repeat(indent));
        format!("[{}]", items.join(&separator))
    }

    /// The next `n` words in brackets, broken into lines.
    fn row(&mut self, n: usize, indent: usize, width: usize) -> String {
        let (n_shown, gap) = self.shown(n);
        let (mut out, mut column) = (String::from("["), indent);
        for i in 0..n_shown {
            for word in (gap == Some(i))
                .then(|| "...".to_owned())
                .into_iter()
                .chain(self.words.next())
            {
                // One place is kept for the closing bracket; the space before a word counts.
                if column > indent && column + 1 + word.len() > width - 1 {
                    out += &format!("\n{}", " ".repeat(indent));
                    column = indent;
                } else if column > indent {
                    out.push(' ');
                    column += 1;
                }
                out += &word;
                column += word.len();
            }
        }
        out + "]"
    }
}

#[cfg(test)]
mod tests;
