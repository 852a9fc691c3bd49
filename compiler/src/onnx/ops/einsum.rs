//! `Einsum`: pairs of operands at a time, as matrix products over grouped axes.

use super::super::import::{Ctx, OpDef, Outs, one};
use super::MANY;
use crate::error::{Error, Result};
use crate::ir::{Dim, ReduceKind, ScalarOp, Shape, ValueId};

pub(super) const OPS: &[OpDef] = &[OpDef::new("Einsum", (1, MANY), einsum)];

/// A label of an axis: a letter, or a place within the ellipsis, counted from its end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Ellipsis(usize),
    Letter(char),
}

/// An operand with one label per axis.
struct Term {
    v: ValueId,
    labels: Vec<Label>,
}

fn einsum<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let equation: String = cx
        .s("equation", "")?
        .chars()
        .filter(|c| !c.is_whitespace())
        .collect();
    let bad = |why: &str| Error::invalid(format!("equation {equation:?}: {why}"));
    let (left, right) = match equation.split_once("->") {
        Some((l, r)) => (l, Some(r)),
        None => (equation.as_str(), None),
    };
    let parts: Vec<&str> = left.split(',').collect();
    let values = cx.vals()?;
    if parts.len() != values.len() {
        return Err(bad(&format!(
            "{} terms for {} operands",
            parts.len(),
            values.len()
        )));
    }
    let mut terms = Vec::new();
    for (part, &v) in parts.iter().zip(&values) {
        let labels = labels_of(part, Some(cx.shape_of(v).rank())).map_err(|e| bad(&e))?;
        terms.push(diagonal(cx, Term { v, labels })?);
    }
    let widest = terms
        .iter()
        .flat_map(|t| &t.labels)
        .filter(|l| matches!(l, Label::Ellipsis(_)))
        .max();
    let n_ellipsis = widest.map_or(0, |l| if let Label::Ellipsis(i) = l { i + 1 } else { 0 });
    let output = match right {
        Some(text) => {
            let n_letters = text.replace("...", "").chars().count();
            let rank = n_letters + if text.contains("...") { n_ellipsis } else { 0 };
            labels_of(text, Some(rank)).map_err(|e| bad(&e))?
        }
        None => implied_output(&parts, n_ellipsis),
    };
    if let Some(i) = output
        .iter()
        .enumerate()
        .position(|(i, l)| output[..i].contains(l) || !terms.iter().any(|t| t.labels.contains(l)))
    {
        return Err(bad(&format!(
            "output axis {i} is repeated or names no axis"
        )));
    }
    one(contract_all(cx, terms, &output)?)
}

/// Labels of a term; an ellipsis stands for the axes that no letter names.
fn labels_of(text: &str, rank: Option<usize>) -> std::result::Result<Vec<Label>, String> {
    let (before, after, dots) = match text.split_once("...") {
        Some((b, a)) => (b, a, true),
        None => (text, "", false),
    };
    let letters = |s: &str| -> std::result::Result<Vec<Label>, String> {
        let letter = |c: char| c.is_ascii_alphabetic().then_some(Label::Letter(c));
        s.chars()
            .map(|c| letter(c).ok_or_else(|| format!("{c:?} is not a label")))
            .collect()
    };
    let (mut labels, after) = (letters(before)?, letters(after)?);
    let named = labels.len() + after.len();
    let rank = rank.unwrap_or(named);
    if rank < named || rank > named && !dots {
        return Err(format!("term {text:?} has {named} labels for rank {rank}"));
    }
    labels.extend((0..rank - named).rev().map(Label::Ellipsis));
    labels.extend(after);
    Ok(labels)
}

/// Without an arrow: the ellipsis, then the letters that appear once, in alphabetical order.
fn implied_output(parts: &[&str], n_ellipsis: usize) -> Vec<Label> {
    let mut letters: Vec<char> = parts
        .iter()
        .flat_map(|p| p.chars())
        .filter(char::is_ascii_alphabetic)
        .collect();
    letters.sort_unstable();
    let once = |c: &&char| letters.iter().filter(|d| *d == *c).count() == 1;
    let ellipsis = (0..n_ellipsis).rev().map(Label::Ellipsis);
    ellipsis
        .chain(letters.iter().filter(once).map(|&c| Label::Letter(c)))
        .collect()
}

/// A label that appears twice in one term selects the diagonal: elsewhere 0, then summed away.
fn diagonal(cx: &mut Ctx<'_, '_>, mut t: Term) -> Result<Term> {
    while let Some((i, j)) = repeated(&t.labels) {
        let ty = cx.type_of(t.v);
        if ty.shape[i] != ty.shape[j] {
            return Err(Error::invalid(format!(
                "a repeated label has extents {} and {}",
                ty.shape[i], ty.shape[j]
            )));
        }
        let iota = |axis| crate::ir::Op::Iota {
            dtype: gristmill_runtime::DType::I64,
            shape: ty.shape.0.clone(),
            axis,
        };
        let (a, b) = (cx.add(iota(i), &[])?, cx.add(iota(j), &[])?);
        let on = cx.map(ScalarOp::Eq, &[a, b])?;
        let zero = cx.b().scalar(ty.dtype, 0.0);
        let kept = cx.map(ScalarOp::Select, &[on, t.v, zero])?;
        t.v = cx.reduce(ReduceKind::Sum, kept, &[j], false)?;
        t.labels.remove(j);
    }
    Ok(t)
}

fn repeated(labels: &[Label]) -> Option<(usize, usize)> {
    (0..labels.len()).find_map(|j| {
        labels[..j]
            .iter()
            .position(|l| *l == labels[j])
            .map(|i| (i, j))
    })
}

fn contract_all(cx: &mut Ctx<'_, '_>, terms: Vec<Term>, output: &[Label]) -> Result<ValueId> {
    let mut rest = terms
        .into_iter()
        .collect::<std::collections::VecDeque<Term>>();
    let mut acc = rest.pop_front().expect("an equation has a term");
    while let Some(next) = rest.pop_front() {
        let later = |l: &Label| output.contains(l) || rest.iter().any(|t| t.labels.contains(l));
        let keep: Vec<Label> = acc
            .labels
            .iter()
            .chain(&next.labels)
            .copied()
            .filter(later)
            .collect();
        acc = summed(cx, acc, |l| keep.contains(l) || next.labels.contains(l))?;
        let next = summed(cx, next, |l| keep.contains(l) || acc.labels.contains(l))?;
        acc = contract(cx, acc, next, &keep)?;
    }
    let acc = summed(cx, acc, |l| output.contains(l))?;
    let perm: Vec<usize> = output
        .iter()
        .filter_map(|l| acc.labels.iter().position(|m| m == l))
        .collect();
    cx.b().transpose(acc.v, &perm)
}

/// Sums over the axes whose labels are not to be kept.
fn summed(cx: &mut Ctx<'_, '_>, t: Term, keep: impl Fn(&Label) -> bool) -> Result<Term> {
    let gone: Vec<usize> = (0..t.labels.len())
        .filter(|&i| !keep(&t.labels[i]))
        .collect();
    if gone.is_empty() {
        return Ok(t);
    }
    let v = cx.reduce(ReduceKind::Sum, t.v, &gone, false)?;
    Ok(Term {
        v,
        labels: t.labels.into_iter().filter(|l| keep(l)).collect(),
    })
}

/// The product of two terms, summed over the shared labels that are not in `keep`.
fn contract(cx: &mut Ctx<'_, '_>, a: Term, b: Term, keep: &[Label]) -> Result<Term> {
    let shared: Vec<Label> = a
        .labels
        .iter()
        .copied()
        .filter(|l| b.labels.contains(l))
        .collect();
    let (batch, inner): (Vec<Label>, Vec<Label>) =
        shared.into_iter().partition(|l| keep.contains(l));
    let only = |t: &Term, other: &Term| {
        t.labels
            .iter()
            .copied()
            .filter(|l| !other.labels.contains(l))
            .collect::<Vec<_>>()
    };
    let (rows, columns) = (only(&a, &b), only(&b, &a));
    let (a, b) = matched(cx, a, b, &inner)?;
    let labels = [batch.as_slice(), &rows, &columns].concat();
    if inner.is_empty() {
        let a = arranged(cx, &a, &[&batch, &rows])?;
        let b = arranged(cx, &b, &[&batch, &columns])?;
        let spread = |cx: &mut Ctx<'_, '_>, v: ValueId, at: usize, n: usize| {
            let mut dims = cx.shape_of(v).0;
            (0..n).for_each(|_| dims.insert(at, Dim::constant(1)));
            cx.b().reshape(v, dims)
        };
        let a = spread(cx, a, batch.len() + rows.len(), columns.len())?;
        let b = spread(cx, b, batch.len(), rows.len())?;
        return Ok(Term {
            v: cx.map(ScalarOp::Mul, &[a, b])?,
            labels,
        });
    }
    let (va, vb) = (
        arranged(cx, &a, &[&batch, &rows, &inner])?,
        arranged(cx, &b, &[&batch, &inner, &columns])?,
    );
    let (sa, sb) = (cx.shape_of(va), cx.shape_of(vb));
    let n = batch.len();
    let ma = cx.b().reshape(va, grouped(&sa, n, rows.len()))?;
    let mb = cx.b().reshape(vb, grouped(&sb, n, inner.len()))?;
    let product = cx.b().matmul(ma, mb)?;
    let mut dims = cx.shape_of(product)[..n].to_vec();
    dims.extend_from_slice(&sa[n..n + rows.len()]);
    dims.extend_from_slice(&sb[n + inner.len()..]);
    Ok(Term {
        v: cx.b().reshape(product, dims)?,
        labels,
    })
}

/// `[batch.., first group, second group]`, the first group being `first` axes long.
fn grouped(shape: &Shape, batch: usize, first: usize) -> Vec<Dim> {
    let product = |dims: &[Dim]| dims.iter().fold(Dim::constant(1), |n, d| n.product(d));
    let mut dims = shape[..batch].to_vec();
    dims.push(product(&shape[batch..batch + first]));
    dims.push(product(&shape[batch + first..]));
    dims
}

/// Axes in the order of the label groups.
fn arranged(cx: &mut Ctx<'_, '_>, t: &Term, groups: &[&Vec<Label>]) -> Result<ValueId> {
    let order = groups.iter().flat_map(|g| g.iter());
    let perm: Vec<usize> = order
        .filter_map(|l| t.labels.iter().position(|m| m == l))
        .collect();
    cx.b().transpose(t.v, &perm)
}

/// Summed axes of extent 1 on one side only are broadcast to that of the other.
fn matched(
    cx: &mut Ctx<'_, '_>,
    mut a: Term,
    mut b: Term,
    inner: &[Label],
) -> Result<(Term, Term)> {
    for l in inner {
        let at = |t: &Term| {
            t.labels
                .iter()
                .position(|m| m == l)
                .expect("a shared label")
        };
        let (i, j) = (at(&a), at(&b));
        let (mut sa, mut sb) = (cx.shape_of(a.v).0, cx.shape_of(b.v).0);
        if sa[i] == sb[j] {
            continue;
        }
        if sa[i].is(1) {
            sa[i] = sb[j].clone();
            a.v = cx.b().broadcast(a.v, sa)?;
        } else if sb[j].is(1) {
            sb[j] = sa[i].clone();
            b.v = cx.b().broadcast(b.v, sb)?;
        } else {
            return Err(Error::invalid(format!(
                "a label has extents {} and {}",
                sa[i], sb[j]
            )));
        }
    }
    Ok((a, b))
}
