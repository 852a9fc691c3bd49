//! Ops that make or move elements: iota, broadcast, reshape, transpose, slice, pad, concat.

use crate::error::{Error, Result};
use gristmill_runtime::{Tensor, with_dtype};

/// Row-major strides, in elements.
pub fn strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].wrapping_mul(shape[i] as isize);
    }
    strides
}

/// Number of elements; saturates, which only shapes with a zero extent reach.
pub fn count(shape: &[usize]) -> usize {
    if shape.contains(&0) {
        0
    } else {
        shape.iter().fold(1, |n, &d| n.saturating_mul(d))
    }
}

/// NumPy broadcasting of two concrete shapes.
pub fn broadcast_shape(a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |j| s[j]);
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y || y == 1 => Ok(x),
            (1, y) => Ok(y),
            _ => Err(Error::invalid(format!(
                "shapes {a:?} and {b:?} do not broadcast"
            ))),
        })
        .collect()
}

/// Strides that read a tensor of shape `from` as if broadcast to `to`: 0 along repeated axes.
pub fn broadcast_strides(from: &[usize], to: &[usize]) -> Vec<isize> {
    let own = strides(from);
    let lead = to.len() - from.len();
    (0..to.len())
        .map(|i| {
            if i < lead || from[i - lead] == 1 {
                0
            } else {
                own[i - lead]
            }
        })
        .collect()
}

/// Calls `f` with the offset `start + sum of index * stride` of every index of `shape`, in row-major order.
pub fn for_each_offset(shape: &[usize], strides: &[isize], start: isize, mut f: impl FnMut(isize)) {
    if shape.contains(&0) {
        return;
    }
    let Some((&n, outer)) = shape.split_last() else {
        return f(start);
    };
    let (mut index, mut offset) = (vec![0; outer.len()], start);
    loop {
        (0..n as isize).for_each(|i| f(offset + i * strides[outer.len()]));
        let Some(axis) = (0..outer.len()).rev().find(|&a| index[a] + 1 < outer[a]) else {
            return;
        };
        for a in axis + 1..outer.len() {
            offset -= index[a] as isize * strides[a];
            index[a] = 0;
        }
        index[axis] += 1;
        offset += strides[axis];
    }
}

/// A dense tensor of `shape` read through strides.
pub fn strided(x: &Tensor, shape: &[usize], strides: &[isize], start: isize) -> Result<Tensor> {
    let mut out = Tensor::zeros(x.dtype(), shape)?;
    with_dtype!(x.dtype(), T => {
        let (from, mut to) = (x.as_slice::<T>(), out.as_mut_slice::<T>().iter_mut());
        for_each_offset(shape, strides, start, |offset| *to.next().expect("one offset per element") = from[offset as usize]);
    });
    Ok(out)
}

/// [`Op::Broadcast`](crate::ir::Op::Broadcast).
pub fn broadcast(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
    if x.shape() == shape {
        return Ok(x.clone());
    }
    strided(x, shape, &broadcast_strides(x.shape(), shape), 0)
}

/// [`Op::Transpose`](crate::ir::Op::Transpose).
pub fn transpose(x: &Tensor, perm: &[usize]) -> Result<Tensor> {
    let own = strides(x.shape());
    let shape: Vec<usize> = perm.iter().map(|&p| x.shape()[p]).collect();
    strided(
        x,
        &shape,
        &perm.iter().map(|&p| own[p]).collect::<Vec<_>>(),
        0,
    )
}

/// [`Op::Concat`](crate::ir::Op::Concat) into `shape`.
pub fn concat(parts: &[&Tensor], axis: usize, shape: &[usize]) -> Result<Tensor> {
    let mut out = Tensor::zeros(parts[0].dtype(), shape)?;
    let row = count(&shape[axis..]).saturating_mul(out.dtype().size_bytes());
    if out.is_empty() {
        return Ok(out);
    }
    let part_rows: Vec<usize> = parts
        .iter()
        .map(|p| count(&p.shape()[axis..]) * p.dtype().size_bytes())
        .collect();
    for (i, to) in out.as_bytes_mut().chunks_exact_mut(row).enumerate() {
        let mut at = 0;
        for (p, &n) in parts.iter().zip(&part_rows) {
            to[at..at + n].copy_from_slice(&p.as_bytes()[i * n..(i + 1) * n]);
            at += n;
        }
    }
    Ok(out)
}

/// Calls `f` with the offsets of each line along `axis`.
pub fn for_each_line(shape: &[usize], axis: usize, mut f: impl FnMut(&[usize])) {
    if count(shape) == 0 {
        return;
    }
    let inner = count(&shape[axis + 1..]);
    let outer = count(&shape[..axis]);
    let mut line = vec![0; shape[axis]];
    for o in 0..outer {
        for i in 0..inner {
            line.iter_mut()
                .enumerate()
                .for_each(|(j, at)| *at = (o * shape[axis] + j) * inner + i);
            f(&line);
        }
    }
}
