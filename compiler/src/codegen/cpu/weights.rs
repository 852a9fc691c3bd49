//! Constant operands of the precompiled kernels: packed or copied once while compiling, straight from what folding noted down.

use super::strided::{Strided, collapse, row_major};
use super::task::Context;
use crate::cluster::bytes::fits_bytes;
use crate::ir::constant::{Identity, Viewed};
use crate::ir::{ConstData, ValueId};
use gristmill_kernels::Isa;
use gristmill_kernels::copy::{CopyDesc, gm_copy};
use gristmill_kernels::gemm::integer::pack_bytes;
use gristmill_kernels::pack::{PackBDesc, gm_pack_b_f32};
use gristmill_runtime::{DType, Tensor};
use std::cell::RefCell;
use std::collections::HashMap;

/// What was made of constants so far, by constant and by what was done: a weight that several clusters read alike is there once.
#[derive(Default)]
pub(super) struct Weights(RefCell<HashMap<(Identity, String), Tensor>>);

impl Weights {
    /// What `make` gives for the constant's elements, or gave before for the same `what`. `None` when it cannot be made.
    fn of(
        &self,
        data: &ConstData,
        what: String,
        make: impl FnOnce(&Tensor) -> Option<Tensor>,
    ) -> Option<Tensor> {
        let key = (data.identity(), what);
        if let Some(found) = self.0.borrow().get(&key) {
            return Some(found.clone());
        }
        let made = make(&data.tensor().ok()?)?;
        self.0.borrow_mut().insert(key, made.clone());
        Some(made)
    }
}

/// A constant as a kernel's operand: the view's strides are those of `data`, and its base has no meaning.
pub(super) struct Source {
    pub(super) data: ConstData,
    pub(super) view: Strided,
}

impl Context<'_> {
    /// The constant that `v` is, inside or outside the cluster.
    fn constant(&self, v: ValueId) -> Option<&ConstData> {
        if let Some(c) = self.body.graph.constant(v) {
            return Some(c);
        }
        let i = self.body.graph.inputs.iter().position(|&x| x == v)?;
        self.outer.constant(self.cluster.inputs[i])
    }

    /// The constant under a view, and the view as one of it. Transposes and reshapes that folding noted down are followed, so that
    /// they need not be done.
    pub(super) fn source(&self, view: &Strided, dtype: DType) -> Option<Source> {
        let mut data = self
            .constant(view.base)
            .filter(|c| c.dtype() == dtype)?
            .clone();
        let mut view = view.clone();
        loop {
            data = match data.viewed() {
                Viewed::Reshaped(x) => x.clone(),
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
        Some(Source { data, view })
    }

    /// The view's elements in row-major order; `None` when they cannot be read or copied.
    pub(super) fn constant_copy(&self, s: &Source) -> Option<Tensor> {
        self.weights.of(&s.data, format!("copy {:?}", s.view), |t| {
            copied(t, &s.view)
        })
    }

    /// The panels that `desc`, whose strides are those of the source's view, describes.
    pub(super) fn constant_panels(
        &self,
        s: &Source,
        desc: &PackBDesc,
        n_elements: usize,
    ) -> Option<Tensor> {
        let what = format!("{desc:?} from {}", s.view.offset);
        self.weights.of(&s.data, what, |t| {
            panels(
                &t.as_slice::<f32>()[s.view.offset as usize..],
                desc,
                n_elements,
            )
        })
    }

    /// The panels of a matrix of `i32` elements as bytes: its last axis are columns, the others rows. `None` when some are no bytes.
    pub(super) fn constant_bytes(&self, s: &Source) -> Option<Tensor> {
        let isa = self.isa;
        self.weights
            .of(&s.data, format!("bytes {isa} {:?}", s.view), |t| {
                byte_panels(isa, t, &s.view)
            })
    }

    /// The panels of a row-major copy of the view, for views that no descriptor of panels can express.
    pub(super) fn panels_of_copy(
        &self,
        s: &Source,
        desc: &PackBDesc,
        n_elements: usize,
    ) -> Option<Tensor> {
        let what = format!("{desc:?} of {:?}", s.view);
        self.weights.of(&s.data, what, |t| {
            panels(copied(t, &s.view)?.as_slice::<f32>(), desc, n_elements)
        })
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
    // The greatest index that the view reaches along each axis.
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

fn copied(t: &Tensor, view: &Strided) -> Option<Tensor> {
    let mut out = Tensor::zeros(DType::F32, &view.shape).ok()?;
    let axes = collapse(&view.shape, &[&view.strides, &row_major(&view.shape)]);
    let dims: Vec<_> = axes
        .iter()
        .map(|a| (a.extent, a.strides[0] as isize, a.strides[1] as isize))
        .collect();
    let desc = CopyDesc::new(Isa::current(), 4, &dims)?;
    let from = t
        .as_ptr()
        .wrapping_offset(view.offset as isize * 4)
        .cast_mut();
    let ptrs = [
        from,
        std::ptr::null_mut(),
        out.as_mut_ptr(),
        std::ptr::null_mut(),
    ];
    // SAFETY: the view lies within its constant, which the verifier checked; the output has the view's shape.
    let status = unsafe { gm_copy(&desc, ptrs.as_ptr(), 0, desc.n_items()) };
    (status == gristmill_kernels::OK).then_some(out)
}

fn byte_panels(isa: Isa, t: &Tensor, view: &Strided) -> Option<Tensor> {
    if !fits_bytes(t) {
        return None;
    }
    let (&n, rows) = view.shape.split_last()?;
    let (&step, strides) = view.strides.split_last()?;
    let mut starts = vec![view.offset];
    for (&extent, &stride) in rows.iter().zip(strides) {
        starts = starts
            .iter()
            .flat_map(|&at| (0..extent as i64).map(move |i| at + i * stride))
            .collect();
    }
    let elements = t.as_slice::<i32>();
    let packed = pack_bytes(isa, starts.len(), n, |i, j| {
        elements[(starts[i] + j as i64 * step) as usize] as i8
    })?;
    Tensor::from_slice(&packed, &[packed.len()]).ok()
}

/// Packs what `desc` describes of `from`, which must cover it, by a call of the kernel that packs at run time.
fn panels(from: &[f32], desc: &PackBDesc, n_elements: usize) -> Option<Tensor> {
    let mut out = Tensor::zeros(DType::F32, &[n_elements]).ok()?;
    let from = from.as_ptr().cast::<u8>().cast_mut();
    let ptrs = [
        from,
        std::ptr::null_mut(),
        out.as_mut_ptr(),
        std::ptr::null_mut(),
    ];
    // SAFETY: `from` covers the matrices, as views lie within their constants; the output has room for all panels.
    let status = unsafe { gm_pack_b_f32(desc, ptrs.as_ptr(), 0, desc.n_items()) };
    (status == gristmill_kernels::OK).then_some(out)
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
