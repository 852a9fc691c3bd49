//! Structural check of a program, independent of the passes that made it: it looks at the program only and is simpler than they are.
//!
//! Invariants:
//! - sizes of inputs, outputs, variables and buffers fit the address space; devices, variables and keys are unique;
//! - every id is in range; a step's dependencies have smaller ids; arena buffers are aligned and lie within the arena;
//! - a buffer at an input, output or constant has its size, and the dtype of the input or output;
//! - constants, inputs and the old values of variables are never written; every output and every new value of a
//!   variable is written, and named by one partition only;
//! - a variable that is used in place is used so by one partition of the host and copied by no step; it is assigned in place only with the
//!   size that is read, and only where all partitions are in the memory of the host;
//! - kernels are for the kind of their device; a GPU's name code and arguments that are there, and tensor maps lie within their buffers;
//! - descriptors of kernels that work by blocks are constants, make sense, and are used for nothing else;
//! - operands have the dtypes and sizes that their step kind asks for, and overlap only where it allows;
//! - every `Send` has one `Recv` with the same key, size and dtype, on the devices that the key names, and the other way round; the other
//!   end is elsewhere if its device is one of another task;
//! - every rank of an `AllReduce` is there once, on the device that all ranks name for it, with the same kind, size and dtype; each step of a
//!   partition comes before or after each of its ranks by dependencies;
//! - the steps of all partitions, with an edge from each `Send` to its `Recv` and all ranks of an `AllReduce` as one, have no cycle (so that a run
//!   cannot hang);
//! - memory is written before it is read, and any two steps that touch the same bytes, one of them writing, are ordered by dependencies;
//! - sub-programs have one partition, no transfers, the operands' types, and a depth of at most [`MAX_NESTING`].

use super::collectives::{check_collectives, ranks};
use super::hazards::{check_hazards, overlap};
use super::state::check_variables;
use super::{
    AllReduce, Buffer, BufferId, If, IoSpec, Kernel, Key, Loc, Loop, MAX_NESTING, Partition,
    Program, Scanned, Step, StepId, StepKind, TripCount, invariant_steps,
};
use crate::device::DeviceName;
use crate::dtype::DType;
use crate::error::Error;
use crate::gpu::GpuParam;
use crate::tensor::{ALIGN_BYTES, checked_size_bytes};
use std::collections::{BTreeMap, BTreeSet};

impl Program {
    /// Every violation of the program's invariants (listed in the source of this module), each as one line; empty for a good program.
    pub fn validate(&self) -> Vec<String> {
        let mut violations = Vec::new();
        check_program(self, &mut violations, 0);
        check_collectives(self, &mut violations);
        check_transfers(self, &mut violations);
        violations
    }

    /// Errors with `Internal` if there is a violation. Executors and images take no program that fails.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let violations = self.validate();
        if violations.is_empty() {
            return Ok(());
        }
        let (name, all) = (&self.name, violations.join("\n  "));
        Err(Error::internal(format!(
            "program {name:?} is malformed:\n  {all}"
        )))
    }
}

impl StepKind {
    /// Buffers that the step reads, and buffers that it writes.
    pub fn accesses(&self) -> (Vec<BufferId>, Vec<BufferId>) {
        match self {
            StepKind::Kernel {
                args, n_outputs, ..
            } => {
                let (reads, writes) = args.split_at(args.len().saturating_sub(*n_outputs as usize));
                (reads.to_vec(), writes.to_vec())
            }
            StepKind::Send { buffer, .. } => (vec![*buffer], vec![]),
            StepKind::Recv { buffer, .. } => (vec![], vec![*buffer]),
            StepKind::Copy { src, dst } => (vec![*src], vec![*dst]),
            StepKind::AllReduce(s) => (vec![s.src], vec![s.dst]),
            StepKind::If(s) => {
                let reads = std::iter::once(s.cond).chain(s.args.iter().copied());
                (reads.collect(), s.results.clone())
            }
            StepKind::Loop(s) => (loop_reads(s), loop_writes(s)),
            StepKind::ReadVariable { dst, .. } => (vec![], vec![*dst]),
            StepKind::AssignVariable { src, .. } => (vec![*src], vec![]),
        }
    }
}

fn loop_reads(s: &Loop) -> Vec<BufferId> {
    let mut reads: Vec<BufferId> = match s.trips {
        TripCount::Fixed(_) => vec![],
        TripCount::While {
            max_trips,
            condition,
        } => max_trips.into_iter().chain(condition).collect(),
    };
    reads.extend(s.carried.iter().map(|c| c.init));
    reads.extend(s.scan_inputs.iter().map(|x| x.buffer));
    reads.extend(&s.args);
    reads
}

fn loop_writes(s: &Loop) -> Vec<BufferId> {
    let carried = s.carried.iter().map(|c| c.result);
    carried
        .chain(s.scan_outputs.iter().map(|x| x.buffer))
        .collect()
}

fn check_program(p: &Program, violations: &mut Vec<String>, depth: usize) {
    if depth > MAX_NESTING {
        violations.push(format!(
            "program {:?}: nested deeper than {MAX_NESTING}",
            p.name
        ));
        return;
    }
    for spec in p.inputs.iter().chain(&p.outputs) {
        if let Err(e) = checked_size_bytes(spec.dtype, &spec.shape) {
            violations.push(format!("program {:?}: {:?}: {e}", p.name, spec.name));
        }
    }
    check_variables(p, violations, depth);
    check_outputs(p, violations);
    check_assigned(p, violations);
    let mut devices = BTreeSet::new();
    for partition in &p.partitions {
        if !devices.insert(&partition.device) {
            violations.push(format!(
                "program {:?}: two partitions on {}",
                p.name, partition.device
            ));
        }
        check_partition(p, partition, violations, depth);
    }
}

/// Every new value of a variable is written.
fn check_assigned(p: &Program, violations: &mut Vec<String>) {
    let mut assigned = BTreeSet::new();
    let mut written = BTreeSet::new();
    let index = |b: &Buffer| match b.loc {
        Loc::Assigned(i) if b.size_bytes() > 0 => Some(i),
        _ => None,
    };
    for partition in &p.partitions {
        assigned.extend(partition.buffers.iter().filter_map(index));
        let ids = partition.steps.iter().flat_map(|s| s.kind.accesses().1);
        let buffers = ids.filter_map(|id| partition.buffers.get(id.0 as usize));
        written.extend(buffers.filter_map(index));
    }
    for i in assigned.difference(&written) {
        let message = format!(
            "program {:?}: variable {i} never gets its new value",
            p.name
        );
        violations.push(message);
    }
}

/// Every output is written, by the only partition that names it.
fn check_outputs(p: &Program, violations: &mut Vec<String>) {
    let mut naming = vec![0; p.outputs.len()];
    let mut is_written = vec![false; p.outputs.len()];
    for partition in &p.partitions {
        for i in outputs_among(partition.buffers.iter()) {
            naming.get_mut(i).into_iter().for_each(|n| *n += 1);
        }
        for step in &partition.steps {
            let written = step.kind.accesses().1;
            let written = written
                .iter()
                .map(|id| partition.buffers.get(id.0 as usize));
            for i in outputs_among(written.flatten()) {
                is_written.get_mut(i).into_iter().for_each(|w| *w = true);
            }
        }
    }
    for (i, spec) in p.outputs.iter().enumerate() {
        let label = || format!("program {:?}: output {:?}", p.name, spec.name);
        if naming[i] > 1 {
            violations.push(format!("{} is named by {} partitions", label(), naming[i]));
        }
        if !is_written[i] && !spec.shape.contains(&0) {
            violations.push(format!("{} is never written", label()));
        }
    }
}

/// The outputs that are at some of these buffers, each once.
fn outputs_among<'b>(buffers: impl Iterator<Item = &'b Buffer>) -> BTreeSet<usize> {
    let output = |b: &Buffer| match b.loc {
        Loc::Output(i) => Some(i as usize),
        _ => None,
    };
    buffers.filter_map(output).collect()
}

fn check_partition(p: &Program, partition: &Partition, violations: &mut Vec<String>, depth: usize) {
    let n_before = violations.len();
    for (i, buffer) in partition.buffers.iter().enumerate() {
        if let Err(problem) = check_buffer(p, partition, buffer) {
            violations.push(format!(
                "{}: buffer {i} {:?}: {problem}",
                partition.device, buffer.name
            ));
        }
    }
    for (i, step) in partition.steps.iter().enumerate() {
        let mut check = StepCheck {
            p,
            partition,
            depth,
            problems: Vec::new(),
            nested: Vec::new(),
        };
        check.step(i, step);
        let nested = check.nested.iter().map(|p| format!("in sub-program: {p}"));
        let problems = check.problems.iter().cloned().chain(nested);
        let label = |problem| {
            format!(
                "{}: step {i} ({}): {problem}",
                partition.device, step.origin
            )
        };
        violations.extend(problems.map(label));
    }
    if violations.len() == n_before {
        check_hazards(partition, &p.variables, violations);
        let blocks = partition.check_blocks();
        let label = |problem| format!("{}: {problem}", partition.device);
        violations.extend(blocks.err().map(label));
    }
}

fn check_buffer(p: &Program, partition: &Partition, b: &Buffer) -> Result<(), String> {
    let size = checked_size_bytes(b.dtype, &b.shape).map_err(|e| e.to_string())?;
    let like = |specs: &[IoSpec], i: u32| {
        let spec = specs
            .get(i as usize)
            .ok_or_else(|| format!("{:?} does not exist", b.loc))?;
        if spec.dtype != b.dtype || checked_size_bytes(spec.dtype, &spec.shape).ok() != Some(size) {
            return Err(format!(
                "{}{:?} at {:?}, which is {}{:?}",
                b.dtype, b.shape, b.loc, spec.dtype, spec.shape
            ));
        }
        Ok(())
    };
    match b.loc {
        Loc::Input(i) => like(&p.inputs, i),
        Loc::Output(i) => like(&p.outputs, i),
        Loc::Constant(c) => check_constant(partition, c, size),
        Loc::Variable(i) | Loc::Assigned(i) => match p.variables.get(i as usize) {
            Some(_) => Ok(()),
            None => Err(format!("{:?} does not exist", b.loc)),
        },
        Loc::Arena { offset_bytes } if offset_bytes % ALIGN_BYTES != 0 => Err(format!(
            "offset {offset_bytes} is not a multiple of {ALIGN_BYTES}"
        )),
        Loc::Arena { offset_bytes } => match offset_bytes.checked_add(size) {
            Some(end) if end <= partition.arena_bytes => Ok(()),
            _ => Err(format!(
                "{size} bytes at {offset_bytes} leave the arena of {} bytes",
                partition.arena_bytes
            )),
        },
    }
}

fn check_constant(partition: &Partition, c: u32, size: usize) -> Result<(), String> {
    let constant = partition.constants.get(c as usize);
    let constant = constant.ok_or_else(|| format!("{:?} does not exist", Loc::Constant(c)))?;
    match constant.size_bytes() {
        held if held == size => Ok(()),
        held => Err(format!("{size} bytes at a constant of {held} bytes")),
    }
}

/// Collects violations of one step.
struct StepCheck<'a> {
    p: &'a Program,
    partition: &'a Partition,
    depth: usize,
    problems: Vec<String>,
    /// Violations inside sub-programs.
    nested: Vec<String>,
}

impl StepCheck<'_> {
    fn step(&mut self, index: usize, step: &Step) {
        if let Some(dep) = step.deps.iter().find(|d| d.0 as usize >= index) {
            self.problem(format!(
                "depends on step {}, which does not come before it",
                dep.0
            ));
        }
        let (reads, writes) = step.kind.accesses();
        if let Some(id) = reads
            .iter()
            .chain(&writes)
            .find(|id| id.0 as usize >= self.partition.buffers.len())
        {
            self.problem(format!("buffer {} does not exist", id.0));
            return;
        }
        for &id in &writes {
            if matches!(
                self.buffer(id).loc,
                Loc::Constant(_) | Loc::Input(_) | Loc::Variable(_)
            ) {
                self.problem(format!(
                    "writes {:?}, which is at {:?}",
                    self.buffer(id).name,
                    self.buffer(id).loc
                ));
            }
        }
        self.overlaps(&step.kind, &reads, &writes);
        self.operands(&step.kind);
    }

    fn problem(&mut self, text: String) {
        self.problems.push(text);
    }

    fn expect(&mut self, good: bool, text: impl FnOnce() -> String) {
        if !good {
            self.problem(text());
        }
    }

    fn buffer(&self, id: BufferId) -> &Buffer {
        &self.partition.buffers[id.0 as usize]
    }

    /// Outputs lie apart from each other and from inputs; kernels, but those of libraries, and copies may also work exactly in place.
    fn overlaps(&mut self, kind: &StepKind, reads: &[BufferId], writes: &[BufferId]) {
        let may_be_in_place = match kind {
            StepKind::Kernel { kernel, .. } => !matches!(
                self.partition.kernels.get(kernel.0 as usize),
                Some(Kernel::Product(_))
            ),
            kind => matches!(kind, StepKind::Copy { .. }),
        };
        for (i, &write) in writes.iter().enumerate() {
            let clash = writes[..i].iter().copied().find(|&w| {
                overlap(&self.p.variables, self.buffer(w), self.buffer(write)).is_some()
            });
            let clash = clash.or_else(|| {
                let bad = |exactly: bool| !(exactly && may_be_in_place);
                reads.iter().copied().find(|&r| {
                    overlap(&self.p.variables, self.buffer(r), self.buffer(write)).is_some_and(bad)
                })
            });
            if let Some(other) = clash {
                let (a, b) = (&self.buffer(write).name, &self.buffer(other).name);
                self.problem(format!("output {a:?} overlaps operand {b:?}"));
            }
        }
    }

    fn operands(&mut self, kind: &StepKind) {
        match kind {
            StepKind::Kernel {
                kernel,
                args,
                n_outputs,
                ..
            } => {
                let n_args = args.len();
                match self.partition.kernels.get(kernel.0 as usize) {
                    Some(kernel) => self.kernel(kernel, args, *n_outputs as usize),
                    None => self.problem(format!("kernel {} does not exist", kernel.0)),
                }
                self.expect(*n_outputs as usize <= n_args, || {
                    format!("{n_outputs} outputs among {n_args} arguments")
                });
            }
            StepKind::Send { key, .. } => self.transfer(key, &key.source),
            StepKind::Recv { key, .. } => self.transfer(key, &key.destination),
            StepKind::Copy { src, dst } => {
                let (from, to) = (
                    self.buffer(*src).size_bytes(),
                    self.buffer(*dst).size_bytes(),
                );
                self.expect(from == to, || format!("copies {from} bytes to {to} bytes"));
            }
            StepKind::AllReduce(s) => self.all_reduce(s),
            StepKind::If(s) => self.branches(s),
            StepKind::Loop(s) => self.loop_operands(s),
            StepKind::ReadVariable {
                variable,
                dst: buffer,
            }
            | StepKind::AssignVariable {
                variable,
                src: buffer,
            } => self.variable(*variable, *buffer),
        }
    }

    /// `own` is the end of the transfer that is to be this device.
    fn transfer(&mut self, key: &Key, own: &DeviceName) {
        let good = *own == self.partition.device && key.source != key.destination;
        self.expect(good, || format!("key {key:?} does not belong here"));
        self.expect(self.depth == 0, || "transfers in a sub-program".to_owned());
    }

    fn all_reduce(&mut self, s: &AllReduce) {
        let here = s.devices.get(s.rank as usize) == Some(&self.partition.device);
        let good = here && self.partition.device.kind.has_own_memory() && self.depth == 0;
        self.expect(good, || {
            format!("rank {} of {:?} does not belong here", s.rank, s.key)
        });
        let (from, to) = (self.type_of(s.src), self.type_of(s.dst));
        self.expect(same_type(&from, &to), || {
            format!("reduces {from:?} to {to:?}")
        });
    }

    fn branches(&mut self, s: &If) {
        self.scalar("condition", Some(s.cond), DType::Bool);
        let (args, results) = (self.types_of(&s.args), self.types_of(&s.results));
        for branch in [&s.then_branch, &s.else_branch] {
            self.sub_program(branch, &args, &results);
        }
    }

    fn variable(&mut self, index: u32, buffer: BufferId) {
        let found = self.p.variables.get(index as usize).map(|v| v.dtype);
        let (expected, _) = self.type_of(buffer);
        self.expect(found == Some(expected), || {
            format!("variable {index} is {found:?}, the buffer {expected:?}")
        });
    }

    /// A kernel fits the device's kind, and a GPU's its code and its arguments.
    fn kernel(&mut self, kernel: &Kernel, args: &[BufferId], n_outputs: usize) {
        let has_own_memory = self.partition.device.kind.has_own_memory();
        let name = kernel.name();
        match kernel {
            Kernel::Cpu(_) => {
                self.expect(!has_own_memory, || format!("kernel {name} is for a CPU"))
            }
            Kernel::Gpu(k) => {
                self.expect(has_own_memory, || format!("kernel {name} is for a GPU"));
                let n_code = self.partition.gpu_code.len();
                self.expect(k.code < n_code, || {
                    format!("kernel {name}: code {} does not exist", k.code)
                });
                k.params.iter().for_each(|p| self.parameter(name, p, args));
            }
            Kernel::Product(p) => {
                self.expect(has_own_memory, || format!("product {name} is for a GPU"));
                let types: Vec<_> = args
                    .iter()
                    .map(|&id| (self.buffer(id).dtype, self.buffer(id).size_bytes()))
                    .collect();
                let problem = p.problem(&types).or_else(|| {
                    let n = 1 + usize::from(p.workspace_bytes > 0);
                    (n_outputs != n).then(|| format!("{n_outputs} outputs, expected {n}"))
                });
                self.expect(problem.is_none(), || {
                    format!("product {name}: {}", problem.unwrap_or_default())
                });
            }
        }
    }

    /// A parameter names an argument that is there, and a tensor map lies within its buffer.
    fn parameter(&mut self, kernel: &str, param: &GpuParam, args: &[BufferId]) {
        let (index, map) = match param {
            GpuParam::Buffer(i) => (*i, None),
            GpuParam::TensorMap(map) => (map.buffer, Some(map)),
            GpuParam::Status => return,
        };
        let Some(&buffer) = args.get(index as usize) else {
            return self.expect(false, || {
                format!("kernel {kernel}: {param:?} of {} arguments", args.len())
            });
        };
        let problem = map.and_then(|m| m.problem(self.buffer(buffer).size_bytes() as u64));
        self.expect(problem.is_none(), || {
            format!("kernel {kernel}: tensor map of argument {index}: {problem:?}")
        });
    }

    fn loop_operands(&mut self, s: &Loop) {
        let (mut inputs, mut outputs) = (vec![], vec![]);
        if let TripCount::While {
            max_trips,
            condition,
        } = s.trips
        {
            self.scalar("trip count", max_trips, DType::I64);
            self.scalar("condition", condition, DType::Bool);
            self.expect(max_trips.is_some() || condition.is_some(), || {
                "loop never ends".to_owned()
            });
            inputs = vec![(DType::I64, vec![]), (DType::Bool, vec![])];
            outputs = vec![(DType::Bool, vec![])];
        }
        for c in &s.carried {
            let (init, result) = (self.type_of(c.init), self.type_of(c.result));
            self.expect(same_type(&init, &result), || {
                format!("carried value is {init:?} before and {result:?} after")
            });
            inputs.push(init);
            outputs.push(result);
        }
        for x in &s.scan_inputs {
            inputs.push(self.slice_type(x, s.trips));
        }
        for x in &s.scan_outputs {
            outputs.push(self.slice_type(x, s.trips));
        }
        inputs.extend(self.types_of(&s.args));
        let is_good = self.sub_program(&s.body, &inputs, &outputs);
        if is_good {
            self.run_once(s);
        }
    }

    /// Steps that run in the first iteration alone are found to do so here, too.
    fn run_once(&mut self, s: &Loop) {
        if s.once.is_empty() {
            return;
        }
        let found = invariant_steps(&s.body, s.args.len());
        let found: BTreeSet<StepId> = found.into_iter().collect();
        self.expect(s.once.is_sorted_by(|a, b| a < b), || {
            "steps of the first iteration are not in order".to_owned()
        });
        let other = s.once.iter().find(|step| !found.contains(step));
        self.expect(other.is_none(), || {
            format!("{other:?} of a loop's body must run in each iteration")
        });
    }

    /// Type of one iteration's slice of a tensor, whose axis 0 is that of the iterations.
    fn slice_type(&mut self, x: &Scanned, trips: TripCount) -> (DType, Vec<usize>) {
        let (dtype, shape) = self.type_of(x.buffer);
        let good = match (shape.first(), trips) {
            (Some(&n), TripCount::Fixed(trips)) => n as u64 == trips,
            (n, _) => n.is_some(),
        };
        self.expect(good, || {
            format!("scanned tensor {shape:?} does not fit {trips:?}")
        });
        (dtype, shape.get(1..).unwrap_or_default().to_vec())
    }

    fn type_of(&self, id: BufferId) -> (DType, Vec<usize>) {
        (self.buffer(id).dtype, self.buffer(id).shape.clone())
    }

    fn types_of(&self, ids: &[BufferId]) -> Vec<(DType, Vec<usize>)> {
        ids.iter().map(|&id| self.type_of(id)).collect()
    }

    fn scalar(&mut self, what: &str, id: Option<BufferId>, dtype: DType) {
        if let Some(id) = id {
            let found = self.type_of(id);
            self.expect(same_type(&found, &(dtype, vec![])), || {
                format!("{what} is {found:?}, expected one {dtype}")
            });
        }
    }

    fn sub_program(
        &mut self,
        sub: &Program,
        inputs: &[(DType, Vec<usize>)],
        outputs: &[(DType, Vec<usize>)],
    ) -> bool {
        let fits = |specs: &[IoSpec], types: &[(DType, Vec<usize>)]| {
            let same =
                |(s, t): (&IoSpec, &(DType, Vec<usize>))| same_type(&(s.dtype, s.shape.clone()), t);
            specs.len() == types.len() && specs.iter().zip(types).all(same)
        };
        self.expect(fits(&sub.inputs, inputs), || {
            format!("sub-program takes {:?}, gets {inputs:?}", sub.inputs)
        });
        self.expect(fits(&sub.outputs, outputs), || {
            format!("sub-program gives {:?}, expected {outputs:?}", sub.outputs)
        });
        let one_here =
            sub.partitions.len() == 1 && sub.partitions[0].device == self.partition.device;
        self.expect(one_here, || {
            "sub-program is not one partition on the same device".to_owned()
        });
        let n_before = self.nested.len();
        check_program(sub, &mut self.nested, self.depth + 1);
        self.nested.len() == n_before
    }
}

/// Same dtype and number of elements: a buffer may show the same bytes under another shape.
fn same_type(a: &(DType, Vec<usize>), b: &(DType, Vec<usize>)) -> bool {
    a.0 == b.0 && checked_size_bytes(a.0, &a.1).ok() == checked_size_bytes(b.0, &b.1).ok()
}

/// Partition, step and buffer of one end of a transfer.
type End<'a> = (usize, usize, Option<&'a Buffer>);

/// Sends and receives match one to one, and no step waits for itself through other devices.
fn check_transfers(p: &Program, violations: &mut Vec<String>) {
    let mut edges = Vec::new();
    for (key, [sends, recvs]) in transfer_ends(p) {
        let label = format!(
            "tensor {:?} from {} to {}",
            key.tensor, key.source, key.destination
        );
        match (sends.as_slice(), recvs.as_slice()) {
            ([_], []) if p.is_remote(&key.destination) => continue,
            ([], [_]) if p.is_remote(&key.source) => continue,
            _ => {}
        }
        let (&[send], &[recv]) = (sends.as_slice(), recvs.as_slice()) else {
            let (n_sent, n_received) = (sends.len(), recvs.len());
            violations.push(format!(
                "{label}: sent {n_sent} times, received {n_received} times"
            ));
            continue;
        };
        edges.push(((send.0, send.1), (recv.0, recv.1)));
        let types = |end: End<'_>| end.2.map(|b| (b.dtype, b.shape.clone()));
        if let (Some(a), Some(b)) = (types(send), types(recv))
            && !same_type(&a, &b)
        {
            violations.push(format!("{label}: sent as {a:?}, received as {b:?}"));
        }
    }
    if violations.is_empty() {
        let (n_stuck, n) = stuck(p, &edges);
        if n_stuck > 0 {
            violations.push(format!(
                "{n_stuck} of {n} steps wait for themselves through transfers between devices"
            ));
        }
    }
}

/// Sends and receives of each key.
fn transfer_ends(p: &Program) -> BTreeMap<&Key, [Vec<End<'_>>; 2]> {
    let mut ends: BTreeMap<&Key, [Vec<End<'_>>; 2]> = BTreeMap::new();
    for (d, partition) in p.partitions.iter().enumerate() {
        for (i, step) in partition.steps.iter().enumerate() {
            let (key, buffer, side) = match &step.kind {
                StepKind::Send { key, buffer } => (key, buffer, 0),
                StepKind::Recv { key, buffer } => (key, buffer, 1),
                _ => continue,
            };
            let buffer = partition.buffers.get(buffer.0 as usize);
            ends.entry(key).or_default()[side].push((d, i, buffer));
        }
    }
    ends
}

impl Program {
    /// True when devices with memory of their own may run their steps one after the other in program order, without waiting for each other in a cycle.
    /// The program is valid. Where tensors come from other tasks, the order of these is not known.
    pub(crate) fn runs_in_order(&self) -> bool {
        let mut edges = Vec::new();
        let mut sends: BTreeMap<&Key, Place> = BTreeMap::new();
        let mut recvs: Vec<(&Key, Place)> = Vec::new();
        for (d, partition) in self.partitions.iter().enumerate() {
            for (i, step) in partition.steps.iter().enumerate() {
                match &step.kind {
                    StepKind::Send { key, .. } => drop(sends.insert(key, (d, i))),
                    StepKind::Recv { key, .. } if self.is_remote(&key.source) => return false,
                    StepKind::Recv { key, .. } => recvs.push((key, (d, i))),
                    _ => {}
                }
                if i > 0 && partition.device.kind.has_own_memory() {
                    edges.push(((d, i - 1), (d, i)));
                }
            }
        }
        edges.extend(
            recvs
                .iter()
                .filter_map(|(key, recv)| Some((*sends.get(key)?, *recv))),
        );
        stuck(self, &edges).0 == 0
    }
}

/// Partition and step.
pub(super) type Place = (usize, usize);

/// Kahn's algorithm over the steps of all partitions, with these edges beside their dependencies: the number of steps on or behind a cycle, and of all
/// steps. Each rank of an all-reduce waits for the dependencies of all ranks.
fn stuck(p: &Program, edges: &[(Place, Place)]) -> (usize, usize) {
    let mut graph = StepGraph::new(p);
    for (d, partition) in p.partitions.iter().enumerate() {
        for (i, step) in partition.steps.iter().enumerate() {
            step.deps
                .iter()
                .for_each(|dep| graph.add_edge((d, dep.0 as usize), (d, i)));
        }
    }
    edges
        .iter()
        .for_each(|&(from, to)| graph.add_edge(from, to));
    let n = graph.after.len();
    (n - graph.n_sorted(), n)
}

/// Steps of all partitions, numbered in one sequence.
struct StepGraph {
    /// Number of the first step of each partition.
    first: Vec<usize>,
    /// Edges into each step that are not yet removed.
    n_before: Vec<u32>,
    after: Vec<Vec<usize>>,
    /// All ranks of the all-reduce that a step is a rank of.
    ranks: BTreeMap<usize, Vec<usize>>,
}

impl StepGraph {
    fn new(p: &Program) -> StepGraph {
        let next = |sum: &mut usize, part: &Partition| {
            Some(std::mem::replace(sum, *sum + part.steps.len()))
        };
        let first: Vec<usize> = p.partitions.iter().scan(0, next).collect();
        let n: usize = p.partitions.iter().map(|part| part.steps.len()).sum();
        let mut of_step = BTreeMap::new();
        for group in ranks(p).into_values() {
            let numbers: Vec<usize> = group.into_iter().map(|(d, i)| first[d] + i).collect();
            of_step.extend(numbers.iter().map(|&n| (n, numbers.clone())));
        }
        StepGraph {
            first,
            n_before: vec![0; n],
            after: vec![Vec::new(); n],
            ranks: of_step,
        }
    }

    fn add_edge(&mut self, from: Place, to: Place) {
        let number = |(d, i): Place| self.first[d] + i;
        let (from, to) = (number(from), number(to));
        for &to in self.ranks.get(&to).unwrap_or(&vec![to]) {
            self.n_before[to] += 1;
            self.after[from].push(to);
        }
    }

    /// Number of steps that have a place in a topological order.
    fn n_sorted(mut self) -> usize {
        let mut ready: Vec<usize> = (0..self.after.len())
            .filter(|&i| self.n_before[i] == 0)
            .collect();
        let mut n_sorted = 0;
        while let Some(i) = ready.pop() {
            n_sorted += 1;
            for &next in &self.after[i] {
                self.n_before[next] -= 1;
                if self.n_before[next] == 0 {
                    ready.push(next);
                }
            }
        }
        n_sorted
    }
}

#[cfg(test)]
mod tests;
