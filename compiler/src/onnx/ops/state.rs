//! Operators with a state that the caller carries from step to step: linear attention, causal
//! convolution, caches.

use super::super::import::{Ctx, OpDef, Out, Outs, one};
use super::attention::{head_count, join_heads, split_heads};
use super::control::scan_over;
use super::norm::per_channel;
use crate::error::{Error, Result};
use crate::ir::{Dim, GraphBuilder, Layout, Op, ScalarOp, ScatterKind, Shape, ValueId, Window};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("LinearAttention", (3, 6), linear_attention),
    OpDef::new("CausalConvWithState", (2, 4), causal_conv),
    OpDef::new("TensorScatter", (2, 3), tensor_scatter),
];

/// `[b, len, heads * d]` as `[len, b, heads, d]`, in the dtype of the state.
fn per_step(cx: &mut Ctx, x: ValueId, heads: &Dim, dtype: DType) -> Result<ValueId> {
    let x = split_heads(cx, x, heads)?;
    let x = cx.transpose(x, &[2, 0, 1, 3])?;
    cx.cast(x, dtype)
}

/// The recurrence over tokens `s = exp(g) s + beta k (v - s' k)^T`, `y = scale q^T s`, one state
/// matrix per head of keys; `s'` is the decayed state, and is absent without the delta rule (Yang
/// et al., arXiv:2412.06464, eq. 10).
fn linear_attention(cx: &mut Ctx) -> Result<Outs> {
    cx.ignore(&["chunk_size"]); // A hint.
    let rule = cx.choice("update_rule", "gated_delta", UPDATE_RULES)?;
    let heads = Heads::read(cx)?;
    let past = cx.opt(3)?;
    let dtype = cx.ty(0)?.dtype;
    let state_dtype = past.map_or(dtype, |p| cx.dtype_of(p));
    let wide = match state_dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let [q, k, v] = projections(cx, &heads, wide)?;
    let mut steps = vec![q, k, v];
    if rule.gated {
        steps.push(gates(cx, &heads, wide)?);
    }
    if rule.delta {
        steps.push(rates(cx, wide)?);
    }
    let state = initial_state(cx, past, k, v)?;
    let results = scan_over(cx, &[state], &steps, false, |b, f| rule.step(b, f))?;
    let y = joined_steps(cx, results[1], &heads)?;
    let y = cx.cast(y, dtype)?;
    let state = cx.cast(results[0], state_dtype)?;
    Ok(vec![Out::Value(y), Out::Value(state)])
}

/// `update_rule`.
#[derive(Clone, Copy)]
struct UpdateRule {
    gated: bool,
    delta: bool,
}

const UPDATE_RULES: &[(&str, UpdateRule)] = &[
    (
        "linear",
        UpdateRule {
            gated: false,
            delta: false,
        },
    ),
    (
        "gated",
        UpdateRule {
            gated: true,
            delta: false,
        },
    ),
    (
        "delta",
        UpdateRule {
            gated: false,
            delta: true,
        },
    ),
    (
        "gated_delta",
        UpdateRule {
            gated: true,
            delta: true,
        },
    ),
];

impl UpdateRule {
    /// New state and output of a token, from the state, `q`, `k`, `v`, and the gate and rate where
    /// the rule has them.
    fn step(self, b: &mut GraphBuilder, f: &[ValueId]) -> Result<Vec<ValueId>> {
        let (mut s, q, k, mut v) = (f[0], f[1], f[2], f[3]);
        let mut rest = f[4..].iter().copied();
        if self.gated {
            s = b.mul(s, rest.next().expect("the gate is scanned"))?;
        }
        if self.delta {
            let row = b.transpose(k, &[0, 1, 3, 2])?;
            let old = b.matmul(row, s)?;
            let error = b.sub(v, old)?;
            v = b.mul(error, rest.next().expect("the rate is scanned"))?;
        }
        let update = b.matmul(k, v)?;
        let s = b.add_(s, update)?;
        Ok(vec![s, b.matmul(q, s)?])
    }
}

/// Numbers of heads.
struct Heads {
    queries: Dim,
    keys: Dim,
    /// Query heads for each key head.
    group: Dim,
}

impl Heads {
    fn read(cx: &Ctx) -> Result<Heads> {
        let queries = head_count(cx, "q_num_heads")?;
        let keys = head_count(cx, "kv_num_heads")?;
        match queries.exact_div(&keys) {
            Some(group) => Ok(Heads {
                queries,
                keys,
                group,
            }),
            None => Err(Error::invalid(format!(
                "{queries} query heads over {keys} key heads"
            ))),
        }
    }
}

/// Per token and key head: the scaled queries that share a state as rows, the key as a column, the
/// value as a row.
fn projections(cx: &mut Ctx, heads: &Heads, wide: DType) -> Result<[ValueId; 3]> {
    let [q, k, v] = cx.first()?;
    let q = per_step(cx, q, &heads.queries, wide)?;
    let k = per_step(cx, k, &heads.keys, wide)?;
    let v = per_step(cx, v, &heads.keys, wide)?;
    let (sk, sv) = (cx.shape_of(k), cx.shape_of(v));
    let scale = query_scale(cx, &sk[3])?;
    let q = cx.mul_real(q, scale)?;
    let (length, batch, kv) = (&sk[0], &sk[1], &heads.keys);
    Ok([
        cx.reshape(q, [length, batch, kv, &heads.group, &sk[3]])?,
        cx.reshape(k, [length, batch, kv, &sk[3], &1.into()])?,
        cx.reshape(v, [length, batch, kv, &1.into(), &sv[3]])?,
    ])
}

/// The factor of queries; one over the root of the head size where 0 is given.
fn query_scale(cx: &Ctx, width: &Dim) -> Result<f64> {
    let width = width.as_const().filter(|w| *w > 0);
    let width = width.ok_or_else(|| Error::unsupported("the head size must be known"))?;
    match cx.f("scale", 0.0)? {
        0.0 => Ok(1.0 / (width as f64).sqrt()),
        scale => Ok(scale),
    }
}

/// The decay of each state, or of each of its rows: `[len, b, heads, rows, 1]`.
fn gates(cx: &mut Ctx, heads: &Heads, wide: DType) -> Result<ValueId> {
    let g = cx.val(4)?;
    let g = per_step(cx, g, &heads.keys, wide)?;
    let g = cx.exp(g)?;
    let mut shape = cx.shape_of(g).0;
    shape.push(1.into());
    cx.reshape(g, shape)
}

/// The rate of each update: `[len, b, heads, 1, 1]`.
fn rates(cx: &mut Ctx, wide: DType) -> Result<ValueId> {
    let rate = cx.val(5)?;
    let rate = cx.cast(rate, wide)?;
    let rate = cx.transpose(rate, &[1, 0, 2])?;
    let mut shape = cx.shape_of(rate).0;
    shape.extend([1.into(), 1.into()]);
    cx.reshape(rate, shape)
}

/// `[b, heads, d, dv]`: the given state, or zeros.
fn initial_state(cx: &mut Ctx, past: Option<ValueId>, k: ValueId, v: ValueId) -> Result<ValueId> {
    let (sk, sv, wide) = (cx.shape_of(k), cx.shape_of(v), cx.dtype_of(k));
    match past {
        Some(p) => cx.cast(p, wide),
        None => {
            let zero = cx.scalar(wide, 0.0);
            cx.broadcast(zero, [&sk[1], &sk[2], &sk[3], &sv[4]])
        }
    }
}

/// `[len, b, kv_heads, group, d]` as `[b, len, heads * d]`.
fn joined_steps(cx: &mut Ctx, y: ValueId, heads: &Heads) -> Result<ValueId> {
    let s = cx.shape_of(y);
    let y = cx.reshape(y, [&s[0], &s[1], &heads.queries, &s[4]])?;
    let y = cx.transpose(y, &[1, 2, 0, 3])?;
    join_heads(cx, y)
}

/// Depthwise convolution over the last `taps` positions, those before the first being the given
/// state.
fn causal_conv(cx: &mut Ctx) -> Result<Outs> {
    let activations = &[("none", false), ("silu", true), ("swish", true)];
    let is_silu = cx.choice("activation", "none", activations)?;
    let [x, w] = cx.first()?;
    let (sx, sw) = (cx.shape_of(x), cx.shape_of(w));
    let (groups, taps) = match sw.iter().map(Dim::as_usize).collect::<Vec<_>>()[..] {
        [Some(groups), _, Some(taps)] if sx.rank() == 3 && taps > 0 => (groups, taps),
        _ => return Err(Error::invalid(format!("weights {sw} do not fit {sx}"))),
    };
    let all = after_state(cx, x, taps - 1)?;
    let conv = plain_conv(groups);
    let mut y = cx.add(conv, &[all, w])?;
    if let Some(bias) = cx.opt(2)? {
        let bias = per_channel(cx, bias, 3)?;
        y = cx.add_(y, bias)?;
    }
    if is_silu {
        y = cx.map(ScalarOp::Silu, &[y])?;
    }
    let state = cx.slice_axis(all, 2, &sx[2], taps - 1)?;
    Ok(vec![Out::Value(y), Out::Value(state)])
}

/// A convolution along one axis, without strides and padding.
fn plain_conv(groups: usize) -> Op {
    let window = Window {
        strides: vec![1],
        dilations: vec![1],
        pads_low: vec![0],
        pads_high: vec![0],
    };
    Op::Conv {
        window,
        groups,
        layout: Layout::ChannelsFirst,
    }
}

/// `x` behind the `n` positions of the given state, or behind zeros.
fn after_state(cx: &mut Ctx, x: ValueId, n: usize) -> Result<ValueId> {
    let given = cx.opt(3)?;
    if n == 0 {
        return Ok(x);
    }
    let before = match given {
        Some(p) => p,
        None => {
            let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
            let zero = cx.scalar(dtype, 0.0);
            cx.broadcast(zero, [&s[0], &s[1], &n.into()])?
        }
    };
    cx.concat(&[before, x], 2)
}

/// Writes `update` into the cache along `axis`, from a position per batch element on.
fn tensor_scatter(cx: &mut Ctx) -> Result<Outs> {
    let circular = cx.choice("mode", "linear", &[("linear", false), ("circular", true)])?;
    let [cache, update] = cx.first()?;
    let (s, new) = (cx.shape_of(cache), cx.shape_of(update));
    let axis = cx.axis(-2)?;
    if axis == 0 || new.rank() != s.rank() {
        let message = format!("an update {new} of a cache {s} along axis {axis}");
        return Err(Error::invalid(message));
    }
    let mut at = written_positions(cx, new, axis)?;
    if circular {
        let n = s[axis].as_const();
        let n = n.ok_or_else(|| Error::unsupported(format!("a circular cache of {}", s[axis])))?;
        at = cx.with_real(ScalarOp::Mod, at, n as f64)?;
    }
    let op = Op::ScatterElements {
        axis,
        kind: ScatterKind::Set,
    };
    one(cx.add(op, &[cache, at, update])?)
}

/// Position along `axis` of each element of the update.
fn written_positions(cx: &mut Ctx, new: Shape, axis: usize) -> Result<ValueId> {
    let mut along = vec![Dim::constant(1); new.rank()];
    along[0] = new[0].clone();
    let at = cx.iota(new.0, axis)?;
    match cx.opt(2)? {
        Some(first) => {
            let first = cx.reshape(first, along)?;
            cx.add_(at, first)
        }
        None => Ok(at),
    }
}
