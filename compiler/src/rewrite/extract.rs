//! Extraction of the cheapest DAG: bottom-up, with the set of classes that each choice needs as a bitset, so that shared
//! work counts once (greedy-DAG extraction; see the egg extraction gym). egg's own extractor prices trees.

use super::cost::{Pricing, Work};
use super::lang::ENode;
use super::terms::Terms;
use crate::cost::Picos;
use crate::error::{Error, Result};
use egg::Id;
use std::collections::{BTreeMap, VecDeque};

/// Above this many reachable classes the bitsets take too much memory.
const MAX_CLASSES: usize = 50_000;

/// Added per op, so that of two choices of equal time the one with fewer ops wins.
const PER_NODE: Picos = Picos(10);

/// The chosen e-node of each class, as its index within the class.
pub(crate) struct Choice {
    index: BTreeMap<Id, usize>,
}

struct Class {
    id: Id,
    nodes: Vec<Candidate>,
}

struct Candidate {
    /// Index in the e-class.
    index: usize,
    cost: Picos,
    /// Dense indices of the children, sorted, without repetition.
    children: Vec<u32>,
}

#[derive(Clone)]
struct Best {
    total: Picos,
    set: Box<[u64]>,
    node: u32,
}

/// Chooses one e-node per class that `root` needs. `None` when the e-graph is too large.
pub(crate) fn extract(terms: &Terms, root: Id, cost: &Pricing) -> Option<Choice> {
    extract_by(terms, root, &mut |class, node| {
        cost.node(terms, class, node).time
    })
}

/// [`extract`] with any price of (class, e-node).
pub(crate) fn extract_by(
    terms: &Terms,
    root: Id,
    price: &mut dyn FnMut(Id, &ENode) -> Picos,
) -> Option<Choice> {
    let classes = reachable(terms, root, price)?;
    let best = solve(&classes);
    let index = classes
        .iter()
        .zip(&best)
        .filter_map(|(c, b)| Some((c.id, c.nodes[b.as_ref()?.node as usize].index)))
        .collect();
    Some(Choice { index })
}

/// Classes that `root` reaches through any e-node, children before parents where the e-graph has no cycle.
fn reachable(
    terms: &Terms,
    root: Id,
    price: &mut dyn FnMut(Id, &ENode) -> Picos,
) -> Option<Vec<Class>> {
    let mut ids = vec![terms.eg.find(root)];
    let mut seen: std::collections::BTreeSet<Id> = ids.iter().copied().collect();
    let mut next = 0;
    while next < ids.len() {
        for n in &terms.eg[ids[next]].nodes {
            for c in &n.children {
                let c = terms.eg.find(*c);
                if seen.insert(c) {
                    ids.push(c);
                }
            }
        }
        next += 1;
    }
    if ids.len() > MAX_CLASSES {
        return None;
    }
    let mut dense = vec![u32::MAX; ids.iter().map(|i| usize::from(*i) + 1).max().unwrap_or(0)];
    let ids: Vec<Id> = seen.into_iter().collect();
    for (i, id) in ids.iter().enumerate() {
        dense[usize::from(*id)] = i as u32;
    }
    let mut class = |id: Id| Class {
        id,
        nodes: terms.eg[id]
            .nodes
            .iter()
            .enumerate()
            .map(|(index, n)| candidate(terms, index, n, price(id, n), &dense))
            .collect(),
    };
    Some(ids.into_iter().map(&mut class).collect())
}

fn candidate(terms: &Terms, index: usize, node: &ENode, price: Picos, dense: &[u32]) -> Candidate {
    let mut children: Vec<u32> = node
        .children
        .iter()
        .map(|c| dense[usize::from(terms.eg.find(*c))])
        .collect();
    children.sort_unstable();
    children.dedup();
    let cost = if node.children.is_empty() {
        price
    } else {
        price + PER_NODE
    };
    Candidate {
        index,
        cost,
        children,
    }
}

fn solve(classes: &[Class]) -> Vec<Option<Best>> {
    let mut parents: Vec<Vec<(u32, u32)>> = vec![Vec::new(); classes.len()];
    let mut queue = VecDeque::new();
    let mut queued: Vec<Vec<bool>> = classes.iter().map(|c| vec![false; c.nodes.len()]).collect();
    for (k, class) in classes.iter().enumerate() {
        for (j, n) in class.nodes.iter().enumerate() {
            n.children
                .iter()
                .for_each(|c| parents[*c as usize].push((k as u32, j as u32)));
            if n.children.is_empty() {
                queue.push_back((k as u32, j as u32));
                queued[k][j] = true;
            }
        }
    }
    let mut best: Vec<Option<Best>> = vec![None; classes.len()];
    let mut weights = vec![Picos::ZERO; classes.len()];
    while let Some((k, j)) = queue.pop_front() {
        queued[k as usize][j as usize] = false;
        let node = &classes[k as usize].nodes[j as usize];
        let Some((total, set)) = evaluate(node, k, &best, &weights) else {
            continue;
        };
        if best[k as usize].as_ref().is_some_and(|b| total >= b.total) {
            continue;
        }
        weights[k as usize] = node.cost;
        best[k as usize] = Some(Best {
            total,
            set,
            node: j,
        });
        for &(pk, pj) in &parents[k as usize] {
            if !std::mem::replace(&mut queued[pk as usize][pj as usize], true) {
                queue.push_back((pk, pj));
            }
        }
    }
    best
}

/// Total time of a candidate with all that it needs, each class counted once. `None` when a child has no choice yet, when
/// the candidate would need its own class, or when it cannot beat the present choice.
fn evaluate(
    node: &Candidate,
    class: u32,
    best: &[Option<Best>],
    weights: &[Picos],
) -> Option<(Picos, Box<[u64]>)> {
    let child = |c: &u32| best[*c as usize].as_ref();
    let (word, bit) = (class as usize / 64, 1u64 << (class % 64));
    let mut largest: Option<u32> = None;
    for c in &node.children {
        let b = child(c)?;
        if b.set[word] & bit != 0 {
            return None;
        }
        if largest
            .is_none_or(|l| b.total > best[l as usize].as_ref().expect("checked before").total)
        {
            largest = Some(*c);
        }
    }
    let Some(largest) = largest else {
        let mut set = vec![0u64; best.len().div_ceil(64)].into_boxed_slice();
        set[word] |= bit;
        return Some((node.cost, set));
    };
    let base = child(&largest)?;
    if best[class as usize]
        .as_ref()
        .is_some_and(|b| node.cost + base.total >= b.total)
    {
        return None;
    }
    let (mut total, mut set) = (base.total + node.cost, base.set.clone());
    for c in node.children.iter().filter(|c| **c != largest) {
        for (w, other) in child(c)?.set.iter().enumerate() {
            let mut new = other & !set[w];
            set[w] |= new;
            while new != 0 {
                total += weights[w * 64 + new.trailing_zeros() as usize];
                new &= new - 1;
            }
        }
    }
    set[word] |= bit;
    Some((total, set))
}

impl Choice {
    /// The chosen e-node of a class.
    pub(crate) fn node<'a>(&self, terms: &'a Terms, class: Id) -> &'a ENode {
        let class = terms.eg.find(class);
        &terms.eg[class].nodes[self.index[&class]]
    }

    /// Chosen classes in an order in which children come first, and first operands' subtrees first.
    pub(crate) fn topological<'a>(
        &self,
        terms: &'a Terms,
        root: Id,
    ) -> Result<Vec<(Id, &'a ENode)>> {
        let mut order = Vec::new();
        // false while the class is on the stack, true once emitted.
        let mut state: BTreeMap<Id, bool> = BTreeMap::new();
        let mut stack = vec![(terms.eg.find(root), 0)];
        while let Some((class, next)) = stack.pop() {
            if !self.index.contains_key(&class) {
                return Err(Error::internal(
                    "extraction left an e-class without a choice",
                ));
            }
            let node = self.node(terms, class);
            if let Some(c) = node.children.get(next) {
                stack.push((class, next + 1));
                state.entry(class).or_insert(false);
                let c = terms.eg.find(*c);
                match state.get(&c) {
                    Some(true) => {}
                    Some(false) => return Err(Error::internal("extraction chose a cycle")),
                    None => stack.push((c, 0)),
                }
            } else if state.insert(class, true) != Some(true) {
                order.push((class, node));
            }
        }
        Ok(order)
    }

    /// Work of the chosen graph.
    pub(crate) fn work(&self, terms: &Terms, root: Id, cost: &Pricing) -> Result<Work> {
        let mut sum = Work::default();
        for (class, node) in self.topological(terms, root)? {
            sum += cost.node(terms, class, node);
        }
        Ok(sum)
    }
}
