//! Carries out requests of streams: no more than those that someone waits for.

use crate::codes::*;
use crate::modules::{self, LaunchCall};
use crate::nccl::Part;
use crate::product::ProductCall;
use crate::world::{self, World};
use gristmill_emulator::{Checks, Device, Fault, FaultKind};
use std::ffi::{CString, c_void};
use std::slice;
use std::time::Instant;

/// One request. Addresses of the host are kept as numbers.
#[derive(Clone)]
pub enum Op {
    Launch(LaunchCall),
    /// Of a library.
    Product(Box<ProductCall>),
    /// From pinned memory, which is read when the request is done.
    ToDevice {
        from: usize,
        to: u64,
        size_bytes: usize,
    },
    /// From memory that was read when the request was made.
    Write {
        to: u64,
        bytes: Vec<u8>,
    },
    ToHost {
        from: u64,
        to: usize,
        size_bytes: usize,
    },
    Copy {
        from: u64,
        to: u64,
        size_bytes: usize,
    },
    /// From the memory of one device to that of another.
    Peer {
        from: (usize, u64),
        to: (usize, u64),
        size_bytes: usize,
    },
    Fill {
        to: u64,
        value: u8,
        size_bytes: usize,
    },
    Free {
        address: u64,
    },
    Record {
        event: usize,
        generation: u64,
    },
    Wait {
        event: usize,
        generation: u64,
    },
    /// One rank of a collective.
    Collective(Part),
    Host {
        function: unsafe extern "C" fn(*mut c_void),
        data: usize,
    },
}

/// Carries out a request that concerns the memory of one device.
fn perform_on(device: &Device, op: Op) -> Result<(), Fault> {
    match op {
        Op::ToDevice {
            from,
            to,
            size_bytes,
        } => {
            // SAFETY: pinned memory of at least this size (checked when asked for), which the caller keeps until the copy is done.
            device.copy_in(to, unsafe {
                slice::from_raw_parts(std::ptr::with_exposed_provenance(from), size_bytes)
            })
        }
        Op::Write { to, bytes } => device.copy_in(to, &bytes),
        Op::ToHost {
            from,
            to,
            size_bytes,
        } => {
            let to = std::ptr::with_exposed_provenance_mut(to);
            // SAFETY: as for `ToDevice`; nobody reads it before the copy is done.
            device.copy_out(unsafe { slice::from_raw_parts_mut(to, size_bytes) }, from)
        }
        Op::Copy {
            from,
            to,
            size_bytes,
        } => device.copy_within(to, from, size_bytes),
        Op::Fill {
            to,
            value,
            size_bytes,
        } => device.fill(to, value, size_bytes),
        Op::Free { address } => device.free(address),
        Op::Launch(_)
        | Op::Product(_)
        | Op::Peer { .. }
        | Op::Record { .. }
        | Op::Wait { .. }
        | Op::Host { .. }
        | Op::Collective(_) => unreachable!("`perform` does these"),
    }
}

impl World {
    /// Does all that the stream has been asked.
    pub fn finish_stream(&mut self, stream: usize) {
        while self.step(stream) {}
    }

    /// Does all that streams of a device have been asked.
    pub fn finish_gpu(&mut self, gpu: usize) {
        let streams: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, s)| s.gpu == gpu)
            .map(|(h, _)| *h)
            .collect();
        streams
            .into_iter()
            .rev()
            .for_each(|s| self.finish_stream(s));
    }

    /// Does the requests before the record of an event.
    pub fn finish_event(&mut self, event: usize, generation: u64) {
        let records = |op: &Op| matches!(op, Op::Record { event: e, generation: g } if (*e, *g) == (event, generation));
        while !self.is_done(event, generation) {
            match self.stream_with(records) {
                Some(stream) if self.step(stream) => {}
                // It waits for a request that is still to come.
                _ => return,
            };
        }
    }

    /// The first stream that has such a request.
    pub fn stream_with(&self, is_it: impl Fn(&Op) -> bool) -> Option<usize> {
        let mut streams = self.streams.iter();
        let found = streams.find(|(_, s)| s.queue.iter().any(|(_, op)| is_it(op)));
        found.map(|(handle, _)| *handle)
    }

    pub fn is_done(&self, event: usize, generation: u64) -> bool {
        self.events.get(&event).is_none_or(|e| e.done >= generation)
    }

    /// Does the first request of a stream; false when there is none, or when it waits for one that is still to come.
    pub fn step(&mut self, stream: usize) -> bool {
        if !self.stepping.insert(stream) {
            return false;
        }
        let done = self.step_once(stream);
        self.stepping.remove(&stream);
        done
    }

    fn step_once(&mut self, stream: usize) -> bool {
        let Some(found) = self.streams.get(&stream) else {
            return false;
        };
        let gpu = found.gpu;
        match self.is_ready(stream) {
            Ok(true) => {}
            Ok(false) => return false,
            Err((code, text)) => {
                self.break_gpu(gpu, code, &text);
                return true;
            }
        }
        let Some(op) = self.pop(stream) else {
            return false;
        };
        if let Err((code, text)) = self.perform(gpu, op) {
            self.break_gpu(gpu, code, &text);
        }
        true
    }

    /// Carries out the requests that the first one of a stream waits for; false when one is still to come.
    fn is_ready(&mut self, stream: usize) -> Result<bool, (Code, String)> {
        let Some(found) = self.streams.get(&stream) else {
            return Ok(false);
        };
        let gpu = found.gpu;
        match found.queue.front() {
            Some(&(_, Op::Wait { event, generation })) => {
                self.finish_event(event, generation);
                Ok(self.is_done(event, generation))
            }
            Some((_, Op::Collective(part))) => self.come_to(gpu, &part.clone()),
            _ => Ok(true),
        }
    }

    fn pop(&mut self, stream: usize) -> Option<Op> {
        let found = self.streams.get_mut(&stream)?;
        let op = found.queue.pop_front();
        if found.is_branch && found.queue.is_empty() {
            self.streams.remove(&stream);
        }
        op.map(|(_, op)| op)
    }

    fn perform(&mut self, gpu: usize, op: Op) -> Result<(), (Code, String)> {
        let result = match op {
            Op::Launch(call) => return self.launch(gpu, &call),
            Op::Product(call) => return self.product(gpu, &call),
            // Both were waited for.
            Op::Wait { .. } => Ok(()),
            Op::Collective(part) => {
                let (to, result) = self.take_result(&part);
                self.gpus[gpu].device.copy_in(to, &result)
            }
            Op::Record { event, generation } => {
                self.mark(event, generation);
                Ok(())
            }
            Op::Host { function, data } => {
                // SAFETY: the caller of `cuLaunchHostFunc` promised that the function may be called with this value.
                world::in_host_function(|| unsafe {
                    function(std::ptr::without_provenance_mut(data))
                });
                Ok(())
            }
            Op::Peer {
                from,
                to,
                size_bytes,
            } => {
                let mut bytes = vec![0; size_bytes];
                let read = self.gpus[from.0].device.copy_out(&mut bytes, from.1);
                read.and_then(|()| self.gpus[to.0].device.copy_in(to.1, &bytes))
            }
            op => perform_on(&self.gpus[gpu].device, op),
        };
        result.map_err(|fault| (code_of(&fault), fault.to_string()))
    }

    /// Counts a launch, and fails if that is the one that shall.
    pub fn count_launch(&mut self, gpu: usize) -> Result<(), (Code, String)> {
        self.gpus[gpu].n_launches += 1;
        let here = Some((gpu, self.gpus[gpu].n_launches));
        if self.settings.lose == here {
            return Err((
                DEVICE_UNAVAILABLE,
                "the device was lost, as EMULATED_CUDA asks".to_owned(),
            ));
        }
        if self.settings.fault == here {
            return Err((
                ILLEGAL_ADDRESS,
                "an illegal access, as EMULATED_CUDA asks".to_owned(),
            ));
        }
        Ok(())
    }

    fn launch(&mut self, gpu: usize, call: &LaunchCall) -> Result<(), (Code, String)> {
        self.count_launch(gpu)?;
        let found = &mut self.gpus[gpu];
        found.n_threads += call
            .config
            .grid
            .iter()
            .chain(&call.config.block)
            .map(|&n| u64::from(n))
            .product::<u64>();
        let checks = Checks::default();
        let done = found.device.launch(
            &call.module,
            &call.entry,
            &call.config,
            &call.params,
            &checks,
        );
        done.map(drop)
            .map_err(|fault| (code_of(&fault), format!("kernel {}: {fault}", call.entry)))
    }

    fn mark(&mut self, event: usize, generation: u64) {
        if let Some(event) = self.events.get_mut(&event) {
            event.done = event.done.max(generation);
            event.at = Some((Instant::now(), self.gpus[event.gpu].n_threads));
        }
    }

    /// From now on every call about the device fails; its requests are dropped, and others that wait for it go on.
    pub fn break_gpu(&mut self, gpu: usize, code: Code, text: &str) {
        self.gpus[gpu].broken = Some(code);
        let name = modules::text_of(code).1.trim_end_matches('\0');
        self.fault = CString::new(format!("{name} ({text})"))
            .ok()
            .map(|text| (code, text));
        let streams = self.streams.values_mut().filter(|s| s.gpu == gpu);
        let dropped: Vec<Op> = streams
            .flat_map(|s| s.queue.drain(..))
            .map(|(_, op)| op)
            .collect();
        for op in dropped {
            if let Op::Record { event, generation } = op {
                self.mark(event, generation);
            }
        }
    }
}

pub fn code_of(fault: &Fault) -> Code {
    match fault.kind() {
        FaultKind::OutOfBounds => ILLEGAL_ADDRESS,
        FaultKind::Misaligned => MISALIGNED_ADDRESS,
        FaultKind::Trap => ASSERT,
        FaultKind::OutOfMemory => OUT_OF_MEMORY,
        FaultKind::InvalidCall => INVALID_VALUE,
        _ => LAUNCH_FAILED,
    }
}
