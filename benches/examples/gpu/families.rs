//! A graph for each family of kernels: small, to be checked, and large, to be timed.

use gristmill::ir::{
    Extremum, Graph, GraphBuilder, Layout, Op, PoolKind, Real, ReduceKind, ScalarOp, ScatterKind,
    ValueId, Window,
};
use gristmill::{DType, Result};

/// The resource that bounds a kernel of the family, and so the unit of its rate.
pub enum Work {
    /// Bytes read and written.
    Bytes(f64),
    /// Floating-point operations, a fused multiply-add as two.
    Flops(f64),
}

/// One graph of a family.
pub struct Family {
    /// Name in the tables.
    pub name: &'static str,
    /// Error that is allowed, relative to the scale of a tensor.
    pub tolerance: f64,
    /// Makes the graph of a scale, 1 for the small one, and counts its work.
    pub make: fn(usize) -> Result<(Graph, Work)>,
    /// Scale of the large one.
    pub large: usize,
}

/// All families.
pub const ALL: &[Family] = &[
    Family {
        name: "map_f32",
        tolerance: 1e-6,
        make: |s| map(DType::F32, s),
        large: 1 << 18,
    },
    Family {
        name: "map_bf16",
        tolerance: 1e-2,
        make: |s| map(DType::BF16, s),
        large: 1 << 19,
    },
    Family {
        name: "reduce_rows_f32",
        tolerance: 1e-5,
        make: |s| reduce(s, 1),
        large: 512,
    },
    Family {
        name: "reduce_columns_f32",
        tolerance: 1e-5,
        make: |s| reduce(s, 0),
        large: 512,
    },
    Family {
        name: "softmax_f32",
        tolerance: 1e-5,
        make: softmax,
        large: 512,
    },
    Family {
        name: "arg_max_f32",
        tolerance: 0.0,
        make: arg_max,
        large: 512,
    },
    Family {
        name: "layer_norm_f32",
        tolerance: 1e-5,
        make: layer_norm,
        large: 352,
    },
    Family {
        name: "matmul_f32",
        tolerance: 1e-5,
        make: |s| matmul(DType::F32, [64 * s; 3]),
        large: 64,
    },
    Family {
        name: "matmul_bf16_4096",
        tolerance: 2e-2,
        make: |s| matmul(DType::BF16, square(s)),
        large: 64,
    },
    Family {
        name: "matmul_bf16_8192",
        tolerance: 2e-2,
        make: |s| matmul(DType::BF16, square(s)),
        large: 128,
    },
    Family {
        name: "matmul_bf16_few_rows",
        tolerance: 2e-2,
        make: |s| matmul(DType::BF16, [2, 64 * s, 64 * s]),
        large: 128,
    },
    Family {
        name: "matmul_f16_long_sums",
        tolerance: 5e-3,
        make: |s| matmul(DType::F16, [64, 4096 * s, 72]),
        large: 64,
    },
    Family {
        name: "matmul_bf16_batched",
        tolerance: 2e-2,
        make: batched,
        large: 16,
    },
    Family {
        name: "matmul_i8",
        tolerance: 0.0,
        make: |s| narrow(DType::I8, DType::I32, s),
        large: 64,
    },
    Family {
        name: "matmul_f8",
        tolerance: 1e-4,
        make: |s| narrow(DType::F8E4M3FN, DType::F32, s),
        large: 64,
    },
    Family {
        name: "attention_f32",
        tolerance: 1e-5,
        make: |s| attention(DType::F32, false, s),
        large: 32,
    },
    Family {
        name: "attention_bf16",
        tolerance: 2e-2,
        make: |s| attention(DType::BF16, false, s),
        large: 128,
    },
    Family {
        name: "attention_bf16_causal",
        tolerance: 2e-2,
        make: |s| attention(DType::BF16, true, s),
        large: 128,
    },
    Family {
        name: "attention_bf16_one_query",
        tolerance: 2e-2,
        make: one_query,
        large: 512,
    },
    Family {
        name: "conv_f32",
        tolerance: 1e-5,
        make: |s| conv(DType::F32, s),
        large: 8,
    },
    Family {
        name: "conv_f16",
        tolerance: 5e-3,
        make: |s| conv(DType::F16, s),
        large: 8,
    },
    Family {
        name: "conv_f32_depthwise",
        tolerance: 1e-5,
        make: depthwise,
        large: 8,
    },
    Family {
        name: "max_pool_f32",
        tolerance: 0.0,
        make: max_pool,
        large: 8,
    },
    Family {
        name: "transpose_f32",
        tolerance: 0.0,
        make: transpose,
        large: 128,
    },
    Family {
        name: "gather_f32",
        tolerance: 0.0,
        make: gather,
        large: 1024,
    },
    Family {
        name: "scatter_f32",
        tolerance: 1e-5,
        make: scatter,
        large: 64,
    },
    Family {
        name: "top_k_f32",
        tolerance: 0.0,
        make: top_k,
        large: 16,
    },
    Family {
        name: "cum_sum_f32",
        tolerance: 1e-5,
        make: cum_sum,
        large: 64,
    },
];

fn one(name: &str, build: impl FnOnce(&mut GraphBuilder) -> Result<ValueId>) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    b.set_origin(&format!("/{name}"));
    let y = build(&mut b)?;
    b.output("y", y);
    b.finish()
}

fn map(dtype: DType, scale: usize) -> Result<(Graph, Work)> {
    let n = 1024 * scale;
    let graph = one("map", |b| {
        let x = b.input("x", dtype, [n]);
        let t = b.map(ScalarOp::Tanh, &[x])?;
        b.map(ScalarOp::Mul, &[x, t])
    })?;
    Ok((graph, Work::Bytes((2 * n * dtype.size_bytes()) as f64)))
}

fn reduce(scale: usize, axis: usize) -> Result<(Graph, Work)> {
    let shape = [8 * scale * 4, 8 * scale * 4];
    let graph = one("reduce", |b| {
        let x = b.input("x", DType::F32, shape);
        b.reduce(ReduceKind::Sum, x, &[axis], false)
    })?;
    Ok((graph, Work::Bytes((4 * shape[0] * shape[1]) as f64)))
}

fn softmax(scale: usize) -> Result<(Graph, Work)> {
    let shape = [16 * scale, 64 * scale];
    let graph = one("softmax", |b| {
        let x = b.input("x", DType::F32, shape);
        b.add1(
            Op::Softmax {
                axis: 1,
                log: false,
            },
            &[x],
        )
    })?;
    Ok((graph, Work::Bytes((8 * shape[0] * shape[1]) as f64)))
}

fn arg_max(scale: usize) -> Result<(Graph, Work)> {
    let shape = [16 * scale, 64 * scale];
    let graph = one("arg_max", |b| {
        let x = b.input("x", DType::F32, shape);
        b.add1(
            Op::ArgReduce {
                kind: Extremum::Max,
                axis: 1,
                keepdims: false,
                select_last: false,
            },
            &[x],
        )
    })?;
    Ok((graph, Work::Bytes((4 * shape[0] * shape[1]) as f64)))
}

fn layer_norm(scale: usize) -> Result<(Graph, Work)> {
    let shape = [1024 * scale, 768];
    let graph = one("layer_norm", |b| {
        let x = b.input("x", DType::F32, shape);
        let [g, h] = ["gain", "bias"].map(|name| b.input(name, DType::F32, [768usize]));
        b.add1(
            Op::LayerNorm {
                axis: 1,
                epsilon: Real(1e-5),
            },
            &[x, g, h],
        )
    })?;
    Ok((graph, Work::Bytes((8 * shape[0] * shape[1]) as f64)))
}

/// Extents of a square product; the small one has as many tiles as warp groups require.
fn square(scale: usize) -> [usize; 3] {
    if scale == 1 {
        [1024, 128, 1024]
    } else {
        [64 * scale; 3]
    }
}

fn matmul(dtype: DType, [m, k, n]: [usize; 3]) -> Result<(Graph, Work)> {
    let graph = one("matmul", |b| {
        let (x, w) = (b.input("x", dtype, [m, k]), b.input("w", dtype, [k, n]));
        b.matmul(x, w)
    })?;
    Ok((graph, Work::Flops(2.0 * (m * k * n) as f64)))
}

fn batched(scale: usize) -> Result<(Graph, Work)> {
    let (batch, side) = (2 * scale, 64 * scale);
    let graph = one("batched", |b| {
        let [x, w] = ["x", "w"].map(|name| b.input(name, DType::BF16, [batch, side, side]));
        b.matmul(x, w)
    })?;
    Ok((
        graph,
        Work::Flops(2.0 * batch as f64 * (side as f64).powi(3)),
    ))
}

/// Elements of 8 bits, multiplied in a type that holds their products.
fn narrow(dtype: DType, wide: DType, scale: usize) -> Result<(Graph, Work)> {
    let side = 64 * scale;
    let graph = one("narrow", |b| {
        let [x, w] = ["x", "w"].map(|name| b.input(name, dtype, [side, side]));
        let (x, w) = (b.cast(x, wide)?, b.cast(w, wide)?);
        let w = b.transpose(w, &[1, 0])?;
        b.matmul(x, w)
    })?;
    Ok((graph, Work::Flops(2.0 * (side as f64).powi(3))))
}

/// One new query per head, as a language model decodes token by token: the rate at which keys and
/// values are read counts.
fn one_query(scale: usize) -> Result<(Graph, Work)> {
    let (heads, length, depth) = (32, 64 * scale, 128);
    let graph = one("one_query", |b| {
        let q = b.input("q", DType::BF16, [1, heads, 1, depth]);
        let [k, v] = ["k", "v"].map(|name| b.input(name, DType::BF16, [1, heads, length, depth]));
        b.add1(
            Op::Attention {
                scale: Real(1.0 / (depth as f64).sqrt()),
                causal: false,
            },
            &[q, k, v],
        )
    })?;
    Ok((graph, Work::Bytes((4 * heads * length * depth) as f64)))
}

fn attention(dtype: DType, causal: bool, scale: usize) -> Result<(Graph, Work)> {
    // The small one has as many tiles of queries as warp groups ask for.
    let (heads, length, depth) = if scale == 1 {
        (64, 128, 128)
    } else {
        (16, 64 * scale, 128)
    };
    let graph = one("attention", |b| {
        let [q, k, v] = ["q", "k", "v"].map(|name| b.input(name, dtype, [1, heads, length, depth]));
        b.add1(
            Op::Attention {
                scale: Real(1.0 / (depth as f64).sqrt()),
                causal,
            },
            &[q, k, v],
        )
    })?;
    // Half of the scores are left out.
    let share = if causal { 0.5 } else { 1.0 };
    Ok((
        graph,
        Work::Flops(share * 4.0 * (heads * length * length * depth) as f64),
    ))
}

fn conv(dtype: DType, scale: usize) -> Result<(Graph, Work)> {
    // `F16` at scale 1 is still large enough for warp groups.
    let (batch, channels, extent) = match (dtype, scale) {
        (DType::F16, 1) => (3, 64, 54),
        _ => (scale * scale / 2 + 1, 16 * scale, 14 * scale.min(4)),
    };
    let graph = one("conv", |b| {
        let x = b.input("x", dtype, [batch, channels, extent, extent]);
        let w = b.input("w", dtype, [channels, channels, 3, 3]);
        b.add1(
            Op::Conv {
                window: padded(3),
                groups: 1,
                layout: Layout::ChannelsFirst,
            },
            &[x, w],
        )
    })?;
    Ok((
        graph,
        Work::Flops(2.0 * 9.0 * (batch * channels * channels * extent * extent) as f64),
    ))
}

fn padded(window: usize) -> Window {
    let (ones, pads) = (vec![1; 2], vec![window / 2; 2]);
    Window {
        strides: ones.clone(),
        dilations: ones,
        pads_low: pads.clone(),
        pads_high: pads,
    }
}

fn depthwise(scale: usize) -> Result<(Graph, Work)> {
    let (batch, channels, extent) = (4 * scale, 32 * scale, 14 * scale);
    let graph = one("depthwise", |b| {
        let x = b.input("x", DType::F32, [batch, channels, extent, extent]);
        let w = b.input("w", DType::F32, [channels, 1, 3, 3]);
        b.add1(
            Op::Conv {
                window: padded(3),
                groups: channels,
                layout: Layout::ChannelsFirst,
            },
            &[x, w],
        )
    })?;
    Ok((
        graph,
        Work::Bytes((8 * batch * channels * extent * extent) as f64),
    ))
}

fn max_pool(scale: usize) -> Result<(Graph, Work)> {
    let (batch, channels, extent) = (4 * scale, 32 * scale, 14 * scale);
    let graph = one("max_pool", |b| {
        let x = b.input("x", DType::F32, [batch, channels, extent, extent]);
        let (kind, layout) = (PoolKind::Max, Layout::ChannelsFirst);
        b.add1(
            Op::Pool {
                kind,
                size: vec![3, 3],
                window: padded(3),
                ceil: false,
                layout,
            },
            &[x],
        )
    })?;
    Ok((
        graph,
        Work::Bytes((8 * batch * channels * extent * extent) as f64),
    ))
}

fn transpose(scale: usize) -> Result<(Graph, Work)> {
    let shape = [64 * scale, 96 * scale];
    let graph = one("transpose", |b| {
        let x = b.input("x", DType::F32, shape);
        b.transpose(x, &[1, 0])
    })?;
    Ok((graph, Work::Bytes((8 * shape[0] * shape[1]) as f64)))
}

fn gather(scale: usize) -> Result<(Graph, Work)> {
    let (rows, picked) = (100 * scale, 64 * scale);
    let graph = one("gather", |b| {
        let x = b.input("x", DType::F32, [rows, 256]);
        let i = b.input("i", DType::I64, [picked]);
        b.add1(Op::Gather { axis: 0 }, &[x, i])
    })?;
    Ok((graph, Work::Bytes((8 * 256 * picked + 8 * picked) as f64)))
}

fn scatter(scale: usize) -> Result<(Graph, Work)> {
    let shape = [16 * scale, 64];
    let graph = one("scatter", |b| {
        let x = b.input("x", DType::F32, shape);
        let i = b.input("i", DType::I64, shape);
        let u = b.input("u", DType::F32, shape);
        b.add1(
            Op::ScatterElements {
                axis: 0,
                kind: ScatterKind::Add,
            },
            &[x, i, u],
        )
    })?;
    Ok((graph, Work::Bytes((20 * shape[0] * shape[1]) as f64)))
}

fn top_k(scale: usize) -> Result<(Graph, Work)> {
    let shape = [16 * scale, 64 * scale];
    let graph = one("top_k", |b| {
        let x = b.input("x", DType::F32, shape);
        Ok(b.add(
            Op::TopK {
                k: 8usize.into(),
                axis: 1,
                largest: true,
            },
            &[x],
        )?[0])
    })?;
    Ok((graph, Work::Bytes((4 * shape[0] * shape[1]) as f64)))
}

fn cum_sum(scale: usize) -> Result<(Graph, Work)> {
    let shape = [16 * scale, 64 * scale];
    let graph = one("cum_sum", |b| {
        let x = b.input("x", DType::F32, shape);
        b.add1(
            Op::CumSum {
                axis: 1,
                exclusive: false,
                reverse: false,
            },
            &[x],
        )
    })?;
    Ok((graph, Work::Bytes((8 * shape[0] * shape[1]) as f64)))
}
