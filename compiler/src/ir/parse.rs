//! Reads the text form of [`super::print`]. Errors name the line.

use super::attr::{Attr, split_quoted, split_top, unquote};
use super::constant::ConstData;
use super::dim::{DimRange, MAX_DIM_SIZE};
use super::graph::{Graph, Node, NodeId, Origin, ValueId};
use super::ops::Op;
use super::print::BESIDE;
use super::request::{AskedBy, DeviceRequest};
use super::types::{Shape, Type};
use crate::error::{Error, Result};
use gristmill_runtime::DType;
use gristmill_runtime::device::DeviceSpec;
use std::str::FromStr;
use std::sync::Arc;

/// Regions may nest this deep.
const MAX_DEPTH: usize = 64;

/// A text may have this many nodes and inputs, with those of its regions.
const MAX_NODES: usize = 1_000_000;

impl Graph {
    /// Parses the text form. Written result types are checked against the type rules.
    pub fn parse(text: &str) -> Result<Graph> {
        Graph::parse_beside(text, &|name| {
            Err(Error::invalid(format!(
                "constant {name:?} is beside the text, and only the text is here"
            )))
        })
    }

    /// Parses a text of [`Graph::to_text_beside`], with the constants beside it by name.
    pub fn parse_beside(text: &str, constants: &Beside<'_>) -> Result<Graph> {
        let at = 0;
        let mut c = Cursor {
            text,
            at,
            constants,
            n_nodes: 0,
        };
        let g = c.graph(0)?;
        c.skip_space();
        if c.rest().is_empty() {
            Ok(g)
        } else {
            Err(c.error("text after the graph"))
        }
    }
}

/// Constants beside a text, by name.
pub type Beside<'c> = dyn Fn(&str) -> Result<ConstData> + 'c;

struct Cursor<'t> {
    text: &'t str,
    at: usize,
    constants: &'t Beside<'t>,
    n_nodes: usize,
}

impl<'t> Cursor<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn error(&self, message: impl std::fmt::Display) -> Error {
        self.error_at(self.at, message)
    }

    /// An error in the line of a position.
    fn error_at(&self, at: usize, message: impl std::fmt::Display) -> Error {
        let line = self.text[..at].matches('\n').count() + 1;
        Error::invalid(format!("line {line}: {message}"))
    }

    /// Skips white space and comment lines (`// ..`).
    fn skip_space(&mut self) {
        loop {
            let trimmed = self.rest().trim_start();
            self.at = self.text.len() - trimmed.len();
            if !trimmed.starts_with("//") {
                return;
            }
            self.at += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    /// Skips a token with the space before it. Without the token the position stays, so that an
    /// error is not in the line of what comes next.
    fn eat(&mut self, token: &str) -> bool {
        let start = self.at;
        self.skip_space();
        let found = self.rest().starts_with(token);
        self.at = if found { self.at + token.len() } else { start };
        found
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        if self.eat(token) {
            return Ok(());
        }
        self.skip_space();
        let found: String = self
            .rest()
            .chars()
            .take_while(|&c| c != '\n')
            .take(40)
            .collect();
        Err(self.error(format!("expected {token:?}, got {found:?}")))
    }

    fn quoted(&mut self) -> Result<String> {
        let start = self.at;
        self.skip_space();
        let end = split_quoted(self.rest()).filter(|_| self.rest().starts_with('"'));
        let end = end.ok_or_else(|| self.error_at(start, "expected a quoted name"))?;
        let name = unquote(&self.rest()[..end])
            .ok_or_else(|| self.error("bad escape in a quoted name"))?;
        self.at += end;
        Ok(name)
    }

    fn number(&mut self, prefix: &str) -> Result<u32> {
        self.number_of(prefix)
    }

    fn number_of<T: FromStr>(&mut self, prefix: &str) -> Result<T> {
        self.expect(prefix)?;
        let digits = self
            .rest()
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(self.rest().len());
        let n = self.rest()[..digits]
            .parse()
            .map_err(|_| self.error(format!("expected a number after {prefix:?}")))?;
        self.at += digits;
        Ok(n)
    }

    fn word(&mut self) -> &'t str {
        self.skip_space();
        let rest = self.rest();
        let end = rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// Text up to the bracket that closes the one just eaten.
    fn until_closed(&mut self, close: char) -> Result<&'t str> {
        let rest = self.rest();
        let (mut depth, mut skip_to) = (0i32, 0);
        for (i, c) in rest.char_indices() {
            if i < skip_to {
                continue;
            }
            match c {
                '"' => {
                    skip_to = i + split_quoted(&rest[i..])
                        .ok_or_else(|| self.error("a quote is not closed"))?
                }
                c if c == close && depth == 0 => {
                    self.at += i + c.len_utf8();
                    return Ok(&rest[..i]);
                }
                '[' | '(' | '{' | '<' => depth += 1,
                ']' | ')' | '}' | '>' => depth -= 1,
                _ => {}
            }
        }
        Err(self.error(format!("{close:?} is missing")))
    }

    fn ty(&mut self) -> Result<Type> {
        let name = self.word();
        let dtype =
            DType::parse(name).ok_or_else(|| self.error(format!("unknown dtype {name:?}")))?;
        self.expect("[")?;
        let dims = self.until_closed(']')?;
        let shape = Attr::parse(&format!("[{dims}]"))
            .ok_or_else(|| self.error(format!("bad shape [{dims}]")))?;
        Ok(Type {
            dtype,
            shape: Shape(shape),
        })
    }

    fn graph(&mut self, depth: usize) -> Result<Graph> {
        if depth > MAX_DEPTH {
            return Err(self.error(format!("regions nest deeper than {MAX_DEPTH}")));
        }
        self.expect("graph")?;
        let mut g = Graph::new(&self.quoted()?);
        self.expect("{")?;
        let mut values: Vec<ValueId> = Vec::new();
        while !self.eat("}") {
            if self.eat("output") {
                let name = self.quoted()?;
                let v = self.value(&values)?;
                g.add_output(&name, v);
            } else if self.eat("range") {
                let symbol = self.quoted()?;
                let range = self.range()?;
                g.ranges.insert(symbol, range);
            } else {
                self.definition(&mut g, &mut values, depth)?;
            }
        }
        Ok(g)
    }

    /// `= least..greatest`.
    fn range(&mut self) -> Result<DimRange> {
        self.expect("=")?;
        let (min, max) = (self.number_of("")?, self.number_of("..")?);
        match min <= max && max <= MAX_DIM_SIZE {
            true => Ok(DimRange { min, max }),
            false => Err(self.error(format!("the range {min}..{max} is empty or too large"))),
        }
    }

    fn value(&mut self, values: &[ValueId]) -> Result<ValueId> {
        let n = self.number("%")?;
        values
            .get(n as usize)
            .copied()
            .ok_or_else(|| self.error(format!("%{n} is used before it is defined")))
    }

    /// `%n = input ..` or `%n: type, .. = op(..) ..`.
    fn definition(&mut self, g: &mut Graph, values: &mut Vec<ValueId>, depth: usize) -> Result<()> {
        self.n_nodes += 1;
        if self.n_nodes > MAX_NODES {
            return Err(self.error(format!("more than {MAX_NODES} nodes")));
        }
        let mut types = Vec::new();
        loop {
            let n = self.number("%")?;
            if n as usize != values.len() + types.len() {
                return Err(self.error(format!(
                    "values are numbered in order: expected %{}, got %{n}",
                    values.len() + types.len()
                )));
            }
            if types.is_empty() && self.eat("=") {
                self.expect("input")?;
                let name = self.quoted()?;
                self.expect(":")?;
                let ty = self.ty()?;
                values.push(g.add_input(&name, ty));
                return Ok(());
            }
            self.expect(":")?;
            types.push(self.ty()?);
            if !self.eat(",") {
                break;
            }
        }
        self.expect("=")?;
        let start = self.at;
        let results = self.node(g, values, depth)?;
        let found: Vec<Type> = results.iter().map(|&v| g.ty(v).clone()).collect();
        if found != types {
            let [written, found] = [&types, &found].map(|types| {
                let types: Vec<String> = types.iter().map(Type::to_string).collect();
                types.join(", ")
            });
            let message = format!("results are written as {written}, but the op gives {found}");
            return Err(self.error_at(start, message));
        }
        values.extend(results);
        Ok(())
    }

    fn node(&mut self, g: &mut Graph, values: &[ValueId], depth: usize) -> Result<Vec<ValueId>> {
        let name = self.word();
        let start = self.at;
        self.expect("(")?;
        let mut inputs = Vec::new();
        while !self.eat(")") {
            inputs.push(self.value(values)?);
            self.eat(",");
        }
        let attrs = if self.eat("{") {
            self.until_closed('}')?
        } else {
            ""
        };
        let op = self.op(start, name, attrs)?;
        let mut regions = Vec::new();
        while self.eat("(") {
            regions.push(self.graph(depth + 1)?);
            self.expect(")")?;
        }
        let mut control = Vec::new();
        if self.eat("after(") {
            while !self.eat(")") {
                control.push(NodeId(self.number("#")?));
                self.eat(",");
            }
        }
        let device = self.request()?;
        let origin = if self.eat("@") {
            Origin::new(&self.quoted()?)
        } else {
            Origin::default()
        };
        let results = g
            .add_with_regions(op, &inputs, regions, &origin)
            .map_err(|e| self.error_at(start, e))?;
        let last = NodeId(g.n_nodes() as u32 - 1);
        if control.iter().any(|c| *c >= last) {
            return Err(self.error("a control edge names a later node"));
        }
        let node: &mut Node = g.node_mut(last);
        node.control = control;
        node.device = device.map(Arc::new);
        Ok(results)
    }

    /// `on "/device:CPU:1" by "who" with "group" by "who"`, any of it.
    fn request(&mut self) -> Result<Option<DeviceRequest>> {
        let mut request = None;
        if self.eat("on ") {
            let spec = self.quoted()?;
            let spec = DeviceSpec::parse(&spec).map_err(|e| self.error(e))?;
            request = Some(DeviceRequest::of(spec, self.asked_by()?));
        }
        while self.eat("with ") {
            let group = self.quoted()?;
            let asked_by = self.asked_by()?;
            request
                .get_or_insert_with(DeviceRequest::default)
                .groups
                .insert(group.into(), asked_by);
        }
        Ok(request)
    }

    fn asked_by(&mut self) -> Result<AskedBy> {
        if self.eat("by ") {
            Ok(AskedBy::new(&self.quoted()?))
        } else {
            Ok(AskedBy::default())
        }
    }

    /// The constant beside the text named by an attribute, which becomes a constant of the text's own.
    fn beside(&self, at: usize, attrs: &mut [(&str, &str)]) -> Result<Option<ConstData>> {
        let is_beside = |(_, text): &&mut (&str, &str)| text.starts_with(BESIDE);
        let Some((_, text)) = attrs.iter_mut().find(is_beside) else {
            return Ok(None);
        };
        let name = unquote(text[BESIDE.len()..].trim());
        let name = name.ok_or_else(|| self.error_at(at, format!("bad name in {text:?}")))?;
        let constant = (self.constants)(&name).map_err(|e| self.error_at(at, e))?;
        *text = "f32[0] <>";
        Ok(Some(constant))
    }

    /// The op of a node at a position.
    fn op(&self, at: usize, name: &str, attrs: &str) -> Result<Op> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for part in split_top(attrs, ',') {
            let (key, value) = part.split_once('=').ok_or_else(|| {
                self.error_at(at, format!("expected `name = value`, got {part:?}"))
            })?;
            pairs.push((key.trim(), value.trim()));
        }
        if pairs
            .iter()
            .any(|(k, v)| *k == "value" && v.starts_with("elided"))
        {
            return Err(
                self.error_at(at, "the constant's value is elided; print the graph with all constants, as `dump --full` does")
            );
        }
        let beside = self.beside(at, &mut pairs)?;
        let mut used = 0;
        let mut attr = |n: &'static str| {
            let found = pairs
                .iter()
                .find(|(k, _)| *k == n)
                .ok_or_else(|| format!("{name}: attribute {n} is missing"))?;
            used += 1;
            Ok(found.1.to_owned())
        };
        let mut op = Op::from_text(name, &mut attr).map_err(|m| self.error_at(at, m))?;
        match (&mut op, beside) {
            (_, None) => {}
            (Op::Constant { value }, Some(beside)) => *value = beside,
            (Op::ReadVariable { initial, .. }, Some(beside)) => *initial = Some(beside),
            (_, Some(_)) => {
                let message = format!("{name} takes no constant from beside the text");
                return Err(self.error_at(at, message));
            }
        }
        if used < pairs.len() {
            return Err(self.error_at(
                at,
                format!("{name}: unknown or repeated attribute among {attrs:?}"),
            ));
        }
        Ok(op)
    }
}
