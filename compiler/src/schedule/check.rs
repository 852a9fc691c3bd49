//! Independent checker of schedules. It looks only at graph, needs and schedule.
//!
//! Invariants:
//! 1. every node but constants is one step; dependencies point to earlier steps;
//! 2. producers of operands, control edges and earlier conflicting uses of a variable come before a step through dependencies;
//! 3. inputs, constants and outputs are where they must be, and each output is written exactly once;
//! 4. arena buffers are aligned and inside the arena;
//! 5. of two buffers that share bytes, all uses of one come before the write of the other through dependencies: so no order that respects
//!    them can let one destroy the other. The exception is a permitted result in the place of a dying operand;
//! 6. every step comes before or after each collective through dependencies;
//! 7. variables that are used where they are have all their uses in the graph itself, reads first; one that is changed there is
//!    changed by a permitted result, after all other readers of its old value and after all that can fail.

use super::{Action, Needs, Place, Schedule, aligned, node_deps, residents, roots};
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, NodeId, Op, Output, ValueId};
use gristmill_runtime::tensor::ALIGN_BYTES;
use std::collections::BTreeMap;
use std::ops::Range;

/// All violations of the invariants, as an `Internal` error. O(n^2 / 64) in steps, plus pairs of
/// buffers that share bytes.
pub fn check(g: &Graph, needs: &Needs, schedule: &Schedule) -> Result<()> {
    let mut checker = Checker {
        g,
        needs,
        s: schedule,
        roots: roots(g),
        steps: BTreeMap::new(),
        before: Vec::new(),
        problems: Vec::new(),
    };
    checker.check_steps();
    if checker.problems.is_empty() {
        checker.before = ancestors(schedule);
        checker.check_order();
        checker.check_fixed();
        checker.check_barriers();
        checker.check_residents();
        checker.check_arena();
    }
    if checker.problems.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!(
        "schedule of graph {:?} is wrong:\n  {}",
        g.name,
        checker.problems.join("\n  ")
    )))
}

/// A schedule under check.
struct Checker<'a> {
    g: &'a Graph,
    needs: &'a Needs,
    s: &'a Schedule,
    /// See [`roots`].
    roots: Vec<ValueId>,
    /// Step of each node.
    steps: BTreeMap<NodeId, usize>,
    /// See [`ancestors`].
    before: Vec<Vec<u64>>,
    problems: Vec<String>,
}

/// `before[i]` has bit `j` when step `j` is done before step `i` starts, in every order.
fn ancestors(s: &Schedule) -> Vec<Vec<u64>> {
    let words = s.steps.len().div_ceil(64);
    let mut before: Vec<Vec<u64>> = Vec::with_capacity(s.steps.len());
    for step in &s.steps {
        let mut row = vec![0u64; words];
        for &d in &step.deps {
            row.iter_mut()
                .zip(&before[d as usize])
                .for_each(|(r, b)| *r |= b);
            row[d as usize / 64] |= 1 << (d % 64);
        }
        before.push(row);
    }
    before
}

/// A buffer in the arena: its writer, and all steps that touch it.
struct Buffer {
    name: String,
    bytes: Range<usize>,
    writer: usize,
    users: Vec<usize>,
    /// True where the bytes are needed in later runs.
    is_kept: bool,
}

impl Buffer {
    fn new(name: String, at: usize, size: usize, writer: usize) -> Buffer {
        Buffer {
            name,
            bytes: at..at.saturating_add(size),
            writer,
            users: vec![writer],
            is_kept: false,
        }
    }
}

impl Checker<'_> {
    fn problem(&mut self, text: String) {
        self.problems.push(text);
    }

    /// Fills [`Checker::steps`].
    fn check_steps(&mut self) {
        let (g, s) = (self.g, self.s);
        for (i, step) in s.steps.iter().enumerate() {
            if let Some(d) = step.deps.iter().find(|&&d| d as usize >= i) {
                self.problem(format!(
                    "step {i} depends on step {d}, which is not earlier"
                ));
            }
            if let Action::Node(id) = step.action
                && (id.0 as usize >= g.n_nodes() || self.steps.insert(id, i).is_some())
            {
                self.problem(format!(
                    "step {i}: node {} is not there or is a step already",
                    id.0
                ));
            }
        }
        for (id, n) in g.nodes() {
            if matches!(n.op, Op::Constant { .. }) == self.steps.contains_key(&id) {
                self.problem(format!(
                    "node {} ({}) is a step although a constant, or is none",
                    id.0,
                    n.op.name()
                ));
            }
        }
        let (n_places, n_values) = (s.places.len(), g.n_values());
        if n_places != n_values {
            self.problem(format!("{n_places} places for {n_values} values"));
        }
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
        self.before[b][a / 64] & (1 << (a % 64)) != 0
    }

    fn check_order(&mut self) {
        let deps = node_deps(self.g);
        let steps = &self.steps;
        let pairs = steps.iter().flat_map(|(id, &step)| {
            let before = deps[id.0 as usize].iter();
            before.map(move |d| (steps[d], step))
        });
        let unordered: Vec<_> = pairs
            .filter(|&(d, step)| !self.is_before(d, step))
            .collect();
        for (d, step) in unordered {
            self.problem(format!(
                "step {step} does not come after step {d}, which it needs"
            ));
        }
        for (i, step) in self.s.steps.iter().enumerate() {
            if let Action::CopyToOutput { value, .. } = step.action
                && let Def::Node(d, _) = self.g.value(value).def
                && self.steps.get(&d).is_some_and(|&d| !self.is_before(d, i))
            {
                self.problem(format!(
                    "step {i} copies value {} before it is made",
                    value.0
                ));
            }
        }
    }

    fn check_barriers(&mut self) {
        let (g, s) = (self.g, self.s);
        let all = 0..s.steps.len();
        let is_collective = |i: &usize| super::is_collective(g, s.steps[*i].action);
        for at in all.clone().filter(is_collective) {
            for i in all.clone().filter(|&i| i != at) {
                if !self.is_before(i.min(at), i.max(at)) {
                    self.problem(format!("step {i} may pass collective {at}"));
                }
            }
        }
    }

    fn check_fixed(&mut self) {
        let mut n_writes = vec![0usize; self.g.outputs.len()];
        for (v, &place) in self.s.places.iter().enumerate() {
            self.check_place(v, place);
            if let Place::Output(i) = place {
                let is_root = self.roots[v].0 as usize == v;
                n_writes[i as usize % self.g.outputs.len().max(1)] += usize::from(is_root);
            }
        }
        for step in &self.s.steps {
            let Action::CopyToOutput { value, output } = step.action else {
                continue;
            };
            match self.g.outputs.get(output as usize) {
                Some(o) if o.value == value => n_writes[output as usize] += 1,
                _ => self.problem(format!("output {output} is not value {}", value.0)),
            }
        }
        for (i, n) in n_writes.into_iter().enumerate().filter(|(_, n)| *n != 1) {
            self.problem(format!("output {i} is written {n} times"));
        }
    }

    fn check_place(&mut self, v: usize, place: Place) {
        let root = self.roots[v];
        if self.s.places[root.0 as usize] != place {
            self.problem(format!(
                "value {v} is not where value {} is, whose bytes it has",
                root.0
            ));
        }
        let expected = self.expected_place(root);
        let is_assigned = |i: u32| {
            self.assigned(i)
                .is_some_and(|v| self.roots[v.0 as usize] == root)
        };
        let is_root = |o: &Output| self.roots[o.value.0 as usize] == root;
        let fits = match place {
            Place::Arena(_) => expected.is_none(),
            Place::Output(i) => {
                expected.is_none() && self.g.outputs.get(i as usize).is_some_and(is_root)
            }
            Place::Assigned(i) => expected.is_none() && is_assigned(i),
            fixed => expected == Some(fixed),
        };
        if !fits {
            self.problem(format!("value {v} cannot be at {place:?}"));
        }
    }

    /// The place of an input or a constant; `None` for other values.
    fn expected_place(&self, root: ValueId) -> Option<Place> {
        let input = self.g.inputs.iter().position(|&i| i == root);
        let constant = match (self.g.value(root).def, self.g.def_node(root).map(|n| &n.op)) {
            (Def::Node(id, _), Some(Op::Constant { .. })) => Some(Place::Constant(id)),
            _ => None,
        };
        let input = input.map(|i| Place::Input(i as u32));
        input.or(constant).or_else(|| self.old_value(root))
    }

    /// The place of a value that is read from a variable where it is.
    fn old_value(&self, v: ValueId) -> Option<Place> {
        let Def::Node(id, _) = self.g.value(v).def else {
            return None;
        };
        let mut residents = (0..).zip(&self.s.residents);
        let found = residents.find(|(_, r)| r.reads.contains(&id))?;
        Some(Place::Variable(found.0))
    }

    /// The value that a variable is assigned where it is.
    fn assigned(&self, i: u32) -> Option<ValueId> {
        let id = self.s.residents.get(i as usize)?.assignment?;
        Some(self.g.node(id).inputs[0])
    }

    /// Variables that are used where they are have all their uses in the graph itself, reads first. Their next values are
    /// written over old ones where the kernel permits it, after all who read these, and when nothing can fail any more.
    fn check_residents(&mut self) {
        let expected = match self.needs.has_residents {
            true => residents::residents(self.g),
            false => Vec::new(),
        };
        if self.s.residents != expected {
            self.problem("other variables are used where they are".to_owned());
        }
        for &i in &self.s.in_place {
            if let Err(why) = self.update_is_safe(i) {
                self.problem(format!("variable {i} is changed where it is: {why}"));
            }
        }
    }

    fn update_is_safe(&self, i: u32) -> std::result::Result<(), String> {
        let id = self.updater(i).ok_or("the kernel does not permit it")?;
        let writer = self.steps[&id];
        let late = self.steps.iter().find(|&(&other, &step)| {
            step != writer && self.is_due_before_update(other, i) && !self.is_before(step, writer)
        });
        match late {
            Some((_, step)) => Err(format!(
                "step {step} may come after step {writer}, which does"
            )),
            None if self.is_shown(i) => Err("the old value is an output".to_owned()),
            None => Ok(()),
        }
    }

    /// The node whose kernel may write the next value of a variable over the old one.
    fn updater(&self, i: u32) -> Option<NodeId> {
        let root = self.roots[self.assigned(i)?.0 as usize];
        let Def::Node(id, result) = self.g.value(root).def else {
            return None;
        };
        let inputs = &self.g.node(id).inputs;
        let pairs = self.needs.in_place.get(&id)?.iter();
        let mut operands = pairs
            .filter(|(_, r)| *r == result)
            .map(|(x, _)| inputs[*x as usize]);
        let n_old = inputs.iter().filter(|&&v| self.is_old(v, i)).count();
        let may_fail = residents::may_fail(self.g, self.g.node(id));
        let may = self.needs.updates_in_place && n_old == 1 && !may_fail;
        let bytes = |v: ValueId| self.g.ty(v).size_bytes();
        let fits = |v: ValueId| self.is_old(v, i) && bytes(v) == bytes(root);
        (may && operands.any(fits)).then_some(id)
    }

    fn is_shown(&self, i: u32) -> bool {
        let mut outputs = self.g.outputs.iter();
        outputs.any(|o| self.is_old(o.value, i))
    }

    fn is_old(&self, v: ValueId, i: u32) -> bool {
        self.s.places[v.0 as usize] == Place::Variable(i)
    }

    /// True for a node that reads the old value of a variable, and for one that may fail.
    fn is_due_before_update(&self, id: NodeId, i: u32) -> bool {
        let node = self.g.node(id);
        let uses = |r: &residents::Resident| r.reads.contains(&id) || r.assignment == Some(id);
        let is_resident = self.s.residents.iter().any(uses);
        let fails = residents::may_fail(self.g, node) && !is_resident;
        fails || node.inputs.iter().any(|&v| self.is_old(v, i))
    }

    fn check_arena(&mut self) {
        let mut buffers = self.value_buffers();
        buffers.extend(self.scratch_buffers());
        buffers.retain(|b| !b.bytes.is_empty());
        let arena_bytes = self.s.arena_bytes;
        for b in &buffers {
            if b.bytes.start % ALIGN_BYTES != 0 || b.bytes.end > aligned(arena_bytes) {
                self.problem(format!(
                    "{} at {:?} is not aligned or not inside the arena of {arena_bytes} bytes",
                    b.name, b.bytes
                ));
            }
        }
        buffers.sort_by_key(|b| b.bytes.start);
        for (i, a) in buffers.iter().enumerate() {
            let others = buffers[i + 1..].iter();
            for b in others.take_while(|b| b.bytes.start < a.bytes.end) {
                let shares = self.may_share(a, b) || self.may_share(b, a);
                if a.is_kept || b.is_kept || !shares {
                    self.problem(format!(
                        "{} and {} share bytes and can be alive together",
                        a.name, b.name
                    ));
                }
            }
        }
    }

    /// The buffers of values in the arena.
    fn value_buffers(&self) -> Vec<Buffer> {
        let mut buffers: BTreeMap<ValueId, Buffer> = BTreeMap::new();
        for (id, &step) in &self.steps {
            for &v in &self.g.node(*id).outputs {
                if let Place::Arena(offset) = self.s.places[v.0 as usize]
                    && self.roots[v.0 as usize] == v
                {
                    let size = self.g.ty(v).size_bytes().unwrap_or(usize::MAX);
                    let name = format!("value {}", v.0);
                    buffers.insert(v, Buffer::new(name, offset, size, step));
                }
            }
        }
        for (id, &step) in &self.steps {
            for v in &self.g.node(*id).inputs {
                if let Some(b) = buffers.get_mut(&self.roots[v.0 as usize]) {
                    b.users.push(step);
                }
            }
        }
        buffers.into_values().collect()
    }

    fn scratch_buffers(&mut self) -> Vec<Buffer> {
        let mut all = Vec::new();
        for (id, sizes) in &self.needs.scratch {
            let offsets = self.s.scratch.get(id).filter(|o| o.len() == sizes.len());
            let (Some(&step), Some(offsets)) = (self.steps.get(id), offsets) else {
                self.problem(format!("scratch of node {} has no place", id.0));
                continue;
            };
            let name = format!("scratch of node {}", id.0);
            let kept = self.needs.kept.get(id);
            let buffers = sizes.iter().zip(offsets).enumerate();
            all.extend(buffers.map(|(i, (&size, &at))| Buffer {
                is_kept: kept.is_some_and(|kept| kept.contains(&i)),
                ..Buffer::new(name.clone(), at, size, step)
            }));
        }
        all
    }

    /// True when no order lets `new` destroy bytes of `old` that are still needed.
    fn may_share(&self, old: &Buffer, new: &Buffer) -> bool {
        let mut users = old.users.iter();
        users.all(|&u| self.is_before(u, new.writer)) || self.overwrites(old, new)
    }

    /// True when `new` may take exactly the bytes of `old`: its writer is permitted to overwrite that
    /// operand, and all other uses of `old` come before.
    fn overwrites(&self, old: &Buffer, new: &Buffer) -> bool {
        let Action::Node(id) = self.s.steps[new.writer].action else {
            return false;
        };
        let node = self.g.node(id);
        let start = Place::Arena(new.bytes.start);
        let is_here = |v: ValueId| self.s.places[v.0 as usize] == start;
        let n_here = node.inputs.iter().filter(|&&v| is_here(v)).count();
        let is_permitted = |&(operand, result): &(u32, u32)| {
            let (operand, result) = (node.inputs[operand as usize], node.outputs[result as usize]);
            is_here(operand) && is_here(result) && n_here == 1
        };
        let mut pairs = self.needs.in_place.get(&id).into_iter().flatten();
        let mut users = old.users.iter();
        pairs.any(is_permitted)
            && old.bytes == new.bytes
            && old.writer != new.writer
            && users.all(|&u| u == new.writer || self.is_before(u, new.writer))
    }
}
