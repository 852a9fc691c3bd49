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
pub(super) fn split_heads(cx: &mut Ctx<'_, '_>, x: ValueId, heads: &Dim) -> Result<ValueId> {
    let s = cx.shape_of(x);
    let d = s
        .last()
        .and_then(|d| d.exact_div(heads))
        .filter(|_| s.rank() == 3);
    let d = d.ok_or_else(|| Error::invalid(format!("{s} does not divide into {heads} heads")))?;
    let x = cx
        .b()
        .reshape(x, [s[0].clone(), s[1].clone(), heads.clone(), d])?;
    cx.b().transpose(x, &[0, 2, 1, 3])
}

/// `[b, heads, len, d]` as `[b, len, heads * d]`.
pub(super) fn join_heads(cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<ValueId> {
    let s = cx.shape_of(x);
    let x = cx.b().transpose(x, &[0, 2, 1, 3])?;
    cx.b()
        .reshape(x, [s[0].clone(), s[2].clone(), s[1].product(&s[3])])
}

/// A number of heads given as an attribute.
pub(super) fn head_count(cx: &Ctx<'_, '_>, name: &'static str) -> Result<Dim> {
    let n = cx.i(name, 0)?;
    if (1..=1 << 20).contains(&n) {
        Ok(Dim::constant(n))
    } else {
        Err(Error::invalid(format!("{name} = {n}")))
    }
}

/// Keys or values `[b, kv_heads, len, d]` repeated for `heads` query heads, each in a row.
pub(super) fn repeat_heads(cx: &mut Ctx<'_, '_>, x: ValueId, heads: &Dim) -> Result<ValueId> {
    let s = cx.shape_of(x);
    if s[1] == *heads {
        return Ok(x);
    }
    let times = heads.exact_div(&s[1]);
    let times = times
        .ok_or_else(|| Error::invalid(format!("{heads} query heads over {} key heads", s[1])))?;
    let [b, h, len, d] = [0, 1, 2, 3].map(|i| s[i].clone());
    let x = cx.b().reshape(
        x,
        [
            b.clone(),
            h.clone(),
            Dim::constant(1),
            len.clone(),
            d.clone(),
        ],
    )?;
    let x = cx
        .b()
        .broadcast(x, [b.clone(), h, times, len.clone(), d.clone()])?;
    cx.b().reshape(x, [b, heads.clone(), len, d])
}

struct Attributes {
    causal: bool,
    /// Farthest key to the left and right of a query.
    window: [Option<i64>; 2],
    softcap: f64,
    /// Which scores the fourth result holds.
    scores: i64,
    scale: Option<f64>,
}

fn attributes(cx: &Ctx<'_, '_>) -> Result<Attributes> {
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
fn attention<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let at = attributes(cx)?;
    let [mut q, mut k, mut v] = [cx.val(0)?, cx.val(1)?, cx.val(2)?];
    let packed = cx.shape_of(q).rank() == 3;
    if packed {
        let (heads, kv_heads) = (
            head_count(cx, "q_num_heads")?,
            head_count(cx, "kv_num_heads")?,
        );
        q = split_heads(cx, q, &heads)?;
        k = split_heads(cx, k, &kv_heads)?;
        v = split_heads(cx, v, &kv_heads)?;
    } else {
        cx.ignore(&["q_num_heads", "kv_num_heads"]);
    }
    for x in [q, k, v] {
        if cx.shape_of(x).rank() != 4 {
            return Err(Error::invalid(format!(
                "expected operands of rank 3 or 4, got {}",
                cx.shape_of(x)
            )));
        }
    }
    let mut past = Dim::constant(0);
    if let (Some(pk), Some(pv)) = (cx.opt(4)?, cx.opt(5)?) {
        past = cx
            .shape_of(pk)
            .get(2)
            .cloned()
            .ok_or_else(|| Error::invalid("past_key must have rank 4"))?;
        k = cx.b().concat(&[pk, k], 2)?;
        v = cx.b().concat(&[pv, v], 2)?;
    }
    let (present_k, present_v) = (k, v);
    let heads = cx.shape_of(q)[1].clone();
    let (k, v) = (repeat_heads(cx, k, &heads)?, repeat_heads(cx, v, &heads)?);
    let (bias, causal_inside) = bias(cx, &at, q, k, &past)?;
    let width = cx.shape_of(q)[3]
        .as_const()
        .ok_or_else(|| Error::unsupported("the head size must be known"))?;
    let scale = at.scale.unwrap_or(1.0 / (width as f64).sqrt());
    let wants_scores = cx.node.output.get(3).is_some_and(|o| !o.is_empty());
    let (mut y, scores) = if at.softcap == 0.0 && !wants_scores {
        let args: Vec<ValueId> = [q, k, v]
            .into_iter()
            .chain(bias.as_ref().map(|b| b.value))
            .collect();
        let y = cx.add(
            Op::Attention {
                scale: Real(scale),
                causal: causal_inside,
            },
            &args,
        )?;
        (
            empty_rows_to_zero(cx, y, bias.as_ref(), causal_inside)?,
            None,
        )
    } else {
        let (y, s) = by_steps(cx, &at, [q, k, v], scale, bias.as_ref(), causal_inside)?;
        (y, Some(s))
    };
    if packed {
        y = join_heads(cx, y)?;
    }
    let mut outs = vec![Out::Value(y), Out::Value(present_k), Out::Value(present_v)];
    outs.extend(scores.map(Out::Value));
    Ok(outs)
}

/// What is added to the scores.
struct Bias {
    /// Broadcasts to `[b, heads, queries, keys]`.
    value: ValueId,
    /// True when it may forbid all keys of a query.
    may_empty: bool,
}

/// The bias from mask, cache lengths and windows; and whether plain causality is left to the attention op.
fn bias(
    cx: &mut Ctx<'_, '_>,
    at: &Attributes,
    q: ValueId,
    k: ValueId,
    past: &Dim,
) -> Result<(Option<Bias>, bool)> {
    let dtype = cx.dtype_of(q);
    let keys = cx.shape_of(k)[2].clone();
    let mut may_empty = false;
    let mut sum: Option<ValueId> = None;
    if let Some(mask) = cx.opt(3)? {
        sum = Some(additive(cx, mask, dtype, &keys)?);
        may_empty = true;
    }
    let filled = cx.opt(6)?;
    let plain = past.is(0) && filled.is_none();
    let causal_inside = at.causal && plain;
    let mut allowed: Vec<ValueId> = Vec::new();
    let windowed = at.window != [None, None];
    if at.causal && !causal_inside || windowed {
        let ahead = distance(cx, q, k, past, filled)?;
        let limits = [
            (ScalarOp::Le, (at.causal && !causal_inside).then_some(0)),
            (ScalarOp::Ge, at.window[0].map(|n| -n)),
            (ScalarOp::Le, at.window[1]),
        ];
        for (op, limit) in limits {
            if let Some(limit) = limit {
                let limit = cx.i64s(&[limit], &[])?;
                allowed.push(cx.map(op, &[ahead, limit])?);
            }
        }
        may_empty |= windowed;
    }
    if let Some(n) = filled {
        let s = cx.shape_of(k);
        let j = cx.add(
            Op::Iota {
                dtype: DType::I64,
                shape: vec![s[2].clone()],
                axis: 0,
            },
            &[],
        )?;
        let n = cx
            .b()
            .reshape(n, [s[0].clone(), 1.into(), 1.into(), 1.into()])?;
        allowed.push(cx.map(ScalarOp::Lt, &[j, n])?);
        may_empty = true;
    }
    for a in allowed {
        let b = additive(cx, a, dtype, &keys)?;
        sum = Some(match sum {
            Some(s) => cx.b().add_(s, b)?,
            None => b,
        });
    }
    Ok((sum.map(|value| Bias { value, may_empty }), causal_inside))
}

/// A mask as what is added to scores: true 0, false minus infinity; padded with minus infinity up to `keys`.
fn additive(cx: &mut Ctx<'_, '_>, mask: ValueId, dtype: DType, keys: &Dim) -> Result<ValueId> {
    let (zero, never) = (
        cx.b().scalar(dtype, 0.0),
        cx.b().scalar(dtype, f64::NEG_INFINITY),
    );
    let mask = match cx.dtype_of(mask) {
        DType::Bool => cx.map(ScalarOp::Select, &[mask, zero, never])?,
        _ => cx.b().cast(mask, dtype)?,
    };
    let shape = cx.shape_of(mask);
    let last = shape
        .last()
        .ok_or_else(|| Error::invalid("the mask is a scalar"))?;
    let missing = (keys.clone() - last.clone()).as_usize();
    match missing {
        Some(n) if n > 0 && !last.is(1) => {
            let mut high = vec![0; shape.rank()];
            high[shape.rank() - 1] = n;
            cx.add(
                Op::Pad {
                    low: vec![0; shape.rank()],
                    high,
                    mode: PadMode::Constant,
                },
                &[mask, never],
            )
        }
        _ => Ok(mask),
    }
}

/// How far key `j` lies to the right of the absolute position of query `i`: `[.., queries, keys]` of `i64`.
///
/// The first query follows `past` keys, or ends the first `filled[b]` keys.
fn distance(
    cx: &mut Ctx<'_, '_>,
    q: ValueId,
    k: ValueId,
    past: &Dim,
    filled: Option<ValueId>,
) -> Result<ValueId> {
    let (queries, keys) = (cx.shape_of(q)[2].clone(), cx.shape_of(k)[2].clone());
    let iota = |cx: &mut Ctx<'_, '_>, n: Dim| {
        cx.add(
            Op::Iota {
                dtype: DType::I64,
                shape: vec![n],
                axis: 0,
            },
            &[],
        )
    };
    let j = iota(cx, keys)?;
    let column = [queries.clone(), 1.into()];
    let Some(filled) = filled.filter(|_| past.is(0)) else {
        let p = iota(cx, past.clone() + queries.clone())?;
        let p = cx.b().slice_axis(p, 0, past.clone(), queries)?;
        let p = cx.b().reshape(p, column)?;
        return cx.b().sub(j, p);
    };
    // The last query is at `filled - 1`; the slice counts the queries that follow.
    let rest = iota(cx, queries.clone())?;
    let backwards = Op::Slice {
        starts: vec![queries.clone() - 1.into()],
        sizes: vec![queries.clone()],
        steps: vec![-1],
    };
    let rest = cx.add(backwards, &[rest])?;
    let rest = cx.b().reshape(rest, column)?;
    let batch = cx.shape_of(q)[0].clone();
    let filled = cx
        .b()
        .reshape(filled, [batch, 1.into(), 1.into(), 1.into()])?;
    let last = cx.with_real(ScalarOp::Sub, filled, 1.0)?;
    let p = cx.b().sub(last, rest)?;
    cx.b().sub(j, p)
}

/// The bias with causality added where the op would have done that.
fn whole_bias(
    cx: &mut Ctx<'_, '_>,
    bias: Option<&Bias>,
    causal: bool,
    (queries, keys, dtype): (Dim, Dim, DType),
) -> Result<Option<ValueId>> {
    let given = bias.map(|b| b.value);
    if !causal {
        return Ok(given);
    }
    let shape = vec![queries, keys.clone()];
    let i = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: shape.clone(),
            axis: 0,
        },
        &[],
    )?;
    let j = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape,
            axis: 1,
        },
        &[],
    )?;
    let below = cx.map(ScalarOp::Le, &[j, i])?;
    let below = additive(cx, below, dtype, &keys)?;
    match given {
        Some(g) => cx.b().add_(g, below).map(Some),
        None => Ok(Some(below)),
    }
}

fn empty_rows_to_zero(
    cx: &mut Ctx<'_, '_>,
    y: ValueId,
    bias: Option<&Bias>,
    causal: bool,
) -> Result<ValueId> {
    let Some(given) = bias.filter(|b| b.may_empty) else {
        return Ok(y);
    };
    let (dtype, keys) = (cx.dtype_of(y), cx.shape_of(given.value).last().cloned());
    let keys = keys.ok_or_else(|| Error::invalid("the mask is a scalar"))?;
    let queries = cx.shape_of(y)[2].clone();
    let bias = whole_bias(cx, bias, causal, (queries, keys, dtype))?.expect("a bias is given");
    zero_where_empty(cx, y, bias)
}

/// Zeros in the rows of `y` for which all of the bias's last axis is minus infinity.
fn zero_where_empty(cx: &mut Ctx<'_, '_>, y: ValueId, bias: ValueId) -> Result<ValueId> {
    let (rank, dtype) = (cx.shape_of(bias).rank(), cx.dtype_of(y));
    let most = cx.reduce(ReduceKind::Max, bias, &[rank - 1], true)?;
    let empty = cx.map(ScalarOp::IsNegInf, &[most])?;
    let zero = cx.b().scalar(dtype, 0.0);
    cx.map(ScalarOp::Select, &[empty, zero, y])
}

/// Output and the scores at the stage that is asked for.
fn by_steps(
    cx: &mut Ctx<'_, '_>,
    at: &Attributes,
    [q, k, v]: [ValueId; 3],
    scale: f64,
    bias: Option<&Bias>,
    causal: bool,
) -> Result<(ValueId, ValueId)> {
    let half = scale.abs().sqrt();
    let q = cx.with_real(ScalarOp::Mul, q, half.copysign(scale))?;
    let k = cx.with_real(ScalarOp::Mul, k, half)?;
    let (queries, keys, dtype) = (
        cx.shape_of(q)[2].clone(),
        cx.shape_of(k)[2].clone(),
        cx.dtype_of(q),
    );
    let k = cx.b().transpose(k, &[0, 1, 3, 2])?;
    let raw = cx.b().matmul(q, k)?;
    let mut capped = raw;
    if at.softcap > 0.0 {
        let t = cx.with_real(ScalarOp::Div, raw, at.softcap)?;
        let t = cx.map(ScalarOp::Tanh, &[t])?;
        capped = cx.with_real(ScalarOp::Mul, t, at.softcap)?;
    }
    let whole = whole_bias(cx, bias, causal, (queries, keys, dtype))?;
    let biased = match whole {
        Some(b) => cx.b().add_(capped, b)?,
        None => capped,
    };
    let mut weights = cx.add(
        Op::Softmax {
            axis: 3,
            log: false,
        },
        &[biased],
    )?;
    if let Some(b) = whole {
        weights = zero_where_empty(cx, weights, b)?;
    }
    let y = cx.b().matmul(weights, v)?;
    let scores = match at.scores {
        0 => raw,
        1 => capped,
        2 => biased,
        3 => weights,
        other => return Err(Error::invalid(format!("qk_matmul_output_mode {other}"))),
    };
    Ok((y, scores))
}

/// Operators of domain `ai.onnx.preview`.
pub(super) const PREVIEW_OPS: &[OpDef] = &[OpDef::new("FlexAttention", (3, 3), flex_attention)];

/// Attention whose scores and probabilities pass through subgraphs; without these, the fused op.
fn flex_attention<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let scale = cx.opt_f("scale")?;
    let (q, k, v) = (cx.val(0)?, cx.val(1)?, cx.val(2)?);
    let (s, dtype) = (cx.shape_of(q), cx.dtype_of(q));
    let width = s
        .get(3)
        .and_then(Dim::as_const)
        .filter(|_| s.rank() == 4 && cx.shape_of(k).rank() == 4);
    let width = width.ok_or_else(|| Error::unsupported(format!("queries of shape {s}")))?;
    if cx.shape_of(v).rank() != 4 {
        return Err(Error::invalid(format!(
            "values of shape {}",
            cx.shape_of(v)
        )));
    }
    let scale = scale.unwrap_or(1.0 / (width as f64).sqrt());
    let inner = match cx.i("softmax_precision", 0)? {
        0 if dtype == DType::F64 => DType::F64,
        0 => DType::F32,
        d => super::super::tensor::dtype_of(d as i32)?,
    };
    let (k, v) = (repeat_heads(cx, k, &s[1])?, repeat_heads(cx, v, &s[1])?);
    if !cx.has_attr("score_mod") && !cx.has_attr("prob_mod") {
        return one(cx.add(
            Op::Attention {
                scale: Real(scale),
                causal: false,
            },
            &[q, k, v],
        )?);
    }
    let k = cx.b().transpose(k, &[0, 1, 3, 2])?;
    let scores = cx.b().matmul(q, k)?;
    let scores = cx.b().cast(scores, inner)?;
    let scores = cx.with_real(ScalarOp::Mul, scores, scale)?;
    let scores = modified(cx, "score_mod", scores)?;
    let weights = cx.add(
        Op::Softmax {
            axis: 3,
            log: false,
        },
        &[scores],
    )?;
    let weights = modified(cx, "prob_mod", weights)?;
    let weights = cx.b().cast(weights, dtype)?;
    one(cx.b().matmul(weights, v)?)
}

/// What the subgraph of an attribute makes of a value; the value itself without the attribute.
fn modified(cx: &mut Ctx<'_, '_>, name: &'static str, x: ValueId) -> Result<ValueId> {
    if !cx.has_attr(name) {
        return Ok(x);
    }
    let g = cx.graph_attr(name)?;
    let arg = cx.made(x);
    let results = cx.inline(g, &[arg])?;
    let &[y] = results.as_slice() else {
        return Err(Error::invalid(format!(
            "{name} gives {} results",
            results.len()
        )));
    };
    let y = cx.materialise(y)?;
    if cx.type_of(y) != cx.type_of(x) {
        return Err(Error::invalid(format!(
            "{name} makes {} of {}",
            cx.type_of(y),
            cx.type_of(x)
        )));
    }
    Ok(y)
}

/// Rotates pairs of the first `rotary_embedding_dim` elements of each head by the angle of the token's position (Su et
/// al., arXiv:2104.09864, eq. 34).
fn rotary<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let interleaved = cx.flag("interleaved", false)?;
    let part = cx.i("rotary_embedding_dim", 0)?;
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
    let width = s
        .get(3)
        .and_then(Dim::as_const)
        .ok_or_else(|| Error::unsupported(format!("heads of shape {s}")))?;
    let part = if part == 0 { width } else { part };
    if part < 2 || part > width || part % 2 != 0 {
        return Err(Error::invalid(format!(
            "rotary_embedding_dim {part} of heads with {width} elements"
        )));
    }
    let [cos, sin] = [angles(cx, 1, &s)?, angles(cx, 2, &s)?];
    let turned = cx.b().slice_axis(x, 3, 0i64, part)?;
    let (a, b) = halves(cx, turned, interleaved, part / 2)?;
    let (ac, bs) = (cx.b().mul(cos, a)?, cx.b().mul(sin, b)?);
    let (as_, bc) = (cx.b().mul(sin, a)?, cx.b().mul(cos, b)?);
    let (real, imaginary) = (cx.b().sub(ac, bs)?, cx.b().add_(as_, bc)?);
    let mut turned_shape = s.0.clone();
    turned_shape[3] = part.into();
    let mut y = if interleaved {
        let mut pair = s.0.clone();
        pair[3] = (part / 2).into();
        pair.push(1.into());
        let (r, i) = (
            cx.b().reshape(real, pair.clone())?,
            cx.b().reshape(imaginary, pair)?,
        );
        let joined = cx.b().concat(&[r, i], 4)?;
        cx.b().reshape(joined, turned_shape)?
    } else {
        cx.b().concat(&[real, imaginary], 3)?
    };
    if part < width {
        let rest = cx.b().slice_axis(x, 3, part, width - part)?;
        y = cx.b().concat(&[y, rest], 3)?;
    }
    one(if packed { join_heads(cx, y)? } else { y })
}

/// A cache of cosines or sines as `[b, 1, len, part / 2]`, looked up at the positions where these are given.
fn angles(cx: &mut Ctx<'_, '_>, operand: usize, x: &Shape) -> Result<ValueId> {
    let mut cache = cx.val(operand)?;
    if let Some(positions) = cx.opt(3)? {
        cache = cx.add(Op::Gather { axis: 0 }, &[cache, positions])?;
    }
    let s = cx.shape_of(cache);
    if s.rank() != 3 {
        return Err(Error::invalid(format!(
            "a cache of shape {s} for heads {x}"
        )));
    }
    cx.b()
        .reshape(cache, [s[0].clone(), 1.into(), s[1].clone(), s[2].clone()])
}

/// The elements that are rotated together: even and odd ones, or the first and the second half of the last axis.
fn halves(
    cx: &mut Ctx<'_, '_>,
    x: ValueId,
    interleaved: bool,
    half: i64,
) -> Result<(ValueId, ValueId)> {
    if !interleaved {
        return Ok((
            cx.b().slice_axis(x, 3, 0i64, half)?,
            cx.b().slice_axis(x, 3, half, half)?,
        ));
    }
    let s = cx.shape_of(x);
    let mut every = |start: i64| {
        let (mut starts, mut sizes, mut steps) =
            (vec![Dim::constant(0); 4], s.0.clone(), vec![1; 4]);
        (starts[3], sizes[3], steps[3]) = (start.into(), half.into(), 2);
        cx.add(
            Op::Slice {
                starts,
                sizes,
                steps,
            },
            &[x],
        )
    };
    Ok((every(0)?, every(1)?))
}
