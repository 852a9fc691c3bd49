//! Extraction of the cheapest DAG: bottom-up, with the set of classes that each choice needs as a bitset,
//! so that shared work counts once (greedy-DAG extraction; see the egg extraction gym). egg's own
//! extractor prices trees. Then a local search ([`descent`]) changes choices whose cost depends on who
//! else makes them.

use super::cost::{Pricing, Work};
use super::descent;
use super::lang::ENode;
use super::terms::Terms;
use crate::cost::Picos;
use crate::error::{Error, Result};
use egg::Id;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Above this many reachable classes the bitsets take too much memory.
const MAX_CLASSES: usize = 50_000;

/// Added per op, so that of two choices of equal time the one with fewer ops wins.
const PER_NODE: Picos = Picos(10);

/// The chosen e-node of each class, as its index within the class.
pub(crate) struct Choice {
    index: BTreeMap<Id, usize>,
}

/// An e-class that the root reaches.
pub(super) struct Class {
    id: Id,
    pub nodes: Vec<Candidate>,
}

/// An e-node as a choice for its class.
pub(super) struct Candidate {
    /// Index in the e-class.
    index: usize,
    /// Time of the op alone.
    pub cost: Picos,
    /// Dense indices of the children, sorted, without repetition.
    pub children: Vec<u32>,
}

/// The cheapest choice for a class.
#[derive(Clone)]
pub(super) struct Best {
    total: Picos,
    set: Box<[u64]>,
    /// Its place among the candidates.
    pub node: u32,
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
    let greedy = solve(&classes).into_iter().map(|best| Some(best?.node));
    let root = terms.eg.find(root);
    let root = classes.binary_search_by_key(&root, |c| c.id).ok()? as u32;
    let chosen = descent::improve(&classes, root, greedy.collect());
    let index = classes
        .iter()
        .zip(chosen)
        .filter_map(|(c, j)| Some((c.id, c.nodes[j? as usize].index)))
        .collect();
    Some(Choice { index })
}

/// Classes that `root` reaches through any e-node, by id. `None` when there are too many.
fn reachable(
    terms: &Terms,
    root: Id,
    price: &mut dyn FnMut(Id, &ENode) -> Picos,
) -> Option<Vec<Class>> {
    let ids = reachable_ids(terms, root);
    if ids.len() > MAX_CLASSES {
        return None;
    }
    let mut class = |&id: &Id| {
        let nodes = terms.eg[id].nodes.iter().enumerate();
        let nodes = nodes.map(|(i, n)| candidate(terms, i, n, price(id, n), &ids));
        Class {
            id,
            nodes: nodes.collect(),
        }
    };
    Some(ids.iter().map(&mut class).collect())
}

fn reachable_ids(terms: &Terms, root: Id) -> Vec<Id> {
    let mut stack = vec![terms.eg.find(root)];
    let mut seen: BTreeSet<Id> = stack.iter().copied().collect();
    while let Some(id) = stack.pop() {
        for child in terms.eg[id].nodes.iter().flat_map(|n| &n.children) {
            let child = terms.eg.find(*child);
            if seen.insert(child) {
                stack.push(child);
            }
        }
    }
    seen.into_iter().collect()
}

/// A candidate of a class. Its children are numbered by their position in `ids`, which is sorted.
fn candidate(terms: &Terms, index: usize, node: &ENode, price: Picos, ids: &[Id]) -> Candidate {
    let position = |c: &Id| {
        let found = ids.binary_search(&terms.eg.find(*c));
        found.expect("children are reachable") as u32
    };
    let mut children: Vec<u32> = node.children.iter().map(position).collect();
    children.sort_unstable();
    children.dedup();
    let cost = if children.is_empty() {
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

#[cfg(test)]
impl Class {
    /// A class with candidates of these costs and children.
    pub(super) fn of(candidates: impl Iterator<Item = (Picos, Vec<u32>)>) -> Class {
        let candidate = |(index, (cost, children))| Candidate {
            index,
            cost,
            children,
        };
        Class {
            id: Id::from(0),
            nodes: candidates.enumerate().map(candidate).collect(),
        }
    }
}

pub(super) fn solve(classes: &[Class]) -> Vec<Option<Best>> {
    let mut queue = Queue::new(classes);
    let mut best = Solution::new(classes.len());
    while let Some((k, j)) = queue.pop() {
        let node = &classes[k as usize].nodes[j as usize];
        if best.improve(k, j, node) {
            queue.push_readers(k);
        }
    }
    best.classes
}

/// A candidate as class and position.
type Position = (u32, u32);

/// Candidates that wait for their evaluation, each at most once.
struct Queue {
    waiting: VecDeque<Position>,
    is_waiting: Vec<Vec<bool>>,
    /// Candidates that read each class.
    readers: Vec<Vec<Position>>,
}

impl Queue {
    /// Begins with the candidates that read no class.
    fn new(classes: &[Class]) -> Queue {
        let idle = |c: &Class| vec![false; c.nodes.len()];
        let mut queue = Queue {
            waiting: VecDeque::new(),
            is_waiting: classes.iter().map(idle).collect(),
            readers: vec![Vec::new(); classes.len()],
        };
        for (k, class) in classes.iter().enumerate() {
            for (j, node) in class.nodes.iter().enumerate() {
                queue.add((k as u32, j as u32), node);
            }
        }
        queue
    }

    fn add(&mut self, at: Position, node: &Candidate) {
        for &child in &node.children {
            self.readers[child as usize].push(at);
        }
        if node.children.is_empty() {
            self.push(at);
        }
    }

    fn push(&mut self, at: Position) {
        let is_waiting = &mut self.is_waiting[at.0 as usize][at.1 as usize];
        if !std::mem::replace(is_waiting, true) {
            self.waiting.push_back(at);
        }
    }

    fn push_readers(&mut self, class: u32) {
        for i in 0..self.readers[class as usize].len() {
            self.push(self.readers[class as usize][i]);
        }
    }

    fn pop(&mut self) -> Option<Position> {
        let (k, j) = self.waiting.pop_front()?;
        self.is_waiting[k as usize][j as usize] = false;
        Some((k, j))
    }
}

/// The best choices so far.
struct Solution {
    classes: Vec<Option<Best>>,
    /// Cost of each class's choice.
    weights: Vec<Picos>,
}

impl Solution {
    fn new(n_classes: usize) -> Solution {
        Solution {
            classes: vec![None; n_classes],
            weights: vec![Picos::ZERO; n_classes],
        }
    }

    fn get(&self, class: u32) -> Option<&Best> {
        self.classes[class as usize].as_ref()
    }

    /// Chooses candidate `j` of class `k` when it is cheaper than the present choice.
    fn improve(&mut self, k: u32, j: u32, node: &Candidate) -> bool {
        let Some((total, set)) = self.evaluate(node, k) else {
            return false;
        };
        let is_better = self.get(k).is_none_or(|b| total < b.total);
        if is_better {
            self.weights[k as usize] = node.cost;
            self.classes[k as usize] = Some(Best {
                total,
                set,
                node: j,
            });
        }
        is_better
    }

    /// Total time of a candidate with all that it needs, each class counted once. `None` when a child
    /// has no choice yet, when the candidate would need its own class, or when it cannot beat the
    /// present choice.
    fn evaluate(&self, node: &Candidate, class: u32) -> Option<(Picos, Box<[u64]>)> {
        let costliest = self.costliest_child(node, class)?;
        let base = costliest.and_then(|c| self.get(c));
        let mut total = node.cost + base.map_or(Picos::ZERO, |b| b.total);
        if self.get(class).is_some_and(|b| total >= b.total) {
            return None;
        }
        let mut set = base.map_or_else(|| self.empty_set(), |b| b.set.clone());
        for &child in node.children.iter().filter(|c| Some(**c) != costliest) {
            total += self.merge(&mut set, &self.get(child)?.set);
        }
        set[class as usize / 64] |= 1 << (class % 64);
        Some((total, set))
    }

    fn empty_set(&self) -> Box<[u64]> {
        vec![0; self.classes.len().div_ceil(64)].into()
    }

    /// The first child of the largest total, if there are children. `None` when one of them has no
    /// choice yet or needs `class`.
    fn costliest_child(&self, node: &Candidate, class: u32) -> Option<Option<u32>> {
        let mut costliest: Option<(u32, Picos)> = None;
        for &child in &node.children {
            let best = self.get(child)?;
            if best.contains(class) {
                return None;
            }
            if costliest.is_none_or(|(_, total)| best.total > total) {
                costliest = Some((child, best.total));
            }
        }
        Some(costliest.map(|(child, _)| child))
    }

    /// Adds the classes of `other` to `set`; the weight of the new ones.
    fn merge(&self, set: &mut [u64], other: &[u64]) -> Picos {
        let mut added = Picos::ZERO;
        for (i, (word, other)) in set.iter_mut().zip(other).enumerate() {
            let mut new = other & !*word;
            *word |= new;
            while new != 0 {
                added += self.weights[i * 64 + new.trailing_zeros() as usize];
                new &= new - 1;
            }
        }
        added
    }
}

impl Best {
    fn contains(&self, class: u32) -> bool {
        self.set[class as usize / 64] & (1 << (class % 64)) != 0
    }
}

/// Progress of a class in [`Choice::topological`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    OnStack,
    Emitted,
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
        let mut states: BTreeMap<Id, State> = BTreeMap::new();
        let mut stack = vec![(terms.eg.find(root), 0)];
        while let Some((class, next)) = stack.pop() {
            let node = self.checked_node(terms, class)?;
            let Some(child) = node.children.get(next) else {
                if states.insert(class, State::Emitted) != Some(State::Emitted) {
                    order.push((class, node));
                }
                continue;
            };
            states.entry(class).or_insert(State::OnStack);
            stack.push((class, next + 1));
            let child = terms.eg.find(*child);
            match states.get(&child) {
                Some(State::Emitted) => {}
                Some(State::OnStack) => return Err(Error::internal("extraction chose a cycle")),
                None => stack.push((child, 0)),
            }
        }
        Ok(order)
    }

    fn checked_node<'a>(&self, terms: &'a Terms, class: Id) -> Result<&'a ENode> {
        if self.index.contains_key(&class) {
            return Ok(self.node(terms, class));
        }
        let message = "extraction left an e-class without a choice";
        Err(Error::internal(message))
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
