//! Constant operands of the precompiled kernels: packed or copied once while compiling, straight from the views that folding keeps.

use super::rejected::Rejected;
use super::strided::{Axis, Strided, collapse, row_major};
use super::task::Context;
use crate::cluster::bytes::fits_bytes;
use crate::codegen::plan::{PackedConstant, WeightPart};
use crate::error::{Error, Result};
use crate::ir::constant::Viewed;
use crate::ir::{ConstData, ValueId};
use gristmill_kernels::Isa;
use gristmill_kernels::copy::{CopyDesc, gm_copy};
use gristmill_kernels::depthwise::is_exact_in_f32;
use gristmill_kernels::gemm::integer::{WORD, pack_bytes, packed_words};
use gristmill_kernels::pack::{PackBDesc, gm_pack_b_f32};
use gristmill_kernels::winograd::{
    FilterStrides, WinogradDesc, pack_winograd, packed_winograd_len,
};
use gristmill_runtime::{DType, Tensor};

/// A constant as a kernel's operand: the view's strides are those of `data`, and its base has no meaning.
pub(super) struct Source {
    pub(super) data: ConstData,
    /// Index into the inputs of the cluster; `None` for a constant of its body.
    operand: Option<usize>,
    pub(super) view: Strided,
}

impl Context<'_> {
    /// The constant that `v` is, and the operand of the cluster if it is outside.
    fn constant(&self, v: ValueId) -> Option<(&ConstData, Option<usize>)> {
        if let Some(c) = self.body.graph.constant(v) {
            return Some((c, None));
        }
        let i = self.body.graph.inputs.iter().position(|&x| x == v)?;
        let constant = self.outer.constant(self.cluster.inputs[i])?;
        Some((constant, Some(i)))
    }

    /// The constant under a view, and the view as one of it. Transposes and reshapes that folding kept as views are followed, so that
    /// none is executed.
    pub(super) fn source(&self, view: &Strided, dtype: DType) -> Option<Source> {
        let (data, operand) = self.constant(view.base)?;
        let mut data = Some(data).filter(|c| c.dtype() == dtype)?.clone();
        let mut view = view.clone();
        loop {
            data = match data.viewed() {
                Viewed::Reshaped(x) | Viewed::Widened(x) => x.clone(),
                Viewed::Transposed(x, perm) => {
                    match through_transpose(&view, data.shape(), x.shape(), perm) {
                        Some(through) => {
                            view = through;
                            x.clone()
                        }
                        None => break,
                    }
                }
                Viewed::Plain => break,
            };
        }
        Some(Source {
            data,
            operand,
            view,
        })
    }

    /// The source in a layout, made from its constant's elements later: see [`Packing::laid_out`](crate::codegen::packing::Packing::laid_out).
    fn laid_out(
        &self,
        s: &Source,
        layout: String,
        shape: &[usize],
        make: impl FnOnce(&Tensor) -> Result<Tensor> + Send + 'static,
    ) -> PackedConstant {
        self.laid_out_as(s, layout, (DType::F32, shape), make)
    }

    /// [`Context::laid_out`] with elements of any type.
    fn laid_out_as(
        &self,
        s: &Source,
        layout: String,
        ty: (DType, &[usize]),
        make: impl FnOnce(&Tensor) -> Result<Tensor> + Send + 'static,
    ) -> PackedConstant {
        let origin = &self.cluster.origin;
        let elements = self
            .constants
            .laid_out(&s.data, layout.clone(), ty, origin, make);
        let weight = s.operand.map(|operand| WeightPart { operand, layout });
        PackedConstant { elements, weight }
    }

    /// The view's elements in row-major order.
    pub(super) fn constant_copy(&self, s: &Source) -> Result<PackedConstant, Rejected> {
        let copy = ViewCopy::of(&s.view)?;
        let layout = format!("copy {:?}", s.view);
        Ok(self.laid_out(s, layout, &s.view.shape, move |t| copy.made(t)))
    }

    /// The panels that `desc`, whose strides are those of the source's view, describes.
    pub(super) fn constant_panels(
        &self,
        s: &Source,
        desc: &PackBDesc,
        n_elements: usize,
    ) -> PackedConstant {
        let (start, layout) = (
            s.view.offset as usize,
            format!("{desc:?} from {}", s.view.offset),
        );
        let desc = *desc;
        self.laid_out(s, layout, &[n_elements], move |t| {
            panels(&t.as_slice::<f32>()[start..], &desc, n_elements)
        })
    }

    /// The panels of a matrix of `i32` elements as bytes: its last axis are columns, the others rows.
    ///
    /// Errors when some elements are no bytes.
    pub(super) fn constant_bytes(&self, s: &Source) -> Result<PackedConstant, Rejected> {
        let isa = self.isa;
        let layout = format!("bytes {isa} {:?}", s.view);
        if s.data.dtype() == DType::I8 {
            return self.panels_of_bytes(s, layout);
        }
        let pack = |t: &Tensor| {
            if !fits_bytes(t) {
                return Err(Rejected::Bytes);
            }
            let elements = t.as_slice::<i32>();
            byte_panels(isa, &s.view, |at| elements[at] as i8)
        };
        let store = self.constants.store();
        let tensor = store.laid_out(&s.data, layout.clone(), pack)?;
        let weight = s.operand.map(|operand| WeightPart { operand, layout });
        let elements = tensor.into();
        Ok(PackedConstant { elements, weight })
    }

    /// [`Context::constant_bytes`] of signed bytes, packed later.
    fn panels_of_bytes(&self, s: &Source, layout: String) -> Result<PackedConstant, Rejected> {
        let (isa, view) = (self.isa, s.view.clone());
        let (&columns, rows) = view.shape.split_last().ok_or(Rejected::Bytes)?;
        let n_rows: usize = rows.iter().product();
        if !n_rows.is_multiple_of(WORD) {
            return Err(Rejected::Bytes);
        }
        let ty = (DType::I32, &[packed_words(isa, n_rows, columns)][..]);
        Ok(self.laid_out_as(s, layout, ty, move |t| {
            let elements = t.as_slice::<i8>();
            let panels = byte_panels(isa, &view, |at| elements[at]);
            panels.map_err(|_| Error::internal("the rows of bytes are no whole words"))
        }))
    }

    /// The `i32` elements of filters, whose last axis are channels, as `f32`.
    ///
    /// Errors when sums of their products with bytes may not be exact.
    pub(super) fn constant_floats(&self, s: &Source) -> Result<PackedConstant, Rejected> {
        let layout = format!("floats {:?}", s.view);
        let convert = |t: &Tensor| floats(t, &s.view);
        let store = self.constants.store();
        let tensor = store.laid_out(&s.data, layout.clone(), convert)?;
        let weight = s.operand.map(|operand| WeightPart { operand, layout });
        let elements = tensor.into();
        Ok(PackedConstant { elements, weight })
    }

    /// The filters of a convolution, transformed for minimal filtering.
    pub(super) fn constant_filters(
        &self,
        s: &Source,
        desc: &WinogradDesc,
        strides: FilterStrides,
    ) -> PackedConstant {
        let (isa, tile) = (self.isa, desc.tile);
        let channels = [desc.in_channels, desc.out_channels];
        let start = s.view.offset as usize;
        let layout = format!("filters {isa} {tile} {channels:?} {strides:?} from {start}");
        let n = packed_winograd_len(isa, tile, channels);
        self.laid_out(s, layout, &[n], move |t| {
            let mut packed = Tensor::zeros(DType::F32, &[n])?;
            let filters = &t.as_slice::<f32>()[start..];
            pack_winograd(isa, tile, channels, filters, strides, packed.as_mut_slice());
            Ok(packed)
        })
    }

    /// The panels of a row-major copy of the view, for views beyond any descriptor of panels.
    pub(super) fn panels_of_copy(
        &self,
        s: &Source,
        desc: &PackBDesc,
        n_elements: usize,
    ) -> Result<PackedConstant, Rejected> {
        let (copy, layout) = (ViewCopy::of(&s.view)?, format!("{desc:?} of {:?}", s.view));
        let desc = *desc;
        Ok(self.laid_out(s, layout, &[n_elements], move |t| {
            panels(copy.made(t)?.as_slice::<f32>(), &desc, n_elements)
        }))
    }
}

/// `view`, which is one of a tensor of shape `to`, as one of the tensor of shape `from` whose axis `perm[i]` is axis `i` of the former.
/// `None` when an axis of the view runs over several axes.
fn through_transpose(
    view: &Strided,
    to: &[usize],
    from: &[usize],
    perm: &[usize],
) -> Option<Strided> {
    let (to_strides, from_strides) = (row_major(to), row_major(from));
    // The largest index that the view reaches along each axis.
    let mut reach: Vec<i64> = (0..to.len())
        .map(|axis| view.offset / to_strides[axis] % to[axis] as i64)
        .collect();
    let offset = reach
        .iter()
        .zip(perm)
        .map(|(at, &p)| at * from_strides[p])
        .sum();
    let mut strides = Vec::with_capacity(view.shape.len());
    for (&extent, &stride) in view.shape.iter().zip(&view.strides) {
        if extent == 1 || stride == 0 {
            strides.push(0);
            continue;
        }
        // The outermost axis on which it is a step: on those inside, it would be a step beyond the end.
        let axis = (0..to.len()).find(|&a| to[a] > 1 && stride >= to_strides[a])?;
        let step = stride / to_strides[axis];
        reach[axis] += (extent as i64 - 1) * step;
        if stride % to_strides[axis] != 0 || reach[axis] >= to[axis] as i64 {
            return None;
        }
        strides.push(step * from_strides[perm[axis]]);
    }
    Some(Strided {
        base: view.base,
        offset,
        shape: view.shape.clone(),
        strides,
    })
}

/// The elements of a view in row-major order.
struct ViewCopy {
    desc: CopyDesc,
    shape: Vec<usize>,
    offset_bytes: isize,
}

impl ViewCopy {
    /// Rejected when the kernel cannot step through the view.
    fn of(view: &Strided) -> Result<ViewCopy, Rejected> {
        let axes = collapse(&view.shape, &[&view.strides, &row_major(&view.shape)]);
        let dims: Vec<_> = axes.iter().map(Axis::copied).collect();
        Ok(ViewCopy {
            desc: CopyDesc::new(Isa::current(), 4, &dims).ok_or(Rejected::Strides(1))?,
            shape: view.shape.clone(),
            offset_bytes: view.offset as isize * 4,
        })
    }

    fn made(&self, t: &Tensor) -> Result<Tensor> {
        let mut out = Tensor::zeros(DType::F32, &self.shape)?;
        let from = t.as_ptr().wrapping_offset(self.offset_bytes);
        let ptrs = [
            from.cast_mut(),
            std::ptr::null_mut(),
            out.as_mut_ptr(),
            std::ptr::null_mut(),
        ];
        // SAFETY: the view lies within its constant, which the verifier checked; the output has the view's shape.
        let status = unsafe { gm_copy(&self.desc, ptrs.as_ptr(), 0, self.desc.n_items()) };
        checked("gm_copy", status)?;
        Ok(out)
    }
}

/// Errors are internal: descriptors are made for this machine.
fn checked(kernel: &str, status: u32) -> Result<()> {
    if status == gristmill_kernels::OK {
        return Ok(());
    }
    let message = format!("{kernel} gave status {status} for a constant");
    Err(Error::internal(message))
}

/// Panels of the bytes `element(position)`.
fn byte_panels(
    isa: Isa,
    view: &Strided,
    element: impl Fn(usize) -> i8,
) -> Result<Tensor, Rejected> {
    let last = view.shape.len() - 1;
    let (n, step) = (view.shape[last], view.strides[last]);
    let rows = row_offsets(view);
    let element = &element;
    let words = |i: usize| {
        let starts = rows
            .get(i..i + WORD)
            .map_or([0; WORD], |r| std::array::from_fn(|w| r[w]));
        move |j: usize| starts.map(|at| element((at + j as i64 * step) as usize))
    };
    let packed = pack_bytes(isa, rows.len(), n, words).ok_or(Rejected::Bytes)?;
    Ok(Tensor::from_slice(&packed, &[packed.len()])?)
}

fn floats(t: &Tensor, view: &Strided) -> Result<Tensor, Rejected> {
    let rows = row_offsets(view);
    let element = |at: usize| match t.dtype() {
        DType::I8 => i32::from(t.as_slice::<i8>()[at]),
        _ => t.as_slice::<i32>()[at],
    };
    let element = &element;
    let last = view.shape.len() - 1;
    let (n, step) = (view.shape[last] as i64, view.strides[last]);
    let row = |&at: &i64| (0..n).map(move |j| element((at + j * step) as usize));
    let whole: Vec<i32> = rows.iter().flat_map(row).collect();
    if !is_exact_in_f32(&whole, rows.len()) {
        return Err(Rejected::Bytes);
    }
    let floats: Vec<f32> = whole.iter().map(|&w| w as f32).collect();
    Ok(Tensor::from_slice(&floats, &view.shape)?)
}

/// Positions of the first elements of all rows, in order.
fn row_offsets(view: &Strided) -> Vec<i64> {
    let last = view.shape.len() - 1;
    let mut offsets = vec![view.offset];
    for (&extent, &stride) in view.shape[..last].iter().zip(&view.strides) {
        let along = |&at: &i64| (0..extent as i64).map(move |i| at + i * stride);
        offsets = offsets.iter().flat_map(along).collect();
    }
    offsets
}

/// Packs the elements that `desc` describes of `from`, which must cover them, by a call of the kernel that packs at run time.
fn panels(from: &[f32], desc: &PackBDesc, n_elements: usize) -> Result<Tensor> {
    let mut out = Tensor::zeros(DType::F32, &[n_elements])?;
    let ptrs = [
        from.as_ptr().cast::<u8>().cast_mut(),
        std::ptr::null_mut(),
        out.as_mut_ptr(),
        std::ptr::null_mut(),
    ];
    // SAFETY: `from` covers the matrices, as views lie within their constants; the output has room for all panels.
    let status = unsafe { gm_pack_b_f32(desc, ptrs.as_ptr(), 0, desc.n_items()) };
    checked("gm_pack_b_f32", status)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(view: &Strided) -> Vec<i64> {
        let n: usize = view.shape.iter().product();
        let mut out = Vec::new();
        for i in 0..n {
            let (mut rest, mut at) = (i, view.offset);
            for (&extent, &stride) in view.shape.iter().zip(&view.strides).rev() {
                at += (rest % extent) as i64 * stride;
                rest /= extent;
            }
            out.push(at);
        }
        out
    }

    /// Positions in the transposed tensor, mapped to those in the one it was made from.
    fn expected(view: &Strided, to: &[usize], from: &[usize], perm: &[usize]) -> Vec<i64> {
        let (to_strides, from_strides) = (row_major(to), row_major(from));
        let position = |&p: &i64| -> i64 {
            (0..to.len())
                .map(|a| p / to_strides[a] % to[a] as i64 * from_strides[perm[a]])
                .sum()
        };
        elements(view).iter().map(position).collect()
    }

    #[test]
    fn views_pass_through_transposes() {
        let (from, perm) = ([5, 4, 3, 2], [2, 3, 1, 0]);
        let to: Vec<usize> = perm.iter().map(|&p| from[p]).collect();
        assert_eq!(to, [3, 2, 4, 5]);
        let view = |offset, shape: &[usize], strides: &[i64]| Strided {
            base: ValueId::new(0),
            offset,
            shape: shape.into(),
            strides: strides.into(),
        };
        let whole = view(0, &to, &row_major(&to));
        let slice = view(20 + 5 + 2, &[2, 1, 3, 1, 2], &[40, 0, 5, 7, 2]);
        for v in [whole, slice] {
            let through = through_transpose(&v, &to, &from, &perm).unwrap();
            assert_eq!(elements(&through), expected(&v, &to, &from, &perm));
        }
        for several_axes in [
            view(0, &[8, 5], &[5, 1]),
            view(3, &[3], &[1]),
            view(0, &[3, 3], &[1, 2]),
        ] {
            assert_eq!(through_transpose(&several_axes, &to, &from, &perm), None);
        }
    }
}
