//! LSTM, GRU and RNN as scans over time.
//!
//! The products with the input weights are one matrix product over all steps, outside the scan; the
//! scan's body holds the recurrent product and the gates. Sequences shorter than the longest are
//! masked: a step beyond the end leaves the state as it is, and gives 0.
//!
//! Of quantised cells, the products with the input weights are of integers. The state stays `f32`,
//! and is multiplied by dequantised weights.

use super::super::import::{Ctx, OpDef, Out, Outs};
use super::control::step_inputs;
use super::norm::filled;
use super::quant::{centred, quantized_by_range};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, GraphBuilder, Op, Real, ScalarOp, ValueId};
use crate::nearest::unknown;
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("LSTM", (3, 8), lstm),
    OpDef::new("GRU", (3, 6), gru),
    OpDef::new("RNN", (3, 6), rnn),
];

/// A cell and its variants.
#[derive(Clone, Copy, PartialEq)]
enum Cell {
    /// Gates i, o, f, c. With `coupled`, the forget gate is one minus the input gate.
    Lstm { coupled: bool },
    /// Gates z, r, h. With `late_reset`, the reset gate applies after the recurrent product.
    Gru { late_reset: bool },
    /// One gate.
    Rnn,
}

impl Cell {
    fn gates(self) -> usize {
        match self {
            Cell::Lstm { .. } => 4,
            Cell::Gru { .. } => 3,
            Cell::Rnn => 1,
        }
    }

    fn n_states(self) -> usize {
        match self {
            Cell::Lstm { .. } => 2,
            _ => 1,
        }
    }

    fn default_activations(self) -> &'static [&'static str] {
        match self {
            Cell::Lstm { .. } => &["Sigmoid", "Tanh", "Tanh"],
            Cell::Gru { .. } => &["Sigmoid", "Tanh"],
            Cell::Rnn => &["Tanh"],
        }
    }
}

/// An activation with its parameters.
#[derive(Clone)]
struct Activation {
    name: String,
    alpha: f64,
    beta: f64,
}

/// The operator's attributes.
struct Config {
    cell: Cell,
    hidden: usize,
    /// Per direction: true when it walks backwards.
    reverse: Vec<bool>,
    /// Per direction.
    activations: Vec<Vec<Activation>>,
    clip: Option<f64>,
    batch_first: bool,
    /// True when weights are bytes, `[directions, inputs, gates * hidden]`.
    is_quantized: bool,
}

/// Operands of one direction, in the shapes that the scan takes.
struct Direction {
    /// `[time, batch, gates * hidden]`: products with the input weights, biases added.
    inputs: ValueId,
    /// `[hidden, gates * hidden]`.
    recurrent: ValueId,
    /// `[hidden]`, of the hidden gate of a GRU with late reset.
    recurrent_bias: Option<ValueId>,
    /// State: `h`, and `c` for LSTM, `[batch, hidden]`.
    state: Vec<ValueId>,
    /// `[3 * hidden]` peephole weights i, o, f.
    peepholes: Option<ValueId>,
    /// `[batch]`: lengths of the sequences.
    lens: Option<ValueId>,
}

fn lstm(cx: &mut Ctx) -> Result<Outs> {
    let coupled = cx.flag("input_forget", false)?;
    recurrent(cx, Cell::Lstm { coupled })
}

/// LSTM by 8-bit weights: operands 8 to 11 are scales and zero points of those of the input and of
/// the recurrence.
pub(super) fn dynamic_quantize_lstm(cx: &mut Ctx) -> Result<Outs> {
    let coupled = cx.flag("input_forget", false)?;
    let config = config(cx, Cell::Lstm { coupled }, true)?;
    scans(cx, &config)
}

fn gru(cx: &mut Ctx) -> Result<Outs> {
    let late_reset = cx.flag("linear_before_reset", false)?;
    recurrent(cx, Cell::Gru { late_reset })
}

fn rnn(cx: &mut Ctx) -> Result<Outs> {
    recurrent(cx, Cell::Rnn)
}

fn config(cx: &mut Ctx, cell: Cell, is_quantized: bool) -> Result<Config> {
    let directions: &[(&str, &[bool])] = &[
        ("forward", &[false]),
        ("reverse", &[true]),
        ("bidirectional", &[false, true]),
    ];
    let reverse = cx.choice("direction", "forward", directions)?.to_vec();
    cx.ignore(&["output_sequence"]);
    Ok(Config {
        cell,
        hidden: hidden_size(cx, cell.gates(), reverse.len(), is_quantized)?,
        activations: activations(cx, cell, reverse.len())?,
        reverse,
        clip: cx.opt_f("clip")?,
        batch_first: cx.flag("layout", false)?,
        is_quantized,
    })
}

/// Names of activations, which are read without regard to case, with the defaults of their alpha
/// and beta.
const ACTIVATIONS: [(&str, Option<f32>, Option<f32>); 11] = [
    ("Relu", None, None),
    ("Tanh", None, None),
    ("Sigmoid", None, None),
    ("Softsign", None, None),
    ("Softplus", None, None),
    ("LeakyRelu", Some(0.01), None),
    ("ThresholdedRelu", Some(1.0), None),
    ("Elu", Some(1.0), None),
    ("Affine", Some(1.0), Some(0.0)),
    ("ScaledTanh", Some(1.0), Some(1.0)),
    ("HardSigmoid", Some(0.2), Some(0.5)),
];

/// Parameters are handed out in order to the activations that have them.
fn activations(cx: &Ctx, cell: Cell, n_directions: usize) -> Result<Vec<Vec<Activation>>> {
    let defaults = cell.default_activations();
    let n = defaults.len() * n_directions;
    let names = cx.strings("activations")?.unwrap_or_else(|| {
        let all = defaults.iter().cycle().take(n);
        all.map(|s| s.to_string()).collect()
    });
    if names.len() != n {
        let message = format!("{} activations, expected {n}", names.len());
        return Err(Error::invalid(message));
    }
    let mut alphas = cx
        .floats("activation_alpha")?
        .unwrap_or_default()
        .into_iter();
    let mut betas = cx
        .floats("activation_beta")?
        .unwrap_or_default()
        .into_iter();
    let mut all = Vec::new();
    for name in names {
        let (alpha, beta) = default_parameters(&name)?;
        all.push(Activation {
            name: name.to_lowercase(),
            alpha: parameter(alpha, &mut alphas),
            beta: parameter(beta, &mut betas),
        });
    }
    let per_direction = all.chunks(defaults.len());
    Ok(per_direction.map(<[Activation]>::to_vec).collect())
}

/// The next given parameter, or the default; 0 for activations that have none.
fn parameter(default: Option<f32>, given: &mut impl Iterator<Item = f64>) -> f64 {
    default.map_or(0.0, |d| given.next().unwrap_or(d.into()))
}

fn default_parameters(name: &str) -> Result<(Option<f32>, Option<f32>)> {
    let mut known = ACTIVATIONS.iter();
    match known.find(|a| a.0.eq_ignore_ascii_case(name)) {
        Some(&(_, alpha, beta)) => Ok((alpha, beta)),
        None => {
            let names = ACTIVATIONS.iter().map(|a| a.0);
            Err(Error::unsupported(unknown("activation", name, names)))
        }
    }
}

fn recurrent(cx: &mut Ctx, cell: Cell) -> Result<Outs> {
    let config = config(cx, cell, false)?;
    scans(cx, &config)
}

/// The scans of all directions.
fn scans(cx: &mut Ctx, config: &Config) -> Result<Outs> {
    let mut x = cx.val(0)?;
    let ty = cx.type_of(x);
    if ty.rank() != 3 {
        return Err(Error::invalid(format!("X must have rank 3, is {ty}")));
    }
    if config.batch_first {
        x = cx.transpose(x, &[1, 0, 2])?;
    }
    let lens = match cx.opt(4)? {
        Some(l) => Some(cx.cast(l, DType::I64)?),
        None => None,
    };
    let input = Input::of(cx, config, x)?;
    let mut sequences = Vec::new();
    let mut states: Vec<Vec<ValueId>> = vec![Vec::new(); 2];
    for d in 0..config.reverse.len() {
        let mut direction = direction(cx, config, &input, d)?;
        direction.lens = lens;
        let results = scan(cx, config, &direction, d)?;
        let (state, sequence) = results.split_at(direction.state.len());
        for (all, &s) in states.iter_mut().zip(state) {
            all.push(s);
        }
        sequences.push(sequence[0]);
    }
    results(cx, config, &sequences, &states)
}

/// Units of the cell, by the weights `R` of the recurrence.
fn hidden_size(cx: &mut Ctx, gates: usize, n: usize, is_quantized: bool) -> Result<usize> {
    let r = cx.ty(2)?;
    // Quantised weights are transposed.
    let (of_hidden, of_gates) = if is_quantized { (1, 2) } else { (2, 1) };
    let hidden = r.shape.get(of_hidden).and_then(Dim::as_usize).unwrap_or(0);
    let wide = (gates * hidden) as i64;
    if r.rank() != 3 || !r.shape[0].is(n as i64) || !r.shape[of_gates].is(wide) {
        let expected = match is_quantized {
            true => format!("[{n}, hidden, {gates} * hidden]"),
            false => format!("[{n}, {gates} * hidden, hidden]"),
        };
        let message = format!("R must be {expected}, got {r}");
        return Err(Error::invalid(message));
    }
    if cx.opt_i("hidden_size")?.is_some_and(|h| h != hidden as i64) {
        let message = format!("hidden_size differs from that of R {r}");
        return Err(Error::invalid(message));
    }
    Ok(hidden)
}

/// Row `d` of a stacked operand, its first axis dropped.
fn of_direction(cx: &mut Ctx, v: ValueId, d: usize) -> Result<ValueId> {
    let shape = cx.shape_of(v);
    let row = match shape.first() {
        Some(n) if n.is(1) => v,
        _ => cx.slice_axis(v, 0, d, 1)?,
    };
    let rest: Vec<Dim> = shape.iter().skip(1).cloned().collect();
    cx.reshape(row, rest)
}

/// The input of all directions, `[time, batch, inputs]`.
struct Input {
    x: ValueId,
    /// Its integers minus their zero point, and their scale, where it is multiplied by bytes.
    integers: Option<(ValueId, ValueId)>,
}

impl Input {
    fn of(cx: &mut Ctx, config: &Config, x: ValueId) -> Result<Input> {
        if !config.is_quantized {
            return Ok(Input { x, integers: None });
        }
        let [bytes, scale, zero] = quantized_by_range(cx, x)?;
        let integers = Some((centred(cx, bytes, Some(zero))?, scale));
        Ok(Input { x, integers })
    }

    /// The products with the input weights of direction `d`.
    fn product(&self, cx: &mut Ctx, d: usize) -> Result<ValueId> {
        let w = cx.val(1)?;
        let w = of_direction(cx, w, d)?;
        let Some((integers, scale)) = self.integers else {
            let w = cx.transpose(w, &[1, 0])?;
            return cx.matmul(self.x, w);
        };
        let [of_weights, zero] = parameters(cx, 8, d)?;
        let w = centred(cx, w, Some(zero))?;
        let sums = cx.matmul(integers, w)?;
        let sums = cx.cast(sums, DType::F32)?;
        let scaled = cx.mul(sums, of_weights)?;
        cx.mul(scaled, scale)
    }
}

/// The scale and the zero point of direction `d`, operands `first` and the next.
fn parameters(cx: &mut Ctx, first: usize, d: usize) -> Result<[ValueId; 2]> {
    let (scale, zero) = (cx.val(first)?, cx.val(first + 1)?);
    Ok([of_direction(cx, scale, d)?, of_direction(cx, zero, d)?])
}

/// The weights of the recurrence, `[hidden, gates * hidden]`.
fn recurrent_weights(cx: &mut Ctx, config: &Config, d: usize) -> Result<ValueId> {
    let r = cx.val(2)?;
    let r = of_direction(cx, r, d)?;
    if !config.is_quantized {
        return cx.transpose(r, &[1, 0]);
    }
    let [scale, zero] = parameters(cx, 10, d)?;
    let r = centred(cx, r, Some(zero))?;
    let r = cx.cast(r, DType::F32)?;
    cx.mul(r, scale)
}

fn direction(cx: &mut Ctx, config: &Config, input: &Input, d: usize) -> Result<Direction> {
    let mut inputs = input.product(cx, d)?;
    let recurrent = recurrent_weights(cx, config, d)?;
    let mut recurrent_bias = None;
    if let Some(b) = cx.opt(3)? {
        let b = of_direction(cx, b, d)?;
        let (bias, late) = biases(cx, config, b)?;
        inputs = cx.add_(inputs, bias)?;
        recurrent_bias = late;
    }
    let mut state = Vec::new();
    for i in 0..config.cell.n_states() {
        state.push(initial_state(cx, config, input.x, 5 + i, d)?);
    }
    let peepholes = match cx.opt(7)? {
        Some(p) => Some(of_direction(cx, p, d)?),
        None => None,
    };
    Ok(Direction {
        inputs,
        recurrent,
        recurrent_bias,
        state,
        peepholes,
        lens: None,
    })
}

/// The sum of the biases of inputs and recurrence; and that of the recurrence which waits for the
/// reset gate.
fn biases(cx: &mut Ctx, config: &Config, b: ValueId) -> Result<(ValueId, Option<ValueId>)> {
    let hidden = config.hidden;
    let wide = config.cell.gates() * hidden;
    let input = cx.slice_axis(b, 0, 0, wide)?;
    let mut rest = cx.slice_axis(b, 0, wide, wide)?;
    let mut late = None;
    if config.cell == (Cell::Gru { late_reset: true }) {
        // The recurrent bias of the hidden gate is added before the reset gate applies.
        late = Some(cx.slice_axis(rest, 0, 2 * hidden, hidden)?);
        let early = cx.slice_axis(rest, 0, 0, 2 * hidden)?;
        let dtype = cx.dtype_of(b);
        let zero = filled(cx, dtype, 0.0, &[hidden.into()])?;
        rest = cx.concat(&[early, zero], 0)?;
    }
    Ok((cx.add_(input, rest)?, late))
}

fn initial_state(
    cx: &mut Ctx,
    config: &Config,
    x: ValueId,
    operand: usize,
    d: usize,
) -> Result<ValueId> {
    let ty = cx.type_of(x);
    let dims = [ty.shape[1].clone(), config.hidden.into()];
    let Some(mut s) = cx.opt(operand)? else {
        return filled(cx, ty.dtype, 0.0, &dims);
    };
    if config.batch_first {
        s = cx.transpose(s, &[1, 0, 2])?;
    }
    let s = of_direction(cx, s, d)?;
    cx.broadcast(s, dims)
}

impl Direction {
    /// Values that all steps read, in the order of [`Body::build`].
    fn invariants(&self) -> Vec<ValueId> {
        let given = [self.peepholes, self.recurrent_bias, self.lens];
        let mut all = vec![self.recurrent];
        all.extend(given.into_iter().flatten());
        all
    }
}

/// The scan of one direction. Results: final state, then the hidden states of all steps.
fn scan(cx: &mut Ctx, config: &Config, dir: &Direction, d: usize) -> Result<Vec<ValueId>> {
    let time = cx.shape_of(dir.inputs)[0].clone();
    let mut scanned = vec![dir.inputs];
    if dir.lens.is_some() {
        scanned.push(cx.iota([time.clone()], 0)?);
    }
    let invariants = dir.invariants();
    let mut b = GraphBuilder::new("step");
    b.set_origin(&cx.path());
    let mut formals = step_inputs(cx, &mut b, &dir.state, &scanned);
    for &v in &invariants {
        let (name, ty) = (format!("a{}", formals.len()), cx.type_of(v));
        formals.push(b.input(&name, ty.dtype, ty.shape.0));
    }
    let body = Body {
        config,
        activations: &config.activations[d],
        n_scanned: scanned.len(),
        b,
    };
    let graph = body.build(&formals, dir)?;
    let op = Op::Scan {
        carried: dir.state.len(),
        scanned: scanned.len(),
        length: time,
        reverse: config.reverse[d],
    };
    let operands = [&dir.state[..], &scanned, &invariants].concat();
    cx.b().add_with_regions(op, &operands, vec![graph])
}

/// The body of the scan under construction: one step for all sequences.
struct Body<'a> {
    config: &'a Config,
    activations: &'a [Activation],
    n_scanned: usize,
    b: GraphBuilder,
}

impl Body<'_> {
    /// `formals`: state, input products, (step number), recurrent weights, (peepholes), (recurrent
    /// bias), (lengths).
    fn build(mut self, formals: &[ValueId], dir: &Direction) -> Result<Graph> {
        let (state, rest) = formals.split_at(dir.state.len());
        let mut invariants = rest[self.n_scanned..].iter().copied();
        let mut next = |given: bool| if given { invariants.next() } else { None };
        let step = Step {
            inputs: rest[0],
            recurrent: next(true).expect("recurrent weights are always there"),
            peepholes: next(dir.peepholes.is_some()),
            recurrent_bias: next(dir.recurrent_bias.is_some()),
        };
        let lens = next(dir.lens.is_some());
        let mut new = self.cell(&step, state)?;
        let mut h = new[0];
        if let Some(lens) = lens {
            (new, h) = self.masked(state, &new, rest[1], lens)?;
        }
        for (i, &v) in new.iter().enumerate() {
            self.b.output(&format!("state_{i}"), v);
        }
        self.b.output("h", h);
        Ok(self.b.into_graph())
    }

    /// The new state.
    fn cell(&mut self, step: &Step, state: &[ValueId]) -> Result<Vec<ValueId>> {
        match self.config.cell {
            Cell::Lstm { coupled } => self.lstm(step, state[0], state[1], coupled),
            Cell::Gru { late_reset } => Ok(vec![self.gru(step, state[0], late_reset)?]),
            Cell::Rnn => {
                let product = self.b.matmul(state[0], step.recurrent)?;
                let sum = self.b.add_(step.inputs, product)?;
                Ok(vec![self.activate(0, sum)?])
            }
        }
    }

    /// Gate `i` of all of them.
    fn gate(&mut self, all: ValueId, i: usize) -> Result<ValueId> {
        let hidden = self.config.hidden;
        self.b.slice_axis(all, 1, i * hidden, hidden)
    }

    fn lstm(&mut self, step: &Step, h: ValueId, c: ValueId, coupled: bool) -> Result<Vec<ValueId>> {
        let product = self.b.matmul(h, step.recurrent)?;
        let all = self.b.add_(step.inputs, product)?;
        let i = self.gate(all, 0)?;
        let i = self.peep(step, i, c, 0)?;
        let i = self.activate(0, i)?;
        let f = if coupled {
            self.one_minus(i)?
        } else {
            let f = self.gate(all, 2)?;
            let f = self.peep(step, f, c, 2)?;
            self.activate(0, f)?
        };
        let g = self.gate(all, 3)?;
        let g = self.activate(1, g)?;
        let (kept, new) = (self.b.mul(f, c)?, self.b.mul(i, g)?);
        let c = self.b.add_(kept, new)?;
        let o = self.gate(all, 1)?;
        let o = self.peep(step, o, c, 1)?;
        let o = self.activate(0, o)?;
        let t = self.apply(2, c)?;
        Ok(vec![self.b.mul(o, t)?, c])
    }

    /// A gate with the part of the cell state that it sees, by peephole weights `i`.
    fn peep(&mut self, step: &Step, gate: ValueId, c: ValueId, i: usize) -> Result<ValueId> {
        let Some(p) = step.peepholes else {
            return Ok(gate);
        };
        let hidden = self.config.hidden;
        let p = self.b.slice_axis(p, 0, i * hidden, hidden)?;
        let seen = self.b.mul(p, c)?;
        self.b.add_(gate, seen)
    }

    fn gru(&mut self, step: &Step, h: ValueId, late_reset: bool) -> Result<ValueId> {
        let (z, fresh) = if late_reset {
            self.late_reset(step, h)?
        } else {
            self.early_reset(step, h)?
        };
        let z = self.activate(0, z)?;
        let x = self.gate(step.inputs, 2)?;
        let sum = self.b.add_(x, fresh)?;
        let fresh = self.activate(1, sum)?;
        let other = self.one_minus(z)?;
        let (new, kept) = (self.b.mul(other, fresh)?, self.b.mul(z, h)?);
        self.b.add_(new, kept)
    }

    /// Update gate before its activation, and `r (h R + b)`.
    fn late_reset(&mut self, step: &Step, h: ValueId) -> Result<(ValueId, ValueId)> {
        let all = self.b.matmul(h, step.recurrent)?;
        let z = self.gate_sum(step.inputs, all, 0)?;
        let r = self.gate_sum(step.inputs, all, 1)?;
        let r = self.activate(0, r)?;
        let mut t = self.gate(all, 2)?;
        if let Some(bias) = step.recurrent_bias {
            t = self.b.add_(t, bias)?;
        }
        Ok((z, self.b.mul(r, t)?))
    }

    /// Update gate before its activation, and `(r h) R`.
    fn early_reset(&mut self, step: &Step, h: ValueId) -> Result<(ValueId, ValueId)> {
        let k = self.config.hidden;
        let early = self.b.slice_axis(step.recurrent, 1, 0, 2 * k)?;
        let last = self.b.slice_axis(step.recurrent, 1, 2 * k, k)?;
        let zr = self.b.matmul(h, early)?;
        let z = self.gate_sum(step.inputs, zr, 0)?;
        let r = self.gate_sum(step.inputs, zr, 1)?;
        let r = self.activate(0, r)?;
        let reset = self.b.mul(r, h)?;
        Ok((z, self.b.matmul(reset, last)?))
    }

    fn gate_sum(&mut self, inputs: ValueId, recurrent: ValueId, i: usize) -> Result<ValueId> {
        let (x, h) = (self.gate(inputs, i)?, self.gate(recurrent, i)?);
        self.b.add_(x, h)
    }

    fn one_minus(&mut self, x: ValueId) -> Result<ValueId> {
        let one = self.b.scalar(self.b.ty(x).dtype, 1.0);
        self.b.sub(one, x)
    }

    /// Clips, then applies activation `i`.
    fn activate(&mut self, i: usize, mut x: ValueId) -> Result<ValueId> {
        if let Some(c) = self.config.clip.filter(|c| *c > 0.0) {
            let (lo, hi) = (Real(-c), Real(c));
            x = self.b.map(ScalarOp::ClampTo { lo, hi }, &[x])?;
        }
        self.apply(i, x)
    }

    fn apply(&mut self, i: usize, x: ValueId) -> Result<ValueId> {
        let Activation { name, alpha, beta } = &self.activations[i];
        let (a, c) = (Real(*alpha), Real(*beta));
        let op = match name.as_str() {
            "relu" => ScalarOp::Relu,
            "sigmoid" => ScalarOp::Sigmoid,
            "softsign" => ScalarOp::Softsign,
            "softplus" => ScalarOp::Softplus,
            "leakyrelu" => ScalarOp::LeakyRelu { alpha: a },
            "thresholdedrelu" => ScalarOp::ThresholdedRelu { alpha: a },
            "elu" => ScalarOp::Elu { alpha: a },
            "hardsigmoid" => ScalarOp::HardSigmoid { alpha: a, beta: c },
            "affine" => {
                let t = self.times(x, *alpha)?;
                let offset = self.b.scalar(self.b.ty(x).dtype, *beta);
                return self.b.add_(t, offset);
            }
            "scaledtanh" => {
                let t = self.times(x, *beta)?;
                let t = self.b.map(ScalarOp::Tanh, &[t])?;
                return self.times(t, *alpha);
            }
            _ => ScalarOp::Tanh,
        };
        self.b.map(op, &[x])
    }

    fn times(&mut self, x: ValueId, factor: f64) -> Result<ValueId> {
        let factor = self.b.scalar(self.b.ty(x).dtype, factor);
        self.b.mul(x, factor)
    }

    /// State and result where step `t` lies within each sequence; the old state and 0 elsewhere.
    fn masked(
        &mut self,
        old: &[ValueId],
        new: &[ValueId],
        t: ValueId,
        lens: ValueId,
    ) -> Result<(Vec<ValueId>, ValueId)> {
        let b = &mut self.b;
        let inside = b.map(ScalarOp::Lt, &[t, lens])?;
        let batch = b.ty(lens).shape[0].clone();
        let inside = b.reshape(inside, [batch, 1.into()])?;
        let mut state = Vec::new();
        for (&o, &n) in old.iter().zip(new) {
            state.push(b.map(ScalarOp::Select, &[inside, n, o])?);
        }
        let zero = b.scalar(b.ty(new[0]).dtype, 0.0);
        let h = b.map(ScalarOp::Select, &[inside, new[0], zero])?;
        Ok((state, h))
    }
}

/// Operands of a step beside the state.
struct Step {
    inputs: ValueId,
    recurrent: ValueId,
    peepholes: Option<ValueId>,
    recurrent_bias: Option<ValueId>,
}

/// `Y [time, directions, batch, hidden]`, `Y_h` and `Y_c [directions, batch, hidden]`; batch comes
/// first with layout 1.
fn results(
    cx: &mut Ctx,
    config: &Config,
    sequences: &[ValueId],
    states: &[Vec<ValueId>],
) -> Result<Outs> {
    let mut y = stacked(cx, sequences, 1)?;
    if config.batch_first {
        y = cx.transpose(y, &[2, 0, 1, 3])?;
    }
    let mut outs = vec![Out::Value(y)];
    for s in states.iter().filter(|s| !s.is_empty()) {
        let mut s = stacked(cx, s, 0)?;
        if config.batch_first {
            s = cx.transpose(s, &[1, 0, 2])?;
        }
        outs.push(Out::Value(s));
    }
    Ok(outs)
}

/// Values joined along a new axis.
fn stacked(cx: &mut Ctx, parts: &[ValueId], axis: usize) -> Result<ValueId> {
    let mut expanded = Vec::new();
    for &p in parts {
        let mut dims = cx.shape_of(p).0;
        dims.insert(axis, Dim::constant(1));
        expanded.push(cx.reshape(p, dims)?);
    }
    match expanded[..] {
        [only] => Ok(only),
        _ => cx.concat(&expanded, axis),
    }
}
