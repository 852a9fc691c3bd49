//! Variables whose bytes a program uses where they are.

use super::{Buffer, Loc, Program, StepKind};
use std::collections::{BTreeMap, BTreeSet};

/// A variable with buffers at [`Loc::Variable`] or [`Loc::Assigned`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resident {
    /// Index into [`Program::variables`].
    pub(crate) variable: u32,
    /// Number of the partition with the buffers.
    pub(crate) partition: usize,
    /// Shape of the value before a run.
    pub(crate) read: Option<Vec<usize>>,
    /// Shape of the assigned value.
    pub(crate) assigned: Option<Vec<usize>>,
}

impl Program {
    /// The variables used where they are, in order.
    pub(crate) fn residents(&self) -> Vec<Resident> {
        let mut found: BTreeMap<u32, Resident> = BTreeMap::new();
        let partitions = self.partitions.iter().enumerate();
        let buffers = partitions.flat_map(|(i, p)| p.buffers.iter().map(move |b| (i, b)));
        for (partition, buffer) in buffers {
            let (Loc::Variable(variable) | Loc::Assigned(variable)) = buffer.loc else {
                continue;
            };
            let resident = found.entry(variable).or_insert(Resident {
                variable,
                partition,
                read: None,
                assigned: None,
            });
            let shape = match buffer.loc {
                Loc::Variable(_) => &mut resident.read,
                _ => &mut resident.assigned,
            };
            shape.get_or_insert_with(|| buffer.shape.clone());
        }
        found.into_values().collect()
    }
}

impl Program {
    /// False if no step assigns a variable. Branches and loops have variables of their own numbers: an assignment there counts as one of this.
    pub(crate) fn may_assign(&self, variable: u32) -> bool {
        let buffers = self.partitions.iter().flat_map(|p| &p.buffers);
        let mut places = buffers.map(|buffer| buffer.loc);
        let is_place = |loc| loc == Loc::Assigned(variable);
        let steps = self.partitions.iter().flat_map(|p| &p.steps);
        let mut kinds = steps.map(|step| &step.kind);
        places.any(is_place)
            || kinds.any(|kind| match kind {
                StepKind::AssignVariable { variable: own, .. } => *own == variable,
                kind => kind.sub_programs().iter().any(|body| body.assigns()),
            })
    }

    /// The buffers read from variables, or assigned to them, each with the variable's index; those of
    /// sub-programs are not among them.
    pub fn variable_buffers(&self) -> Vec<(u32, &Buffer)> {
        let mut found = Vec::new();
        for partition in &self.partitions {
            let places = partition.buffers.iter().filter_map(|b| match b.loc {
                Loc::Variable(i) | Loc::Assigned(i) => Some((i, b)),
                _ => None,
            });
            found.extend(places);
            let copied = partition.steps.iter().filter_map(|step| match step.kind {
                StepKind::ReadVariable { variable, dst: b }
                | StepKind::AssignVariable { variable, src: b } => {
                    Some((variable, &partition.buffers[b.0 as usize]))
                }
                _ => None,
            });
            found.extend(copied);
        }
        found
    }
}

/// Appends violations that concern variables: names and types, and where they are.
pub(super) fn check_variables(p: &Program, violations: &mut Vec<String>, depth: usize) {
    let mut names = BTreeSet::new();
    for (index, v) in p.variables.iter().enumerate() {
        let label = format!(
            "program {:?}: variable {:?}/{:?}",
            p.name, v.container, v.name
        );
        if !names.insert((&v.container, &v.name)) {
            violations.push(format!("{label}: declared twice"));
        }
        if v.initial.as_ref().is_some_and(|t| t.dtype() != v.dtype) {
            violations.push(format!("{label}: initial value has another dtype"));
        }
        let at = |loc: Loc| buffers_at(p, loc);
        let (read, assigned) = (
            at(Loc::Variable(index as u32)),
            at(Loc::Assigned(index as u32)),
        );
        let problems = check_places(p, index, [&read, &assigned], depth);
        violations.extend(problems.into_iter().map(|why| format!("{label}: {why}")));
    }
}

/// Buffers at a place, each with the number of its partition.
fn buffers_at(p: &Program, loc: Loc) -> Vec<(usize, &Buffer)> {
    let partitions = p.partitions.iter().enumerate();
    let all = partitions.flat_map(|(i, part)| part.buffers.iter().map(move |b| (i, b)));
    all.filter(|(_, b)| b.loc == loc).collect()
}

/// Violations of a variable whose buffers hold its value, and its next one.
fn check_places(
    p: &Program,
    index: usize,
    [read, assigned]: [&[(usize, &Buffer)]; 2],
    depth: usize,
) -> Vec<&'static str> {
    let variable = &p.variables[index];
    let mut problems = Vec::new();
    let mut expect = |good: bool, problem| {
        if !good {
            problems.push(problem);
        }
    };
    let all = || read.iter().chain(assigned);
    let partitions: BTreeSet<usize> = all().map(|&(i, _)| i).collect();
    // Kernels of a device with memory of its own may fail at any time.
    let mut all_partitions = p.partitions.iter();
    let is_on_host = all_partitions.all(|p| !p.device.kind.has_own_memory());
    let is_resident = !partitions.is_empty();
    expect(!is_resident || depth == 0, "used in place by a sub-program");
    expect(partitions.len() < 2, "used in place on two devices");
    expect(
        !variable.in_place || is_on_host,
        "assigned in place in a program with a device that has memory of its own",
    );
    expect(
        all().all(|(_, b)| b.dtype == variable.dtype),
        "a buffer of it has another dtype",
    );
    expect(
        same_shapes(read) && same_shapes(assigned),
        "buffers of it have different shapes",
    );
    expect(
        !is_resident || !is_copied(p, &variable.container, &variable.name),
        "used in place and copied",
    );
    let size = |buffers: &[(usize, &Buffer)]| buffers.first().map(|(_, b)| b.size_bytes());
    let may_be_in_place = !read.is_empty() && size(read) == size(assigned);
    expect(
        !variable.in_place || may_be_in_place,
        "assigned in place, but not read with the same size",
    );
    problems
}

fn same_shapes(buffers: &[(usize, &Buffer)]) -> bool {
    buffers.windows(2).all(|b| b[0].1.shape == b[1].1.shape)
}

/// True when a step, of a sub-program perhaps, copies a variable's value.
fn is_copied(p: &Program, container: &str, name: &str) -> bool {
    let is_it = |index: u32| {
        let variable = p.variables.get(index as usize);
        variable.is_some_and(|v| v.container == container && v.name == name)
    };
    let mut steps = p.partitions.iter().flat_map(|part| &part.steps);
    steps.any(|step| match &step.kind {
        StepKind::ReadVariable { variable, .. } | StepKind::AssignVariable { variable, .. } => {
            is_it(*variable)
        }
        kind => {
            let mut bodies = kind.sub_programs().into_iter();
            bodies.any(|body| is_copied(body, container, name))
        }
    })
}
