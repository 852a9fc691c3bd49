//! Independent checker of schedules. It looks only at graph, needs and schedule.
//!
//! Invariants:
//! 1. every node but constants is one step; dependencies point to earlier steps;
//! 2. producers of operands, control edges and earlier conflicting uses of a variable come before a step through dependencies;
//! 3. inputs, constants and outputs are where they must be, and each output is written exactly once;
//! 4. arena buffers are aligned and inside the arena;
//! 5. of two buffers that share bytes, all uses of one come before the write of the other through dependencies: so no order that respects
//!    them can let one destroy the other. The exception is a permitted result in the place of a dying operand;
//! 6. every step comes before or after each collective through dependencies.

use super::{Action, Needs, Place, Schedule, aligned, node_deps, roots};
use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, Op, ValueId};
use gristmill_runtime::tensor::ALIGN_BYTES;
use std::collections::BTreeMap;
use std::ops::Range;

/// All violations of the invariants, as an `Internal` error. O(n^2 / 64) in steps, plus pairs of buffers that share bytes.
pub fn check(g: &Graph, needs: &Needs, schedule: &Schedule) -> Result<()> {
    let mut problems = Vec::new();
    if let Some(steps) = check_steps(g, schedule, &mut problems) {
        let before = ancestors(schedule);
        check_order(g, schedule, &steps, &before, &mut problems);
        check_fixed(g, schedule, &mut problems);
        check_barriers(g, schedule, &before, &mut problems);
        check_arena(g, needs, schedule, &steps, &before, &mut problems);
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!(
        "schedule of graph {:?} is wrong:\n  {}",
        g.name,
        problems.join("\n  ")
    )))
}

/// Step of each node; `None` when steps are missing or doubled.
fn check_steps(
    g: &Graph,
    s: &Schedule,
    problems: &mut Vec<String>,
) -> Option<BTreeMap<NodeId, usize>> {
    let mut steps = BTreeMap::new();
    for (i, step) in s.steps.iter().enumerate() {
        if let Some(d) = step.deps.iter().find(|&&d| d as usize >= i) {
            problems.push(format!(
                "step {i} depends on step {d}, which is not earlier"
            ));
        }
        if let Action::Node(id) = step.action
            && (id.0 as usize >= g.n_nodes() || steps.insert(id, i).is_some())
        {
            problems.push(format!(
                "step {i}: node {} is not there or is a step already",
                id.0
            ));
        }
    }
    let missing = g
        .nodes()
        .filter(|(id, n)| matches!(n.op, Op::Constant { .. }) == steps.contains_key(id));
    problems.extend(missing.map(|(id, n)| {
        format!(
            "node {} ({}) is a step although a constant, or is none",
            id.0,
            n.op.name()
        )
    }));
    if s.places.len() != g.n_values() {
        problems.push(format!(
            "{} places for {} values",
            s.places.len(),
            g.n_values()
        ));
    }
    problems.is_empty().then_some(steps)
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

fn is_before(before: &[Vec<u64>], a: usize, b: usize) -> bool {
    before[b][a / 64] & (1 << (a % 64)) != 0
}

fn check_order(
    g: &Graph,
    s: &Schedule,
    steps: &BTreeMap<NodeId, usize>,
    before: &[Vec<u64>],
    problems: &mut Vec<String>,
) {
    let deps = node_deps(g);
    for (id, &step) in steps {
        for d in &deps[id.0 as usize] {
            if !is_before(before, steps[d], step) {
                problems.push(format!(
                    "step {step} does not come after step {}, which it needs",
                    steps[d]
                ));
            }
        }
    }
    for (i, step) in s.steps.iter().enumerate() {
        let Action::CopyToOutput { value, .. } = step.action else {
            continue;
        };
        if let crate::ir::Def::Node(d, _) = g.value(value).def
            && steps.get(&d).is_some_and(|&d| !is_before(before, d, i))
        {
            problems.push(format!(
                "step {i} copies value {} before it is made",
                value.0
            ));
        }
    }
}

fn check_barriers(g: &Graph, s: &Schedule, before: &[Vec<u64>], problems: &mut Vec<String>) {
    for at in (0..s.steps.len()).filter(|&i| super::is_collective(g, s.steps[i].action)) {
        let passes = |i: &usize| !is_before(before, *i.min(&at), *i.max(&at));
        problems.extend(
            (0..s.steps.len())
                .filter(|&i| i != at)
                .filter(passes)
                .map(|i| format!("step {i} may pass collective {at}")),
        );
    }
}

fn check_fixed(g: &Graph, s: &Schedule, problems: &mut Vec<String>) {
    let roots = roots(g);
    let mut written = vec![0usize; g.outputs.len()];
    for (v, &place) in s.places.iter().enumerate() {
        let root = roots[v];
        if s.places[root.0 as usize] != place {
            problems.push(format!(
                "value {v} is not where value {} is, whose bytes it has",
                root.0
            ));
        }
        let input = g
            .inputs
            .iter()
            .position(|&i| i == root)
            .map(|i| Place::Input(i as u32));
        let constant = match (g.value(root).def, g.def_node(root).map(|n| &n.op)) {
            (crate::ir::Def::Node(id, _), Some(Op::Constant { .. })) => Some(Place::Constant(id)),
            _ => None,
        };
        let expected = input.or(constant);
        let fits = match place {
            Place::Arena(_) => expected.is_none(),
            Place::Output(i) => {
                expected.is_none()
                    && g.outputs
                        .get(i as usize)
                        .is_some_and(|o| roots[o.value.0 as usize] == root)
            }
            fixed => expected == Some(fixed),
        };
        if !fits {
            problems.push(format!("value {v} cannot be at {place:?}"));
        }
        if let Place::Output(i) = place {
            written[i as usize % g.outputs.len().max(1)] += usize::from(root.0 as usize == v);
        }
    }
    for step in &s.steps {
        if let Action::CopyToOutput { value, output } = step.action {
            let fits = g
                .outputs
                .get(output as usize)
                .is_some_and(|o| o.value == value);
            match fits {
                true => written[output as usize] += 1,
                false => problems.push(format!("output {output} is not value {}", value.0)),
            }
        }
    }
    problems.extend(
        written
            .iter()
            .enumerate()
            .filter(|(_, n)| **n != 1)
            .map(|(i, n)| format!("output {i} is written {n} times")),
    );
}

/// A buffer in the arena: who writes it, who else touches it.
struct Buffer {
    name: String,
    bytes: Range<usize>,
    writer: usize,
    users: Vec<usize>,
}

fn check_arena(
    g: &Graph,
    needs: &Needs,
    s: &Schedule,
    steps: &BTreeMap<NodeId, usize>,
    before: &[Vec<u64>],
    problems: &mut Vec<String>,
) {
    let mut buffers = arena_buffers(g, needs, s, steps, problems);
    buffers.retain(|b| !b.bytes.is_empty());
    for b in &buffers {
        if b.bytes.start % ALIGN_BYTES != 0 || b.bytes.end > aligned(s.arena_bytes) {
            problems.push(format!(
                "{} at {:?} is not aligned or not inside the arena of {} bytes",
                b.name, b.bytes, s.arena_bytes
            ));
        }
    }
    buffers.sort_by_key(|b| b.bytes.start);
    let all_before =
        |a: &Buffer, writer: usize| a.users.iter().all(|&u| is_before(before, u, writer));
    for (i, a) in buffers.iter().enumerate() {
        for b in buffers[i + 1..]
            .iter()
            .take_while(|b| b.bytes.start < a.bytes.end)
        {
            let apart = all_before(a, b.writer) || all_before(b, a.writer);
            let in_place =
                overwrites(g, needs, s, a, b, before) || overwrites(g, needs, s, b, a, before);
            if !apart && !in_place {
                problems.push(format!(
                    "{} and {} share bytes and can be alive together",
                    a.name, b.name
                ));
            }
        }
    }
}

fn arena_buffers(
    g: &Graph,
    needs: &Needs,
    s: &Schedule,
    steps: &BTreeMap<NodeId, usize>,
    problems: &mut Vec<String>,
) -> Vec<Buffer> {
    let roots = roots(g);
    let mut buffers: BTreeMap<ValueId, Buffer> = BTreeMap::new();
    for (id, &step) in steps {
        for &v in &g.node(*id).outputs {
            let Place::Arena(offset) = s.places[v.0 as usize] else {
                continue;
            };
            if roots[v.0 as usize] == v {
                let size = g.ty(v).size_bytes().unwrap_or(usize::MAX);
                let bytes = offset..offset.saturating_add(size);
                buffers.insert(
                    v,
                    Buffer {
                        name: format!("value {}", v.0),
                        bytes,
                        writer: step,
                        users: vec![step],
                    },
                );
            }
        }
    }
    for (id, &step) in steps {
        for v in &g.node(*id).inputs {
            if let Some(b) = buffers.get_mut(&roots[v.0 as usize]) {
                b.users.push(step);
            }
        }
    }
    let mut all: Vec<Buffer> = buffers.into_values().collect();
    for (id, sizes) in &needs.scratch {
        let (Some(&step), Some(offsets)) = (
            steps.get(id),
            s.scratch.get(id).filter(|o| o.len() == sizes.len()),
        ) else {
            problems.push(format!("scratch of node {} has no place", id.0));
            continue;
        };
        all.extend(sizes.iter().zip(offsets).map(|(&size, &at)| Buffer {
            name: format!("scratch of node {}", id.0),
            bytes: at..at.saturating_add(size),
            writer: step,
            users: vec![step],
        }));
    }
    all
}

/// True when `new` may take exactly the bytes of `old`: its writer is permitted to overwrite that
/// operand, and all other uses of `old` come before.
fn overwrites(
    g: &Graph,
    needs: &Needs,
    s: &Schedule,
    old: &Buffer,
    new: &Buffer,
    before: &[Vec<u64>],
) -> bool {
    let Action::Node(id) = s.steps[new.writer].action else {
        return false;
    };
    let node = g.node(id);
    let at = |v: ValueId| matches!(s.places[v.0 as usize], Place::Arena(o) if o == new.bytes.start);
    let permitted = needs
        .in_place
        .get(&id)
        .into_iter()
        .flatten()
        .any(|&(operand, result)| {
            let (operand, result) = (node.inputs[operand as usize], node.outputs[result as usize]);
            at(operand) && at(result) && node.inputs.iter().filter(|&&v| at(v)).count() == 1
        });
    let others_before = old
        .users
        .iter()
        .all(|&u| u == new.writer || is_before(before, u, new.writer));
    permitted && old.bytes == new.bytes && old.writer != new.writer && others_before
}
