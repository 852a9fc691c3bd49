//! Streams and events: queues of requests that have not been carried out.

use crate::codes::*;
use crate::execute::Op;
use crate::world::{self, World};
use std::collections::VecDeque;
use std::time::Instant;

/// A queue of one context.
pub struct Stream {
    pub gpu: usize,
    pub queue: VecDeque<(Instant, Op)>,
    /// The capture that it takes part in.
    pub capture: Option<usize>,
    /// A branch of a launched graph: gone when it is empty.
    pub is_branch: bool,
}

/// A point of a stream. Each record is a new generation; a wait is for the last one recorded when it was asked for.
pub struct Event {
    pub gpu: usize,
    pub recorded: u64,
    pub done: u64,
    /// When the last generation was done, and how many threads its device had launched then.
    pub at: Option<(Instant, u64)>,
    /// The capture in which it was recorded last, and its generation there.
    pub captured: Option<(usize, u64)>,
}

impl Event {
    pub fn new(gpu: usize) -> Event {
        Event {
            gpu,
            recorded: 0,
            done: 0,
            at: None,
            captured: None,
        }
    }
}

pub fn create_stream() -> Outcome<usize> {
    world::with_context(|world, gpu| {
        let handle = world.handle();
        let stream = Stream {
            gpu,
            queue: VecDeque::new(),
            capture: None,
            is_branch: false,
        };
        world.streams.insert(handle, stream);
        Ok(handle)
    })
}

/// Its requests are still carried out.
pub fn destroy_stream(stream: usize) -> Outcome {
    world::with(|world| {
        let found = world.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        found.is_branch = true;
        if found.queue.is_empty() {
            world.streams.remove(&stream);
        }
        Ok(())
    })
}

pub fn synchronize_stream(stream: usize) -> Outcome {
    world::until(|| {
        world::with_stream(stream, |world, gpu| {
            world.refuse_in_capture(stream)?;
            world.finish_stream(stream);
            world.check(gpu)?;
            Ok(world.is_empty(stream))
        })
    })
}

pub fn query_stream(stream: usize) -> Outcome {
    world::with_stream(stream, |world, _| {
        world.refuse_in_capture(stream)?;
        if world.streams[&stream].queue.is_empty() {
            Ok(())
        } else {
            Err(NOT_READY)
        }
    })
}

pub fn create_event() -> Outcome<usize> {
    world::with_context(|world, gpu| {
        let handle = world.handle();
        world.events.insert(handle, Event::new(gpu));
        Ok(handle)
    })
}

pub fn destroy_event(event: usize) -> Outcome {
    world::until(|| {
        world::with(|world| {
            // Waits that have been asked for still hold.
            let found = world.events.get(&event).ok_or(INVALID_HANDLE)?;
            let generation = found.recorded;
            world.finish_event(event, generation);
            let is_done = world.is_done(event, generation);
            if is_done {
                world.events.remove(&event);
            }
            Ok(is_done)
        })
    })
}

pub fn record(event: usize, stream: usize) -> Outcome {
    world::with_stream(stream, |world, gpu| {
        let found = world.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        if found.gpu != gpu {
            return Err(INVALID_HANDLE);
        }
        found.recorded += 1;
        let generation = found.recorded;
        found.captured = world.streams[&stream]
            .capture
            .map(|capture| (capture, generation));
        if found.captured.is_some() {
            // Outside of the capture nothing is recorded.
            found.done = generation;
        }
        world.ask(stream, Op::Record { event, generation })
    })
}

pub fn wait(stream: usize, event: usize) -> Outcome {
    world::with_stream(stream, |world, _| {
        let found = world.events.get(&event).ok_or(INVALID_HANDLE)?;
        let (generation, captured) = (
            found.recorded,
            found.captured.filter(|c| world.captures.contains_key(&c.0)),
        );
        world.join_capture(stream, captured.map(|c| c.0))?;
        if generation == 0 {
            Ok(())
        } else {
            world.ask(stream, Op::Wait { event, generation })
        }
    })
}

pub fn synchronize_event(event: usize) -> Outcome {
    world::until(|| {
        world::with(|world| {
            let (gpu, generation) = world.event(event)?;
            world.finish_event(event, generation);
            world.check(gpu)?;
            Ok(world.is_done(event, generation))
        })
    })
}

pub fn query_event(event: usize) -> Outcome {
    world::with(|world| {
        let (gpu, generation) = world.event(event)?;
        world.check(gpu)?;
        if world.is_done(event, generation) {
            Ok(())
        } else {
            Err(NOT_READY)
        }
    })
}

/// Milliseconds from one event to another, both done.
pub fn elapsed_ms(start: usize, end: usize) -> Outcome<f32> {
    world::with(|world| {
        let at = |event: usize| {
            let found = world.events.get(&event).ok_or(INVALID_HANDLE)?;
            if found.done < found.recorded {
                Err(NOT_READY)
            } else {
                found.at.ok_or(INVALID_HANDLE)
            }
        };
        let ((from, threads_from), (to, threads_to)) = (at(start)?, at(end)?);
        if world.settings.counts_threads {
            return Ok(threads_to.saturating_sub(threads_from) as f32 / 1e3);
        }
        Ok(to.saturating_duration_since(from).as_secs_f32() * 1e3)
    })
}

impl World {
    /// True when all requests of a stream are done.
    pub fn is_empty(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_none_or(|s| s.queue.is_empty())
    }

    /// The same of all streams of a device.
    pub fn is_idle(&self, gpu: usize) -> bool {
        self.streams
            .values()
            .filter(|s| s.gpu == gpu)
            .all(|s| s.queue.is_empty())
    }

    /// Device and last generation of an event. Refused while that is in a capture.
    fn event(&mut self, event: usize) -> Outcome<(usize, u64)> {
        let found = self.events.get(&event).ok_or(INVALID_HANDLE)?;
        match found.captured.filter(|c| self.captures.contains_key(&c.0)) {
            Some(_) => Err(STREAM_CAPTURE_UNSUPPORTED),
            None => Ok((found.gpu, found.recorded)),
        }
    }

    /// Puts a request into a stream, or into the graph that it is captured for.
    pub fn ask(&mut self, stream: usize, op: Op) -> Outcome {
        let found = self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        match found.capture {
            Some(capture) => self
                .captures
                .get_mut(&capture)
                .ok_or(INVALID_HANDLE)?
                .push(stream, op),
            None => {
                found.queue.push_back((Instant::now(), op));
                Ok(())
            }
        }
    }
}
