//! The text of dims: sums of terms `k*atom`, where an atom that is no name, `min` or `max` stands in
//! brackets behind a coefficient, since `*` and `//` bind alike and to the left.

use super::extremes::Kind;
use super::{Atom, Dim};
use crate::ir::attr::{Attr, split_quoted, unquote};
use std::collections::BTreeSet;
use std::fmt;

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Atom::Symbol(s) if is_plain(s) => f.write_str(s),
            Atom::Symbol(s) => write!(f, "{s:?}"),
            Atom::FloorDiv(d, c) => write!(f, "({d})//{c}"),
            Atom::Mul(a, b) => write!(f, "({a})*({b})"),
            Atom::Min(operands) => write_call(f, "min", operands),
            Atom::Max(operands) => write_call(f, "max", operands),
        }
    }
}

fn write_call(f: &mut fmt::Formatter<'_>, name: &str, operands: &[Dim]) -> fmt::Result {
    write!(f, "{name}(")?;
    for (i, d) in operands.iter().enumerate() {
        write!(f, "{}{d}", if i == 0 { "" } else { ", " })?;
    }
    f.write_str(")")
}

/// True for a name that the text form need not quote.
fn is_plain(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.has_summary() {
            return self.write_summary(f);
        }
        let mut sign = "";
        for (atom, k) in &self.terms {
            let atom: &Atom = atom;
            f.write_str(sign)?;
            sign = " + ";
            let is_product = matches!(atom, Atom::FloorDiv(..) | Atom::Mul(..));
            match (*k, is_product) {
                (1, _) => write!(f, "{atom}")?,
                (k, true) => write!(f, "{k}*({atom})")?,
                (k, false) => write!(f, "{k}*{atom}")?,
            }
        }
        match (sign, self.constant) {
            ("", c) => write!(f, "{c}"),
            (_, 0) => Ok(()),
            (_, c) => write!(f, " + {c}"),
        }
    }
}

impl Dim {
    /// Stands for an expression whose text nobody would read; it is not read back.
    fn write_summary(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut symbols = BTreeSet::new();
        self.visit_symbols(&mut |s| symbols.extend([s.to_owned()]));
        let names: Vec<String> = symbols.into_iter().collect();
        let n_atoms = self.n_atoms();
        write!(f, "<{n_atoms} terms over {}>", names.join(", "))
    }
}

impl Attr for Dim {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<Dim> {
        let mut p = Parser {
            text: text.trim(),
            depth: 0,
        };
        let d = p.sum()?;
        p.text.is_empty().then_some(d)
    }
    fn map_dims(&self, f: &dyn Fn(&Dim) -> Dim) -> Dim {
        f(self)
    }
}

/// Nesting of brackets beyond which a text is refused.
const MAX_DEPTH: u32 = 256;

/// Recursive descent over `k*atom + ... + c`.
struct Parser<'a> {
    text: &'a str,
    depth: u32,
}

impl Parser<'_> {
    fn eat(&mut self, token: &str) -> bool {
        let rest = self.text.trim_start();
        match rest.strip_prefix(token) {
            Some(rest) => {
                self.text = rest.trim_start();
                true
            }
            None => false,
        }
    }

    fn sum(&mut self) -> Option<Dim> {
        let mut total = self.term()?;
        while self.eat("+") {
            total = total + self.term()?;
        }
        Some(total)
    }

    fn term(&mut self) -> Option<Dim> {
        let mut d = self.factor()?;
        loop {
            if self.eat("//") {
                let by = self.integer()?;
                if by <= 0 {
                    return None;
                }
                d = d.floor_div(by);
                if d.is_too_deep() {
                    return None;
                }
            } else if self.eat("*") {
                d = d.product(&self.factor()?);
            } else {
                return Some(d);
            }
        }
    }

    fn integer(&mut self) -> Option<i64> {
        let end = self
            .text
            .char_indices()
            .find(|(i, c)| !(c.is_ascii_digit() || *i == 0 && *c == '-'))
            .map_or(self.text.len(), |(i, _)| i);
        let value = self.text[..end].parse().ok()?;
        self.text = self.text[end..].trim_start();
        Some(value)
    }

    fn factor(&mut self) -> Option<Dim> {
        if self.eat("(") {
            return self.nested(|p| {
                let d = p.sum()?;
                p.eat(")").then_some(d)
            });
        }
        let first = self.text.chars().next()?;
        if first == '"' {
            let end = split_quoted(self.text)?;
            let name = unquote(&self.text[..end])?;
            self.text = self.text[end..].trim_start();
            return Some(Dim::symbol(&name));
        }
        if first.is_ascii_digit() || first == '-' {
            return self.integer().map(Dim::constant);
        }
        let end = self
            .text
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'))
            .unwrap_or(self.text.len());
        if end == 0 {
            return None;
        }
        let name = &self.text[..end];
        self.text = self.text[end..].trim_start();
        match name {
            "min" if self.eat("(") => self.nested(|p| p.operands(Kind::Min)),
            "max" if self.eat("(") => self.nested(|p| p.operands(Kind::Max)),
            _ => Some(Dim::symbol(name)),
        }
    }

    fn operands(&mut self, kind: Kind) -> Option<Dim> {
        let mut operands = vec![self.sum()?];
        while self.eat(",") {
            operands.push(self.sum()?);
        }
        self.eat(")").then(|| Dim::extreme(kind, operands))
    }

    fn nested(&mut self, f: impl FnOnce(&mut Self) -> Option<Dim>) -> Option<Dim> {
        self.depth += 1;
        let d = (self.depth <= MAX_DEPTH).then(|| f(self))?;
        self.depth -= 1;
        d
    }
}
