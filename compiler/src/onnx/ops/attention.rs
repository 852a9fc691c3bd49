//! Attention and rotary positions.

use super::super::import::{Ctx, OpDef, Out, Outs, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, PadMode, Real, ReduceKind, ScalarOp, Shape, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Attention", (3, 7), attention),
    OpDef::new("RotaryEmbedding", (3, 4), rotary),
];

/// `[b, len, heads * d]` as `[b, heads, len, d]`.
pub(super) fn split_heads(cx: &mut Ctx, x: ValueId, heads: &Dim) -> Result<ValueId> {
    let s = cx.shape_of(x);
    let d = s
        .last()
        .and_then(|d| d.exact_div(heads))
        .filter(|_| s.rank() == 3);
    let d = d.ok_or_else(|| Error::invalid(format!("{s} does not divide into {heads} heads")))?;
    let x = cx.reshape(x, [s[0].clone(), s[1].clone(), heads.clone(), d])?;
    cx.transpose(x, &[0, 2, 1, 3])
}

/// `[b, heads, len, d]` as `[b, len, heads * d]`.
pub(super) fn join_heads(cx: &mut Ctx, x: ValueId) -> Result<ValueId> {
    let s = cx.shape_of(x);
    let x = cx.transpose(x, &[0, 2, 1, 3])?;
    cx.reshape(x, [s[0].clone(), s[2].clone(), s[1].product(&s[3])])
}

/// A number of heads given as an attribute.
pub(super) fn head_count(cx: &Ctx, name: &'static str) -> Result<Dim> {
    let n = cx.i(name, 0)?;
    if (1..=1 << 20).contains(&n) {
        Ok(Dim::constant(n))
    } else {
        Err(Error::invalid(format!("{name} = {n}")))
    }
}

/// Keys or values `[b, kv_heads, len, d]` repeated for `heads` query heads, each in a row.
pub(super) fn repeat_heads(cx: &mut Ctx, x: ValueId, heads: &Dim) -> Result<ValueId> {
    let s = cx.shape_of(x);
    let [b, h, len, d] = [&s[0], &s[1], &s[2], &s[3]];
    if h == heads {
        return Ok(x);
    }
    let times = heads.exact_div(h);
    let times =
        times.ok_or_else(|| Error::invalid(format!("{heads} query heads over {h} key heads")))?;
    let x = cx.reshape(x, [b, h, &1.into(), len, d])?;
    let x = cx.broadcast(x, [b, h, &times, len, d])?;
    cx.reshape(x, [b, heads, len, d])
}

struct Attributes {
    causal: bool,
    /// Farthest key to the left and right of a query.
    window: [Option<i64>; 2],
    softcap: f64,
    /// Stage of the scores that the fourth result holds.
    scores: i64,
    scale: Option<f64>,
}

impl Attributes {
    fn is_windowed(&self) -> bool {
        self.window != [None, None]
    }
}

fn attributes(cx: &Ctx) -> Result<Attributes> {
    cx.ignore(&["softmax_precision"]); // The IR's rules compute the softmax of half types in f32.
    let bound = |name| Ok::<_, Error>(Some(cx.i(name, -1)?).filter(|n| *n >= 0));
    Ok(Attributes {
        causal: cx.flag("is_causal", false)?,
        window: [bound("left_window_size")?, bound("right_window_size")?],
        softcap: cx.f("softcap", 0.0)?,
        scores: cx.i("qk_matmul_output_mode", 0)?,
        scale: cx.opt_f("scale")?,
    })
}

/// Results: the output, keys and values with the past ones before them, and the scores at a stage.
///
/// A query that no key is allowed for gives zeros.
fn attention(cx: &mut Ctx) -> Result<Outs> {
    let at = attributes(cx)?;
    let packed = cx.ty(0)?.rank() == 3;
    let [q, k, v] = heads_of(cx, packed)?;
    let ([k, v], past) = with_past(cx, [k, v])?;
    let present = [Out::Value(k), Out::Value(v)];
    let heads = cx.shape_of(q)[1].clone();
    let (k, v) = (repeat_heads(cx, k, &heads)?, repeat_heads(cx, v, &heads)?);
    let bias = bias(cx, &at, q, k, &past)?;
    let usual = head_scale(cx, q)?;
    let scale = at.scale.unwrap_or(usual);
    let wants_scores = cx.node.output.get(3).is_some_and(|o| !o.is_empty());
    let (mut y, scores) = if at.softcap == 0.0 && !wants_scores {
        (fused(cx, [q, k, v], scale, &bias)?, None)
    } else {
        let (y, scores) = by_steps(cx, &at, [q, k, v], scale, &bias)?;
        (y, Some(scores))
    };
    if packed {
        y = join_heads(cx, y)?;
    }
    let mut outs = vec![Out::Value(y)];
    outs.extend(present);
    outs.extend(scores.map(Out::Value));
    Ok(outs)
}

/// The usual factor of scores: one over the root of the head size.
fn head_scale(cx: &mut Ctx, q: ValueId) -> Result<f64> {
    let width = cx.shape_of(q)[3].as_const();
    let width = width.ok_or_else(|| Error::unsupported("the head size must be known"))?;
    Ok(1.0 / (width as f64).sqrt())
}

/// Queries, keys and values as `[b, heads, len, d]`.
fn heads_of(cx: &mut Ctx, packed: bool) -> Result<[ValueId; 3]> {
    let [mut q, mut k, mut v] = cx.first()?;
    if packed {
        let heads = head_count(cx, "q_num_heads")?;
        let kv_heads = head_count(cx, "kv_num_heads")?;
        q = split_heads(cx, q, &heads)?;
        k = split_heads(cx, k, &kv_heads)?;
        v = split_heads(cx, v, &kv_heads)?;
    } else {
        cx.ignore(&["q_num_heads", "kv_num_heads"]);
    }
    for x in [q, k, v] {
        let s = cx.shape_of(x);
        if s.rank() != 4 {
            let message = format!("expected operands of rank 3 or 4, got {s}");
            return Err(Error::invalid(message));
        }
    }
    Ok([q, k, v])
}

/// Keys and values with the past ones before them, and the number of those.
fn with_past(cx: &mut Ctx, [k, v]: [ValueId; 2]) -> Result<([ValueId; 2], Dim)> {
    let (Some(past_k), Some(past_v)) = (cx.opt(4)?, cx.opt(5)?) else {
        return Ok(([k, v], Dim::constant(0)));
    };
    let past = cx.shape_of(past_k).get(2).cloned();
    let past = past.ok_or_else(|| Error::invalid("past_key must have rank 4"))?;
    let all = [cx.concat(&[past_k, k], 2)?, cx.concat(&[past_v, v], 2)?];
    Ok((all, past))
}

/// The output by the attention op.
fn fused(cx: &mut Ctx, qkv: [ValueId; 3], scale: f64, bias: &Bias) -> Result<ValueId> {
    let mut args = qkv.to_vec();
    args.extend(bias.value);
    let op = Op::Attention {
        scale: Real(scale),
        causal: bias.causal,
    };
    let y = cx.add(op, &args)?;
    empty_rows_to_zero(cx, y, bias)
}

/// The addend of the scores.
struct Bias {
    /// Broadcasts to `[b, heads, queries, keys]`.
    value: Option<ValueId>,
    /// True when it may forbid all keys of a query.
    may_empty: bool,
    /// True when the attention op is to allow only keys up to the query's index.
    causal: bool,
}

/// The bias from mask, cache lengths and windows. Plain causality is left to the attention op.
fn bias(cx: &mut Ctx, at: &Attributes, q: ValueId, k: ValueId, past: &Dim) -> Result<Bias> {
    let (mask, filled) = (cx.opt(3)?, cx.opt(6)?);
    let causal = at.causal && past.is(0) && filled.is_none();
    let mut parts: Vec<ValueId> = mask.into_iter().collect();
    if at.causal && !causal || at.is_windowed() {
        let ahead = distance(cx, q, k, past, filled)?;
        parts.extend(in_reach(cx, at, ahead, at.causal && !causal)?);
    }
    if let Some(n) = filled {
        parts.push(in_cache(cx, k, n)?);
    }
    Ok(Bias {
        value: sum_of_masks(cx, &parts, q, k)?,
        may_empty: mask.is_some() || filled.is_some() || at.is_windowed(),
        causal,
    })
}

/// Mask of the keys within the filled part of the cache: `[b, 1, 1, keys]`.
fn in_cache(cx: &mut Ctx, k: ValueId, filled: ValueId) -> Result<ValueId> {
    let s = cx.shape_of(k);
    let j = cx.iota([s[2].clone()], 0)?;
    let n = cx.reshape(filled, [s[0].clone(), 1.into(), 1.into(), 1.into()])?;
    cx.map(ScalarOp::Lt, &[j, n])
}

/// Masks of keys as one addend of scores.
fn sum_of_masks(
    cx: &mut Ctx,
    masks: &[ValueId],
    q: ValueId,
    k: ValueId,
) -> Result<Option<ValueId>> {
    let (dtype, n_keys) = (cx.dtype_of(q), cx.shape_of(k)[2].clone());
    let mut sum = None;
    for &mask in masks {
        let addend = additive(cx, mask, dtype, &n_keys)?;
        sum = Some(match sum {
            Some(sum) => cx.add_(sum, addend)?,
            None => addend,
        });
    }
    Ok(sum)
}

/// Masks of the keys that causality and the window allow at a distance from the query.
fn in_reach(cx: &mut Ctx, at: &Attributes, ahead: ValueId, causal: bool) -> Result<Vec<ValueId>> {
    let limits = [
        (ScalarOp::Le, causal.then_some(0)),
        (ScalarOp::Ge, at.window[0].map(|n| -n)),
        (ScalarOp::Le, at.window[1]),
    ];
    let mut masks = Vec::new();
    for (op, limit) in limits {
        if let Some(limit) = limit {
            let limit = cx.i64s(&[limit], &[])?;
            masks.push(cx.map(op, &[ahead, limit])?);
        }
    }
    Ok(masks)
}

/// A mask as an addend of scores: true 0, false minus infinity; padded with minus infinity up to
/// `keys`.
fn additive(cx: &mut Ctx, mask: ValueId, dtype: DType, keys: &Dim) -> Result<ValueId> {
    let (zero, never) = (cx.scalar(dtype, 0.0), cx.scalar(dtype, f64::NEG_INFINITY));
    let mask = match cx.dtype_of(mask) {
        DType::Bool => cx.select(mask, zero, never)?,
        _ => cx.cast(mask, dtype)?,
    };
    let shape = cx.shape_of(mask);
    let last = shape.last();
    let last = last.ok_or_else(|| Error::invalid("the mask is a scalar"))?;
    match (keys.clone() - last.clone()).as_usize() {
        Some(n) if n > 0 && !last.is(1) => {
            let mut high = vec![0; shape.rank()];
            high[shape.rank() - 1] = n;
            let pad = Op::Pad {
                low: vec![0; shape.rank()],
                high,
                mode: PadMode::Constant,
            };
            cx.add(pad, &[mask, never])
        }
        _ => Ok(mask),
    }
}

/// Distance of key `j` to the right of the absolute position of query `i`: `[.., queries, keys]` of
/// `i64`.
///
/// The first query follows `past` keys, or ends the first `filled[b]` keys.
fn distance(
    cx: &mut Ctx,
    q: ValueId,
    k: ValueId,
    past: &Dim,
    filled: Option<ValueId>,
) -> Result<ValueId> {
    let (sq, keys) = (cx.shape_of(q), cx.shape_of(k)[2].clone());
    let j = cx.iota([keys], 0)?;
    let p = match filled.filter(|_| past.is(0)) {
        Some(filled) => last_positions(cx, filled, &sq)?,
        None => {
            let p = cx.iota([past.clone() + sq[2].clone()], 0)?;
            let p = cx.slice_axis(p, 0, past, &sq[2])?;
            cx.reshape(p, [sq[2].clone(), 1.into()])?
        }
    };
    cx.sub(j, p)
}

/// Positions of queries of which the last is at `filled[b] - 1`: `[b, 1, queries, 1]`.
fn last_positions(cx: &mut Ctx, filled: ValueId, sq: &Shape) -> Result<ValueId> {
    let queries = &sq[2];
    // The number of queries that follow.
    let rest = cx.iota([queries.clone()], 0)?;
    let backwards = Op::Slice {
        starts: vec![queries.clone() - 1.into()],
        sizes: vec![queries.clone()],
        steps: vec![-1],
    };
    let rest = cx.add(backwards, &[rest])?;
    let rest = cx.reshape(rest, [queries.clone(), 1.into()])?;
    let filled = cx.reshape(filled, [sq[0].clone(), 1.into(), 1.into(), 1.into()])?;
    let last = cx.with_real(ScalarOp::Sub, filled, 1.0)?;
    cx.sub(last, rest)
}

/// The bias with causality added where the op would have done that.
fn whole_bias(
    cx: &mut Ctx,
    bias: &Bias,
    queries: &Dim,
    keys: &Dim,
    dtype: DType,
) -> Result<Option<ValueId>> {
    if !bias.causal {
        return Ok(bias.value);
    }
    let shape = [queries.clone(), keys.clone()];
    let (i, j) = (cx.iota(shape.clone(), 0)?, cx.iota(shape, 1)?);
    let below = cx.map(ScalarOp::Le, &[j, i])?;
    let below = additive(cx, below, dtype, keys)?;
    match bias.value {
        Some(given) => cx.add_(given, below).map(Some),
        None => Ok(Some(below)),
    }
}

fn empty_rows_to_zero(cx: &mut Ctx, y: ValueId, bias: &Bias) -> Result<ValueId> {
    let Some(given) = bias.value.filter(|_| bias.may_empty) else {
        return Ok(y);
    };
    let (dtype, queries) = (cx.dtype_of(y), cx.shape_of(y)[2].clone());
    let keys = cx.shape_of(given).last().cloned();
    let keys = keys.ok_or_else(|| Error::invalid("the mask is a scalar"))?;
    let whole = whole_bias(cx, bias, &queries, &keys, dtype)?;
    zero_where_empty(cx, y, whole.expect("a bias is given"))
}

/// Zeros in the rows of `y` for which all of the bias's last axis is minus infinity.
fn zero_where_empty(cx: &mut Ctx, y: ValueId, bias: ValueId) -> Result<ValueId> {
    let (rank, dtype) = (cx.shape_of(bias).rank(), cx.dtype_of(y));
    let most = cx.reduce(ReduceKind::Max, bias, &[rank - 1], true)?;
    let empty = cx.map(ScalarOp::IsNegInf, &[most])?;
    let zero = cx.scalar(dtype, 0.0);
    cx.select(empty, zero, y)
}

/// Output and the scores at the stage that is asked for.
fn by_steps(
    cx: &mut Ctx,
    at: &Attributes,
    [q, k, v]: [ValueId; 3],
    scale: f64,
    bias: &Bias,
) -> Result<(ValueId, ValueId)> {
    let raw = scores(cx, q, k, scale)?;
    let (shape, dtype) = (cx.shape_of(raw), cx.dtype_of(raw));
    let capped = capped(cx, raw, at.softcap)?;
    let whole = whole_bias(cx, bias, &shape[2], &shape[3], dtype)?;
    let biased = match whole {
        Some(b) => cx.add_(capped, b)?,
        None => capped,
    };
    let mut weights = softmax(cx, biased)?;
    if let Some(b) = whole {
        weights = zero_where_empty(cx, weights, b)?;
    }
    let y = cx.matmul(weights, v)?;
    let stages = [raw, capped, biased, weights];
    match usize::try_from(at.scores).ok().and_then(|i| stages.get(i)) {
        Some(&scores) => Ok((y, scores)),
        None => Err(Error::invalid(format!(
            "qk_matmul_output_mode must be 0 to 3, is {}",
            at.scores
        ))),
    }
}

/// `cap * tanh(x / cap)`; `x` itself without a cap.
fn capped(cx: &mut Ctx, x: ValueId, cap: f64) -> Result<ValueId> {
    if cap <= 0.0 {
        return Ok(x);
    }
    let t = cx.with_real(ScalarOp::Div, x, cap)?;
    let t = cx.tanh(t)?;
    cx.mul_real(t, cap)
}

/// `q k^T` with the root of the scale on either side, so that half types do not overflow.
fn scores(cx: &mut Ctx, q: ValueId, k: ValueId, scale: f64) -> Result<ValueId> {
    let half = scale.abs().sqrt();
    let q = cx.mul_real(q, half.copysign(scale))?;
    let k = cx.mul_real(k, half)?;
    let k = cx.transpose(k, &[0, 1, 3, 2])?;
    cx.matmul(q, k)
}

fn softmax(cx: &mut Ctx, scores: ValueId) -> Result<ValueId> {
    let op = Op::Softmax {
        axis: 3,
        log: false,
    };
    cx.add(op, &[scores])
}

/// Operators of domain `ai.onnx.preview`.
pub(super) const PREVIEW_OPS: &[OpDef] = &[OpDef::new("FlexAttention", (3, 3), flex_attention)];

/// Attention whose scores and probabilities pass through subgraphs; without these, the fused op.
fn flex_attention(cx: &mut Ctx) -> Result<Outs> {
    let [q, k, v] = cx.first()?;
    let (s, dtype) = (cx.shape_of(q), cx.dtype_of(q));
    let scale = flex_scale(cx, [q, k, v])?;
    let inner = softmax_dtype(cx, dtype)?;
    let (k, v) = (repeat_heads(cx, k, &s[1])?, repeat_heads(cx, v, &s[1])?);
    if !cx.has_attr("score_mod") && !cx.has_attr("prob_mod") {
        let op = Op::Attention {
            scale: Real(scale),
            causal: false,
        };
        return one(cx.add(op, &[q, k, v])?);
    }
    let k = cx.transpose(k, &[0, 1, 3, 2])?;
    let scores = cx.matmul(q, k)?;
    let scores = cx.cast(scores, inner)?;
    let scores = cx.mul_real(scores, scale)?;
    let scores = modified(cx, "score_mod", scores)?;
    let weights = softmax(cx, scores)?;
    let weights = modified(cx, "prob_mod", weights)?;
    let weights = cx.cast(weights, dtype)?;
    one(cx.matmul(weights, v)?)
}

/// The dtype of scores: by default single precision, or that of doubles.
fn softmax_dtype(cx: &Ctx, dtype: DType) -> Result<DType> {
    match cx.i("softmax_precision", 0)? {
        0 if dtype == DType::F64 => Ok(DType::F64),
        0 => Ok(DType::F32),
        d => super::super::tensor::dtype_of(d as i32),
    }
}

/// The factor of the scores of queries, keys and values, which must have rank 4.
fn flex_scale(cx: &mut Ctx, [q, k, v]: [ValueId; 3]) -> Result<f64> {
    for (name, x) in [("queries", q), ("keys", k), ("values", v)] {
        let s = cx.shape_of(x);
        if s.rank() != 4 {
            return Err(Error::invalid(format!("{name} of shape {s}")));
        }
    }
    let usual = head_scale(cx, q)?;
    Ok(cx.opt_f("scale")?.unwrap_or(usual))
}

/// The result of the subgraph of an attribute for a value; the value itself without the attribute.
fn modified(cx: &mut Ctx, name: &'static str, x: ValueId) -> Result<ValueId> {
    if !cx.has_attr(name) {
        return Ok(x);
    }
    let g = cx.graph_attr(name)?;
    let arg = cx.made(x);
    let results = cx.inline(g, &[arg])?;
    let &[y] = results.as_slice() else {
        let message = format!("{name} gives {} results", results.len());
        return Err(Error::invalid(message));
    };
    let y = cx.materialise(y)?;
    let (from, to) = (cx.type_of(x), cx.type_of(y));
    if from != to {
        return Err(Error::invalid(format!("{name} makes {to} of {from}")));
    }
    Ok(y)
}

/// Rotates pairs of the first `rotary_embedding_dim` elements of each head by the angle of the
/// token's position (Su et al., arXiv:2104.09864, eq. 34).
fn rotary(cx: &mut Ctx) -> Result<Outs> {
    let interleaved = cx.flag("interleaved", false)?;
    let given = cx.val(0)?;
    let packed = cx.shape_of(given).rank() == 3;
    let x = if packed {
        let heads = head_count(cx, "num_heads")?;
        split_heads(cx, given, &heads)?
    } else {
        cx.ignore(&["num_heads"]);
        given
    };
    let s = cx.shape_of(x);
    let (part, width) = rotated_part(cx, &s)?;
    let [cos, sin] = [angles(cx, 1, &s)?, angles(cx, 2, &s)?];
    let pairs = cx.slice_axis(x, 3, 0i64, part)?;
    let (a, b) = halves(cx, pairs, interleaved, part / 2)?;
    let (real, imaginary) = rotated(cx, [a, b], [cos, sin])?;
    let mut y = if interleaved {
        interleave(cx, real, imaginary)?
    } else {
        cx.concat(&[real, imaginary], 3)?
    };
    if part < width {
        let rest = cx.slice_axis(x, 3, part, width - part)?;
        y = cx.concat(&[y, rest], 3)?;
    }
    one(if packed { join_heads(cx, y)? } else { y })
}

/// Pairs `(a, b)` as complex numbers, times `cos + i sin`.
fn rotated(
    cx: &mut Ctx,
    [a, b]: [ValueId; 2],
    [cos, sin]: [ValueId; 2],
) -> Result<(ValueId, ValueId)> {
    let (ac, bs) = (cx.mul(cos, a)?, cx.mul(sin, b)?);
    let (as_, bc) = (cx.mul(sin, a)?, cx.mul(cos, b)?);
    Ok((cx.sub(ac, bs)?, cx.add_(as_, bc)?))
}

/// Elements of each head that are rotated, and elements of each head.
fn rotated_part(cx: &Ctx, s: &Shape) -> Result<(i64, i64)> {
    let width = s.get(3).and_then(Dim::as_const);
    let width = width.ok_or_else(|| Error::unsupported(format!("heads of shape {s}")))?;
    match cx.i("rotary_embedding_dim", 0)? {
        0 if width % 2 == 0 && width > 0 => Ok((width, width)),
        part if part >= 2 && part <= width && part % 2 == 0 => Ok((part, width)),
        part => Err(Error::invalid(format!(
            "rotary_embedding_dim {part} of heads with {width} elements"
        ))),
    }
}

/// Elements of two values in turn, along the last of four axes.
fn interleave(cx: &mut Ctx, a: ValueId, b: ValueId) -> Result<ValueId> {
    let s = cx.shape_of(a);
    let mut column = s.0.clone();
    column.push(1.into());
    let a = cx.reshape(a, column.clone())?;
    let b = cx.reshape(b, column)?;
    let joined = cx.concat(&[a, b], 4)?;
    cx.reshape(joined, [&s[0], &s[1], &s[2], &s[3].scale(2)])
}

/// A cache of cosines or sines as `[b, 1, len, part / 2]`, looked up at the positions where these
/// are given.
fn angles(cx: &mut Ctx, operand: usize, x: &Shape) -> Result<ValueId> {
    let mut cache = cx.val(operand)?;
    if let Some(positions) = cx.opt(3)? {
        cache = cx.gather(cache, positions, 0)?;
    }
    let s = cx.shape_of(cache);
    if s.rank() != 3 {
        return Err(Error::invalid(format!(
            "a cache of shape {s} for heads {x}"
        )));
    }
    cx.reshape(cache, [s[0].clone(), 1.into(), s[1].clone(), s[2].clone()])
}

/// The elements that are rotated together: even and odd ones, or the first and the second half of
/// the last axis.
fn halves(cx: &mut Ctx, x: ValueId, interleaved: bool, half: i64) -> Result<(ValueId, ValueId)> {
    let (first, second) = if interleaved {
        (every_second(cx, x, 0, half)?, every_second(cx, x, 1, half)?)
    } else {
        (
            cx.slice_axis(x, 3, 0i64, half)?,
            cx.slice_axis(x, 3, half, half)?,
        )
    };
    Ok((first, second))
}

/// `n` elements of the last of four axes, two steps apart.
fn every_second(cx: &mut Ctx, x: ValueId, start: i64, n: i64) -> Result<ValueId> {
    let mut starts = vec![Dim::constant(0); 4];
    let mut sizes = cx.shape_of(x).0;
    (starts[3], sizes[3]) = (start.into(), n.into());
    let op = Op::Slice {
        starts,
        sizes,
        steps: vec![1, 1, 1, 2],
    };
    cx.add(op, &[x])
}
