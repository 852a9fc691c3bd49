//! Graphs, made by capturing streams.

use crate::codes::*;
use crate::execute::Op;
use crate::streams::{Event, Stream};
use crate::world::{self, World};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

/// A capture in progress: the requests of each stream.
pub struct Capture {
    origin: usize,
    branches: BTreeMap<usize, Vec<Op>>,
    is_valid: bool,
}

/// Result of a capture: the branch of the stream that it began in, then the others.
#[derive(Clone)]
pub struct Graph {
    branches: Vec<Vec<Op>>,
}

impl Capture {
    pub fn push(&mut self, stream: usize, op: Op) -> Outcome {
        if !self.is_valid {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        self.branches.entry(stream).or_default().push(op);
        Ok(())
    }

    /// True when all branches join the first.
    fn is_joined(&self) -> bool {
        let is_waited_for = |op: &Op| {
            let Op::Record { event, generation } = op else {
                return false;
            };
            let waits = |op: &Op| matches!(op, Op::Wait { event: e, generation: g } if (e, g) == (event, generation));
            self.branches.values().flatten().any(waits)
        };
        self.branches
            .iter()
            .all(|(s, ops)| *s == self.origin || ops.last().is_none_or(is_waited_for))
    }
}

pub fn begin(stream: usize) -> Outcome {
    world::with_stream(stream, |world, _| {
        world.refuse_in_capture(stream)?;
        if !world.settings.graphs {
            return Err(NOT_SUPPORTED);
        }
        let capture = world.handle();
        let branches = BTreeMap::from([(stream, Vec::new())]);
        world.captures.insert(
            capture,
            Capture {
                origin: stream,
                branches,
                is_valid: true,
            },
        );
        world
            .streams
            .get_mut(&stream)
            .ok_or(INVALID_HANDLE)?
            .capture = Some(capture);
        Ok(())
    })
}

pub fn end(stream: usize) -> Outcome<usize> {
    world::with_stream(stream, |world, _| {
        let capture = world.streams[&stream].capture.ok_or(INVALID_VALUE)?;
        let mut made = world.captures.remove(&capture).ok_or(INVALID_VALUE)?;
        world
            .streams
            .values_mut()
            .filter(|s| s.capture == Some(capture))
            .for_each(|s| s.capture = None);
        if !made.is_valid || made.origin != stream {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        if !made.is_joined() {
            return Err(STREAM_CAPTURE_UNJOINED);
        }
        let first = made.branches.remove(&stream).unwrap_or_default();
        let branches = std::iter::once(first)
            .chain(made.branches.into_values())
            .collect();
        let handle = world.handle();
        world.graphs.insert(handle, Graph { branches });
        Ok(handle)
    })
}

/// True when the stream takes part in a capture.
pub fn is_capturing(stream: usize) -> Outcome<bool> {
    world::with_stream(stream, |world, _| {
        Ok(world.streams[&stream].capture.is_some())
    })
}

pub fn instantiate(graph: usize) -> Outcome<usize> {
    world::with_context(|world, _| {
        let made = world.graphs.get(&graph).cloned().ok_or(INVALID_HANDLE)?;
        let handle = world.handle();
        world.graphs.insert(handle, made);
        Ok(handle)
    })
}

pub fn destroy(graph: usize) -> Outcome {
    world::with(|world| world.graphs.remove(&graph).map(drop).ok_or(INVALID_HANDLE))
}

/// Asks for all of a graph: its first branch of the stream, others of streams that live as long as they have something to do.
pub fn launch(graph: usize, stream: usize) -> Outcome {
    world::with_stream(stream, |world, gpu| {
        world.refuse_in_capture(stream)?;
        let mut made = world.graphs.get(&graph).cloned().ok_or(INVALID_HANDLE)?;
        world.renew_events(gpu, &mut made);
        let branches = made.branches.into_iter().enumerate();
        for (i, ops) in branches {
            let queue: VecDeque<(Instant, Op)> =
                ops.into_iter().map(|op| (Instant::now(), op)).collect();
            if i == 0 {
                world
                    .streams
                    .get_mut(&stream)
                    .ok_or(INVALID_HANDLE)?
                    .queue
                    .extend(queue);
            } else if !queue.is_empty() {
                let handle = world.handle();
                world.streams.insert(
                    handle,
                    Stream {
                        gpu,
                        queue,
                        capture: None,
                        is_branch: true,
                    },
                );
            }
        }
        Ok(())
    })
}

impl World {
    /// Gives a launch events of its own.
    fn renew_events(&mut self, gpu: usize, graph: &mut Graph) {
        let mut renewed: BTreeMap<(usize, u64), usize> = BTreeMap::new();
        for op in graph.branches.iter_mut().flatten() {
            if let Op::Record { event, generation } | Op::Wait { event, generation } = op {
                let handle = *renewed.entry((*event, *generation)).or_insert_with(|| {
                    let handle = self.handle();
                    self.events.insert(
                        handle,
                        Event {
                            recorded: 1,
                            ..Event::new(gpu)
                        },
                    );
                    handle
                });
                (*event, *generation) = (handle, 1);
            }
        }
    }

    /// A call that would wait for a stream in capture is an error, which ends the capture.
    pub fn refuse_in_capture(&mut self, stream: usize) -> Outcome {
        match self.streams.get(&stream).and_then(|s| s.capture) {
            None => Ok(()),
            Some(capture) => {
                self.captures
                    .entry(capture)
                    .and_modify(|c| c.is_valid = false);
                Err(STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// A stream that waits for an event of a capture takes part in it; one that takes part must not wait for anything else.
    pub fn join_capture(&mut self, stream: usize, capture: Option<usize>) -> Outcome {
        let found = self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        match (found.capture, capture) {
            (Some(own), other) if other != Some(own) => {
                self.captures.entry(own).and_modify(|c| c.is_valid = false);
                Err(STREAM_CAPTURE_ISOLATION)
            }
            (None, Some(_)) if !found.queue.is_empty() => {
                // Work that was asked for before is not part of the graph; it is done first.
                self.finish_stream(stream);
                if !self.is_empty(stream) {
                    return Err(STREAM_CAPTURE_ISOLATION);
                }
                self.join_capture(stream, capture)
            }
            _ => {
                found.capture = capture;
                Ok(())
            }
        }
    }
}
