//! Text form of graphs. It prints the same on every run and, unless constants are elided, parses back.
//!
//! ```text
//! graph "mlp" {
//!   %0 = input "x": f32[batch, 784]
//!   %1: f32[batch, 10] = matmul(%0, %2) {attr = value} (region graph { .. }) after(#3) on "/device:CPU:0" by "who" with "group" @ "/fc/MatMul"
//!   output "y" %1
//! }
//! ```
//!
//! Values are numbered in order of appearance; `#n` is the n-th node line. Regions are nested graphs with their own numbers.

use super::attr::Attr;
use super::constant::ConstData;
use super::graph::{Graph, Node, ValueId};
use super::ops::Op;
use super::types::Shape;
use gristmill_runtime::Tensor;
use std::fmt::{self, Write};

/// The words before the name of a constant beside the text.
pub(super) const BESIDE: &str = "beside ";

/// Options of printing.
#[derive(Clone, Copy, Debug)]
pub struct PrintOptions {
    /// Constants of more elements print as a length and checksum, and do not parse back.
    pub elide_above: usize,
    /// Print origins.
    pub origins: bool,
    /// Print who asked for a device.
    pub asked_by: bool,
}

impl PrintOptions {
    /// Everything, as the parser reads it.
    pub const FULL: PrintOptions = PrintOptions {
        elide_above: usize::MAX,
        origins: true,
        asked_by: true,
    };
    /// For people: large constants elided, and who asked for devices.
    pub const SHORT: PrintOptions = PrintOptions {
        elide_above: 16,
        origins: true,
        asked_by: false,
    };

    /// Constants in full, or for people.
    pub fn of(full: bool) -> PrintOptions {
        if full {
            PrintOptions::FULL
        } else {
            PrintOptions::SHORT
        }
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(PrintOptions::FULL))
    }
}

impl Graph {
    /// The text form.
    pub fn to_text(&self, options: PrintOptions) -> String {
        self.to_text_beside(options, &|_| None)
    }

    /// The text form with some constants by name, as `beside "name"`. [`Graph::parse_beside`] reads it.
    pub fn to_text_beside(&self, options: PrintOptions, named: &Named<'_>) -> String {
        let mut out = String::new();
        Printer {
            graph: self,
            options,
            named,
            numbers: vec![u32::MAX; self.n_values()],
            next: 0,
        }
        .graph(&mut out, 0)
        .expect("writing to a String does not fail");
        out
    }
}

/// Names of constants kept beside a text; none for those in it.
pub type Named<'n> = dyn Fn(&ConstData) -> Option<String> + 'n;

struct Printer<'g> {
    graph: &'g Graph,
    options: PrintOptions,
    named: &'g Named<'g>,
    numbers: Vec<u32>,
    next: u32,
}

impl Printer<'_> {
    fn define(&mut self, v: ValueId) -> u32 {
        self.numbers[v.0 as usize] = self.next;
        self.next += 1;
        self.next - 1
    }

    fn graph(&mut self, out: &mut String, depth: usize) -> fmt::Result {
        let g = self.graph;
        let pad = "  ".repeat(depth + 1);
        writeln!(out, "graph {:?} {{", g.name)?;
        for (symbol, range) in &g.ranges {
            writeln!(out, "{pad}range {symbol:?} = {range}")?;
        }
        for (&v, name) in g.inputs.iter().zip(&g.input_names) {
            let n = self.define(v);
            writeln!(out, "{pad}%{n} = input {name:?}: {}", g.ty(v))?;
        }
        for (_, node) in g.nodes() {
            out.push_str(&pad);
            self.node(out, node, depth)?;
        }
        for o in &g.outputs {
            writeln!(
                out,
                "{pad}output {:?} %{}",
                o.name, self.numbers[o.value.0 as usize]
            )?;
        }
        write!(out, "{}}}", "  ".repeat(depth))?;
        if depth == 0 { writeln!(out) } else { Ok(()) }
    }

    fn node(&mut self, out: &mut String, node: &Node, depth: usize) -> fmt::Result {
        for (i, &v) in node.outputs.iter().enumerate() {
            let n = self.define(v);
            write!(
                out,
                "{}%{n}: {}",
                if i == 0 { "" } else { ", " },
                self.graph.ty(v)
            )?;
        }
        let inputs: Vec<String> = node
            .inputs
            .iter()
            .map(|v| format!("%{}", self.numbers[v.0 as usize]))
            .collect();
        write!(out, " = {}({})", node.op.name(), inputs.join(", "))?;
        let attrs: Vec<String> = self.attrs(&node.op);
        if !attrs.is_empty() {
            write!(out, " {{{}}}", attrs.join(", "))?;
        }
        for region in &node.regions {
            out.push_str(" (");
            Printer {
                graph: region,
                options: self.options,
                named: self.named,
                numbers: vec![u32::MAX; region.n_values()],
                next: 0,
            }
            .graph(out, depth + 1)?;
            out.push(')');
        }
        if !node.control.is_empty() {
            let ids: Vec<String> = node.control.iter().map(|n| format!("#{}", n.0)).collect();
            write!(out, " after({})", ids.join(", "))?;
        }
        if let Some(d) = &node.device {
            write!(out, " {}", d.to_text(self.options.asked_by))?;
        }
        if self.options.origins && !node.origin.as_str().is_empty() {
            write!(out, " @ {:?}", node.origin.as_str())?;
        }
        writeln!(out)
    }

    fn attrs(&self, op: &Op) -> Vec<String> {
        let constant = op.elements();
        let beside = constant.and_then(|value| (self.named)(value));
        let beside = beside.map(|name| format!("{BESIDE}{name:?}"));
        let instead = beside.or_else(|| self.elided(constant?));
        let all = |op: &Op, initial: Option<String>| {
            let attrs = op.attrs().into_iter();
            let attrs = attrs.map(|(name, text)| match (name, &initial) {
                ("initial", Some(initial)) => format!("{name} = {initial}"),
                _ => format!("{name} = {text}"),
            });
            attrs.collect()
        };
        match (op, instead) {
            (Op::Constant { .. }, Some(instead)) => vec![format!("value = {instead}")],
            (op, Some(instead)) => all(&begun_with_zero(op), Some(instead)),
            (op, None) => all(op, None),
        }
    }

    /// Type and checksum of a constant that is too large to be printed.
    fn elided(&self, value: &ConstData) -> Option<String> {
        let is_large = value.len() > self.options.elide_above;
        let t = is_large.then(|| value.tensor().ok()).flatten()?;
        let (dtype, shape) = (t.dtype(), Shape::of(t.shape()));
        Some(format!(
            "elided {dtype}{shape} {:016x}",
            fnv1a(t.as_bytes())
        ))
    }
}

/// A read of a variable with one byte as its initial value: the text of a large one takes longer to write than all else.
fn begun_with_zero(op: &Op) -> Op {
    let mut small = op.clone();
    if let Op::ReadVariable { initial, .. } = &mut small {
        *initial = Some(ConstData::held(Tensor::scalar(0u8)));
    }
    small
}

impl Op {
    /// The elements among its attributes: a constant's value, or the initial one of a variable.
    pub(crate) fn elements(&self) -> Option<&ConstData> {
        match self {
            Op::Constant { value } => Some(value),
            Op::ReadVariable { initial, .. } => initial.as_ref(),
            _ => None,
        }
    }

    /// Name and attributes in a few words, for lists that people read: `map neg`,
    /// `cluster contract`.
    pub(crate) fn label(&self) -> String {
        if let Op::Cluster { kind, .. } = self {
            return format!("{} {}", self.name(), kind.print());
        }
        let mut label = self.name().to_owned();
        for (_, value) in self.attrs() {
            label.push(' ');
            label.push_str(&value);
        }
        label
    }
}

/// FNV-1a over 64-bit words, so that two dumps show whether a constant changed.
fn fnv1a(bytes: &[u8]) -> u64 {
    let word = |c: &[u8]| c.iter().rev().fold(0u64, |w, &b| w << 8 | u64::from(b));
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |h, c| {
        (h ^ word(c)).wrapping_mul(0x0100_0000_01b3)
    })
}
