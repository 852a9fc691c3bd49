//! Threads of the host program, in place of those of a [`Pool`](super::Pool).

use crate::sync::lock;
use std::mem::transmute;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Threads of the host program, such as its own pool.
pub trait HostThreads: Send + Sync {
    /// Makes the calls `share(0)` to `share(n - 1)`, side by side where it can, and returns when all
    /// of them have returned.
    ///
    /// Each call works until nothing is left to do, so calls that are made one after another, twice
    /// or not at all cost time and change no result. They may be made from any thread, and never
    /// wait for each other. Runs in flight, and the devices of a program, ask independently. A panic
    /// of this function fails the run.
    fn parallel(&self, n: usize, share: &(dyn Fn(usize) + Sync));
}

/// [`HostThreads`] of a pool with a function which runs a task on one of its threads at some time, as `spawn` of a rayon pool does.
///
/// The caller makes calls too. When its own call returns, it takes back the tasks still waiting, so it never waits for a free thread:
/// runs may start inside of the pool, whatever its size, and after its end.
pub struct Spawning<F>(F);

/// A task for a pool.
pub type Task = Box<dyn FnOnce() + Send>;

impl<F: Fn(Task) + Send + Sync> Spawning<F> {
    /// The threads behind `spawn`, which may drop tasks.
    pub fn new(spawn: F) -> Spawning<F> {
        Spawning(spawn)
    }
}

/// The tasks of one run.
#[derive(Default)]
struct Tasks {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    n_running: usize,
    /// True once the caller takes back the others.
    is_over: bool,
    has_panicked: bool,
}

/// The call of a task. It lives until [`Tasks::end`] has returned.
#[derive(Clone, Copy)]
struct Share(*const (dyn Fn(usize) + Sync));

// SAFETY: what it points to is `Sync`.
unsafe impl Send for Share {}

impl Tasks {
    /// Makes call `i`, unless the caller has taken it back.
    fn run(&self, i: usize, share: Share) {
        let mut state = lock(&self.state);
        if state.is_over {
            return;
        }
        state.n_running += 1;
        drop(state);
        // SAFETY: the task counts as running, so the caller is still in `Spawning::parallel`, which borrows the function.
        let call = || unsafe { (*share.0)(i) };
        let ended = catch_unwind(AssertUnwindSafe(call));
        let mut state = lock(&self.state);
        state.n_running -= 1;
        state.has_panicked |= ended.is_err();
        self.ended.notify_all();
    }

    /// Takes back waiting tasks, and waits for running ones. True if one has panicked.
    fn end(&self) -> bool {
        let mut state = lock(&self.state);
        state.is_over = true;
        while state.n_running > 0 {
            let waited = self.ended.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.has_panicked
    }
}

impl<F: Fn(Task) + Send + Sync> HostThreads for Spawning<F> {
    fn parallel(&self, n: usize, share: &(dyn Fn(usize) + Sync)) {
        let tasks = Arc::<Tasks>::default();
        // SAFETY: lifetimes alone change; no task uses it after `end`, which is called before this function returns or unwinds.
        let call = unsafe {
            transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                share,
            )
        };
        let call = Share(call);
        let own = catch_unwind(AssertUnwindSafe(|| {
            for i in 1..n {
                let tasks = tasks.clone();
                (self.0)(Box::new(move || {
                    let call: Share = call;
                    tasks.run(i, call);
                }));
            }
            share(0);
        }));
        let has_panicked = tasks.end();
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!has_panicked, "a task of the host's pool panicked");
    }
}
