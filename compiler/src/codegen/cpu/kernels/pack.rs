//! Packed right-hand sides: constants while compiling, other values by a call before the product.

use super::rejected::Rejected;
use super::strided::{Strided, collapse, row_major};
use super::task::{Call, Context, Place, Ptr, pointers, read};
use super::weights::Source;
use crate::codegen::plan::PackedConstant;
use crate::ir::Node;
use gristmill_kernels::calls;
use gristmill_kernels::epilogue::MAX_BATCH;
use gristmill_kernels::pack::{PackBDesc, PackBatchDim, packed_len};
use gristmill_runtime::DType;

/// The packed right-hand side of a contraction.
pub(super) struct Packed {
    /// Address of the panels.
    pub(super) ptr: Ptr,
    /// Elements between the panels of neighbouring matrices, per batch axis of the right-hand side.
    pub(super) strides: Vec<i64>,
    /// The call that packs at run time, and the bytes that it writes.
    pub(super) at_run_time: Option<(Call, usize)>,
}

impl Packed {
    fn constant(panels: PackedConstant, strides: Vec<i64>) -> Packed {
        Packed {
            ptr: Ptr::Read(Place::Packed(panels), 0),
            strides,
            at_run_time: None,
        }
    }

    /// Packs the elements of `view` into the task's first intermediate buffer.
    fn at_run_time(
        view: &Strided,
        desc: &PackBDesc,
        n_elements: usize,
        strides: Vec<i64>,
    ) -> Packed {
        let out = Ptr::Write(Place::Temp(0), 0);
        let ptrs = pointers(read(view), Ptr::Null, out, false, vec![]);
        let ns = view.shape.iter().product::<usize>() as f64 / 4.0;
        let call = Call::new(calls::gm_pack_b_f32(desc), ptrs, desc.n_items(), ns);
        Packed {
            ptr: Ptr::Read(Place::Temp(0), 0),
            strides,
            at_run_time: Some((call, n_elements * size_of::<f32>())),
        }
    }
}

/// The right-hand side `[.., k, n]` of a matrix product.
pub(super) fn pack_rhs(cx: &Context, node: &Node, k: usize, n: usize) -> Result<Packed, Rejected> {
    let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
    let source = cx.source(&resolved, DType::F32);
    let rhs = source.as_ref().map_or(&resolved, |s| &s.view);
    let batch = &rhs.shape[..rhs.shape.len() - 2];
    let per_matrix = packed_len(cx.isa, k, n);
    let per_axis = row_major(batch).into_iter();
    let strides: Vec<i64> = per_axis.map(|s| s * per_matrix as i64).collect();
    let desc = matrices(cx, rhs, [k, n], &strides)?;
    let n_elements = batch.iter().product::<usize>() * per_matrix;
    match &source {
        Some(s) => Ok(Packed::constant(
            cx.constant_panels(s, &desc, n_elements),
            strides,
        )),
        None => Ok(Packed::at_run_time(rhs, &desc, n_elements, strides)),
    }
}

/// Describes the packing of all matrices of a view; `packed` are the strides between their panels.
fn matrices(
    cx: &Context,
    rhs: &Strided,
    [k, n]: [usize; 2],
    packed: &[i64],
) -> Result<PackBDesc, Rejected> {
    let lead = rhs.shape.len() - 2;
    let axes = collapse(&rhs.shape[..lead], &[&rhs.strides[..lead], packed]);
    let first = MAX_BATCH.checked_sub(axes.len()).ok_or(Rejected::Loops)?;
    let (row, column) = (rhs.strides[lead] as isize, rhs.strides[lead + 1] as isize);
    let mut desc = PackBDesc::new(cx.isa, k, n, row, column);
    for (dim, axis) in desc.batch[first..].iter_mut().zip(&axes) {
        *dim = PackBatchDim {
            extent: axis.extent,
            b_stride: axis.strides[0] as isize,
            packed_stride: axis.strides[1] as isize,
        };
    }
    Ok(desc)
}

/// Panels per group of convolution weights `[taps.., in / groups, out]`; a row of a matrix is a tap and a channel.
pub(super) fn pack_conv_weights(
    cx: &Context,
    node: &Node,
    [k, c_out]: [usize; 2],
    groups: usize,
) -> Result<Packed, Rejected> {
    let per_group = c_out / groups;
    let group_len = packed_len(cx.isa, k, per_group);
    let mut desc = PackBDesc::new(cx.isa, k, per_group, c_out as isize, 1);
    desc.batch[MAX_BATCH - 1] = PackBatchDim {
        extent: groups,
        b_stride: per_group as isize,
        packed_stride: group_len as isize,
    };
    let n_elements = groups * group_len;
    let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
    if let Some(source) = cx.source(&resolved, DType::F32) {
        let panels = constant_conv_panels(cx, &source, desc, n_elements)?;
        return Ok(Packed::constant(panels, vec![]));
    }
    let weights = cx.view(node.inputs[1], Strided::is_contiguous);
    Ok(Packed::at_run_time(&weights, &desc, n_elements, vec![]))
}

/// Taps and channels are packed as they lie when rows have one stride, else from a copy.
fn constant_conv_panels(
    cx: &Context,
    source: &Source,
    mut desc: PackBDesc,
    n_elements: usize,
) -> Result<PackedConstant, Rejected> {
    let w = &source.view;
    let last = w.shape.len() - 1;
    let column = w.strides[last];
    let row = match &collapse(&w.shape[..last], &[&w.strides[..last]])[..] {
        [] => 0,
        [axis] => axis.strides[0],
        _ => return cx.panels_of_copy(source, &desc, n_elements),
    };
    (desc.row_stride, desc.col_stride) = (row as isize, column as isize);
    desc.batch[MAX_BATCH - 1].b_stride = (desc.n as i64 * column) as isize;
    Ok(cx.constant_panels(source, &desc, n_elements))
}
