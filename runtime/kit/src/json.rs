//! JSON as the command line of the compiler prints it, without a crate for it.

use std::fmt::Write;

/// A value.
pub enum Json {
    Null,
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Map(Vec<(String, Json)>),
}

impl From<u64> for Json {
    fn from(n: u64) -> Json {
        Json::Number(n as f64)
    }
}

impl From<usize> for Json {
    fn from(n: usize) -> Json {
        Json::Number(n as f64)
    }
}

impl From<f64> for Json {
    fn from(n: f64) -> Json {
        Json::Number(n)
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Json {
        Json::Text(text.to_owned())
    }
}

impl<T: Into<Json>> From<Option<T>> for Json {
    fn from(value: Option<T>) -> Json {
        value.map_or(Json::Null, Into::into)
    }
}

impl<T: Into<Json>> From<Vec<T>> for Json {
    fn from(list: Vec<T>) -> Json {
        Json::List(list.into_iter().map(Into::into).collect())
    }
}

/// A map with names of ours.
pub fn map<const N: usize>(members: [(&str, Json); N]) -> Json {
    Json::Map(members.map(|(name, value)| (name.to_owned(), value)).into())
}

impl Json {
    /// Its text, indented.
    pub fn text(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, 0);
        out
    }

    fn write(&self, out: &mut String, depth: usize) {
        match self {
            Json::Null => out.push_str("null"),
            Json::Number(n) => number(*n, out),
            Json::Text(text) => quoted(text, out),
            Json::List(items) => {
                let write = |item: &Json, out: &mut String| item.write(out, depth + 1);
                block(out, depth, ['[', ']'], items, write);
            }
            Json::Map(members) => {
                let write = |(name, value): &(String, Json), out: &mut String| {
                    member(name, value, out, depth);
                };
                block(out, depth, ['{', '}'], members, write);
            }
        }
    }
}

fn member(name: &str, value: &Json, out: &mut String, depth: usize) {
    quoted(name, out);
    out.push_str(": ");
    value.write(out, depth + 1);
}

/// Items on lines of their own between brackets.
fn block<T>(
    out: &mut String,
    depth: usize,
    brackets: [char; 2],
    items: &[T],
    write: impl Fn(&T, &mut String),
) {
    out.push(brackets[0]);
    for (i, item) in items.iter().enumerate() {
        out.push_str(if i == 0 { "\n" } else { ",\n" });
        out.push_str(&"  ".repeat(depth + 1));
        write(item, out);
    }
    if !items.is_empty() {
        out.push('\n');
        out.push_str(&"  ".repeat(depth));
    }
    out.push(brackets[1]);
}

/// JSON has neither NaN nor infinities: they are `null`.
fn number(n: f64, out: &mut String) {
    let is_whole = n.fract() == 0.0 && n.abs() < (1u64 << 53) as f64;
    let written = match n.is_finite() {
        false => write!(out, "null"),
        true if is_whole => write!(out, "{n:.0}"),
        true => write!(out, "{n:?}"),
    };
    written.expect("a string grows");
}

fn quoted(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            c if c < ' ' => {
                write!(out, "\\u{:04x}", u32::from(c)).expect("a string grows");
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped_and_indented() {
        let value = map([
            ("name", "a\"\\\n\u{1}é".into()),
            ("n", Json::from(vec![3.0, 0.5, 1e300, f64::NAN])),
            ("none", Json::from(None::<u64>)),
            ("empty", Json::List(Vec::new())),
        ]);
        let expected = r#"{
  "name": "a\"\\\n\u0001é",
  "n": [
    3,
    0.5,
    1e300,
    null
  ],
  "none": null,
  "empty": []
}"#;
        assert_eq!(value.text(), expected);
    }
}
