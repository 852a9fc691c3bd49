//! Matrix products of `f32`, or of 8-bit integers by constants, through the packed micro-kernels.

use super::bytes::BytesProduct;
use super::epilogue::{Chain, contraction_ns, epilogue_ops};
use super::pack::{Packed, pack_rhs};
use super::rejected::Rejected;
use super::strided::{Axis, Strided, collapse, row_major};
use super::task::{Call, Context, Place, Ptr, Task, pointers, read};
use crate::ir::{Node, NodeId};
use gristmill_kernels::calls;
use gristmill_kernels::epilogue::MAX_BATCH;
use gristmill_kernels::gemm::{BatchDim, GemmDesc};
use gristmill_runtime::DType;

// Tensors of the loops around a product; operands of the epilogue follow.
const LEFT: usize = 0;
const RIGHT: usize = 1;
const RESULT: usize = 2;
const OPERANDS: usize = 3;

/// The task of a matrix product and the element-wise ops on its tiles.
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let product = Product::find(cx, node)?;
    let loops = product.loops(cx, node)?;
    let mut desc = product.descriptor(cx, &loops);
    let (epilogue, mut operands) = epilogue_ops(&product.chain.terms, &|i| {
        let tensor = OPERANDS + i;
        (loops.row.strides[tensor], batch_array(&loops.batch, tensor))
    })?;
    (desc.epilogue, desc.n_epilogue) = epilogue;
    let Product { sides, chain, .. } = &product;
    if let Some(b) = &sides.integers {
        let keeps_sums = cx.body.dtype(chain.result) == DType::I32;
        desc.integers = b.describe(&mut operands, keeps_sums);
    }
    desc.plan(1);
    let out = Ptr::Write(Place::Value(chain.result), 0);
    let (left, right) = (sides.read_left.clone(), sides.right.ptr.clone());
    let ptrs = pointers(left, right, out, false, operands);
    let (items, ns) = (desc.n_items(), product.cost_ns(&desc));
    let call = Call::new(calls::gm_gemm_f32(&desc), ptrs, items, ns);
    Ok(product.finish(cx, id, call))
}

struct Product {
    /// Of the result.
    shape: Vec<usize>,
    sides: Sides,
    chain: Chain,
}

/// The operands, in `f32` or in words of bytes.
struct Sides {
    left: Strided,
    read_left: Ptr,
    /// Depth of the product, in elements or words.
    k: usize,
    right: Packed,
    integers: Option<BytesProduct>,
}

/// The loops around a product. Rows share one right-hand side.
struct Loops {
    row: Axis,
    batch: Vec<Axis>,
}

impl Product {
    fn find(cx: &Context, node: &Node) -> Result<Product, Rejected> {
        let shape = cx.body.shape(node.outputs[0]).to_vec();
        if shape.contains(&0) {
            return Err(Rejected::Empty);
        }
        let sides = sides(cx, node, shape[shape.len() - 1])?;
        let chain = Chain::of(cx, node, &|_| true).quantized(cx);
        Ok(Product {
            shape,
            sides,
            chain,
        })
    }

    fn n_columns(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    fn n_rows(&self) -> usize {
        let rows = &self.shape[..self.shape.len() - 1];
        rows.iter().product()
    }

    /// The loops over rows and matrices, joined where all tensors allow it.
    fn loops(&self, cx: &Context, node: &Node) -> Result<Loops, Rejected> {
        let n_axes = self.shape.len() - 1;
        let batch = &self.shape[..n_axes - 1];
        let left = self.left_strides(batch);
        let rhs_shape = cx.body.shape(node.inputs[1]);
        let rhs_batch = &rhs_shape[..rhs_shape.len() - 2];
        let mut right = broadcast_strides(rhs_batch, &self.sides.right.strides, batch);
        right.push(0);
        let result = row_major(&self.shape);
        let mut strides: Vec<&[i64]> = vec![&left, &right, &result[..n_axes]];
        let operands = self.chain.tensors();
        strides.extend(operands.iter().map(|t| &t.strides[..n_axes]));
        split_rows(collapse(&self.shape[..n_axes], &strides), strides.len())
    }

    /// Strides of the left-hand side over the matrices and rows of the result.
    fn left_strides(&self, batch: &[usize]) -> Vec<i64> {
        let left = &self.sides.left;
        let n = left.shape.len() - 2;
        let mut strides = broadcast_strides(&left.shape[..n], &left.strides[..n], batch);
        strides.push(left.strides[n]);
        strides
    }

    fn descriptor(&self, cx: &Context, loops: &Loops) -> GemmDesc {
        let row = &loops.row;
        let mut desc = GemmDesc::new(cx.isa, row.extent, self.n_columns(), self.sides.k);
        desc.lda = row.strides[LEFT] as usize;
        desc.ldc = row.strides[RESULT] as usize;
        desc.quantize = self.chain.quantize;
        let first = MAX_BATCH - loops.batch.len();
        for (dim, axis) in desc.batch[first..].iter_mut().zip(&loops.batch) {
            *dim = BatchDim {
                extent: axis.extent,
                a_stride: axis.strides[LEFT] as isize,
                b_stride: axis.strides[RIGHT] as isize,
                c_stride: axis.strides[RESULT] as isize,
            };
        }
        desc
    }

    fn cost_ns(&self, desc: &GemmDesc) -> f64 {
        let n_elements = self.n_rows() * self.n_columns();
        contraction_ns(desc.work(), n_elements, &self.chain)
    }

    fn finish(self, cx: &Context, id: NodeId, call: Call) -> Task {
        let before = self.sides.integers.map_or(vec![], |b| b.nodes);
        let (mut calls, mut temps) = (vec![call], vec![]);
        if let Some((pack, bytes)) = self.sides.right.at_run_time {
            calls.insert(0, pack);
            temps.push(bytes);
        }
        self.chain.into_task(cx, before, id, calls, temps)
    }
}

fn sides(cx: &Context, node: &Node, n: usize) -> Result<Sides, Rejected> {
    if let Some(b) = BytesProduct::find(cx, node)? {
        return byte_sides(cx, node, b);
    }
    let has_unit_columns =
        |v: &Strided| v.strides.last() == Some(&1) && v.strides.iter().all(|&s| s >= 0);
    let left = cx.view(node.inputs[0], has_unit_columns);
    let k = left.shape[left.shape.len() - 1];
    if k == 0 {
        return Err(Rejected::Empty);
    }
    Ok(Sides {
        read_left: read(&left),
        k,
        right: pack_rhs(cx, node, k, n)?,
        left,
        integers: None,
    })
}

/// Words of bytes by one packed matrix.
fn byte_sides(cx: &Context, node: &Node, b: BytesProduct) -> Result<Sides, Rejected> {
    let shape = cx.body.shape(node.inputs[1]);
    let batch = &shape[..shape.len() - 2];
    if batch.iter().any(|&extent| extent != 1) {
        return Err(Rejected::Strides(1));
    }
    let right = Packed {
        ptr: b.right.clone(),
        strides: vec![0; batch.len()],
        at_run_time: None,
    };
    Ok(Sides {
        left: b.left.clone(),
        read_left: b.read_left(),
        k: b.n_words,
        right,
        integers: Some(b),
    })
}

/// The innermost loop becomes the kernel's rows if all of its rows read one right-hand side.
fn split_rows(mut axes: Vec<Axis>, n_tensors: usize) -> Result<Loops, Rejected> {
    let shares_right = axes.last().is_some_and(|last| last.strides[RIGHT] == 0);
    let one_row = Axis {
        extent: 1,
        strides: vec![0; n_tensors],
    };
    let row = axes.pop_if(|_| shares_right).unwrap_or(one_row);
    if axes.len() > MAX_BATCH {
        return Err(Rejected::Loops);
    }
    Ok(Loops { row, batch: axes })
}

fn batch_array(batch: &[Axis], tensor: usize) -> [isize; MAX_BATCH] {
    let mut strides = [0; MAX_BATCH];
    let first = MAX_BATCH - batch.len();
    for (stride, axis) in strides[first..].iter_mut().zip(batch) {
        *stride = axis.strides[tensor] as isize;
    }
    strides
}

fn broadcast_strides(from: &[usize], strides: &[i64], to: &[usize]) -> Vec<i64> {
    let mut out = vec![0; to.len()];
    let lead = to.len() - from.len();
    for i in 0..from.len() {
        out[lead + i] = if from[i] == 1 { 0 } else { strides[i] };
    }
    out
}
