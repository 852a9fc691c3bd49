//! Control flow: sub-programs that read their arguments and write their results in place.

use super::frame::{Addresses, Arena, Frame, Links, Span};
use super::memory::{Block, Memory};
use super::step::{Context, Stop};
use crate::error::{Error, ErrorKind};
use crate::program::LOOP_BYTES;
use crate::program::{Buffer, BufferId, Carried, If, Loop, Program, Scanned, StepId, TripCount};
use std::sync::Arc;

/// [`If`] with both branches instantiated.
pub(crate) struct PreparedIf {
    cond: BufferId,
    args: Vec<BufferId>,
    results: Vec<BufferId>,
    /// Else, then: indexed by the condition.
    pub(crate) branches: [Frame; 2],
}

impl PreparedIf {
    pub(crate) fn new(s: &If, links: &Links<'_>) -> Result<PreparedIf, Error> {
        let branch = |p: &Arc<Program>| Frame::new(p, 0, links, Arena::Own);
        let branches = [branch(&s.else_branch)?, branch(&s.then_branch)?];
        Ok(PreparedIf {
            cond: s.cond,
            args: s.args.clone(),
            results: s.results.clone(),
            branches,
        })
    }
}

/// Runs the branch that the condition picks.
pub(crate) fn run_if(
    s: &mut PreparedIf,
    addresses: &Addresses,
    context: &mut Context<'_>,
) -> Result<(), Stop> {
    let at = |id: &BufferId| addresses.buffers[id.0 as usize];
    // SAFETY: validated: a bool buffer of one element, written by an earlier step.
    let taken = unsafe { read_bool(&addresses.memory, at(&s.cond))? };
    let branch = &mut s.branches[taken as usize];
    set(&mut branch.inputs, s.args.iter().map(at));
    set(&mut branch.outputs, s.results.iter().map(at));
    branch.bind();
    branch.run_sub_program(&[], context)
}

/// # Safety
///
/// `from` is the address of a bool that no one writes meanwhile.
unsafe fn read_bool(memory: &Memory, from: *mut u8) -> Result<bool, Error> {
    let mut byte = [0];
    // SAFETY: the caller's promise.
    unsafe { memory.read(from, &mut byte)? };
    Ok(byte[0] != 0)
}

fn set(slots: &mut [*mut u8], values: impl Iterator<Item = *mut u8>) {
    slots
        .iter_mut()
        .zip(values)
        .for_each(|(slot, value)| *slot = value);
}

/// [`Loop`] with its body instantiated.
pub(crate) struct PreparedLoop {
    trips: TripCount,
    pub(crate) body: Frame,
    carried: Vec<PreparedCarried>,
    scan_inputs: Vec<Slices>,
    scan_outputs: Vec<Slices>,
    args: Vec<BufferId>,
    /// Steps of the body, in order, of the first iteration alone.
    once: Vec<StepId>,
    /// Iteration number, condition and next condition, [`CELL_BYTES`] apart.
    cells: Block,
}

const CELL_BYTES: usize = LOOP_BYTES / 3;

struct PreparedCarried {
    init: usize,
    result: Span,
    /// The other half of the double buffer: iterations write `result` and `spare` in turn.
    spare: Block,
}

struct Slices {
    name: String,
    buffer: usize,
    extent: u64,
    slice_bytes: usize,
    reverse: bool,
}

impl Slices {
    fn new(s: &Scanned, buffers: &[Buffer]) -> Slices {
        let buffer = &buffers[s.buffer.0 as usize];
        let extent = buffer.shape[0];
        Slices {
            name: buffer.name.clone(),
            buffer: s.buffer.0 as usize,
            extent: extent as u64,
            slice_bytes: buffer.size_bytes().checked_div(extent).unwrap_or(0),
            reverse: s.reverse,
        }
    }

    /// Address of the slice of iteration `i < extent`.
    fn address(&self, addresses: &Addresses, i: u64) -> *mut u8 {
        let index = if self.reverse { self.extent - 1 - i } else { i };
        addresses.buffers[self.buffer].wrapping_add(index as usize * self.slice_bytes)
    }
}

impl PreparedLoop {
    pub(crate) fn new(
        s: &Loop,
        buffers: &[Buffer],
        links: &Links<'_>,
    ) -> Result<PreparedLoop, Error> {
        let carry = |c: &Carried| {
            let result = Span::of(buffers, c.result);
            Ok(PreparedCarried {
                init: c.init.0 as usize,
                result,
                spare: links.memory.allocate(result.size_bytes)?,
            })
        };
        Ok(PreparedLoop {
            trips: s.trips,
            body: Frame::new(&s.body, 0, links, Arena::Own)?,
            carried: s.carried.iter().map(carry).collect::<Result<_, Error>>()?,
            scan_inputs: s
                .scan_inputs
                .iter()
                .map(|x| Slices::new(x, buffers))
                .collect(),
            scan_outputs: s
                .scan_outputs
                .iter()
                .map(|x| Slices::new(x, buffers))
                .collect(),
            args: s.args.clone(),
            once: s.once.clone(),
            cells: links.memory.allocate(LOOP_BYTES)?,
        })
    }

    /// Iteration number, condition, next condition.
    fn cell(&self, n: usize) -> *mut u8 {
        self.cells.as_ptr().wrapping_add(n * CELL_BYTES)
    }

    fn has_header(&self) -> bool {
        matches!(self.trips, TripCount::While { .. })
    }

    /// Where the value of `carried[index]` lies after `writes` iterations, when iteration 0 writes to `spare` if `flip`.
    fn carried_address(
        &self,
        index: usize,
        writes: u64,
        flip: bool,
        addresses: &Addresses,
    ) -> *mut u8 {
        let c = &self.carried[index];
        match writes {
            0 => addresses.buffers[c.init],
            n if (n % 2 == 1) != flip => addresses.buffers[c.result.buffer],
            _ => c.spare.as_ptr(),
        }
    }

    /// Points the body's inputs and outputs at the operands of iteration `i`.
    fn bind_iteration(&mut self, i: u64, flip: bool, addresses: &Addresses) {
        let mut inputs = std::mem::take(&mut self.body.inputs);
        let mut outputs = std::mem::take(&mut self.body.outputs);
        let header = if self.has_header() { 2 } else { 0 };
        let cell = |n: usize| self.cell(n);
        let carried = |writes: u64| (0..self.carried.len()).map(move |c| (c, writes));
        let place = |(c, writes): (usize, u64)| self.carried_address(c, writes, flip, addresses);
        let slice = |s: &Slices| s.address(addresses, i);
        let args = self.args.iter().map(|id| addresses.buffers[id.0 as usize]);
        let scanned = self.scan_inputs.iter().map(slice);
        set(
            &mut inputs,
            (0..header)
                .map(cell)
                .chain(carried(i).map(place))
                .chain(scanned)
                .chain(args),
        );
        let next_condition = (0..header / 2).map(|_| cell(2));
        set(
            &mut outputs,
            next_condition
                .chain(carried(i + 1).map(place))
                .chain(self.scan_outputs.iter().map(slice)),
        );
        (self.body.inputs, self.body.outputs) = (inputs, outputs);
        self.body.bind();
    }

    /// Most iterations, and whether the first one runs at all.
    fn start(&self, addresses: &Addresses) -> Result<(u64, bool), Error> {
        let TripCount::While {
            max_trips,
            condition,
        } = self.trips
        else {
            let TripCount::Fixed(n) = self.trips else {
                unreachable!("the other kind")
            };
            return Ok((n, true));
        };
        let at = |id: BufferId| addresses.buffers[id.0 as usize];
        let mut max = i64::MAX.to_ne_bytes();
        // SAFETY: validated: `max_trips` holds one i64 and `condition` one bool, written by earlier steps.
        unsafe {
            max_trips.map_or(Ok(()), |id| addresses.memory.read(at(id), &mut max))?;
            let first = condition.map_or(Ok(true), |id| read_bool(&addresses.memory, at(id)))?;
            let max = max_trips.map_or(u64::MAX, |_| i64::from_ne_bytes(max).max(0) as u64);
            Ok((max, first))
        }
    }

    /// Writes the cells for iteration `i`.
    fn write_header(&self, i: u64, condition: bool, memory: &Memory) -> Result<(), Error> {
        // SAFETY: three cells were allocated, and no step runs now.
        unsafe {
            memory.write(self.cell(0), &(i as i64).to_ne_bytes())?;
            memory.write(self.cell(1), &[condition as u8])
        }
    }

    /// Errors when iteration `i` would pass the end of a scanned tensor.
    fn check_room(&self, i: u64) -> Result<(), Error> {
        let full = self
            .scan_inputs
            .iter()
            .chain(&self.scan_outputs)
            .find(|s| i >= s.extent);
        full.map_or(Ok(()), |s| {
            let message = format!(
                "loop runs past the {} slices of {:?} that it was compiled for",
                s.extent, s.name
            );
            Err(Error::new(ErrorKind::Unsupported, message))
        })
    }

    /// Errors when the loop ended before a scan output was full.
    fn check_full(&self, n: u64) -> Result<(), Error> {
        let short = self.scan_outputs.iter().find(|s| s.extent != n);
        short.map_or(Ok(()), |s| {
            let message = format!(
                "loop ended after {n} iterations, but {:?} was compiled for {}",
                s.name, s.extent
            );
            Err(Error::new(ErrorKind::Unsupported, message))
        })
    }
}

/// Runs the body as often as the trip count says.
pub(crate) fn run_loop(
    s: &mut PreparedLoop,
    addresses: &Addresses,
    context: &mut Context<'_>,
) -> Result<(), Stop> {
    let on_device = |e: Error, context: &Context<'_>| e.context(format!("on {}", context.device));
    let memory = &addresses.memory;
    let (max, mut condition) = s.start(addresses)?;
    let ends_by_condition = matches!(
        s.trips,
        TripCount::While {
            condition: Some(_),
            ..
        }
    );
    // Where the number of iterations is known, start so that the last one writes `result`.
    let flip = !ends_by_condition && max > 0 && max % 2 == 0;
    let mut i = 0;
    while i < max && condition {
        s.check_room(i).map_err(|e| on_device(e, context))?;
        if s.has_header() {
            s.write_header(i, condition, memory)?;
        }
        s.bind_iteration(i, flip, addresses);
        let skipped = if i == 0 { &[][..] } else { &s.once };
        s.body.run_sub_program(skipped, context)?;
        if ends_by_condition {
            // SAFETY: the body has just written its condition there.
            condition = unsafe { read_bool(memory, s.cell(2))? };
        }
        i += 1;
        if context.rendezvous.is_aborted() {
            return Err(Stop::Aborted);
        }
    }
    s.check_full(i).map_err(|e| on_device(e, context))?;
    for (index, c) in s.carried.iter().enumerate() {
        let last = s.carried_address(index, i, flip, addresses);
        let result = addresses.buffers[c.result.buffer];
        // SAFETY: both hold the carried value's size; they are the same, or the result and a separate buffer (validated).
        unsafe { memory.copy(last, result, c.result.size_bytes)? };
    }
    Ok(())
}
