//! The body of a kernel as CUDA text: one statement per value, so that it can be read beside the scalar program it came from.

use super::text::{element_type, literal, memory_type};
use crate::codegen::pull::{Emit, Ix, Kind, Order};
use crate::error::{Error, Result};
use crate::ir::ScalarOp;
use gristmill_runtime::DType;

/// A variable, a literal or a buffer: an index into the emitter's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Value(u32);

/// Text and kind of a value.
struct Known {
    text: String,
    kind: Kind,
}

/// A kernel's body being written.
pub(super) struct Emitter {
    text: String,
    depth: usize,
    known: Vec<Known>,
    n_names: usize,
    /// True if indices have 64 bits.
    wide: bool,
    /// True if some statement may report a fault.
    faults: bool,
}

/// An operand in a loop over the elements `k` of a vector.
pub(super) enum Operand {
    /// The same for all elements.
    Same(Value),
    /// Expression of element `k`, and its dtype.
    Element(String, DType),
}

impl Operand {
    /// The value of element `k`.
    pub(super) fn value(self, e: &mut Emitter) -> Value {
        match self {
            Operand::Same(value) => value,
            Operand::Element(text, dtype) => e.define(Kind::Element(dtype), &text),
        }
    }
}

/// The test that turns an element in memory into a value: truth values are bytes there.
pub(super) fn truth_test(dtype: DType) -> &'static str {
    if dtype == DType::Bool { " != 0" } else { "" }
}

/// A kernel's finished body.
pub(super) struct Body {
    pub(super) text: String,
    pub(super) faults: bool,
}

impl Emitter {
    /// An empty body. With `wide`, indices have 64 bits.
    pub(super) fn new(wide: bool) -> Emitter {
        Emitter {
            text: String::new(),
            depth: 1,
            known: Vec::new(),
            n_names: 0,
            wide,
            faults: false,
        }
    }

    pub(super) fn finish(self) -> Body {
        Body {
            text: self.text,
            faults: self.faults,
        }
    }

    /// Appends a line at the depth of the current block.
    pub(super) fn line(&mut self, line: &str) {
        self.text.extend(std::iter::repeat_n("    ", self.depth));
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Writes `name = value;`.
    pub(super) fn set(&mut self, name: &str, value: Value) {
        self.line(&format!("{name} = {};", self.text(value)));
    }

    /// Opens a block with a line.
    pub(super) fn open(&mut self, line: &str) {
        self.line(&format!("{line} {{"));
        self.depth += 1;
    }

    /// Closes a block.
    pub(super) fn close(&mut self) {
        self.close_with("}");
    }

    /// Closes a block that something follows on its last line.
    pub(super) fn close_with(&mut self, line: &str) {
        self.depth -= 1;
        self.line(line);
    }

    /// Goes one block deeper, for one that a line has opened.
    pub(super) fn indent(&mut self) {
        self.depth += 1;
    }

    /// The expression for a value.
    pub(super) fn text(&self, v: Value) -> &str {
        &self.known[v.0 as usize].text
    }

    pub(super) fn kind(&self, v: Value) -> Kind {
        self.known[v.0 as usize].kind
    }

    /// A value that needs no statement: a literal, a parameter, a variable that stands already.
    pub(super) fn named(&mut self, kind: Kind, text: impl Into<String>) -> Value {
        self.known.push(Known {
            text: text.into(),
            kind,
        });
        Value(self.known.len() as u32 - 1)
    }

    /// Opens an unrolled loop of `n` steps; gives its index.
    pub(super) fn open_unrolled(&mut self, n: usize) -> Value {
        let i = self.fresh('p');
        self.line("#pragma unroll");
        self.open(&format!("for (ix {i} = 0; {i} < {n}; ++{i})"));
        self.named(Kind::Index, i)
    }

    /// Loads `width` neighbouring elements, whose position is a multiple of that; gives the vector's name.
    pub(super) fn load_vector(&mut self, width: usize, buffer: Value, at: Ix<Value>) -> String {
        let name = self.fresh('x');
        let line = format!(
            "const auto {name} = gm_load<{width}>({} + {});",
            self.text(buffer),
            self.position(at)
        );
        self.line(&line);
        name
    }

    /// Loads a vector of such elements, whose position is a multiple of its width, as operand
    /// number `t` of a loop over the elements `k`.
    pub(super) fn load_operand(
        &mut self,
        t: usize,
        (width, dtype): (usize, DType),
        buffer: Value,
        at: Ix<Value>,
    ) -> Operand {
        let from = format!("{} + {}", self.text(buffer), self.position(at));
        self.line(&format!("const auto x{t} = gm_load<{width}>({from});"));
        Operand::Element(format!("x{t}.v[k]{}", truth_test(dtype)), dtype)
    }

    /// Declares `n` vectors of `width` elements as they are in memory; gives their name.
    pub(super) fn declare_vectors(&mut self, dtype: DType, width: usize, n: usize) -> String {
        let name = self.fresh('y');
        self.line(&format!(
            "gm_vector<{}, {width}> {name}[{n}];",
            memory_type(dtype)
        ));
        name
    }

    /// `offset + sum(at[i] * strides[i])`.
    pub(super) fn strided(&mut self, offset: i64, at: &[Ix<Value>], strides: &[i64]) -> Ix<Value> {
        at.iter()
            .zip(strides)
            .fold(Ix::C(offset), |sum, (&i, &stride)| {
                let step = self.mul(i, stride);
                self.add(sum, step)
            })
    }

    /// Runs `f` where all of the conditions hold.
    pub(super) fn guarded(
        &mut self,
        conditions: &[Option<Value>],
        f: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let all: Vec<&str> = conditions.iter().flatten().map(|&c| self.text(c)).collect();
        if all.is_empty() {
            return f(self);
        }
        let line = format!("if ({})", all.join(" && "));
        self.open(&line);
        f(self)?;
        self.close();
        Ok(())
    }

    /// The condition `i < extent`; `None` when `i` goes in whole steps that end there exactly.
    pub(super) fn below(&mut self, i: Ix<Value>, extent: usize, step: usize) -> Option<Value> {
        if extent.is_multiple_of(step) {
            return None;
        }
        let (i, limit) = (self.val(i), self.index(extent as i64));
        Some(self.index_compare(Order::Less, i, limit))
    }

    /// The smaller of two indices.
    pub(super) fn smaller(&mut self, a: Ix<Value>, b: Ix<Value>) -> Ix<Value> {
        let (a, b) = (self.val(a), self.val(b));
        Ix::V(self.index_min(a, b))
    }

    fn fresh(&mut self, letter: char) -> String {
        self.n_names += 1;
        format!("{letter}{}", self.n_names - 1)
    }

    /// Positions are `p`, not `i`, since `i8` is a type.
    fn letter(kind: Kind) -> char {
        if kind == Kind::Index { 'p' } else { 'v' }
    }

    fn type_of(kind: Kind) -> &'static str {
        match kind {
            Kind::Element(dtype) => element_type(dtype),
            Kind::Index => "ix",
        }
    }

    /// A new variable that never changes.
    pub(super) fn define(&mut self, kind: Kind, expression: &str) -> Value {
        let name = self.fresh(Self::letter(kind));
        self.line(&format!(
            "const {} {name} = {expression};",
            Self::type_of(kind)
        ));
        self.named(kind, name)
    }

    /// A new variable that later statements set.
    pub(super) fn variable(&mut self, kind: Kind, initial: Option<&str>) -> Value {
        let name = self.fresh(Self::letter(kind));
        let initial = initial.map_or(String::new(), |i| format!(" = {i}"));
        self.line(&format!("{} {name}{initial};", Self::type_of(kind)));
        self.named(kind, name)
    }

    /// Sets variables all at once: none sees another's new value.
    pub(super) fn assign(&mut self, variables: &[Value], values: &[Value]) {
        let mut values = values.to_vec();
        for value in &mut values {
            if variables.contains(value) && variables.len() > 1 {
                let text = self.text(*value).to_owned();
                *value = self.define(self.kind(*value), &text);
            }
        }
        for (&to, &from) in variables.iter().zip(&values) {
            if to != from {
                self.line(&format!("{} = {};", self.text(to), self.text(from)));
            }
        }
    }

    fn binary(&mut self, kind: Kind, a: Value, op: &str, b: Value) -> Value {
        let expression = format!("{} {op} {}", self.text(a), self.text(b));
        self.define(kind, &expression)
    }

    /// `op` of two elements of one dtype.
    pub(super) fn combine(&mut self, op: ScalarOp, a: Value, b: Value) -> Result<Value> {
        let dtype = self.dtype(a)?;
        self.scalar_op(op, &[dtype; 2], &[a, b])
    }

    /// An element in dtype `to`.
    pub(super) fn cast(&mut self, value: Value, to: DType) -> Result<Value> {
        let from = self.dtype(value)?;
        self.convert(value, from, to)
    }

    fn dtype(&self, value: Value) -> Result<DType> {
        match self.kind(value) {
            Kind::Element(dtype) => Ok(dtype),
            Kind::Index => Err(Error::internal("an index is no element")),
        }
    }

    /// The address that faults are reported to; the kernel gets it as a parameter.
    pub(super) fn status(&mut self) -> &'static str {
        self.faults = true;
        "status"
    }

    fn index_text(&self, i: i64) -> String {
        literal(if self.wide { DType::I64 } else { DType::I32 }, i as u64)
    }

    /// The expression for an index.
    pub(super) fn position(&self, at: Ix<Value>) -> String {
        match at {
            Ix::C(c) => self.index_text(c),
            Ix::V(v) => self.text(v).to_owned(),
        }
    }

    /// `for` over `start..end` by `step`; the body gets the index.
    pub(super) fn counted(
        &mut self,
        [start, end, step]: [&str; 3],
        body: impl FnOnce(&mut Self, Value) -> Result<()>,
    ) -> Result<()> {
        let i = self.fresh('p');
        self.open(&format!(
            "for (ix {i} = {start}; {i} < {end}; {i} += {step})"
        ));
        let i = self.named(Kind::Index, i);
        body(self, i)?;
        self.close();
        Ok(())
    }

    /// [`Emitter::counted`] over `n` items that the grid's blocks share; the body gets the item's number.
    pub(super) fn by_block(
        &mut self,
        n: usize,
        body: impl FnOnce(&mut Self, Value) -> Result<()>,
    ) -> Result<()> {
        self.counted(["ix(blockIdx.x)", &n.to_string(), "ix(gridDim.x)"], body)
    }

    /// [`Emitter::counted`] over `n` items that a block's threads share; the body gets the item's
    /// number.
    pub(super) fn by_thread(
        &mut self,
        n: usize,
        n_threads: usize,
        body: impl FnOnce(&mut Self, Value) -> Result<()>,
    ) -> Result<()> {
        let bounds = ["ix(threadIdx.x)", &n.to_string(), &n_threads.to_string()];
        self.counted(bounds, body)
    }
}

impl Emit for Emitter {
    type Value = Value;

    fn constant(&mut self, dtype: DType, bits: u64) -> Value {
        self.named(Kind::Element(dtype), literal(dtype, bits))
    }

    fn primitive(&mut self, op: ScalarOp, from: DType, to: DType, args: &[Value]) -> Result<Value> {
        let expression = self.expression(op, from, to, args)?;
        Ok(self.define(Kind::Element(to), &expression))
    }

    fn quotient(&mut self, dtype: DType, a: Value, b: Value) -> Value {
        self.binary(Kind::Element(dtype), a, "/", b)
    }

    fn is_nan(&mut self, x: Value) -> Value {
        self.binary(Kind::Element(DType::Bool), x, "!=", x)
    }

    fn is_number(&mut self, x: Value) -> Value {
        self.binary(Kind::Element(DType::Bool), x, "==", x)
    }

    fn choose(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        let expression = format!(
            "{} ? {} : {}",
            self.text(condition),
            self.text(yes),
            self.text(no)
        );
        self.define(self.kind(yes), &expression)
    }

    fn index(&mut self, i: i64) -> Value {
        self.named(Kind::Index, self.index_text(i))
    }

    fn index_to_i64(&mut self, i: Value) -> Value {
        self.named(Kind::Element(DType::I64), format!("i64({})", self.text(i)))
    }

    fn i64_to_index(&mut self, x: Value) -> Value {
        let expression = format!("ix({})", self.text(x));
        self.define(Kind::Index, &expression)
    }

    fn truth_to_index(&mut self, x: Value) -> Value {
        self.named(Kind::Index, format!("ix({})", self.text(x)))
    }

    fn index_add(&mut self, a: Value, b: Value) -> Value {
        self.binary(Kind::Index, a, "+", b)
    }

    fn index_add_const(&mut self, a: Value, b: i64) -> Value {
        let expression = match b {
            ..0 => format!("{} - {}", self.text(a), self.index_text(b.wrapping_neg())),
            _ => format!("{} + {}", self.text(a), self.index_text(b)),
        };
        self.define(Kind::Index, &expression)
    }

    fn index_sub(&mut self, a: Value, b: Value) -> Value {
        self.binary(Kind::Index, a, "-", b)
    }

    fn index_neg(&mut self, a: Value) -> Value {
        let expression = format!("-{}", self.text(a));
        self.define(Kind::Index, &expression)
    }

    fn index_mul(&mut self, a: Value, b: Value) -> Value {
        self.binary(Kind::Index, a, "*", b)
    }

    fn index_mul_const(&mut self, a: Value, b: i64) -> Value {
        let expression = format!("{} * {}", self.text(a), self.index_text(b));
        self.define(Kind::Index, &expression)
    }

    fn index_div(&mut self, a: Value, b: Value) -> Value {
        // A negative dividend is a huge unsigned one, whose quotient no extent reaches.
        let expression = format!("ix(uix({}) / uix({}))", self.text(a), self.text(b));
        self.define(Kind::Index, &expression)
    }

    fn index_div_const(&mut self, a: Value, b: i64) -> Value {
        let expression = format!("ix(uix({}) / uix({}))", self.text(a), self.index_text(b));
        self.define(Kind::Index, &expression)
    }

    fn index_min(&mut self, a: Value, b: Value) -> Value {
        let expression = format!("gm_min({}, {})", self.text(a), self.text(b));
        self.define(Kind::Index, &expression)
    }

    fn index_max(&mut self, a: Value, b: Value) -> Value {
        let expression = format!("gm_max({}, {})", self.text(a), self.text(b));
        self.define(Kind::Index, &expression)
    }

    fn index_compare(&mut self, order: Order, a: Value, b: Value) -> Value {
        let (a, b) = (self.text(a), self.text(b));
        let expression = match order {
            Order::Less => format!("{a} < {b}"),
            Order::AtLeast => format!("{a} >= {b}"),
            Order::Within => format!("uix({a}) < uix({b})"),
            Order::Equal => format!("{a} == {b}"),
        };
        self.define(Kind::Element(DType::Bool), &expression)
    }

    fn load(&mut self, dtype: DType, buffer: Value, at: Ix<Value>) -> Value {
        let (buffer, test) = (self.text(buffer), truth_test(dtype));
        let expression = format!("{buffer}[{}]{test}", self.position(at));
        self.define(Kind::Element(dtype), &expression)
    }

    fn store(&mut self, dtype: DType, value: Value, buffer: Value, at: Ix<Value>) {
        let value = match dtype {
            DType::Bool => format!("{}({})", memory_type(dtype), self.text(value)),
            _ => self.text(value).to_owned(),
        };
        self.line(&format!(
            "{}[{}] = {value};",
            self.text(buffer),
            self.position(at)
        ));
    }

    fn fault_if(&mut self, condition: Value, status: u32) {
        let place = self.status();
        self.open(&format!("if ({})", self.text(condition)));
        self.line(&format!("gm_fault({place}, {status});"));
        self.line("return;");
        self.close();
    }

    fn for_loop(
        &mut self,
        start: Ix<Value>,
        end: Ix<Value>,
        step: i64,
        carried: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let mut state = Vec::with_capacity(carried.len());
        for &c in carried {
            let initial = self.text(c).to_owned();
            state.push(self.variable(self.kind(c), Some(&initial)));
        }
        let (start, end) = (self.position(start), self.position(end));
        let step = self.index_text(step);
        self.counted([&start, &end, &step], |e, i| {
            let next = body(e, i, &state)?;
            e.assign(&state, &next);
            Ok(())
        })?;
        Ok(state)
    }

    fn branch<S>(
        &mut self,
        condition: Value,
        kinds: &[Kind],
        state: &mut S,
        yes: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
        no: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let results: Vec<Value> = kinds.iter().map(|&k| self.variable(k, None)).collect();
        self.open(&format!("if ({})", self.text(condition)));
        let values = yes(state, self)?;
        self.assign(&results, &values);
        self.close_with("} else {");
        self.indent();
        let values = no(state, self)?;
        self.assign(&results, &values);
        self.close();
        Ok(results)
    }
}
