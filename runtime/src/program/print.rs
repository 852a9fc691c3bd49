//! Text of a program: the `schedule` stage of dumps. Addresses never appear, so the text is the same on every run.

use super::{
    AllReduce, BufferId, If, IoSpec, Kernel, Loc, Loop, Partition, Program, Step, StepKind,
    TripCount,
};
use crate::printable::printable;
use std::fmt;

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(self, f, 0)
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Program({:?}, {} partitions)",
            self.name,
            self.partitions.len()
        )
    }
}

fn pad(f: &mut fmt::Formatter<'_>, indent: usize) -> fmt::Result {
    write!(f, "{:1$}", "", indent * 2)
}

fn print(p: &Program, f: &mut fmt::Formatter<'_>, indent: usize) -> fmt::Result {
    pad(f, indent)?;
    writeln!(f, "program {:?} {{", p.name)?;
    let specs = |f: &mut fmt::Formatter<'_>, word: &str, specs: &[IoSpec]| {
        specs.iter().enumerate().try_for_each(|(i, s)| {
            pad(f, indent + 1)?;
            writeln!(f, "{word} {i} {:?}: {}{:?}", s.name, s.dtype, s.shape)
        })
    };
    specs(f, "input", &p.inputs)?;
    specs(f, "output", &p.outputs)?;
    for (i, v) in p.variables.iter().enumerate() {
        pad(f, indent + 1)?;
        writeln!(
            f,
            "variable {i} {:?}/{:?}: {}",
            v.container, v.name, v.dtype
        )?;
    }
    p.partitions
        .iter()
        .try_for_each(|part| print_partition(part, f, indent + 1))?;
    pad(f, indent)?;
    writeln!(f, "}}")
}

fn print_partition(p: &Partition, f: &mut fmt::Formatter<'_>, indent: usize) -> fmt::Result {
    pad(f, indent)?;
    let constant_bytes: usize = p.constants.iter().map(|c| c.size_bytes()).sum();
    writeln!(
        f,
        "partition {} arena {} B constants {} ({constant_bytes} B) {{",
        p.device,
        p.arena_bytes,
        p.constants.len()
    )?;
    for (i, b) in p.buffers.iter().enumerate() {
        pad(f, indent + 1)?;
        write!(f, "b{i} {:?}: {}{:?} ", b.name, b.dtype, b.shape)?;
        match b.loc {
            Loc::Arena { offset_bytes } => writeln!(f, "at {offset_bytes}")?,
            Loc::Constant(c) => writeln!(f, "constant {c}")?,
            Loc::Input(n) => writeln!(f, "input {n}")?,
            Loc::Output(n) => writeln!(f, "output {n}")?,
            Loc::Variable(n) => writeln!(f, "variable {n}")?,
            Loc::Assigned(n) => writeln!(f, "assigned to variable {n}")?,
        }
    }
    p.steps
        .iter()
        .enumerate()
        .try_for_each(|(i, s)| print_step(p, i, s, f, indent + 1))?;
    pad(f, indent)?;
    writeln!(f, "}}")
}

fn ids(ids: impl IntoIterator<Item = BufferId>) -> String {
    ids.into_iter()
        .map(|b| format!("b{}", b.0))
        .collect::<Vec<_>>()
        .join(" ")
}

fn print_step(
    p: &Partition,
    i: usize,
    step: &Step,
    f: &mut fmt::Formatter<'_>,
    indent: usize,
) -> fmt::Result {
    pad(f, indent)?;
    write!(f, "s{i} = ")?;
    print_kind(p, &step.kind, f)?;
    if !step.deps.is_empty() {
        let deps: Vec<String> = step.deps.iter().map(|d| format!("s{}", d.0)).collect();
        write!(f, " after {}", deps.join(" "))?;
    }
    writeln!(f, "  // {}", printable(&step.origin))?;
    step.kind
        .sub_programs()
        .into_iter()
        .try_for_each(|sub| print(sub, f, indent + 1))
}

fn print_kind(p: &Partition, kind: &StepKind, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match kind {
        StepKind::Kernel {
            kernel,
            args,
            n_outputs,
            items,
            grain,
        } => {
            let kernel = p.kernels.get(kernel.0 as usize);
            let (ins, outs) = args.split_at(args.len().saturating_sub(*n_outputs as usize));
            write!(
                f,
                "{}({}) -> {} items {items} grain {grain}",
                kernel.map_or("?", |k| k.name()),
                ids(ins.to_vec()),
                ids(outs.to_vec())
            )?;
            match kernel {
                Some(Kernel::Product(product)) => write!(f, " by a library: {product}"),
                _ => Ok(()),
            }
        }
        StepKind::Send { key, buffer } => write!(
            f,
            "send b{} {:?} to {}",
            buffer.0, key.tensor, key.destination
        ),
        StepKind::Recv { key, buffer } => write!(
            f,
            "recv {:?} from {} -> b{}",
            key.tensor, key.source, buffer.0
        ),
        StepKind::Copy { src, dst } => write!(f, "copy b{} -> b{}", src.0, dst.0),
        StepKind::AllReduce(s) => print_all_reduce(s, f),
        StepKind::If(s) => print_if(s, f),
        StepKind::Loop(s) => print_loop(s, f),
        StepKind::ReadVariable { variable, dst } => {
            write!(f, "read variable {variable} -> b{}", dst.0)
        }
        StepKind::AssignVariable { variable, src } => {
            write!(f, "assign variable {variable} = b{}", src.0)
        }
    }
}

fn print_all_reduce(s: &AllReduce, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let kind = format!("{:?}", s.kind).to_lowercase();
    write!(
        f,
        "{kind} b{} -> b{} {:?} rank {} of {}",
        s.src.0,
        s.dst.0,
        s.key,
        s.rank,
        s.devices.len()
    )
}

fn print_if(s: &If, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(
        f,
        "if b{} ({}) -> {}",
        s.cond.0,
        ids(s.args.iter().copied()),
        ids(s.results.iter().copied())
    )
}

fn print_loop(s: &Loop, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match s.trips {
        TripCount::Fixed(n) => write!(f, "loop {n} times")?,
        TripCount::While {
            max_trips,
            condition,
        } => {
            let id = |b: Option<BufferId>| b.map_or("none".to_owned(), |b| format!("b{}", b.0));
            write!(f, "loop max {} while {}", id(max_trips), id(condition))?;
        }
    }
    for c in &s.carried {
        write!(f, " carry b{} -> b{}", c.init.0, c.result.0)?;
    }
    for (word, list) in [("scan", &s.scan_inputs), ("stack", &s.scan_outputs)] {
        for x in list {
            write!(
                f,
                " {word} b{}{}",
                x.buffer.0,
                if x.reverse { " reversed" } else { "" }
            )?;
        }
    }
    write!(f, " ({})", ids(s.args.iter().copied()))?;
    if !s.once.is_empty() {
        let steps: Vec<String> = s.once.iter().map(|step| step.0.to_string()).collect();
        write!(f, " once {}", steps.join(" "))?;
    }
    Ok(())
}
