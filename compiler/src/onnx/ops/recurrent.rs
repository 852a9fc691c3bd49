//! LSTM, GRU and RNN as scans over time.
//!
//! The products with the input weights are one matrix product over all steps, outside the scan; the scan's body holds the
//! recurrent product and the gates. Sequences shorter than the longest are masked: a step beyond the end leaves the state
//! as it is, and gives 0.

use super::super::import::{Ctx, OpDef, Out, Outs};
use crate::error::{Error, Result};
use crate::ir::{Dim, GraphBuilder, Op, Real, ScalarOp, ValueId};
use crate::nearest::unknown;
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("LSTM", (3, 8), lstm),
    OpDef::new("GRU", (3, 6), gru),
    OpDef::new("RNN", (3, 6), rnn),
];

/// Which cell, with what distinguishes its variants.
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

/// What the operator's attributes say.
struct Config {
    cell: Cell,
    /// Per direction: whether it walks backwards.
    reverse: Vec<bool>,
    /// Per direction.
    activations: Vec<Vec<Activation>>,
    clip: Option<f64>,
    batch_first: bool,
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
}

fn lstm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let coupled = cx.flag("input_forget", false)?;
    recurrent(cx, Cell::Lstm { coupled })
}

fn gru<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let late_reset = cx.flag("linear_before_reset", false)?;
    recurrent(cx, Cell::Gru { late_reset })
}

fn rnn<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    recurrent(cx, Cell::Rnn)
}

fn config(cx: &Ctx<'_, '_>, cell: Cell) -> Result<Config> {
    let directions: &[(&str, &[bool])] = &[
        ("forward", &[false]),
        ("reverse", &[true]),
        ("bidirectional", &[false, true]),
    ];
    let reverse = cx.choice("direction", "forward", directions)?.to_vec();
    cx.ignore(&["output_sequence"]);
    Ok(Config {
        cell,
        activations: activations(cx, cell, reverse.len())?,
        reverse,
        clip: cx.opt_f("clip")?,
        batch_first: cx.flag("layout", false)?,
    })
}

/// Names of activations, which are read without regard to case, with the defaults of their alpha and beta.
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
fn activations(cx: &Ctx<'_, '_>, cell: Cell, n_directions: usize) -> Result<Vec<Vec<Activation>>> {
    let defaults = cell.default_activations();
    let names = cx.strings("activations")?;
    let names = names.unwrap_or_else(|| {
        defaults
            .iter()
            .map(|s| s.to_string())
            .cycle()
            .take(defaults.len() * n_directions)
            .collect()
    });
    if names.len() != defaults.len() * n_directions {
        return Err(Error::invalid(format!(
            "{} activations, expected {}",
            names.len(),
            defaults.len() * n_directions
        )));
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
    for given in names {
        let name = given.to_lowercase();
        let known = ACTIVATIONS.iter().find(|a| a.0.to_lowercase() == name);
        let Some(&(_, alpha, beta)) = known else {
            let names = ACTIVATIONS.iter().map(|a| a.0);
            return Err(Error::unsupported(unknown("activation", &given, names)));
        };
        let alpha = alpha.map_or(0.0, |default: f32| alphas.next().unwrap_or(default.into()));
        let beta = beta.map_or(0.0, |default: f32| betas.next().unwrap_or(default.into()));
        all.push(Activation { name, alpha, beta });
    }
    Ok(all
        .chunks(defaults.len())
        .map(<[Activation]>::to_vec)
        .collect())
}

fn recurrent<'m>(cx: &mut Ctx<'_, 'm>, cell: Cell) -> Result<Outs<'m>> {
    let config = config(cx, cell)?;
    let weights = cx.ty(2)?;
    let (gates, n) = (cell.gates(), config.reverse.len());
    let hidden = weights.shape.last().and_then(Dim::as_usize).unwrap_or(0);
    if weights.rank() != 3
        || !weights.shape[0].is(n as i64)
        || !weights.shape[1].is((gates * hidden) as i64)
    {
        return Err(Error::invalid(format!(
            "R must be [{n}, {gates} * hidden, hidden], got {weights}"
        )));
    }
    if cx.opt_i("hidden_size")?.is_some_and(|h| h != hidden as i64) {
        return Err(Error::invalid(format!(
            "hidden_size differs from that of R {weights}"
        )));
    }
    let mut x = cx.val(0)?;
    if cx.shape_of(x).rank() != 3 {
        return Err(Error::invalid(format!(
            "X must have rank 3, is {}",
            cx.type_of(x)
        )));
    }
    if config.batch_first {
        x = cx.b().transpose(x, &[1, 0, 2])?;
    }
    let lens = match cx.opt(4)? {
        Some(l) => Some(cx.b().cast(l, DType::I64)?),
        None => None,
    };
    let mut sequences = Vec::new();
    let mut states: Vec<Vec<ValueId>> = vec![Vec::new(); 2];
    for d in 0..n {
        let direction = direction(cx, &config, x, d, hidden)?;
        let results = scan(cx, &config, &direction, d, x, lens, hidden)?;
        let (state, sequence) = results.split_at(direction.state.len());
        state
            .iter()
            .enumerate()
            .for_each(|(i, &s)| states[i].push(s));
        sequences.push(sequence[0]);
    }
    results(cx, &config, &sequences, &states)
}

/// Row `d` of a stacked operand, its first axis dropped.
fn of_direction(cx: &mut Ctx<'_, '_>, v: ValueId, d: usize) -> Result<ValueId> {
    let shape = cx.shape_of(v);
    let row = if shape.first().is_some_and(|n| n.is(1)) {
        v
    } else {
        cx.b().slice_axis(v, 0, d, 1)?
    };
    cx.b()
        .reshape(row, shape.iter().skip(1).cloned().collect::<Vec<_>>())
}

fn direction(
    cx: &mut Ctx<'_, '_>,
    config: &Config,
    x: ValueId,
    d: usize,
    hidden: usize,
) -> Result<Direction> {
    let gates = config.cell.gates();
    let (w, r) = (cx.val(1)?, cx.val(2)?);
    let (w, r) = (of_direction(cx, w, d)?, of_direction(cx, r, d)?);
    let (w, recurrent) = (cx.b().transpose(w, &[1, 0])?, cx.b().transpose(r, &[1, 0])?);
    let mut inputs = cx.b().matmul(x, w)?;
    let mut recurrent_bias = None;
    if let Some(b) = cx.opt(3)? {
        let b = of_direction(cx, b, d)?;
        let wide = gates * hidden;
        let (input_bias, mut rest) = (
            cx.b().slice_axis(b, 0, 0, wide)?,
            cx.b().slice_axis(b, 0, wide, wide)?,
        );
        if config.cell == (Cell::Gru { late_reset: true }) {
            // The recurrent bias of the hidden gate is added before the reset gate applies.
            recurrent_bias = Some(cx.b().slice_axis(rest, 0, 2 * hidden, hidden)?);
            let early = cx.b().slice_axis(rest, 0, 0, 2 * hidden)?;
            let dtype = cx.dtype_of(b);
            let zero = super::norm::filled(cx, dtype, 0.0, &[hidden.into()])?;
            rest = cx.b().concat(&[early, zero], 0)?;
        }
        let bias = cx.map(ScalarOp::Add, &[input_bias, rest])?;
        inputs = cx.map(ScalarOp::Add, &[inputs, bias])?;
    }
    let n_states = if matches!(config.cell, Cell::Lstm { .. }) {
        2
    } else {
        1
    };
    let mut state = Vec::new();
    for i in 0..n_states {
        state.push(initial_state(cx, config, x, 5 + i, d, hidden)?);
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
    })
}

fn initial_state(
    cx: &mut Ctx<'_, '_>,
    config: &Config,
    x: ValueId,
    operand: usize,
    d: usize,
    hidden: usize,
) -> Result<ValueId> {
    let x_ty = cx.type_of(x);
    let dims = [x_ty.shape[1].clone(), hidden.into()];
    let Some(s) = cx.opt(operand)? else {
        return super::norm::filled(cx, x_ty.dtype, 0.0, &dims);
    };
    let s = if config.batch_first {
        cx.b().transpose(s, &[1, 0, 2])?
    } else {
        s
    };
    let s = of_direction(cx, s, d)?;
    cx.b().broadcast(s, dims)
}

/// The scan of one direction. Results: final state, then the hidden states of all steps.
fn scan(
    cx: &mut Ctx<'_, '_>,
    config: &Config,
    dir: &Direction,
    d: usize,
    x: ValueId,
    lens: Option<ValueId>,
    hidden: usize,
) -> Result<Vec<ValueId>> {
    let time = cx.shape_of(x)[0].clone();
    let mut operands = dir.state.clone();
    operands.push(dir.inputs);
    if lens.is_some() {
        operands.push(cx.add(
            Op::Iota {
                dtype: DType::I64,
                shape: vec![time.clone()],
                axis: 0,
            },
            &[],
        )?);
    }
    let scanned = operands.len() - dir.state.len();
    operands.push(dir.recurrent);
    operands.extend(dir.peepholes.iter().chain(&dir.recurrent_bias).chain(&lens));
    let mut b = GraphBuilder::new("step");
    b.set_origin(&cx.path());
    let mut formals = Vec::new();
    for (i, &v) in operands.iter().enumerate() {
        let ty = cx.type_of(v);
        let per_step = (dir.state.len()..dir.state.len() + scanned).contains(&i);
        let shape = if per_step {
            ty.shape[1..].to_vec()
        } else {
            ty.shape.0
        };
        formals.push(b.input(&format!("a{i}"), ty.dtype, shape));
    }
    let body = Body {
        config,
        activations: &config.activations[d],
        hidden,
        n_states: dir.state.len(),
        scanned,
    };
    let extras = (
        dir.peepholes.is_some(),
        dir.recurrent_bias.is_some(),
        lens.is_some(),
    );
    body.build(&mut b, &formals, extras)?;
    let op = Op::Scan {
        carried: dir.state.len(),
        scanned,
        length: time,
        reverse: config.reverse[d],
    };
    cx.b().add_with_regions(op, &operands, vec![b.into_graph()])
}

/// Builds the body of the scan: one step for all sequences.
struct Body<'a> {
    config: &'a Config,
    activations: &'a [Activation],
    hidden: usize,
    n_states: usize,
    scanned: usize,
}

impl Body<'_> {
    /// `formals`: state, input products, (step number), recurrent weights, (peepholes), (recurrent bias), (lengths).
    fn build(
        &self,
        b: &mut GraphBuilder,
        formals: &[ValueId],
        extras: (bool, bool, bool),
    ) -> Result<()> {
        let (state, rest) = formals.split_at(self.n_states);
        let (inputs, mut invariants) = (rest[0], rest[self.scanned..].iter().copied());
        let recurrent = invariants
            .next()
            .expect("recurrent weights are always there");
        let mut next = |given: bool| if given { invariants.next() } else { None };
        let (peepholes, recurrent_bias, lens) = (next(extras.0), next(extras.1), next(extras.2));
        let new = match self.config.cell {
            Cell::Lstm { coupled } => self.lstm(b, state, inputs, recurrent, peepholes, coupled)?,
            Cell::Gru { late_reset } => {
                vec![self.gru(b, state[0], inputs, recurrent, recurrent_bias, late_reset)?]
            }
            Cell::Rnn => {
                let product = b.matmul(state[0], recurrent)?;
                let sum = b.add_(inputs, product)?;
                vec![self.activate(b, 0, sum)?]
            }
        };
        let (new, out) = match lens {
            Some(lens) => masked(b, state, &new, rest[1], lens)?,
            None => (new.clone(), new[0]),
        };
        new.iter()
            .enumerate()
            .for_each(|(i, &v)| b.output(&format!("state_{i}"), v));
        b.output("h", out);
        Ok(())
    }

    fn gate(&self, b: &mut GraphBuilder, all: ValueId, i: usize) -> Result<ValueId> {
        b.slice_axis(all, 1, i * self.hidden, self.hidden)
    }

    fn lstm(
        &self,
        b: &mut GraphBuilder,
        state: &[ValueId],
        inputs: ValueId,
        recurrent: ValueId,
        peepholes: Option<ValueId>,
        coupled: bool,
    ) -> Result<Vec<ValueId>> {
        let (h, c) = (state[0], state[1]);
        let product = b.matmul(h, recurrent)?;
        let all = b.add_(inputs, product)?;
        let peep = |b: &mut GraphBuilder, gate: ValueId, c: ValueId, i: usize| match peepholes {
            Some(p) => {
                let p = b.slice_axis(p, 0, i * self.hidden, self.hidden)?;
                let t = b.mul(p, c)?;
                b.add_(gate, t)
            }
            None => Ok(gate),
        };
        let [i, o, f, g] = [
            self.gate(b, all, 0)?,
            self.gate(b, all, 1)?,
            self.gate(b, all, 2)?,
            self.gate(b, all, 3)?,
        ];
        let i = peep(b, i, c, 0)?;
        let i = self.activate(b, 0, i)?;
        let f = if coupled {
            let one = b.scalar(b.ty(i).dtype, 1.0);
            b.sub(one, i)?
        } else {
            let f = peep(b, f, c, 2)?;
            self.activate(b, 0, f)?
        };
        let g = self.activate(b, 1, g)?;
        let (kept, new) = (b.mul(f, c)?, b.mul(i, g)?);
        let c = b.add_(kept, new)?;
        let o = peep(b, o, c, 1)?;
        let o = self.activate(b, 0, o)?;
        let t = self.apply(b, 2, c)?;
        Ok(vec![b.mul(o, t)?, c])
    }

    fn gru(
        &self,
        b: &mut GraphBuilder,
        h: ValueId,
        inputs: ValueId,
        recurrent: ValueId,
        recurrent_bias: Option<ValueId>,
        late_reset: bool,
    ) -> Result<ValueId> {
        let k = self.hidden;
        let [xz, xr, xh] = [
            self.gate(b, inputs, 0)?,
            self.gate(b, inputs, 1)?,
            self.gate(b, inputs, 2)?,
        ];
        let (z, fresh) = if late_reset {
            let all = b.matmul(h, recurrent)?;
            let [z, r, t] = [
                self.gate(b, all, 0)?,
                self.gate(b, all, 1)?,
                self.gate(b, all, 2)?,
            ];
            let (z, r) = (b.add_(xz, z)?, b.add_(xr, r)?);
            let r = self.activate(b, 0, r)?;
            let t = match recurrent_bias {
                Some(bias) => b.add_(t, bias)?,
                None => t,
            };
            (z, b.mul(r, t)?)
        } else {
            let (early, last) = (
                b.slice_axis(recurrent, 1, 0, 2 * k)?,
                b.slice_axis(recurrent, 1, 2 * k, k)?,
            );
            let zr = b.matmul(h, early)?;
            let [z, r] = [self.gate(b, zr, 0)?, self.gate(b, zr, 1)?];
            let (z, r) = (b.add_(xz, z)?, b.add_(xr, r)?);
            let r = self.activate(b, 0, r)?;
            let reset = b.mul(r, h)?;
            (z, b.matmul(reset, last)?)
        };
        let z = self.activate(b, 0, z)?;
        let sum = b.add_(xh, fresh)?;
        let fresh = self.activate(b, 1, sum)?;
        let one = b.scalar(b.ty(z).dtype, 1.0);
        let other = b.sub(one, z)?;
        let (new, kept) = (b.mul(other, fresh)?, b.mul(z, h)?);
        b.add_(new, kept)
    }

    /// Clips, then applies activation `i`.
    fn activate(&self, b: &mut GraphBuilder, i: usize, x: ValueId) -> Result<ValueId> {
        let x = match self.config.clip {
            Some(c) if c > 0.0 => b.map(
                ScalarOp::ClampTo {
                    lo: Real(-c),
                    hi: Real(c),
                },
                &[x],
            )?,
            _ => x,
        };
        self.apply(b, i, x)
    }

    fn apply(&self, b: &mut GraphBuilder, i: usize, x: ValueId) -> Result<ValueId> {
        let Activation { name, alpha, beta } = &self.activations[i];
        let (a, c) = (Real(*alpha), Real(*beta));
        let times = |b: &mut GraphBuilder, x: ValueId, k: f64| {
            let k = b.scalar(b.ty(x).dtype, k);
            b.mul(x, k)
        };
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
                let t = times(b, x, *alpha)?;
                let offset = b.scalar(b.ty(x).dtype, *beta);
                return b.add_(t, offset);
            }
            "scaledtanh" => {
                let t = times(b, x, *beta)?;
                let t = b.map(ScalarOp::Tanh, &[t])?;
                return times(b, t, *alpha);
            }
            _ => ScalarOp::Tanh,
        };
        b.map(op, &[x])
    }
}

/// State and result where step `t` lies within each sequence; the old state and 0 elsewhere.
fn masked(
    b: &mut GraphBuilder,
    old: &[ValueId],
    new: &[ValueId],
    t: ValueId,
    lens: ValueId,
) -> Result<(Vec<ValueId>, ValueId)> {
    let inside = b.map(ScalarOp::Lt, &[t, lens])?;
    let batch = b.ty(lens).shape[0].clone();
    let inside = b.reshape(inside, [batch, 1.into()])?;
    let mut state = Vec::new();
    for (&o, &n) in old.iter().zip(new) {
        state.push(b.map(ScalarOp::Select, &[inside, n, o])?);
    }
    let zero = b.scalar(b.ty(new[0]).dtype, 0.0);
    let out = b.map(ScalarOp::Select, &[inside, new[0], zero])?;
    Ok((state, out))
}

/// `Y [time, directions, batch, hidden]`, `Y_h` and `Y_c [directions, batch, hidden]`; batch comes first with layout 1.
fn results<'m>(
    cx: &mut Ctx<'_, 'm>,
    config: &Config,
    sequences: &[ValueId],
    states: &[Vec<ValueId>],
) -> Result<Outs<'m>> {
    let stack = |cx: &mut Ctx<'_, 'm>, parts: &[ValueId], axis: usize| -> Result<ValueId> {
        let mut expanded = Vec::new();
        for &p in parts {
            let mut dims = cx.shape_of(p).0;
            dims.insert(axis, Dim::constant(1));
            expanded.push(cx.b().reshape(p, dims)?);
        }
        if expanded.len() == 1 {
            Ok(expanded[0])
        } else {
            cx.b().concat(&expanded, axis)
        }
    };
    let y = stack(cx, sequences, 1)?;
    let y = if config.batch_first {
        cx.b().transpose(y, &[2, 0, 1, 3])?
    } else {
        y
    };
    let mut outs = vec![Out::Value(y)];
    for s in states.iter().filter(|s| !s.is_empty()) {
        let s = stack(cx, s, 0)?;
        outs.push(Out::Value(if config.batch_first {
            cx.b().transpose(s, &[1, 0, 2])?
        } else {
            s
        }));
    }
    Ok(outs)
}
