//! Horizontal fusion: independent kernels of one cluster run in one launch.
//!
//! A launch takes microseconds, as long as a GPU takes for a hundred thousand elements, so a step of
//! an optimiser over many small parameters is launched for all of them at once. Blocks of the launch
//! are divided among the kernels in order: each becomes a function, which is told the number of its
//! block and of its blocks.

use super::candidates::Resources;
use super::cluster::{BLOCK, MAX_BLOCKS};
use super::emit::Body;
use super::source::{Parameters, Source, source};
use crate::codegen::kernel_forms::Choice;
use crate::codegen::plan::{Arg, PlanStep};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Most kernels of a launch, and buffers, whose addresses are its parameters: of these, 4096 bytes are
/// the most before CUDA 12.1.
const MOST_PARTS: usize = 32;
const MOST_BUFFERS: usize = 400;

/// A kernel before it has a launch.
pub(super) struct Piece {
    pub(super) what: String,
    pub(super) name: String,
    pub(super) choice: Option<Choice>,
    /// True for indices of 64 bits.
    pub(super) wide: bool,
    pub(super) resources: Resources,
    pub(super) parameters: Parameters,
    pub(super) body: Body,
    /// Buffers, in the order of the parameters: those read, then those written.
    pub(super) buffers: [Vec<Arg>; 2],
}

impl Piece {
    /// The step of a kernel with these buffers.
    pub(super) fn step(&self, kernel: usize) -> PlanStep {
        step(kernel, &self.buffers)
    }

    /// True for a kernel with usual blocks, without arrays of its own in shared memory and with nothing to
    /// end a thread early: others may join it.
    fn is_usual(&self) -> bool {
        let blocks = Resources::new(self.resources.blocks as usize, BLOCK);
        self.resources == blocks
            && (1..=MAX_BLOCKS).contains(&blocks.blocks)
            && !self.body.faults
            && !self.body.text.contains("__shared__")
            && !self.parameters.has_maps()
    }

    /// True if one of the two writes what the other reads or writes. Each buffer of a cluster has one
    /// [`Arg`], as a GPU's kernels write nothing in place.
    fn waits_for(&self, earlier: &Piece) -> bool {
        let [before, now] = [&earlier.buffers, &self.buffers];
        let meet = |xs: &[Arg], ys: &[Arg]| xs.iter().any(|x| ys.contains(x));
        meet(&now[0], &before[1]) || meet(&now[1], &before[1]) || meet(&now[1], &before[0])
    }

    /// True for a kernel with the same code.
    fn is_like(&self, other: &Piece) -> bool {
        let code = |p: &Piece| (p.resources.blocks, p.wide);
        code(self) == code(other)
            && self.body.text == other.body.text
            && self.parameters.declared() == other.parameters.declared()
    }

    /// The kernel as a function.
    fn function(&self, number: usize) -> String {
        let text = self.body.text.replace("blockIdx.x", "block");
        let text = text.replace("gridDim.x", "n_blocks");
        let declared = self.parameters.declared().join(", ");
        let what = &self.what;
        format!(
            "// {what}\nGM_DEVICE void part{number}({declared}, u32 block, u32 n_blocks) {{\n{text}}}\n\n"
        )
    }

    fn n_buffers(&self) -> usize {
        self.buffers.iter().map(Vec::len).sum()
    }
}

fn step(kernel: usize, [reads, writes]: &[Vec<Arg>; 2]) -> PlanStep {
    PlanStep {
        kernel,
        n_outputs: writes.len() as u32,
        args: reads.iter().chain(writes).copied().collect(),
        items: 1,
        grain: 0,
    }
}

/// The kernels in launches, in an order of computation.
pub(super) fn launches(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let mut levels: Vec<usize> = Vec::new();
    for piece in &pieces {
        let before = pieces
            .iter()
            .zip(&levels)
            .filter(|(p, _)| piece.waits_for(p));
        levels.push(before.map(|(_, level)| level + 1).max().unwrap_or(0));
    }
    let mut by_level: BTreeMap<usize, Vec<Piece>> = BTreeMap::new();
    for (piece, level) in pieces.into_iter().zip(levels) {
        by_level.entry(level).or_default().push(piece);
    }
    by_level.into_values().flat_map(divided).collect()
}

/// Independent kernels, in launches.
fn divided(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let mut launches: Vec<Vec<Piece>> = Vec::new();
    for piece in pieces {
        let has_room = |launch: &&mut Vec<Piece>| {
            let n_buffers: usize = launch.iter().map(Piece::n_buffers).sum();
            launch.len() < MOST_PARTS
                && n_buffers + piece.n_buffers() <= MOST_BUFFERS
                && launch[0].wide == piece.wide
                && launch[0].is_usual()
        };
        match launches
            .iter_mut()
            .find(has_room)
            .filter(|_| piece.is_usual())
        {
            Some(launch) => launch.push(piece),
            None => launches.push(vec![piece]),
        }
    }
    launches
}

/// Several kernels as one.
pub(super) struct Bundle {
    pub(super) source: Source,
    pub(super) resources: Resources,
    buffers: [Vec<Arg>; 2],
}

/// The parameters of several kernels: each buffer once.
#[derive(Default)]
struct Shared {
    parameters: Parameters,
    buffers: [Vec<Arg>; 2],
    names: [BTreeMap<Arg, String>; 2],
}

impl Shared {
    fn of(pieces: &[Piece]) -> Shared {
        let mut shared = Shared::default();
        for side in [0, 1] {
            for piece in pieces {
                for (i, &arg) in piece.buffers[side].iter().enumerate() {
                    let ty = piece.parameters.memory_type(side, i);
                    shared.declare(side, arg, ty);
                }
            }
        }
        shared
    }

    fn declare(&mut self, side: usize, arg: Arg, ty: &'static str) {
        if !self.names[side].contains_key(&arg) {
            let name = self.parameters.declare(side == 1, ty);
            self.names[side].insert(arg, name);
            self.buffers[side].push(arg);
        }
    }

    /// Arguments of a function for kernels with the same code: the buffers of kernel `i`.
    fn arguments(&self, kernels: &[&Piece]) -> Vec<String> {
        let sides = [0, 1].into_iter();
        let places = sides.flat_map(|side| {
            let n = kernels[0].buffers[side].len();
            (0..n).map(move |place| (side, place))
        });
        let argument = |(side, place): (usize, usize)| {
            let of_kernel = |k: &&Piece| self.names[side][&k.buffers[side][place]].as_str();
            let names: Vec<&str> = kernels.iter().map(of_kernel).collect();
            let (last, others) = names.split_last().expect("a function has kernels");
            if others.iter().all(|name| name == last) {
                return (*last).to_owned();
            }
            let chosen = others.iter().enumerate();
            let chosen: String = chosen
                .map(|(i, name)| format!("i == {i} ? {name} : "))
                .collect();
            chosen + last
        };
        places.map(argument).collect()
    }
}

/// Kernels by their code, in order of the first of each.
fn by_code(pieces: &[Piece]) -> Vec<Vec<&Piece>> {
    let mut groups: Vec<Vec<&Piece>> = Vec::new();
    for piece in pieces {
        match groups.iter_mut().find(|group| group[0].is_like(piece)) {
            Some(group) => group.push(piece),
            None => groups.push(vec![piece]),
        }
    }
    groups
}

impl Bundle {
    pub(super) fn step(&self, kernel: usize) -> PlanStep {
        step(kernel, &self.buffers)
    }

    /// Of the kernels of one of the [`launches`].
    pub(super) fn new(entry: &str, pieces: &[Piece]) -> Bundle {
        let shared = Shared::of(pieces);
        let (mut functions, mut calls, mut first) = (String::new(), String::new(), 0);
        for (number, kernels) in by_code(pieces).iter().enumerate() {
            functions += &kernels[0].function(number);
            let (own, n) = (kernels[0].resources.blocks, kernels.len() as u64);
            let end = first + own * n;
            let other = if number == 0 { "" } else { "else " };
            let _ = writeln!(calls, "        {other}if (b < {end}u) {{");
            let at = if n > 1 {
                let _ = writeln!(calls, "            const u32 i = (b - {first}u) / {own}u;");
                format!("b - {first}u - i * {own}u")
            } else {
                format!("b - {first}u")
            };
            let arguments = shared.arguments(kernels).join(", ");
            let _ = writeln!(
                calls,
                "            part{number}({arguments}, {at}, {own}u);"
            );
            calls += "        }\n";
            first = end;
        }
        let text = format!(
            "    for (u32 b = blockIdx.x; b < {first}u; b += gridDim.x) {{\n{calls}    }}\n"
        );
        let resources = Resources::new(first as usize, BLOCK);
        let (wide, faults) = (pieces[0].wide, false);
        let body = Body { text, faults };
        Bundle {
            source: source(
                entry,
                &resources,
                wide,
                &shared.parameters,
                &functions,
                body,
            ),
            resources,
            buffers: shared.buffers,
        }
    }
}
