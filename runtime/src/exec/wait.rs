//! Waiting: spin, then yield, then sleep.

use crate::sync::{lock, wait_on, wait_timeout};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Time for which a waiting thread keeps its core before it sleeps. It affects no result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    spin: Duration,
    yields: u32,
}

impl Patience {
    /// For `threads` threads that wait for each other on this machine.
    pub(crate) fn for_threads(threads: usize) -> Patience {
        Patience::on_cores(threads, crate::cpu::n_cores())
    }

    /// For `threads` threads that wait for each other: spinning pays only while each can have a
    /// core of its own.
    pub(crate) fn on_cores(threads: usize, cores: usize) -> Patience {
        if cfg!(miri) || threads > cores {
            return Patience {
                spin: Duration::ZERO,
                yields: 8,
            };
        }
        Patience {
            spin: Duration::from_micros(200),
            yields: 64,
        }
    }
}

/// A place to wait for a condition that other threads make true.
///
/// The condition lives in atomics of the caller's; a thread that makes it true calls [`Event::notify`] afterwards. Any number of threads
/// may wait. Nothing is queued, so there is no bound to state; a waiter whose condition never comes true waits for ever, which is why every
/// condition in this crate includes its abort or close flag.
#[derive(Default)]
pub(crate) struct Event {
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    condvar: Condvar,
}

impl Event {
    /// Returns once `done()` holds.
    pub(crate) fn wait_until(&self, patience: Patience, done: impl FnMut() -> bool) {
        self.wait(patience, done, |guard| Some(wait_on(&self.condvar, guard)));
    }

    /// Returns once `done()` holds, or after about so long without: then false.
    pub(crate) fn wait_for(
        &self,
        at_most: Duration,
        patience: Patience,
        done: impl FnMut() -> bool,
    ) -> bool {
        self.wait(patience, done, |guard| {
            let (guard, timed_out) = wait_timeout(&self.condvar, guard, at_most);
            (!timed_out).then_some(guard)
        })
    }

    /// Looks at `done()` until it holds, sleeping by `sleep`, which gives up with `None`; whether it holds.
    fn wait<'a>(
        &'a self,
        patience: Patience,
        mut done: impl FnMut() -> bool,
        sleep: impl Fn(MutexGuard<'a, ()>) -> Option<MutexGuard<'a, ()>>,
    ) -> bool {
        if done() || spin(patience, &mut done) {
            return true;
        }
        let mut guard = lock(&self.mutex);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `notify`: either the notifier sees this sleeper, or this thread sees the condition.
        fence(Ordering::SeqCst);
        let holds = loop {
            if done() {
                break true;
            }
            match sleep(guard) {
                Some(woken) => guard = woken,
                None => break done(),
            }
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        holds
    }

    /// Wakes all sleepers to look at their condition again. Costs one fence when nobody sleeps.
    pub(crate) fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // Taking the lock orders this wake-up after the sleeper's last look at its condition.
            drop(lock(&self.mutex));
            self.condvar.notify_all();
        }
    }
}

/// Polls `done` for as long as `patience` says; true when it came true.
fn spin(patience: Patience, done: &mut impl FnMut() -> bool) -> bool {
    if !patience.spin.is_zero() {
        let start = Instant::now();
        while start.elapsed() < patience.spin {
            for _ in 0..32 {
                if done() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
    }
    (0..patience.yields).any(|_| {
        std::thread::yield_now();
        done()
    })
}
