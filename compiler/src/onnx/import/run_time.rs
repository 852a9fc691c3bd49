//! Extents that only a run shows, as symbols that get their values from a tensor.

use super::conditions::Condition;
use super::symbolic::symbolic_scalar;
use super::{Contents, Ctx, Importer, Slot, V};
use crate::error::Result;
use crate::ir::{Dim, Op, Origin, Ranges, ScalarOp, Shape, Type, ValueId};
use gristmill_runtime::{DType, Tensor};
use std::collections::{BTreeMap, BTreeSet};

/// Most elements of an operand that extents are taken from.
const MAX_ELEMENTS: usize = 64;

/// The beginning of symbols that stand for elements; no dim of a model begins so.
const ELEMENT: char = '\0';

/// True for a symbol that stands for an element, which may be negative.
fn is_element(symbol: &str) -> bool {
    symbol.starts_with(ELEMENT)
}

/// True for a dim that contains an element.
pub(super) fn has_element(dim: &Dim) -> bool {
    let mut has = false;
    dim.visit_symbols(&mut |s| has |= is_element(s));
    has
}

/// An element of an operand that a shape is computed from.
#[derive(Clone)]
pub(in crate::onnx) enum Element {
    /// Known at import.
    Known(Dim),
    /// Known during a run: an `i64` of rank 0.
    Value(ValueId),
}

impl Importer<'_> {
    /// A symbol that no dim of the model has, named after an operator.
    pub(super) fn new_symbol(&mut self, operator: &str) -> Dim {
        self.n_symbols += 1;
        let name = format!("{}.{}", operator.to_lowercase(), self.n_symbols);
        match self.symbols.contains(&name) {
            true => self.new_symbol(operator),
            false => Dim::symbol(&name),
        }
    }

    /// Notes that an integer result has the elements of an operand, in their order.
    pub(super) fn note_source(&mut self, results: &[V], operand: Option<V>) {
        let is_integer = |v: &V| self.ty(*v).is_ok_and(|ty| ty.dtype.is_int());
        if let ([result], Some(operand)) = (results, operand)
            && self.run_time
            && operand != *result
            && is_integer(&operand)
            && is_integer(result)
        {
            let source = self.sources.get(&operand).copied();
            self.sources.insert(*result, source.unwrap_or(operand));
        }
    }

    /// Row-major elements of an integer value; `None` when they are too many, or their number is
    /// not known.
    fn elements(&mut self, v: V) -> Result<Option<Vec<Element>>> {
        let Some(tracked) = self.tracked(v)? else {
            return Ok(None);
        };
        let mut elements = Vec::new();
        for dim in tracked {
            let value = dim.as_symbol().filter(|s| is_element(s));
            elements.push(match value.and_then(|s| self.extent_values.get(s)) {
                Some(&v) => Element::Value(self.materialise(v)?),
                None => Element::Known(dim),
            });
        }
        Ok(Some(elements))
    }

    /// Row-major elements of an integer value, those that are not known as symbols of their own:
    /// numbers of any sign, which may be moved and nothing else. `None` when they are too many.
    fn tracked(&mut self, v: V) -> Result<Option<Vec<Dim>>> {
        if let Some(known) = self.known_dims(v)? {
            return Ok(Some(known));
        }
        let ty = self.ty(v)?;
        let n = ty.shape.n_elements().as_usize();
        match n.filter(|n| *n <= MAX_ELEMENTS && ty.dtype.is_int()) {
            Some(n) => self.element_symbols(v, n).map(Some),
            None => Ok(None),
        }
    }

    fn element_symbols(&mut self, v: V, n: usize) -> Result<Vec<Dim>> {
        let source = self.sources.get(&v).copied().unwrap_or(v);
        let frame = self.frames.len() - 1;
        if let Some(known) = self.frames[frame].elements.get(&source) {
            return Ok(known.clone());
        }
        let x = self.materialise(source)?;
        let b = self.b();
        let x = b.cast(x, DType::I64)?;
        let flat = b.reshape(x, [n])?;
        let mut symbols = Vec::new();
        for i in 0..n {
            symbols.push(self.element_symbol(flat, i)?);
        }
        self.frames[frame].elements.insert(source, symbols.clone());
        Ok(symbols)
    }

    /// A symbol for element `i` of a vector.
    fn element_symbol(&mut self, flat: ValueId, i: usize) -> Result<Dim> {
        let element = self.b().slice_axis(flat, 0, i, 1)?;
        let element = self.b().reshape(element, Vec::<Dim>::new())?;
        self.n_symbols += 1;
        let symbol = format!("{ELEMENT}{}", self.n_symbols);
        let v = self.made(element);
        self.extent_values.insert(symbol.clone(), v);
        Ok(Dim::symbol(&symbol))
    }

    /// A value of the model that is this IR value of the current frame.
    pub(super) fn made(&mut self, id: ValueId) -> V {
        let ty = self.b().ty(id).clone();
        let home = self.frames.len() - 1;
        let v = self.slot(Slot {
            name: "",
            ty: Some(ty),
            known: None,
            home,
        });
        self.frames[home].ids.insert(v, id);
        v
    }

    /// Row-major elements of an integer value when they are known, symbols allowed.
    fn known_dims(&mut self, v: V) -> Result<Option<Vec<Dim>>> {
        if let Some(Contents::Dims(dims)) = &self.slots[v.0 as usize].known {
            return Ok(Some(dims.clone()));
        }
        let constant = self.constant(v)?;
        let ints = constant.and_then(|t| super::super::tensor::to_i64s(&t));
        Ok(ints.map(|ints| ints.into_iter().map(Dim::constant).collect()))
    }

    /// IR values, in a frame, of the symbols of some dims that are elements of tensors.
    pub(super) fn symbol_values(
        &mut self,
        dims: &[Dim],
        frame: usize,
    ) -> Result<BTreeMap<String, ValueId>> {
        let mut symbols = BTreeSet::new();
        for dim in dims {
            dim.visit_symbols(&mut |s| {
                symbols.insert(s.to_owned());
            });
        }
        let mut values = BTreeMap::new();
        for symbol in symbols {
            if let Some(&v) = self.extent_values.get(&symbol) {
                values.insert(symbol, self.materialise_in(v, frame)?);
            }
        }
        Ok(values)
    }
}

impl Ctx<'_, '_> {
    /// True where extents may be left to a run.
    pub fn is_run_time(&self) -> bool {
        self.im.run_time
    }

    /// Elements of the integer operand `i`; an error where they must be known, and are not.
    pub fn elements(&mut self, i: usize) -> Result<Vec<Element>> {
        if let Some(known) = self.try_dims(i)? {
            return Ok(known.into_iter().map(Element::Known).collect());
        }
        let is_integer = self.ty(i)?.dtype.is_int();
        let v = self.v(i)?;
        match self.im.run_time && is_integer {
            true => self.im.elements(v)?.ok_or_else(|| self.unknown(i)),
            false => Err(self.unknown(i)),
        }
    }

    /// Row-major elements of operand `i`, those that are not known as symbols of their own, which may
    /// only be moved.
    pub fn tracked(&mut self, i: usize) -> Result<Option<Vec<Dim>>> {
        if !self.im.run_time || !self.has(i) {
            return self.try_dims(i);
        }
        let v = self.v(i)?;
        self.im.tracked(v)
    }

    /// True for a concatenation of integers of which some are known.
    pub fn is_mixed(&self) -> bool {
        if !self.im.run_time || self.node.op_type != "Concat" {
            return false;
        }
        let slots = || self.operands().map(|v| &self.im.slots[v.0 as usize]);
        let is_list = |ty: &Type| ty.dtype.is_int() && ty.rank() == 1;
        slots().all(|s| s.ty.as_ref().is_some_and(is_list))
            && slots().any(|s| s.known.is_some())
            && slots().any(|s| s.known.is_none())
    }

    /// The extent that an element is.
    pub fn extent_of(&mut self, element: Element) -> Result<Dim> {
        match element {
            Element::Known(dim) => Ok(dim),
            Element::Value(value) => self.extent(value),
        }
    }

    /// The extent that an `i64` of rank 0 decides during a run, as a symbol.
    pub fn extent(&mut self, value: ValueId) -> Result<Dim> {
        let frame = self.im.frames.len() - 1;
        if let Some(known) = self.im.frames[frame].extents.get(&value) {
            return Ok(known.clone());
        }
        let dim = self.new_symbol();
        let symbol = dim.to_string();
        let scalar = self.add(
            Op::Extent {
                symbol: symbol.clone(),
            },
            &[value],
        )?;
        let v = self.made(scalar);
        self.im.extent_values.insert(symbol, v);
        self.im.frames[frame].extents.insert(value, dim.clone());
        Ok(dim)
    }

    /// Number of symbols made so far.
    pub fn n_symbols(&self) -> usize {
        self.im.n_symbols
    }

    /// Runs `f`; when it fails, all that it reported is forgotten and its error is given.
    pub fn attempt<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (n_errors, needs) = (self.im.errors.len(), self.im.needs.clone());
        let n_conditions = self.im.conditions.len();
        let result = f(self);
        if result.is_err() {
            self.im.conditions.truncate(n_conditions);
            self.im.errors.truncate(n_errors);
            self.im.needs = needs;
        }
        result
    }

    /// True for a dim that the shapes of the inputs tell.
    pub fn is_of_inputs(&self, dim: &Dim) -> bool {
        let mut is_of_inputs = true;
        dim.visit_symbols(&mut |s| is_of_inputs &= self.im.symbols.contains(s));
        is_of_inputs
    }

    /// A symbol of its own.
    pub fn new_symbol(&mut self) -> Dim {
        self.im.new_symbol(&self.node.op_type)
    }

    /// An element as an `i64` of rank 0.
    pub fn element_value(&mut self, element: &Element) -> Result<ValueId> {
        match element {
            Element::Known(dim) => self.dim_value(dim),
            Element::Value(value) => Ok(*value),
        }
    }

    /// The value of a dim as an `i64` of rank 0.
    pub fn dim_value(&mut self, dim: &Dim) -> Result<ValueId> {
        let frame = self.im.frames.len() - 1;
        let values = self.im.symbol_values(std::slice::from_ref(dim), frame)?;
        symbolic_scalar(self.b(), dim, &values)
    }

    /// An `i64` constant of rank 0.
    pub fn int(&mut self, value: i64) -> ValueId {
        self.b().constant(Tensor::scalar(value))
    }

    /// Declared ranges of symbols.
    pub fn ranges(&self) -> &Ranges {
        &self.im.ranges
    }

    /// The least of two dims.
    pub fn least(&self, a: &Dim, b: &Dim) -> Dim {
        a.least_within(b, &self.im.ranges)
    }

    /// The greatest of two dims.
    pub fn greatest(&self, a: &Dim, b: &Dim) -> Dim {
        a.greatest_within(b, &self.im.ranges)
    }

    /// Operands of an element-wise op, whose extents are equal or 1: those that are not known to be equal, and are neither
    /// constants nor 1, are taken to be equal. That is checked once sizes are known; where it does not hold, the model is
    /// compiled for the sizes at hand.
    pub fn fitted(&mut self, args: &[ValueId]) -> Result<Vec<ValueId>> {
        if args.len() < 2 {
            return Ok(args.to_vec());
        }
        let shapes: Vec<Shape> = args.iter().map(|&v| self.shape_of(v)).collect();
        let rank = shapes.iter().map(Shape::rank).max().unwrap_or(0);
        let common: Vec<Option<Dim>> = (0..rank).map(|a| self.common(&shapes, a)).collect();
        let pairs = args.iter().zip(&shapes);
        let fit = |(&v, shape): (&ValueId, &Shape)| {
            let fitted = fitted_to(shape, &common[rank - shape.rank()..]);
            self.equal_extents(v, fitted)
        };
        pairs.map(fit).collect()
    }

    /// The extent of an axis, counted from the end of each shape, where several that are not 1 differ and may be equal.
    fn common(&self, shapes: &[Shape], axis: usize) -> Option<Dim> {
        let rank = shapes.iter().map(Shape::rank).max()?;
        let extents = shapes
            .iter()
            .filter_map(|s| s.get((axis + s.rank()).checked_sub(rank)?));
        let wide: BTreeSet<&Dim> = extents.filter(|d| !d.is(1)).collect();
        self.simplest(&wide)
    }

    /// The extent to use for several that may be equal: a constant before an expression over inputs, that before one with
    /// an extreme, and that before one that a run decides. `None` if there is one alone, or two constants.
    fn simplest(&self, extents: &BTreeSet<&Dim>) -> Option<Dim> {
        let n_constants = extents.iter().filter(|d| d.as_const().is_some()).count();
        let order = |d: &Dim| {
            let is_symbolic = d.as_const().is_none();
            (
                self.is_decided_by_run(d),
                d.has_extreme(),
                is_symbolic,
                d.n_atoms(),
            )
        };
        let simplest = extents.iter().min_by_key(|d| order(d));
        let simplest = simplest.filter(|_| extents.len() > 1 && n_constants < 2);
        simplest.map(|d| (*d).clone())
    }

    /// An operand and a target of a broadcast, whose extents are taken to be equal as in [`Ctx::fitted`].
    pub fn fitted_to_target(&mut self, x: ValueId, wanted: &mut [Dim]) -> Result<ValueId> {
        let own = self.shape_of(x);
        let (mut same, mut simplest) = (own.0.clone(), own.0.clone());
        let targets = wanted.iter_mut().rev();
        for (i, (w, d)) in targets.zip(own.iter().rev()).enumerate() {
            let both: BTreeSet<&Dim> = [&*w, d].into();
            let is_open = self.is_decided_by_run(w) || self.is_decided_by_run(d);
            let found = self
                .simplest(&both)
                .filter(|_| !is_open && !d.is(1) && !w.is(1));
            if let Some(found) = found {
                let axis = own.rank() - 1 - i;
                (same[axis], simplest[axis]) = (w.clone(), found.clone());
                *w = found;
            }
        }
        // The first is a condition also where the operand's own extent is the simplest one.
        let x = self.equal_extents(x, same)?;
        self.equal_extents(x, simplest)
    }

    /// Parts of a concatenation, whose extents are equal but along one axis: as in [`Ctx::fitted`].
    pub fn fitted_parts(&mut self, parts: &[ValueId], axis: usize) -> Result<Vec<ValueId>> {
        let shapes: Vec<Shape> = parts.iter().map(|&v| self.shape_of(v)).collect();
        let rank = shapes.first().map_or(0, Shape::rank);
        if shapes.iter().any(|s| s.rank() != rank) {
            return Ok(parts.to_vec());
        }
        let common = |a: usize| {
            let extents: BTreeSet<&Dim> = shapes.iter().map(|s| &s[a]).collect();
            self.simplest(&extents).filter(|_| a != axis)
        };
        let common: Vec<Option<Dim>> = (0..rank).map(common).collect();
        let fit = |(&v, shape): (&ValueId, &Shape)| {
            let axes = shape.iter().zip(&common);
            let fitted = axes.map(|(d, common)| common.as_ref().unwrap_or(d).clone());
            self.equal_extents(v, fitted.collect())
        };
        parts.iter().zip(&shapes).map(fit).collect()
    }

    /// The value with extents that are taken to be its own: during a run where one decides them, and
    /// otherwise by slices whose start and size fit equal extents only.
    pub fn equal_extents(&mut self, v: ValueId, shape: Vec<Dim>) -> Result<ValueId> {
        let own = self.shape_of(v);
        let mut dims = own.iter().chain(&shape);
        for (have, want) in own.iter().zip(&shape) {
            self.assume_equal(have, want);
        }
        if own.rank() != shape.len() || dims.any(|d| self.is_decided_by_run(d)) {
            return self.shaped(v, shape);
        }
        if *own == shape[..] {
            return Ok(v);
        }
        // The last element of `want` is inside of `have` from `want - have` on for equal ones alone.
        let pairs = own.iter().zip(&shape);
        let starts = pairs.map(|(have, want)| want.clone() - have.clone());
        let op = Op::Slice {
            starts: starts.collect(),
            steps: vec![1; shape.len()],
            sizes: shape,
        };
        self.add(op, &[v])
    }

    /// Takes two extents to be equal, which is checked once the sizes of the inputs are known.
    pub fn assume_equal(&mut self, have: &Dim, want: &Dim) {
        if have != want && !self.is_decided_by_run(have) && !self.is_decided_by_run(want) {
            let condition = Condition {
                have: have.clone(),
                want: want.clone(),
                origin: Origin::new(&self.path()),
            };
            self.im.conditions.push(condition);
        }
    }

    /// True when a symbol of the dim gets its value during a run.
    pub fn is_decided_by_run(&self, dim: &Dim) -> bool {
        let mut is_decided = false;
        dim.visit_symbols(&mut |s| is_decided |= !self.im.symbols.contains(s));
        is_decided
    }

    /// The value with these extents, which the run checks where they are not known to be its own.
    pub fn shaped(&mut self, v: ValueId, shape: Vec<Dim>) -> Result<ValueId> {
        match *self.shape_of(v) == shape[..] {
            true => Ok(v),
            false => self.add(Op::Shaped { shape }, &[v]),
        }
    }

    /// `a` where it is less than `b`.
    pub fn lesser(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Min, &[a, b])
    }

    /// `a` where it is greater than `b`.
    pub fn greater(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Max, &[a, b])
    }
}

/// A shape with the extents of its axes that have several elements replaced.
fn fitted_to(shape: &Shape, widest: &[Option<Dim>]) -> Vec<Dim> {
    let extents = shape.iter().zip(widest);
    let extents = extents.map(|(d, wide)| wide.as_ref().filter(|_| !d.is(1)).unwrap_or(d));
    extents.cloned().collect()
}
