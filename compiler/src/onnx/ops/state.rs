//! Operators with a state that the caller carries from step to step: linear attention, causal convolution, caches.

use super::super::import::{Ctx, OpDef, Out, Outs, axis_of, one};
use super::attention::{head_count, join_heads, split_heads};
use super::control::scan_over;
use super::norm::per_channel;
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, ScalarOp, ScatterKind, ValueId, Window};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("LinearAttention", (3, 6), linear_attention),
    OpDef::new("CausalConvWithState", (2, 4), causal_conv),
    OpDef::new("TensorScatter", (2, 3), tensor_scatter),
];

/// `[b, len, heads * d]` as `[len, b, heads, d]`, in the dtype of the state.
fn per_step(cx: &mut Ctx<'_, '_>, x: ValueId, heads: &Dim, dtype: DType) -> Result<ValueId> {
    let x = split_heads(cx, x, heads)?;
    let x = cx.b().transpose(x, &[2, 0, 1, 3])?;
    cx.b().cast(x, dtype)
}

/// The recurrence over tokens `s = exp(g) s + beta k (v - s' k)^T`, `y = scale q^T s`, one state matrix per head of keys;
/// `s'` is the decayed state, and is absent without the delta rule (Yang et al., arXiv:2412.06464, eq. 10).
fn linear_attention<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    cx.ignore(&["chunk_size"]); // A hint.
    let rules = &[
        ("linear", (false, false)),
        ("gated", (true, false)),
        ("delta", (false, true)),
        ("gated_delta", (true, true)),
    ];
    let (gated, delta) = cx.choice("update_rule", "gated_delta", rules)?;
    let (heads, kv_heads) = (
        head_count(cx, "q_num_heads")?,
        head_count(cx, "kv_num_heads")?,
    );
    let group = heads.exact_div(&kv_heads);
    let group = group
        .ok_or_else(|| Error::invalid(format!("{heads} query heads over {kv_heads} key heads")))?;
    let dtype = cx.ty(0)?.dtype;
    let past = cx.opt(3)?;
    let wide = match past.map(|p| cx.dtype_of(p)).unwrap_or(dtype) {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let (q, k, v) = (cx.val(0)?, cx.val(1)?, cx.val(2)?);
    let (q, k, v) = (
        per_step(cx, q, &heads, wide)?,
        per_step(cx, k, &kv_heads, wide)?,
        per_step(cx, v, &kv_heads, wide)?,
    );
    let (sk, sv) = (cx.shape_of(k), cx.shape_of(v));
    let [length, batch, width] = [0, 1, 3].map(|i| sk[i].clone());
    let known = width.as_const().filter(|w| *w > 0);
    let known = known.ok_or_else(|| Error::unsupported("the head size must be known"))?;
    let scale = match cx.f("scale", 0.0)? {
        0.0 => 1.0 / (known as f64).sqrt(),
        s => s,
    };
    let q = cx.with_real(ScalarOp::Mul, q, scale)?;
    // Query heads that share a state are the rows of one matrix.
    let q = cx.b().reshape(
        q,
        [
            length.clone(),
            batch.clone(),
            kv_heads.clone(),
            group,
            width.clone(),
        ],
    )?;
    let column = [
        length.clone(),
        batch.clone(),
        kv_heads.clone(),
        width.clone(),
        1.into(),
    ];
    let k = cx.b().reshape(k, column)?;
    let v = cx.b().reshape(
        v,
        [
            length.clone(),
            batch.clone(),
            kv_heads.clone(),
            1.into(),
            sv[3].clone(),
        ],
    )?;
    let mut steps = vec![q, k, v];
    if gated {
        let g = cx.val(4)?;
        let g = per_step(cx, g, &kv_heads, wide)?;
        let g = cx.map(ScalarOp::Exp, &[g])?;
        let rows = cx.shape_of(g)[3].clone();
        steps.push(cx.b().reshape(
            g,
            [
                length.clone(),
                batch.clone(),
                kv_heads.clone(),
                rows,
                1.into(),
            ],
        )?);
    }
    if delta {
        let rate = cx.val(5)?;
        let n = cx.shape_of(rate).last().cloned().unwrap_or(1.into());
        let rate = cx.b().cast(rate, wide)?;
        let rate = cx.b().transpose(rate, &[1, 0, 2])?;
        steps.push(
            cx.b()
                .reshape(rate, [length.clone(), batch.clone(), n, 1.into(), 1.into()])?,
        );
    }
    let shape = [batch.clone(), kv_heads, width, sv[3].clone()];
    let state = match past {
        Some(p) => cx.b().cast(p, wide)?,
        None => {
            let zero = cx.b().scalar(wide, 0.0);
            cx.b().broadcast(zero, shape)?
        }
    };
    let results = scan_over(cx, &[state], &steps, false, |b, f| {
        let (mut s, q, k, v) = (f[0], f[1], f[2], f[3]);
        let mut rest = f[4..].iter().copied();
        if gated {
            s = b.mul(s, rest.next().expect("the gate is scanned"))?;
        }
        let mut new = v;
        if delta {
            let row = b.transpose(k, &[0, 1, 3, 2])?;
            let old = b.matmul(row, s)?;
            let error = b.sub(v, old)?;
            new = b.mul(error, rest.next().expect("the rate is scanned"))?;
        }
        let update = b.matmul(k, new)?;
        let s = b.add_(s, update)?;
        Ok(vec![s, b.matmul(q, s)?])
    })?;
    let y = cx
        .b()
        .reshape(results[1], [length, batch, heads, sv[3].clone()])?;
    let y = cx.b().transpose(y, &[1, 2, 0, 3])?;
    let y = cx.b().cast(y, dtype)?;
    let y = join_heads(cx, y)?;
    let to = past.map_or(dtype, |p| cx.dtype_of(p));
    let state = cx.b().cast(results[0], to)?;
    Ok(vec![Out::Value(y), Out::Value(state)])
}

/// Depthwise convolution over the last `taps` positions, those before the first being the given state.
fn causal_conv<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let activations = &[("none", false), ("silu", true), ("swish", true)];
    let is_silu = cx.choice("activation", "none", activations)?;
    let (x, w) = (cx.val(0)?, cx.val(1)?);
    let (sx, sw, dtype) = (cx.shape_of(x), cx.shape_of(w), cx.dtype_of(x));
    let taps = sw
        .get(2)
        .and_then(Dim::as_usize)
        .filter(|t| sx.rank() == 3 && *t > 0);
    let groups = sw.first().and_then(Dim::as_usize);
    let (Some(taps), Some(groups)) = (taps, groups) else {
        return Err(Error::invalid(format!("weights {sw} do not fit {sx}")));
    };
    let before = match cx.opt(3)? {
        Some(p) => p,
        None => {
            let zero = cx.b().scalar(dtype, 0.0);
            cx.b()
                .broadcast(zero, [sx[0].clone(), sx[1].clone(), (taps - 1).into()])?
        }
    };
    let all = if taps == 1 {
        x
    } else {
        cx.b().concat(&[before, x], 2)?
    };
    let window = Window {
        strides: vec![1],
        dilations: vec![1],
        pads_low: vec![0],
        pads_high: vec![0],
    };
    let mut y = cx.add(
        Op::Conv {
            window,
            groups,
            layout: Layout::ChannelsFirst,
        },
        &[all, w],
    )?;
    if let Some(bias) = cx.opt(2)? {
        let bias = per_channel(cx, bias, 3)?;
        y = cx.b().add_(y, bias)?;
    }
    if is_silu {
        y = cx.map(ScalarOp::Silu, &[y])?;
    }
    let state = cx.b().slice_axis(all, 2, sx[2].clone(), taps - 1)?;
    Ok(vec![Out::Value(y), Out::Value(state)])
}

/// Writes `update` into the cache along `axis`, from a position per batch element on.
fn tensor_scatter<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let circular = cx.choice("mode", "linear", &[("linear", false), ("circular", true)])?;
    let (cache, update) = (cx.val(0)?, cx.val(1)?);
    let (s, new) = (cx.shape_of(cache), cx.shape_of(update));
    let axis = axis_of(cx.i("axis", -2)?, s.rank())?;
    if axis == 0 || new.rank() != s.rank() {
        return Err(Error::invalid(format!(
            "an update {new} of a cache {s} along axis {axis}"
        )));
    }
    let mut at = cx.add(
        Op::Iota {
            dtype: DType::I64,
            shape: new.0.clone(),
            axis,
        },
        &[],
    )?;
    if let Some(first) = cx.opt(2)? {
        let mut along = vec![Dim::constant(1); s.rank()];
        along[0] = s[0].clone();
        let first = cx.b().reshape(first, along)?;
        at = cx.b().add_(at, first)?;
    }
    if circular {
        let n = s[axis]
            .as_const()
            .ok_or_else(|| Error::unsupported(format!("a circular cache of {}", s[axis])))?;
        at = cx.with_real(ScalarOp::Mod, at, n as f64)?;
    }
    one(cx.add(
        Op::ScatterElements {
            axis,
            kind: ScatterKind::Set,
        },
        &[cache, at, update],
    )?)
}
