//! Units: what a contiguous part has all or nothing of.
//!
//! Tasks of a group are one unit. Contiguity speaks of the forward graph, so a group of backward tasks only takes its place from the backward edges
//! around it, turned round (as the published program does). Units that lie on a ring are one unit. At last a unit that takes no time, has no
//! constants and touches one other unit only joins that: it never does harm there.

use crate::problem::Problem;
use crate::{Bytes, Nanos};
use std::collections::{BTreeMap, BTreeSet};

/// The units of a problem.
pub(super) struct Contracted {
    /// Unit of each task.
    pub(super) unit_of: Vec<u32>,
    pub(super) n_units: usize,
    /// Forward edges between units, each once.
    pub(super) edges: BTreeSet<(u32, u32)>,
}

/// Contracts groups, rings and idle leaves, until nothing more joins. Units are numbered in topological order. `fits_anyway` tells that constants
/// do not matter, for all of them fit on one accelerator.
pub(super) fn contract(p: &Problem, backward: &[bool], fits_anyway: bool) -> Contracted {
    let is_back = |t: usize| backward.get(t).copied().unwrap_or(false);
    let mut unit_of: Vec<u32> = p.group_of.clone();
    loop {
        let edges = forward_edges(p, &unit_of, &is_back);
        let n = unit_of.iter().map(|&u| u as usize + 1).max().unwrap_or(0);
        let ring = rings(n, &edges);
        let joined = join_leaves(p, &unit_of, &ring, &edges, fits_anyway);
        let changed = (0..n).any(|u| joined[u] != u as u32);
        unit_of.iter_mut().for_each(|u| *u = joined[*u as usize]);
        if !changed {
            return numbered(unit_of, edges);
        }
    }
}

/// Edges between units among forward tasks, and turned round among backward tasks where one end has no forward task.
fn forward_edges(
    p: &Problem,
    unit_of: &[u32],
    is_back: &impl Fn(usize) -> bool,
) -> BTreeSet<(u32, u32)> {
    let n = unit_of.iter().map(|&u| u as usize + 1).max().unwrap_or(0);
    let mut has_forward = vec![false; n];
    (0..p.n_tasks())
        .filter(|&t| !is_back(t))
        .for_each(|t| has_forward[unit_of[t] as usize] = true);
    let mut edges = BTreeSet::new();
    for t in 0..p.n_tasks() {
        for c in p.successors(t) {
            let (from, to) = (unit_of[t], unit_of[c as usize]);
            if from == to {
                continue;
            }
            match (is_back(t), is_back(c as usize)) {
                (false, false) => drop(edges.insert((from, to))),
                (true, true) if !has_forward[from as usize] || !has_forward[to as usize] => {
                    edges.insert((to, from));
                }
                _ => {}
            }
        }
    }
    edges
}

/// For each unit the least unit of its ring, itself if it is on none: strongly connected components (Kosaraju), without recursion.
fn rings(n: usize, edges: &BTreeSet<(u32, u32)>) -> Vec<u32> {
    let (mut after, mut before) = (vec![Vec::new(); n], vec![Vec::new(); n]);
    for &(a, b) in edges {
        after[a as usize].push(b);
        before[b as usize].push(a);
    }
    let mut seen = vec![false; n];
    let mut finished = Vec::with_capacity(n);
    for root in 0..n as u32 {
        walk(root, &after, &mut seen, &mut |u| finished.push(u));
    }
    let mut seen = vec![false; n];
    let mut ring: Vec<u32> = (0..n as u32).collect();
    for &root in finished.iter().rev() {
        let mut members = Vec::new();
        walk(root, &before, &mut seen, &mut |u| members.push(u));
        let least = members.iter().copied().min().unwrap_or(root);
        members.iter().for_each(|&u| ring[u as usize] = least);
    }
    ring
}

/// Depth first from `root`; `leave` sees each new unit after all that it leads to.
fn walk(root: u32, next: &[Vec<u32>], seen: &mut [bool], leave: &mut impl FnMut(u32)) {
    if std::mem::replace(&mut seen[root as usize], true) {
        return;
    }
    let mut stack = vec![(root, 0)];
    while let Some((u, i)) = stack.pop() {
        match next[u as usize].get(i) {
            Some(&v) => {
                stack.push((u, i + 1));
                if !std::mem::replace(&mut seen[v as usize], true) {
                    stack.push((v, 0));
                }
            }
            None => leave(u),
        }
    }
}

/// Lets idle units with one neighbour join it.
fn join_leaves(
    p: &Problem,
    unit_of: &[u32],
    ring: &[u32],
    edges: &BTreeSet<(u32, u32)>,
    fits_anyway: bool,
) -> Vec<u32> {
    let mut joined = ring.to_vec();
    let unit = |t: u32| ring[unit_of[t as usize] as usize];
    let mut neighbours: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut link = |a: u32, b: u32| {
        if a != b {
            neighbours.entry(a).or_default().insert(b);
            neighbours.entry(b).or_default().insert(a);
        }
    };
    (0..p.n_tasks()).for_each(|t| p.successors(t).for_each(|c| link(unit(t as u32), unit(c))));
    edges
        .iter()
        .for_each(|&(a, b)| link(ring[a as usize], ring[b as usize]));
    let mut busy = vec![false; ring.len()];
    for t in 0..p.n_tasks() {
        let idle = p.costs(t).iter().all(|&c| c == Nanos::ZERO);
        let light = fits_anyway || p.resident[t] == Bytes::ZERO && p.constants_of.row(t).is_empty();
        busy[unit(t as u32) as usize] |= !(idle && light);
    }
    for (&leaf, others) in &neighbours {
        if others.len() != 1 || busy[leaf as usize] || joined[leaf as usize] != leaf {
            continue;
        }
        if let Some(&to) = others.first().filter(|&&to| joined[to as usize] == to) {
            joined[leaf as usize] = to;
        }
    }
    (0..ring.len()).map(|u| joined[ring[u] as usize]).collect()
}

/// Units renumbered without holes, before others that come after them.
fn numbered(unit_of: Vec<u32>, edges: BTreeSet<(u32, u32)>) -> Contracted {
    let units: BTreeSet<u32> = unit_of.iter().copied().collect();
    let mut waiting: BTreeMap<u32, usize> = units.iter().map(|&u| (u, 0)).collect();
    let mut after: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for &(a, b) in &edges {
        after.entry(a).or_default().push(b);
        *waiting.entry(b).or_default() += 1;
    }
    let mut ready: BTreeSet<u32> = waiting.iter().filter(|w| *w.1 == 0).map(|w| *w.0).collect();
    let mut number = BTreeMap::new();
    while let Some(u) = ready.pop_first() {
        number.insert(u, number.len() as u32);
        for &v in after.get(&u).into_iter().flatten() {
            if let Some(w) = waiting.get_mut(&v) {
                *w -= 1;
                if *w == 0 {
                    ready.insert(v);
                }
            }
        }
    }
    let renumber = |u: u32| number.get(&u).copied().unwrap_or(0);
    Contracted {
        n_units: units.len(),
        edges: edges
            .into_iter()
            .map(|(a, b)| (renumber(a), renumber(b)))
            .collect(),
        unit_of: unit_of.into_iter().map(renumber).collect(),
    }
}
