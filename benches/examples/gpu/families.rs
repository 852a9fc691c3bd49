//! A graph for each family of kernels: small, to be checked, and large, to be timed.

use gristmill::ir::{Graph, GraphBuilder, Layout, Op, Real, ReduceKind, ScalarOp, ScatterKind, ValueId, Window};
use gristmill::{DType, Result};

/// What bounds a kernel of the family, and so what is reported.
pub enum Work {
    /// Bytes read and written.
    Bytes(f64),
    /// Floating-point operations, a fused multiply-add as two.
    Flops(f64),
}

/// One graph of a family.
pub struct Family {
    /// What the tables call it.
    pub name: &'static str,
    /// Error that is allowed, relative to the scale of a tensor.
    pub tolerance: f64,
    /// Makes the graph, and tells what it does; `scale` is 1 for the small one.
    pub make: fn(usize) -> Result<(Graph, Work)>,
    /// Scale of the large one.
    pub large: usize,
}

/// All families.
pub const ALL: &[Family] = &[
    Family { name: "map_f32", tolerance: 1e-6, make: |s| map(DType::F32, s), large: 1 << 18 },
    Family { name: "map_bf16", tolerance: 1e-2, make: |s| map(DType::BF16, s), large: 1 << 19 },
    Family { name: "reduce_rows_f32", tolerance: 1e-5, make: |s| reduce(s, 1), large: 256 },
    Family { name: "reduce_columns_f32", tolerance: 1e-5, make: |s| reduce(s, 0), large: 256 },
    Family { name: "softmax_f32", tolerance: 1e-5, make: softmax, large: 256 },
    Family { name: "layer_norm_f32", tolerance: 1e-5, make: layer_norm, large: 256 },
    Family { name: "matmul_f32", tolerance: 1e-5, make: |s| matmul(DType::F32, [64 * s; 3]), large: 64 },
    Family { name: "matmul_bf16_4096", tolerance: 2e-2, make: |s| matmul(DType::BF16, square(s)), large: 64 },
    Family { name: "matmul_bf16_8192", tolerance: 2e-2, make: |s| matmul(DType::BF16, square(s)), large: 128 },
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
    Family { name: "attention_f32", tolerance: 1e-5, make: |s| attention(DType::F32, s), large: 32 },
    Family { name: "attention_bf16", tolerance: 2e-2, make: |s| attention(DType::BF16, s), large: 128 },
    Family { name: "conv_f32", tolerance: 1e-5, make: |s| conv(DType::F32, s), large: 8 },
    Family { name: "conv_f16", tolerance: 5e-3, make: |s| conv(DType::F16, s), large: 8 },
    Family { name: "transpose_f32", tolerance: 0.0, make: transpose, large: 128 },
    Family { name: "gather_f32", tolerance: 0.0, make: gather, large: 1024 },
    Family { name: "scatter_f32", tolerance: 1e-5, make: scatter, large: 64 },
    Family { name: "top_k_f32", tolerance: 0.0, make: top_k, large: 16 },
    Family { name: "cum_sum_f32", tolerance: 1e-5, make: cum_sum, large: 64 },
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
        b.add1(Op::Softmax { axis: 1, log: false }, &[x])
    })?;
    Ok((graph, Work::Bytes((8 * shape[0] * shape[1]) as f64)))
}

fn layer_norm(scale: usize) -> Result<(Graph, Work)> {
    let shape = [1024 * scale, 768];
    let graph = one("layer_norm", |b| {
        let x = b.input("x", DType::F32, shape);
        let [g, h] = ["gain", "bias"].map(|name| b.input(name, DType::F32, [768usize]));
        b.add1(Op::LayerNorm { axis: 1, epsilon: Real(1e-5) }, &[x, g, h])
    })?;
    Ok((graph, Work::Bytes((8 * shape[0] * shape[1]) as f64)))
}

/// Extents of a square product; of the small one, such as make as many tiles as warp groups ask for.
fn square(scale: usize) -> [usize; 3] {
    if scale == 1 { [1024, 128, 1024] } else { [64 * scale; 3] }
}

fn matmul(dtype: DType, [m, k, n]: [usize; 3]) -> Result<(Graph, Work)> {
    let graph = one("matmul", |b| {
        let (x, w) = (b.input("x", dtype, [m, k]), b.input("w", dtype, [k, n]));
        b.matmul(x, w)
    })?;
    Ok((graph, Work::Flops(2.0 * (m * k * n) as f64)))
}

fn attention(dtype: DType, scale: usize) -> Result<(Graph, Work)> {
    // The small one has as many tiles of queries as warp groups ask for.
    let (heads, length, depth) = if scale == 1 { (64, 128, 128) } else { (16, 64 * scale, 128) };
    let graph = one("attention", |b| {
        let [q, k, v] = ["q", "k", "v"].map(|name| b.input(name, dtype, [1, heads, length, depth]));
        b.add1(Op::Attention { scale: Real(1.0 / (depth as f64).sqrt()), causal: false }, &[q, k, v])
    })?;
    Ok((graph, Work::Flops(4.0 * (heads * length * length * depth) as f64)))
}

fn conv(dtype: DType, scale: usize) -> Result<(Graph, Work)> {
    let (batch, channels, extent) = (scale * scale / 2 + 1, 16 * scale, 14 * scale.min(4));
    let graph = one("conv", |b| {
        let x = b.input("x", dtype, [batch, channels, extent, extent]);
        let w = b.input("w", dtype, [channels, channels, 3, 3]);
        let ones = vec![1; 2];
        let window = Window { strides: ones.clone(), dilations: ones.clone(), pads_low: ones.clone(), pads_high: ones };
        b.add1(Op::Conv { window, groups: 1, layout: Layout::ChannelsFirst }, &[x, w])
    })?;
    Ok((graph, Work::Flops(2.0 * 9.0 * (batch * channels * channels * extent * extent) as f64)))
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
        b.add1(Op::ScatterElements { axis: 0, kind: ScatterKind::Add }, &[x, i, u])
    })?;
    Ok((graph, Work::Bytes((20 * shape[0] * shape[1]) as f64)))
}

fn top_k(scale: usize) -> Result<(Graph, Work)> {
    let shape = [16 * scale, 64 * scale];
    let graph = one("top_k", |b| {
        let x = b.input("x", DType::F32, shape);
        Ok(b.add(Op::TopK { k: 8usize.into(), axis: 1, largest: true }, &[x])?[0])
    })?;
    Ok((graph, Work::Bytes((4 * shape[0] * shape[1]) as f64)))
}

fn cum_sum(scale: usize) -> Result<(Graph, Work)> {
    let shape = [16 * scale, 64 * scale];
    let graph = one("cum_sum", |b| {
        let x = b.input("x", DType::F32, shape);
        b.add1(Op::CumSum { axis: 1, exclusive: false, reverse: false }, &[x])
    })?;
    Ok((graph, Work::Bytes((8 * shape[0] * shape[1]) as f64)))
}
