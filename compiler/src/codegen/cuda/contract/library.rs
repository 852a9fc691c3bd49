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
        if region
            .nodes()
            .filter(|(_, n)| matches!(n.op, Op::MatMul))
            .count()
            != 1
        {
            return Ok(None);
        }
        // Composite ops stay: none of them is part of a library's product.
        let body = Body::new(node, &|_, _| true)?;
        let Some((product, reads)) = find(&body, tf32) else {
            return Ok(None);
        };
        Ok(Some(Library {
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
        let mut args: Vec<Arg> = found
            .collect::<Option<_>>()
            .ok_or_else(|| Error::internal("an operand of a library has no buffer"))?;
        let n_reads = args.len();
        args.push(placed.destination(&self.body, self.body.graph.outputs[0].value));
        if workspace_bytes > 0 {
            placed.plan.scratch.push(product.workspace_buffer_bytes());
            args.push(Arg::Scratch(placed.plan.scratch.len() as u32 - 1));
        }
        let n_outputs = (args.len() - n_reads) as u32;
        placed.plan.steps.push(PlanStep {
            kernel,
            args,
            n_outputs,
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
    let after = After::find(body, output.value)?;
    let node = body
        .graph
        .def_node(after.product)
        .filter(|n| matches!(n.op, Op::MatMul))?;
    let shape = body.shape(after.product);
    let (batch, &[m, n]) = shape.split_last_chunk::<2>()?;
    let k = *body.shape(node.inputs[0]).last()?;
    let [(lhs, of_lhs), (rhs, of_rhs)] = [
        operand(body, node.inputs[0], batch)?,
        operand(body, node.inputs[1], batch)?,
    ];
    let out = Matrix {
        align_bytes: alignment(body, output.value, 0),
        ..Matrix::dense(body.dtype(output.value), n)
    };
    let product = Product {
        name: String::new(),
        m,
        n,
        k,
        n_batch: batch.iter().product(),
        lhs,
        rhs,
        out: Matrix {
            batch_stride: m * n,
            ..out
        },
        compute: compute(lhs.dtype, tf32)?,
        bias: None,
        relu: after.relu,
        workspace_bytes: 0,
    };
    let mut product = folded(product);
    let mut reads = vec![of_lhs, of_rhs];
    if let Some(bias) = &after.bias {
        product.bias = Some(vector(bias, n)?);
        product.out.align_bytes =
            product
                .out
                .align_bytes
                .min(alignment(body, bias.base, product.bias?));
        reads.push(bias.base);
    }
    let size = |v: &ValueId| {
        (
            body.dtype(*v),
            body.n_elements(*v) * body.dtype(*v).size_bytes(),
        )
    };
    let args: Vec<_> = reads.iter().chain([&output.value]).map(size).collect();
    product.problem(&args).is_none().then_some((product, reads))
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
    let apart = |matrix: Matrix| Matrix {
        batch_stride: 0,
        ..matrix
    };
    let follows = p.lhs.order == Order::Row && p.lhs.batch_stride == p.m * p.lhs.pitch;
    let p = match p.n_batch > 1 && p.rhs.batch_stride == 0 && follows {
        true => Product {
            m: p.m * p.n_batch,
            n_batch: 1,
            ..p
        },
        false => p,
    };
    match p.n_batch {
        1 => Product {
            lhs: apart(p.lhs),
            rhs: apart(p.rhs),
            out: apart(p.out),
            ..p
        },
        _ => p,
    }
}

/// Epilogue of a product, from the result back to the product.
struct After {
    product: ValueId,
    bias: Option<Strided>,
    relu: bool,
}

impl After {
    /// Undoes a relu, a bias and a rounding to a half type, in this order, each if it is there.
    fn find(body: &Body, result: ValueId) -> Option<After> {
        let map = |v: ValueId| {
            body.graph.def_node(v).and_then(|n| {
                if let Op::Map(op) = n.op {
                    Some((op, n))
                } else {
                    None
                }
            })
        };
        let mut v = unshaped(body, result);
        let mut after = After {
            product: v,
            bias: None,
            relu: false,
        };
        if let Some((ScalarOp::Relu, node)) = map(v) {
            after.relu = true;
            v = unshaped(body, node.inputs[0]);
        }
        if let Some((ScalarOp::Add, node)) = map(v) {
            let view = |b: ValueId| Strided::resolve(body, b, &|v| in_memory(body, v));
            let same = |x: ValueId| body.shape(x) == body.shape(v);
            let (x, b) = (0..2)
                .map(|i| (node.inputs[i], view(node.inputs[1 - i])))
                .find(|(x, b)| same(*x) && in_memory(body, b.base))?;
            after.bias = Some(b.broadcast(body.shape(v))?);
            v = unshaped(body, x);
        }
        if let Some((ScalarOp::Cast(DType::F16 | DType::BF16), node)) = map(v) {
            v = unshaped(body, node.inputs[0]);
        }
        after.product = v;
        Some(after)
    }
}

/// The value that `v` is a reshape of.
fn unshaped(body: &Body, mut v: ValueId) -> ValueId {
    while let Some(node) = body
        .graph
        .def_node(v)
        .filter(|n| matches!(n.op, Op::Reshape { .. }))
    {
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
    let (outer, &[by_row, by_column]) = view.strides.split_last_chunk::<2>()?;
    let batch_stride = match &collapse(batch, &[outer])[..] {
        [] => 0,
        [axis] => usize::try_from(axis.strides[0]).ok()?,
        _ => return None,
    };
    let (order, pitch) = lines(*sides, [by_row, by_column])?;
    let offset = usize::try_from(view.offset).ok()?;
    let align_bytes = alignment(body, view.base, offset);
    Some((
        Matrix {
            dtype,
            order,
            pitch,
            batch_stride,
            offset,
            align_bytes,
        },
        view.base,
    ))
}

/// Order of a matrix in memory, and the pitch of its rows or columns.
fn lines([rows, columns]: [usize; 2], [by_row, by_column]: [i64; 2]) -> Option<(Order, usize)> {
    let pitch = |n_lines: usize, stride: i64, length: usize| {
        if n_lines == 1 {
            Some(length)
        } else {
            usize::try_from(stride).ok().filter(|&s| s >= length)
        }
    };
    let in_rows = (by_column == 1 || columns == 1)
        .then(|| pitch(rows, by_row, columns))
        .flatten();
    let in_columns = || {
        (by_row == 1 || rows == 1)
            .then(|| pitch(columns, by_column, rows))
            .flatten()
    };
    in_rows
        .map(|p| (Order::Row, p))
        .or_else(|| in_columns().map(|p| (Order::Column, p)))
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
