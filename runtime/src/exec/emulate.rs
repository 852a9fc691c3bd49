//! Emulated devices: kernels of known length and links of known speed, so that placement's prediction can be compared with the executor's run.
//!
//! Order: a link moves one tensor at a time, in the order in which they were sent; links are independent of each other. Blocking: `post` never
//! blocks, one thread of the executor delivers tensors that are due. Bound: a tensor waits at most once per key and run. Peer gone: tensors of an
//! aborted run are dropped when the next one begins.

use crate::device::DeviceName;
use crate::error::{Error, ErrorKind};
use crate::program::{CpuKernel, Kernel, Key};
use crate::status;
use crate::sync::{lock, wait_on, wait_timeout};
use crate::text::Function;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Transport of tensors between devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through the memory of this process, as fast as it is.
    #[default]
    InProcess,
    /// Through the memory of this process, but no sooner than over a link of this speed from the first device to the second. Every pair between
    /// which the program sends must be there.
    Emulated(BTreeMap<(DeviceName, DeviceName), LinkRate>),
}

/// Speed of an emulated link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRate {
    /// Time before the first byte, in ns.
    pub latency_ns: u64,
    /// Bytes per second after that; at least 1.
    pub bytes_per_second: u64,
}

impl LinkRate {
    /// Time of `size_bytes` over the idle link.
    pub fn transfer(&self, size_bytes: usize) -> Duration {
        let ns =
            (size_bytes as u128 * 1_000_000_000).div_ceil(u128::from(self.bytes_per_second.max(1)));
        Duration::from_nanos(
            self.latency_ns
                .saturating_add(u64::try_from(ns).unwrap_or(u64::MAX)),
        )
    }
}

/// A tensor that crossed an emulated link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// The tensor, its source and its destination.
    pub key: Key,
    /// Its size.
    pub size_bytes: usize,
    /// When it entered the link.
    pub start: Instant,
    /// When it had crossed.
    pub end: Instant,
}

/// A kernel that does nothing for as many nanoseconds as its step has work items, and touches no buffer. Its steps have grain 0.
///
/// It sleeps and only spins at the end, so a machine emulates more devices than it has cores.
pub fn wait_kernel() -> Kernel {
    // SAFETY: the kernel uses none of its arguments, so it keeps to the ABI in any step.
    let function = unsafe { Function::of_process(wait) };
    Kernel::Cpu(CpuKernel {
        name: "wait".into(),
        function,
        workspace_bytes_per_thread: 0,
        blocks: None,
    })
}

unsafe extern "C" fn wait(_args: *const *mut u8, begin: u64, end: u64) -> u32 {
    let until = Instant::now() + Duration::from_nanos(end - begin);
    let left = until.saturating_duration_since(Instant::now());
    let late = LATE_HERE.with(|late| *late);
    if left > late {
        std::thread::sleep(left - late);
    }
    while Instant::now() < until {
        std::hint::spin_loop();
    }
    status::OK
}

/// A sleep may end so much later than asked: with the system's slack of timers, and with the least one.
const LATE_BY_DEFAULT: Duration = Duration::from_micros(100);
const LATE: Duration = Duration::from_micros(25);

std::thread_local! {
    /// The delay of this thread's wake-ups. Linux joins those within 50 us unless a thread asks for less.
    static LATE_HERE: Duration = match without_slack() {
        Some(()) => LATE,
        None => LATE_BY_DEFAULT,
    };
}

/// Asks for punctual wake-ups of this thread; `None` if the system refuses.
fn without_slack() -> Option<()> {
    let own = std::fs::read_link("/proc/thread-self").ok()?;
    let number = own.file_name()?.to_str()?;
    std::fs::write(format!("/proc/{number}/timerslack_ns"), "1").ok()
}

/// Hands tensors over when they are due.
pub(crate) struct Courier {
    rates: Vec<LinkRate>,
    /// By rendezvous slot: its key, its link and the size of its tensor.
    slots: Vec<(Key, usize, usize)>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// When each link has moved all that was sent over it.
    free: Vec<Option<Instant>>,
    /// Tensors on their way: when they are due, slot, epoch.
    under_way: BinaryHeap<Reverse<(Instant, usize, u64)>>,
    /// Slot, start and end of all tensors of this epoch.
    log: Vec<(usize, Instant, Instant)>,
    closed: bool,
}

impl Courier {
    /// For the keys of a program, and the sizes in bytes by slot; `None` when nothing has to be emulated.
    ///
    /// Errors with `InvalidInput` when the link of a key is not there or moves nothing.
    pub(crate) fn new(
        keys: &BTreeMap<Key, usize>,
        sizes: &[usize],
        transport: &Transport,
    ) -> Result<Option<Courier>, Error> {
        let Transport::Emulated(links) = transport else {
            return Ok(None);
        };
        let mut slots: Vec<(usize, Key, usize)> = Vec::with_capacity(keys.len());
        for (key, &slot) in keys {
            let pair = (key.source.clone(), key.destination.clone());
            let link = links
                .keys()
                .position(|k| *k == pair)
                .filter(|_| links[&pair].bytes_per_second > 0);
            let link = link.ok_or_else(|| {
                let message = format!(
                    "no emulated link of at least 1 byte/s from {} to {}",
                    key.source, key.destination
                );
                Error::new(
                    ErrorKind::InvalidInput,
                    format!("{message}, over which {:?} is sent", key.tensor),
                )
            })?;
            slots.push((slot, key.clone(), link));
        }
        slots.sort_unstable_by_key(|s| s.0);
        let n = slots.len();
        let state = State {
            free: vec![None; links.len()],
            under_way: BinaryHeap::with_capacity(n),
            log: Vec::with_capacity(n),
            closed: false,
        };
        Ok((n > 0).then(|| Courier {
            rates: links.values().copied().collect(),
            slots: slots
                .into_iter()
                .map(|(slot, key, link)| (key, link, sizes[slot]))
                .collect(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Forgets the epoch before. Called while no worker runs.
    pub(crate) fn begin_epoch(&self) {
        let mut state = self.lock();
        state.free.fill(None);
        state.under_way.clear();
        state.log.clear();
    }

    /// Puts a staged tensor on its link.
    pub(crate) fn post(&self, slot: usize, epoch: u64) {
        let (_, link, size_bytes) = self.slots[slot];
        let now = Instant::now();
        let mut state = self.lock();
        let start = state.free[link].map_or(now, |free| free.max(now));
        let end = start + self.rates[link].transfer(size_bytes);
        state.free[link] = Some(end);
        state.log.push((slot, start, end));
        state.under_way.push(Reverse((end, slot, epoch)));
        drop(state);
        self.changed.notify_one();
    }

    /// The life of the thread that calls `deliver(slot, epoch)` for each tensor when it is due; ends when the courier is closed.
    pub(crate) fn run(&self, deliver: impl Fn(usize, u64)) {
        let late = LATE_HERE.with(|late| *late);
        let mut state = self.lock();
        while !state.closed {
            let Some(&Reverse((due, slot, epoch))) = state.under_way.peek() else {
                state = wait_on(&self.changed, state);
                continue;
            };
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.under_way.pop();
                drop(state);
                deliver(slot, epoch);
                state = self.lock();
            } else if left > late {
                state = wait_timeout(&self.changed, state, left - late).0;
            } else {
                // Others may post while this one spins.
                drop(state);
                std::hint::spin_loop();
                state = self.lock();
            }
        }
    }

    /// Ends [`Courier::run`].
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    /// Tensors sent in this epoch, in the order of sending.
    pub(crate) fn crossings(&self) -> Vec<Crossing> {
        let crossing = |&(slot, start, end): &(usize, Instant, Instant)| {
            let (key, _, size_bytes) = &self.slots[slot];
            Crossing {
                key: key.clone(),
                size_bytes: *size_bytes,
                start,
                end,
            }
        };
        self.lock().log.iter().map(crossing).collect()
    }
}
