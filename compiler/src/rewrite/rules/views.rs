//! Views: identities and compositions.

use super::{as_shape_of, rules};
use crate::ir::{Dim, Op, broadcast_shapes};
use crate::rewrite::run::Root;
use crate::rewrite::terms::{Applied, Miss::NoMatch, Terms, compose, is_identity};
use egg::Id;

rules! {
    /// A view that changes nothing.
    "identity-view" Bits at Op::Reshape { .. } | Op::Transpose { .. } | Op::Broadcast { .. } | Op::Slice { .. } | Op::Pad { .. } => identity_view;
    /// A concatenation of one part; empty parts are dropped.
    "concat-of-one" Bits at Op::Concat { .. } => concat_of_one;
    /// Two transposes: one.
    "transpose-transpose" Bits at Op::Transpose { .. } => transpose_transpose;
    /// Two reshapes: one.
    "reshape-reshape" Bits at Op::Reshape { .. } => reshape_reshape;
    /// A reshape that puts reduced axes back: the reduction keeps them.
    "reduce-keepdims" Bits at Op::Reshape { .. } => reduce_keepdims;
    /// Two broadcasts: one.
    "broadcast-broadcast" Bits at Op::Broadcast { .. } => broadcast_broadcast;
    /// A transpose that only moves axes of extent 1 is a reshape.
    "transpose-of-units" Bits at Op::Transpose { .. } => transpose_of_units;
    /// A broadcast that only adds axes of extent 1 is a reshape.
    "broadcast-to-reshape" Bits at Op::Broadcast { .. } => broadcast_to_reshape;
    /// A broadcast operand that the element-wise op would broadcast by itself.
    "map-of-broadcast" Bits at Op::Map(_) => map_of_broadcast;
    /// A slice of a slice.
    "slice-slice" Bits at Op::Slice { .. } => slice_slice;
    /// A slice that lies within one part of a concatenation.
    "slice-of-concat" Bits at Op::Slice { .. } => slice_of_concat;
    /// Adjacent slices of one tensor, joined again.
    "concat-of-slices" Bits at Op::Concat { .. } => concat_of_slices;
    /// A gather at one constant position is a slice.
    "gather-constant" Bits at Op::Gather { .. } => gather_constant;
}

fn identity_view(t: &mut Terms, r: &Root) -> Applied {
    let same = match r.op {
        Op::Transpose { perm } => is_identity(perm),
        Op::Slice { starts, steps, .. } => {
            starts.iter().all(|s| s.is(0))
                && steps.iter().all(|s| *s == 1)
                && t.ty(r.args[0]) == t.ty(r.class)
        }
        _ => t.ty(r.args[0]) == t.ty(r.class),
    };
    if same { Ok(r.args[0]) } else { Err(NoMatch) }
}

fn concat_of_one(t: &mut Terms, r: &Root) -> Applied {
    let Op::Concat { axis } = r.op else {
        return Err(NoMatch);
    };
    let parts: Vec<Id> = r
        .args
        .iter()
        .copied()
        .filter(|p| !t.ty(*p).shape[*axis].is(0))
        .collect();
    match parts.as_slice() {
        [] => Ok(r.args[0]),
        [one] => Ok(*one),
        all if all.len() < r.args.len() => t.add(r.op.clone(), all),
        _ => Err(NoMatch),
    }
}

fn transpose_transpose(t: &mut Terms, r: &Root) -> Applied {
    let Op::Transpose { perm } = r.op else {
        return Err(NoMatch);
    };
    let mut result = Err(NoMatch);
    for (q, x) in t.transposes_of(r.args[0]) {
        let composed = compose(&q, perm);
        let y = if is_identity(&composed) {
            x
        } else {
            t.add(Op::Transpose { perm: composed }, &[x])?
        };
        if let Ok(earlier) = result {
            t.eg.union(earlier, y);
        }
        result = Ok(y);
    }
    result
}

fn reshape_reshape(t: &mut Terms, r: &Root) -> Applied {
    let x = t
        .find(r.args[0], |op, ch| {
            matches!(op, Op::Reshape { .. }).then(|| ch[0])
        })
        .ok_or(NoMatch)?;
    let shape = t.ty(r.class).shape.0.clone();
    t.reshape(x, shape)
}

fn reduce_keepdims(t: &mut Terms, r: &Root) -> Applied {
    let reduce = |op: &Op, ch: &[Id]| match op {
        Op::Reduce {
            kind,
            axes,
            keepdims: false,
        } => Some((*kind, axes.clone(), ch[0])),
        _ => None,
    };
    let (kind, axes, x) = t.find(r.args[0], reduce).ok_or(NoMatch)?;
    let out = &t.ty(r.class).shape;
    let kept = |i: usize, d: &Dim| {
        if axes.contains(&i) {
            out[i].is(1)
        } else {
            out[i] == *d
        }
    };
    let fits = out.rank() == t.rank(x) && t.ty(x).shape.iter().enumerate().all(|(i, d)| kept(i, d));
    if fits {
        t.add(
            Op::Reduce {
                kind,
                axes,
                keepdims: true,
            },
            &[x],
        )
    } else {
        Err(NoMatch)
    }
}

fn broadcast_broadcast(t: &mut Terms, r: &Root) -> Applied {
    let x = t
        .find(r.args[0], |op, ch| {
            matches!(op, Op::Broadcast { .. }).then(|| ch[0])
        })
        .ok_or(NoMatch)?;
    as_shape_of(t, x, r.class)
}

fn transpose_of_units(t: &mut Terms, r: &Root) -> Applied {
    let Op::Transpose { perm } = r.op else {
        return Err(NoMatch);
    };
    let shape = &t.ty(r.args[0]).shape;
    let moved: Vec<usize> = perm.iter().copied().filter(|&p| !shape[p].is(1)).collect();
    if !moved.is_sorted() {
        return Err(NoMatch);
    }
    let out = t.ty(r.class).shape.0.clone();
    t.reshape(r.args[0], out)
}

fn broadcast_to_reshape(t: &mut Terms, r: &Root) -> Applied {
    let (from, to) = (&t.ty(r.args[0]).shape, &t.ty(r.class).shape);
    let lead = to.rank() - from.rank();
    if !to[..lead].iter().all(|d| d.is(1)) || to[lead..] != from[..] {
        return Err(NoMatch);
    }
    let out = to.0.clone();
    t.reshape(r.args[0], out)
}

fn map_of_broadcast(t: &mut Terms, r: &Root) -> Applied {
    let bare = |t: &Terms, id: Id| {
        t.find(id, |op, ch| {
            matches!(op, Op::Broadcast { .. }).then(|| ch[0])
        })
    };
    let out = t.ty(r.class).shape.0.clone();
    let mut args = r.args.to_vec();
    for i in 0..args.len() {
        let Some(x) = bare(t, args[i]) else { continue };
        let old = std::mem::replace(&mut args[i], x);
        let mut shape = Vec::new();
        for a in &args {
            shape = broadcast_shapes(&shape, &t.ty(*a).shape).map_err(|_| NoMatch)?;
        }
        if shape != out {
            args[i] = old;
        }
    }
    if args == r.args {
        Err(NoMatch)
    } else {
        t.add(r.op.clone(), &args)
    }
}

fn slice_slice(t: &mut Terms, r: &Root) -> Applied {
    let Op::Slice {
        starts,
        sizes,
        steps,
    } = r.op
    else {
        return Err(NoMatch);
    };
    let below = |op: &Op, ch: &[Id]| match op {
        Op::Slice { starts, steps, .. } => Some((starts.clone(), steps.clone(), ch[0])),
        _ => None,
    };
    let (s0, k0, x) = t.find(r.args[0], below).ok_or(NoMatch)?;
    let starts = (0..s0.len())
        .map(|i| s0[i].clone() + starts[i].scale(k0[i]))
        .collect();
    let steps = (0..k0.len()).map(|i| k0[i] * steps[i]).collect();
    t.add(
        Op::Slice {
            starts,
            sizes: sizes.clone(),
            steps,
        },
        &[x],
    )
}

/// The one axis along which a slice of unit step is not whole.
fn sliced_axis(t: &Terms, x: Id, starts: &[Dim], sizes: &[Dim], steps: &[i64]) -> Option<usize> {
    let shape = &t.ty(x).shape;
    let mut cut = (0..shape.rank()).filter(|&i| !starts[i].is(0) || sizes[i] != shape[i]);
    let axis = cut.next()?;
    (cut.next().is_none() && steps.iter().all(|s| *s == 1)).then_some(axis)
}

fn slice_of_concat(t: &mut Terms, r: &Root) -> Applied {
    let Op::Slice {
        starts,
        sizes,
        steps,
    } = r.op
    else {
        return Err(NoMatch);
    };
    let axis = sliced_axis(t, r.args[0], starts, sizes, steps).ok_or(NoMatch)?;
    let parts = |op: &Op, ch: &[Id]| match op {
        Op::Concat { axis: a } if *a == axis => Some(ch.to_vec()),
        _ => None,
    };
    let mut offset = Dim::constant(0);
    for p in t.find(r.args[0], parts).ok_or(NoMatch)? {
        let extent = t.ty(p).shape[axis].clone();
        let start = starts[axis].clone() - offset.clone();
        let end = extent.clone() - start.clone() - sizes[axis].clone();
        if start.as_const().is_some_and(|s| s >= 0) && end.as_const().is_some_and(|e| e >= 0) {
            let mut starts = starts.clone();
            starts[axis] = start;
            if *t.ty(p).shape == *sizes {
                return Ok(p);
            }
            return t.add(
                Op::Slice {
                    starts,
                    sizes: sizes.clone(),
                    steps: steps.clone(),
                },
                &[p],
            );
        }
        offset = offset + extent;
    }
    Err(NoMatch)
}

fn concat_of_slices(t: &mut Terms, r: &Root) -> Applied {
    let Op::Concat { axis } = r.op else {
        return Err(NoMatch);
    };
    let mut source: Option<(Id, Vec<Dim>)> = None;
    let mut end = Dim::constant(0);
    for p in r.args {
        let slice = |op: &Op, ch: &[Id]| match op {
            Op::Slice {
                starts,
                sizes,
                steps,
            } if steps.iter().all(|s| *s == 1)
                && source
                    .as_ref()
                    .is_none_or(|(x, _)| t.same(*x, ch[0]) && starts[*axis] == end) =>
            {
                Some((ch[0], starts.clone(), sizes.clone()))
            }
            _ => None,
        };
        let (x, starts, sizes) = t.find(*p, slice).ok_or(NoMatch)?;
        end = starts[*axis].clone() + sizes[*axis].clone();
        match &source {
            None => source = Some((x, starts)),
            Some((_, first)) => {
                let others = |s: &[Dim]| {
                    s.iter()
                        .enumerate()
                        .filter(|(i, _)| i != axis)
                        .map(|(_, d)| d.clone())
                        .collect::<Vec<_>>()
                };
                if others(first) != others(&starts) {
                    return Err(NoMatch);
                }
            }
        }
    }
    let (x, starts) = source.ok_or(NoMatch)?;
    let sizes = t.ty(r.class).shape.0.clone();
    if starts.iter().all(|s| s.is(0)) && *t.ty(x).shape == sizes {
        return Ok(x);
    }
    let steps = vec![1; sizes.len()];
    t.add(
        Op::Slice {
            starts,
            sizes,
            steps,
        },
        &[x],
    )
}

fn gather_constant(t: &mut Terms, r: &Root) -> Applied {
    let Op::Gather { axis } = r.op else {
        return Err(NoMatch);
    };
    let index = t.ty(r.args[1]);
    if !index.shape.iter().all(|d| d.is(1)) {
        return Err(NoMatch);
    }
    let i = t.uniform(r.args[1]).ok_or(NoMatch)? as i64;
    let mut sizes = t.ty(r.args[0]).shape.0.clone();
    let start = if i < 0 {
        sizes[*axis].clone() + i.into()
    } else {
        i.into()
    };
    // An index out of range must stay a run-time error.
    let inside = start
        .as_const()
        .zip(sizes[*axis].as_const())
        .is_some_and(|(s, n)| 0 <= s && s < n);
    if !inside {
        return Err(crate::rewrite::terms::rejected(
            "the index is not known to be in range",
        ));
    }
    let mut starts = vec![Dim::constant(0); sizes.len()];
    starts[*axis] = start;
    sizes[*axis] = 1.into();
    let steps = vec![1; sizes.len()];
    let slice = t.add(
        Op::Slice {
            starts,
            sizes,
            steps,
        },
        &[r.args[0]],
    )?;
    let out = t.ty(r.class).shape.0.clone();
    t.reshape(slice, out)
}
