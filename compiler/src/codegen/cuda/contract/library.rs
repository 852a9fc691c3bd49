//! Products that a library of the device may compute instead of a kernel of ours: one matrix
//! product of whole buffers, in row or column order, with an optional bias and relu.

use super::operand::{narrowed, strided};
use crate::codegen::body::Body;
use crate::codegen::placed::Placed;
use crate::codegen::plan::{Arg, KernelPlan, PlanStep};
use crate::codegen::strided::{Strided, collapse};
use crate::error::{Error, Result};
use crate::ir::{Node, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;
use gristmill_runtime::product::{Compute, Matrix, Order, Product};
use gristmill_runtime::tensor::ALIGN_BYTES;

/// A cluster that is a product of a library, and the values that it reads.
pub(in crate::codegen::cuda) struct Library {
    body: Body,
    product: Product,
    reads: Vec<ValueId>,
}

impl Library {
    /// The product that the cluster `node` is, if a library can be asked for it; `tf32` as in [`crate::codegen::cuda::Options`].
    pub(in crate::codegen::cuda) fn find(node: &Node, tf32: bool) -> Result<Option<Library>> {
        let region = node
            .regions
            .first()
            .ok_or_else(|| Error::internal("a cluster has no body"))?;
        let products = region.nodes().filter(|(_, n)| matches!(n.op, Op::MatMul));
        if products.count() != 1 {
            return Ok(None);
        }
        // Composite ops stay: none of them is part of a library's product.
        let body = Body::new(node, &|_, _| true)?;
        let found = find(&body, tf32);
        Ok(found.map(|(product, reads)| Library {
            body,
            product,
            reads,
        }))
    }

    /// The product to request from the library, without name and workspace.
    pub(in crate::codegen::cuda) fn product(&self) -> &Product {
        &self.product
    }

    /// The cluster's plan, whose only step is kernel number `kernel`, and the product with a name and so much workspace.
    pub(in crate::codegen::cuda) fn plan(
        self,
        name: String,
        kernel: usize,
        workspace_bytes: usize,
    ) -> Result<(Product, KernelPlan)> {
        let product = Product {
            name,
            workspace_bytes,
            ..self.product
        };
        let mut placed = Placed::new(&self.body)?;
        let found = self.reads.iter().map(|v| placed.location.get(v).copied());
        let args: Option<Vec<Arg>> = found.collect();
        let mut args =
            args.ok_or_else(|| Error::internal("an operand of a library has no buffer"))?;
        let n_reads = args.len();
        args.push(placed.destination(&self.body, self.body.graph.outputs[0].value));
        if workspace_bytes > 0 {
            placed.plan.scratch.push(product.workspace_buffer_bytes());
            args.push(Arg::Scratch(placed.plan.scratch.len() as u32 - 1));
        }
        placed.plan.steps.push(PlanStep {
            kernel,
            n_outputs: (args.len() - n_reads) as u32,
            args,
            items: 1,
            grain: 0,
        });
        Ok((product, placed.plan))
    }
}

/// True if a value has a buffer before the product is computed.
fn in_memory(body: &Body, v: ValueId) -> bool {
    match body.graph.def_node(v) {
        None => true,
        // Constants of one element are literals in the code.
        Some(node) => matches!(&node.op, Op::Constant { value } if value.len() != 1),
    }
}

/// The product that is all of a body, and the values that it reads.
fn find(body: &Body, tf32: bool) -> Option<(Product, Vec<ValueId>)> {
    let [output] = &body.graph.outputs[..] else {
        return None;
    };
    let epilogue = Epilogue::find(body, output.value)?;
    let (product, mut reads) = dense(body, &epilogue, output.value, tf32)?;
    let mut product = folded(product);
    if let Some(bias) = &epilogue.bias {
        let offset = vector(bias, product.n)?;
        let align_bytes = alignment(body, bias.base, offset);
        product.bias = Some(offset);
        product.out.align_bytes = product.out.align_bytes.min(align_bytes);
        reads.push(bias.base);
    }
    let size = |&v: &ValueId| {
        let dtype = body.dtype(v);
        (dtype, body.n_elements(v) * dtype.size_bytes())
    };
    let args: Vec<_> = reads.iter().chain([&output.value]).map(size).collect();
    product.problem(&args).is_none().then_some((product, reads))
}

/// The product before `epilogue`, stored as `output`, and its operands. The bias is left out.
fn dense(
    body: &Body,
    epilogue: &Epilogue,
    output: ValueId,
    tf32: bool,
) -> Option<(Product, Vec<ValueId>)> {
    let node = body.graph.def_node(epilogue.product)?;
    let Op::MatMul = node.op else { return None };
    let (batch, &[m, n]) = body.shape(epilogue.product).split_last_chunk::<2>()?;
    let (lhs, of_lhs) = operand(body, node.inputs[0], batch)?;
    let (rhs, of_rhs) = operand(body, node.inputs[1], batch)?;
    let out = Matrix {
        align_bytes: alignment(body, output, 0),
        batch_stride: m * n,
        ..Matrix::dense(body.dtype(output), n)
    };
    let product = Product {
        name: String::new(),
        m,
        n,
        k: *body.shape(node.inputs[0]).last()?,
        n_batch: batch.iter().product(),
        lhs,
        rhs,
        out,
        compute: compute(lhs.dtype, tf32)?,
        bias: None,
        relu: epilogue.relu,
        workspace_bytes: 0,
    };
    Some((product, vec![of_lhs, of_rhs]))
}

/// Dtype in which elements are multiplied and accumulated.
fn compute(dtype: DType, tf32: bool) -> Option<Compute> {
    match dtype {
        DType::F32 if tf32 => Some(Compute::Tf32),
        DType::F32 | DType::F16 | DType::BF16 => Some(Compute::F32),
        DType::F64 => Some(Compute::F64),
        DType::I8 => Some(Compute::I32),
        _ => None,
    }
}

/// Several products by one right-hand side are one product of all their rows, where these follow each other.
fn folded(p: Product) -> Product {
    let follows = p.lhs.order == Order::Row && p.lhs.batch_stride == p.m * p.lhs.pitch;
    let is_foldable = p.rhs.batch_stride == 0 && follows;
    if p.n_batch != 1 && !(p.n_batch > 1 && is_foldable) {
        return p;
    }
    let single = |matrix: Matrix| Matrix {
        batch_stride: 0,
        ..matrix
    };
    Product {
        m: p.m * p.n_batch,
        n_batch: 1,
        lhs: single(p.lhs),
        rhs: single(p.rhs),
        out: single(p.out),
        ..p
    }
}

/// Epilogue of a product, from the result back to the product.
struct Epilogue {
    product: ValueId,
    bias: Option<Strided>,
    relu: bool,
}

impl Epilogue {
    /// Undoes a relu, a bias and a rounding to a half type, in this order, each if it is there.
    fn find(body: &Body, result: ValueId) -> Option<Epilogue> {
        let mut product = unshaped(body, result);
        let relu = map(body, product).filter(|(op, _)| *op == ScalarOp::Relu);
        if let Some((_, node)) = relu {
            product = unshaped(body, node.inputs[0]);
        }
        let mut bias = None;
        if let Some((ScalarOp::Add, node)) = map(body, product) {
            let (x, view) = biased(body, node)?;
            bias = Some(view);
            product = unshaped(body, x);
        }
        if let Some((ScalarOp::Cast(DType::F16 | DType::BF16), node)) = map(body, product) {
            product = unshaped(body, node.inputs[0]);
        }
        Some(Epilogue {
            product,
            bias,
            relu: relu.is_some(),
        })
    }
}

/// The element-wise op that computes a value.
fn map(body: &Body, v: ValueId) -> Option<(ScalarOp, &Node)> {
    let node = body.graph.def_node(v)?;
    match node.op {
        Op::Map(op) => Some((op, node)),
        _ => None,
    }
}

/// The operand of a sum that has all of its elements, and the other one, broadcast to them.
fn biased(body: &Body, sum: &Node) -> Option<(ValueId, Strided)> {
    let shape = body.shape(sum.outputs[0]);
    let view = |v: ValueId| Strided::resolve(body, v, &|v| in_memory(body, v));
    let (x, bias) = [(0, 1), (1, 0)]
        .map(|(i, j)| (sum.inputs[i], view(sum.inputs[j])))
        .into_iter()
        .find(|(x, bias)| body.shape(*x) == shape && in_memory(body, bias.base))?;
    Some((x, bias.broadcast(shape)?))
}

/// The value that `v` is a reshape of.
fn unshaped(body: &Body, mut v: ValueId) -> ValueId {
    let is_reshape = |n: &&Node| matches!(n.op, Op::Reshape { .. });
    while let Some(node) = body.graph.def_node(v).filter(is_reshape) {
        v = node.inputs[0];
    }
    v
}

/// Where a vector of `n` elements begins that is repeated along all but the last axes.
fn vector(view: &Strided, n: usize) -> Option<usize> {
    match &collapse(&view.shape, &[&view.strides])[..] {
        // A single column: every row has the same element.
        [] if n == 1 => {}
        [axis] if axis.strides == [0] && n == 1 => {}
        [axis] if axis.strides == [1] && axis.extent == n => {}
        [rows, axis] if rows.strides == [0] && axis.strides == [1] && axis.extent == n => {}
        _ => return None,
    }
    usize::try_from(view.offset).ok()
}

/// An operand of products over `batch`, and the value in whose buffer it is.
fn operand(body: &Body, v: ValueId, batch: &[usize]) -> Option<(Matrix, ValueId)> {
    let stored = |v: ValueId| in_memory(body, v);
    let dtype = narrowed(body, &stored, v).map_or(body.dtype(v), |narrow| narrow.0);
    let sides = body.shape(v).last_chunk::<2>()?;
    let view = strided(body, &stored, v, dtype)?.broadcast(&[batch, sides].concat())?;
    let (outer, &strides) = view.strides.split_last_chunk::<2>()?;
    let batch_stride = match &collapse(batch, &[outer])[..] {
        [] => 0,
        [axis] => usize::try_from(axis.strides[0]).ok()?,
        _ => return None,
    };
    let (order, pitch) = order(*sides, strides)?;
    let offset = usize::try_from(view.offset).ok()?;
    let matrix = Matrix {
        dtype,
        order,
        pitch,
        batch_stride,
        offset,
        align_bytes: alignment(body, view.base, offset),
    };
    Some((matrix, view.base))
}

/// Order of a matrix in memory, and the pitch of its rows or columns.
fn order([rows, columns]: [usize; 2], [by_row, by_column]: [i64; 2]) -> Option<(Order, usize)> {
    let row_pitch = || pitch(rows, by_row, columns);
    let column_pitch = || pitch(columns, by_column, rows);
    let is_inner = |stride: i64, extent: usize| stride == 1 || extent == 1;
    let in_rows = is_inner(by_column, columns).then(row_pitch).flatten();
    let in_columns = || is_inner(by_row, rows).then(column_pitch).flatten();
    let rows = in_rows.map(|pitch| (Order::Row, pitch));
    rows.or_else(|| Some((Order::Column, in_columns()?)))
}

/// Pitch of lines of such a length, of which the next begins after `stride`; `None` when they overlap.
fn pitch(n_lines: usize, stride: i64, length: usize) -> Option<usize> {
    if n_lines == 1 {
        return Some(length);
    }
    usize::try_from(stride).ok().filter(|&s| s >= length)
}

/// Largest power of two that divides the address of element `offset` of a value's buffer, wherever
/// a loop places the buffer.
fn alignment(body: &Body, v: ValueId, offset: usize) -> usize {
    let size = body.dtype(v).size_bytes();
    let multiples = [offset * size, body.n_elements(v) * size];
    multiples
        .iter()
        .filter(|m| **m > 0)
        .fold(ALIGN_BYTES, |align, m| {
            align.min(1 << m.trailing_zeros().min(30))
        })
}
