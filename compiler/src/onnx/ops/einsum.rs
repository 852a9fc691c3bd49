//! `Einsum`: pairs of operands at a time, as matrix products over grouped axes.

use super::super::import::{Ctx, OpDef, Outs, one, product};
use super::MANY;
use crate::error::{Error, Result};
use crate::ir::{Dim, ReduceKind, Shape, ValueId};
use std::collections::VecDeque;

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

impl Term {
    fn axis(&self, label: &Label) -> Option<usize> {
        self.labels.iter().position(|l| l == label)
    }

    /// Axes that the ellipsis stands for.
    fn n_ellipsis(&self) -> usize {
        let in_ellipsis = |l: &&Label| matches!(l, Label::Ellipsis(_));
        self.labels.iter().filter(in_ellipsis).count()
    }

    fn labels_not_in(&self, other: &Term) -> Vec<Label> {
        let labels = self.labels.iter().copied();
        labels.filter(|l| !other.labels.contains(l)).collect()
    }
}

fn einsum(cx: &mut Ctx) -> Result<Outs> {
    let mut equation = cx.s("equation", "")?;
    equation.retain(|c| !c.is_whitespace());
    let values = cx.vals()?;
    let parsed = parse(cx, &equation, &values);
    let (terms, output) =
        parsed.map_err(|why| Error::invalid(format!("equation {equation:?}: {why}")))?;
    let mut diagonals = Vec::new();
    for t in terms {
        diagonals.push(diagonal(cx, t)?);
    }
    one(contract_all(cx, diagonals, &output)?)
}

type Parsed<T> = std::result::Result<T, String>;

/// The terms of an equation, and the labels of its output.
fn parse(cx: &mut Ctx, equation: &str, values: &[ValueId]) -> Parsed<(Vec<Term>, Vec<Label>)> {
    let (left, right) = match equation.split_once("->") {
        Some((l, r)) => (l, Some(r)),
        None => (equation, None),
    };
    let parts: Vec<&str> = left.split(',').collect();
    let (n_parts, n_values) = (parts.len(), values.len());
    if n_parts != n_values {
        return Err(format!("{n_parts} terms for {n_values} operands"));
    }
    let mut terms = Vec::new();
    for (part, &v) in parts.iter().zip(values) {
        let labels = labels_of(part, cx.shape_of(v).rank())?;
        terms.push(Term { v, labels });
    }
    let n_ellipsis = terms.iter().map(Term::n_ellipsis).max().unwrap_or(0);
    let output = match right {
        Some(text) => given_output(text, n_ellipsis, &terms)?,
        None => implied_output(&parts, n_ellipsis),
    };
    Ok((terms, output))
}

/// The labels behind the arrow. Each must be of a term, and there once.
fn given_output(text: &str, n_ellipsis: usize, terms: &[Term]) -> Parsed<Vec<Label>> {
    let dots = text.contains("...");
    let n_letters = text.replace("...", "").chars().count();
    let output = labels_of(text, n_letters + if dots { n_ellipsis } else { 0 })?;
    for (i, l) in output.iter().enumerate() {
        let is_known = terms.iter().any(|t| t.labels.contains(l));
        if output[..i].contains(l) || !is_known {
            return Err(format!("output axis {i} is repeated or names no axis"));
        }
    }
    Ok(output)
}

/// Labels of a term; an ellipsis stands for the axes that no letter names.
fn labels_of(text: &str, rank: usize) -> Parsed<Vec<Label>> {
    let (before, after, dots) = match text.split_once("...") {
        Some((b, a)) => (b, a, true),
        None => (text, "", false),
    };
    let (mut labels, after) = (letters(before)?, letters(after)?);
    let named = labels.len() + after.len();
    if rank < named || rank > named && !dots {
        return Err(format!("term {text:?} has {named} labels for rank {rank}"));
    }
    labels.extend((0..rank - named).rev().map(Label::Ellipsis));
    labels.extend(after);
    Ok(labels)
}

fn letters(text: &str) -> Parsed<Vec<Label>> {
    match text.chars().find(|c| !c.is_ascii_alphabetic()) {
        Some(c) => Err(format!("{c:?} is not a label")),
        None => Ok(text.chars().map(Label::Letter).collect()),
    }
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
fn diagonal(cx: &mut Ctx, mut t: Term) -> Result<Term> {
    while let Some((i, j)) = repeated(&t.labels) {
        let ty = cx.type_of(t.v);
        let (m, n) = (&ty.shape[i], &ty.shape[j]);
        if m != n {
            let message = format!("a repeated label has extents {m} and {n}");
            return Err(Error::invalid(message));
        }
        let (a, b) = (cx.iota(ty.shape.0.clone(), i)?, cx.iota(ty.shape.0, j)?);
        let on = cx.eq(a, b)?;
        let zero = cx.scalar(ty.dtype, 0.0);
        let on_diagonal = cx.select(on, t.v, zero)?;
        t.v = cx.reduce(ReduceKind::Sum, on_diagonal, &[j], false)?;
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

/// The product of all terms, from left to right; a label is summed over once no later term has it.
fn contract_all(cx: &mut Ctx, terms: Vec<Term>, output: &[Label]) -> Result<ValueId> {
    let mut rest = VecDeque::from(terms);
    let mut acc = rest.pop_front().expect("an equation has a term");
    while let Some(next) = rest.pop_front() {
        let later = |l: &Label| output.contains(l) || rest.iter().any(|t| t.labels.contains(l));
        let labels = acc.labels.iter().chain(&next.labels).copied();
        let keep: Vec<Label> = labels.filter(later).collect();
        acc = summed(cx, acc, |l| keep.contains(l) || next.labels.contains(l))?;
        let next = summed(cx, next, |l| keep.contains(l) || acc.labels.contains(l))?;
        acc = contract(cx, acc, next, &keep)?;
    }
    let acc = summed(cx, acc, |l| output.contains(l))?;
    arranged(cx, &acc, &[output])
}

/// Sums over the axes whose labels are not to be kept.
fn summed(cx: &mut Ctx, t: Term, keep: impl Fn(&Label) -> bool) -> Result<Term> {
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
fn contract(cx: &mut Ctx, a: Term, b: Term, keep: &[Label]) -> Result<Term> {
    let shared = a.labels.iter().copied().filter(|l| b.labels.contains(l));
    let (batch, inner): (Vec<Label>, Vec<Label>) = shared.partition(|l| keep.contains(l));
    let groups = Groups {
        rows: a.labels_not_in(&b),
        columns: b.labels_not_in(&a),
        batch,
        inner,
    };
    let (a, b) = matched(cx, a, b, &groups.inner)?;
    let v = if groups.inner.is_empty() {
        groups.outer_product(cx, &a, &b)?
    } else {
        groups.inner_product(cx, &a, &b)?
    };
    let labels = [groups.batch, groups.rows, groups.columns].concat();
    Ok(Term { v, labels })
}

/// Labels of a product of two terms.
struct Groups {
    /// Of both and of the result.
    batch: Vec<Label>,
    /// Of the left one alone.
    rows: Vec<Label>,
    /// Of the right one alone.
    columns: Vec<Label>,
    /// Of both, summed over.
    inner: Vec<Label>,
}

impl Groups {
    fn outer_product(&self, cx: &mut Ctx, a: &Term, b: &Term) -> Result<ValueId> {
        let (n, m) = (self.batch.len(), self.rows.len());
        let a = arranged(cx, a, &[&self.batch, &self.rows])?;
        let b = arranged(cx, b, &[&self.batch, &self.columns])?;
        let a = with_ones(cx, a, n + m, self.columns.len())?;
        let b = with_ones(cx, b, n, m)?;
        cx.mul(a, b)
    }

    fn inner_product(&self, cx: &mut Ctx, a: &Term, b: &Term) -> Result<ValueId> {
        let (n, n_rows, n_inner) = (self.batch.len(), self.rows.len(), self.inner.len());
        let a = arranged(cx, a, &[&self.batch, &self.rows, &self.inner])?;
        let b = arranged(cx, b, &[&self.batch, &self.inner, &self.columns])?;
        let (sa, sb) = (cx.shape_of(a), cx.shape_of(b));
        let a = cx.reshape(a, grouped(&sa, n, n_rows))?;
        let b = cx.reshape(b, grouped(&sb, n, n_inner))?;
        let y = cx.matmul(a, b)?;
        let mut dims = cx.shape_of(y)[..n].to_vec();
        dims.extend_from_slice(&sa[n..n + n_rows]);
        dims.extend_from_slice(&sb[n + n_inner..]);
        cx.reshape(y, dims)
    }
}

/// `n` axes of extent 1 inserted at an axis.
fn with_ones(cx: &mut Ctx, v: ValueId, at: usize, n: usize) -> Result<ValueId> {
    let mut dims = cx.shape_of(v).0;
    dims.splice(at..at, vec![Dim::constant(1); n]);
    cx.reshape(v, dims)
}

/// `[batch.., first group, second group]`, the first group being `first` axes long.
fn grouped(shape: &Shape, batch: usize, first: usize) -> Vec<Dim> {
    let mut dims = shape[..batch].to_vec();
    dims.push(product(&shape[batch..batch + first]));
    dims.push(product(&shape[batch + first..]));
    dims
}

/// Axes in the order of the label groups.
fn arranged(cx: &mut Ctx, t: &Term, groups: &[&[Label]]) -> Result<ValueId> {
    let order = groups.iter().flat_map(|g| g.iter());
    let perm: Vec<usize> = order.filter_map(|l| t.axis(l)).collect();
    cx.transpose(t.v, &perm)
}

/// Summed axes of extent 1 on one side only are broadcast to that of the other.
fn matched(cx: &mut Ctx, mut a: Term, mut b: Term, inner: &[Label]) -> Result<(Term, Term)> {
    for l in inner {
        let i = a.axis(l).expect("a shared label");
        let j = b.axis(l).expect("a shared label");
        let (m, n) = (cx.shape_of(a.v)[i].clone(), cx.shape_of(b.v)[j].clone());
        if m == n {
            continue;
        }
        if m.is(1) {
            a.v = broadcast_axis(cx, a.v, i, n)?;
        } else if n.is(1) {
            b.v = broadcast_axis(cx, b.v, j, m)?;
        } else {
            let message = format!("a label has extents {m} and {n}");
            return Err(Error::invalid(message));
        }
    }
    Ok((a, b))
}

fn broadcast_axis(cx: &mut Ctx, v: ValueId, axis: usize, extent: Dim) -> Result<ValueId> {
    let mut dims = cx.shape_of(v).0;
    dims[axis] = extent;
    cx.broadcast(v, dims)
}
