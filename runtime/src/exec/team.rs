//! The threads of one logical device: a leader that runs the partition, and followers that help with parallel kernels.
//!
//! A job of `items` work items is cut into at most `4 * threads` chunks of at least `grain` items. The unclaimed chunks are a range
//! `[front, back)` packed with the job's epoch into one atomic word: the leader claims from the front, followers from the back, each by
//! compare-and-swap. That balances load dynamically and yet gives the leader the same end of the data in every kernel, which keeps its
//! cache warm. A follower that comes late finds nothing to claim and delays nobody: the leader waits for claimed chunks only, so a team
//! larger than the machine merely falls back to the leader's own work.

use super::host::HostThreads;
use super::wait::{Event, Patience};
use crate::sync::lock;
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Chunks per thread: more balances better, fewer cost less.
const CHUNKS_PER_THREAD: u64 = 4;
/// Largest team; its chunks must fit the 12-bit fields of [`pack`].
pub(crate) const MAX_THREADS: usize = 1000;

/// Status in [`Team::status`] that stands for a caught panic.
const PANICKED: u32 = u32::MAX;

/// Failure of a job.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum JobFailure {
    /// The first non-zero status.
    Status(u32),
    /// A panic's message.
    Panic(String),
}

#[derive(Clone, Copy)]
struct Job {
    /// Calls `*data` on items `[begin, end)` as thread `thread`.
    run: unsafe fn(data: *const (), begin: u64, end: u64, thread: usize) -> u32,
    data: *const (),
    items: u64,
    chunk: u64,
}

/// State shared by a leader and its followers.
pub(crate) struct Team {
    patience: Patience,
    /// `epoch << 24 | front << 12 | back`.
    state: AtomicU64,
    job: UnsafeCell<Job>,
    chunks_done: AtomicU64,
    status: AtomicU32,
    panic: Mutex<Option<String>>,
    /// Followers wait here for work, a roll call or the end.
    work: Event,
    /// The leader waits here for the last claimed chunk.
    done: Event,
    roll_calls: AtomicU64,
    closed: AtomicBool,
}

// SAFETY: `job` is the only part that is not Sync. The leader writes it while no chunk of the previous job is claimed and undone, before it
// publishes the new epoch with release order; a follower reads it only after its claim of a chunk of that epoch (acquire), which keeps the
// leader waiting until the chunk is done. `data` points to a `Sync` closure that outlives the job for the same reason.
unsafe impl Sync for Team {}
// SAFETY: as above; nothing is tied to the creating thread.
unsafe impl Send for Team {}

fn pack(epoch: u64, front: u64, back: u64) -> u64 {
    (epoch << 24) | (front << 12) | back
}

fn unpack(state: u64) -> (u64, u64, u64) {
    (state >> 24, (state >> 12) & 0xfff, state & 0xfff)
}

/// Text of a panic's payload.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}

impl Team {
    fn claim(&self, from_front: bool) -> Option<u64> {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            let (epoch, front, back) = unpack(state);
            if front >= back {
                return None;
            }
            let (next, chunk) = if from_front {
                (pack(epoch, front + 1, back), front)
            } else {
                (pack(epoch, front, back - 1), back - 1)
            };
            // The epoch in the word makes the swap fail when the job has changed since the load.
            match self
                .state
                .compare_exchange_weak(state, next, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Some(chunk),
                Err(now) => state = now,
            }
        }
    }

    fn has_work(&self) -> bool {
        let (_, front, back) = unpack(self.state.load(Ordering::Acquire));
        front < back
    }

    /// Claims and runs chunks until none is left.
    fn work(&self, thread: usize, from_front: bool) {
        while let Some(index) = self.claim(from_front) {
            // SAFETY: a chunk of this job is claimed and not done, so the leader leaves `job` alone (see `Sync`).
            let job = unsafe { *self.job.get() };
            if self.status.load(Ordering::Relaxed) == 0 {
                let begin = index * job.chunk;
                let end = job.items.min(begin + job.chunk);
                // SAFETY: `data` is the closure `run` was instantiated for, alive until all chunks are done.
                let outcome = catch_unwind(AssertUnwindSafe(|| unsafe {
                    (job.run)(job.data, begin, end, thread)
                }));
                self.record(outcome);
            }
            // Only the leader's wait needs waking, and only by the last chunk; how many there are is (items / chunk) rounded up.
            if self.chunks_done.fetch_add(1, Ordering::AcqRel) + 1 == job.items.div_ceil(job.chunk)
                && thread != 0
            {
                self.done.notify();
            }
        }
    }

    fn record(&self, outcome: std::thread::Result<u32>) {
        let status = outcome.unwrap_or_else(|payload| {
            let mut slot = lock(&self.panic);
            slot.get_or_insert(panic_message(&*payload));
            PANICKED
        });
        if status != 0 {
            // The first failure stays; which of several comes first may differ from run to run.
            let _ = self
                .status
                .compare_exchange(0, status, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Result of the job, whose chunks are all done.
    fn outcome(&self) -> Result<(), JobFailure> {
        match self.status.load(Ordering::Relaxed) {
            0 => Ok(()),
            PANICKED => {
                let message = lock(&self.panic).take();
                Err(JobFailure::Panic(message.unwrap_or_default()))
            }
            status => Err(JobFailure::Status(status)),
        }
    }

    /// Helps as follower `thread` (from 1, of no other follower at the same time) until the team is
    /// closed or `is_called_off`, after which [`Team::wake`] is called.
    pub(crate) fn follow(&self, thread: usize, is_called_off: impl Fn() -> bool) {
        let is_over = || self.closed.load(Ordering::Acquire) || is_called_off();
        let mut roll_calls = self.roll_calls.load(Ordering::Relaxed);
        while !is_over() {
            self.work.wait_until(self.patience, || {
                self.has_work()
                    || is_over()
                    || self.roll_calls.load(Ordering::Relaxed) != roll_calls
            });
            roll_calls = self.roll_calls.load(Ordering::Relaxed);
            self.work(thread, false);
        }
    }

    /// Wakes followers to look whether they are called off.
    pub(crate) fn wake(&self) {
        self.work.notify();
    }

    /// Makes followers return.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.work.notify();
    }
}

/// The one handle that gives a team work.
pub(crate) struct Leader {
    team: Arc<Team>,
    /// Threads that jobs are cut for, the leader included.
    size: usize,
    /// Whose threads take the place of followers.
    host: Option<Arc<dyn HostThreads>>,
}

impl Leader {
    /// A team without followers.
    pub(crate) fn new(patience: Patience) -> Leader {
        let nothing = Job {
            run: |_, _, _, _| 0,
            data: std::ptr::null(),
            items: 0,
            chunk: 1,
        };
        let team = Team {
            patience,
            state: AtomicU64::new(0),
            job: UnsafeCell::new(nothing),
            chunks_done: AtomicU64::new(0),
            status: AtomicU32::new(0),
            panic: Mutex::new(None),
            work: Event::default(),
            done: Event::default(),
            roll_calls: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        };
        Leader {
            team: Arc::new(team),
            size: 1,
            host: None,
        }
    }

    /// Has the threads of a host in place of followers, if there is one.
    pub(crate) fn with_host(mut self, host: Option<Arc<dyn HostThreads>>) -> Leader {
        self.host = host;
        self
    }

    /// Sets the number of threads, the leader included, of which the others call [`Team::follow`].
    pub(crate) fn set_size(&mut self, size: usize) {
        self.size = size.clamp(1, MAX_THREADS);
    }

    /// The shared part, for followers.
    pub(crate) fn team(&self) -> &Arc<Team> {
        &self.team
    }

    /// Wakes followers ahead of the work, so that the first parallel kernel of a run finds them spinning.
    pub(crate) fn call_roll(&self) {
        if self.size > 1 && self.host.is_none() {
            self.team.roll_calls.fetch_add(1, Ordering::Relaxed);
            self.team.work.notify();
        }
    }

    /// Runs `f(begin, end, thread)` over disjoint ranges that cover `0..items`, on this thread (number 0) and the followers.
    ///
    /// Returns when all ranges are done. After a failure the remaining ranges are skipped.
    pub(crate) fn run<F>(&mut self, items: u64, grain: u64, f: &F) -> Result<(), JobFailure>
    where
        F: Fn(u64, u64, usize) -> u32 + Sync,
    {
        if items == 0 {
            return Ok(());
        }
        let chunk = items
            .div_ceil(CHUNKS_PER_THREAD * self.size as u64)
            .max(grain);
        let n_chunks = items.div_ceil(chunk);
        if grain == 0 || self.size == 1 || n_chunks == 1 {
            return match f(0, items, 0) {
                0 => Ok(()),
                status => Err(JobFailure::Status(status)),
            };
        }
        unsafe fn call<F: Fn(u64, u64, usize) -> u32>(
            data: *const (),
            begin: u64,
            end: u64,
            thread: usize,
        ) -> u32 {
            // SAFETY: `data` was made from a `&F` that is alive during the job.
            unsafe { (*(data as *const F))(begin, end, thread) }
        }
        let job = Job {
            run: call::<F>,
            data: f as *const F as *const (),
            items,
            chunk,
        };
        // SAFETY: `call::<F>` takes a pointer to an `F`, and `f` is borrowed until this returns, after all chunks are done.
        unsafe { self.publish(job, n_chunks) };
        let asked = self.host.as_ref().map_or(Ok(()), |host| self.ask(&**host));
        let team = &*self.team;
        team.work(0, true);
        team.done.wait_until(team.patience, || {
            team.chunks_done.load(Ordering::Acquire) == n_chunks
        });
        asked.and_then(|()| team.outcome())
    }

    /// Has the host's threads work, each under a number of its own whatever the host does.
    fn ask(&self, host: &dyn HostThreads) -> Result<(), JobFailure> {
        let n_came = AtomicUsize::new(0);
        let share = |_: usize| {
            let thread = n_came.fetch_add(1, Ordering::Relaxed);
            if thread < self.size {
                self.team.work(thread, thread == 0);
            }
        };
        catch_unwind(AssertUnwindSafe(|| host.parallel(self.size, &share)))
            .map_err(|payload| JobFailure::Panic(panic_message(&*payload)))
    }

    /// Lets followers claim the chunks of a job.
    ///
    /// # Safety
    ///
    /// `job.run` may be called with `job.data`, from any thread, until `n_chunks` chunks are done.
    unsafe fn publish(&mut self, job: Job, n_chunks: u64) {
        let team = &*self.team;
        // SAFETY: `&mut self` means that no other job is published, and the last one's chunks are all done (see `Sync`).
        unsafe { *team.job.get() = job };
        team.chunks_done.store(0, Ordering::Relaxed);
        team.status.store(0, Ordering::Relaxed);
        let (epoch, _, _) = unpack(team.state.load(Ordering::Relaxed));
        team.state
            .store(pack(epoch + 1, 0, n_chunks), Ordering::Release);
        team.work.notify();
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.team.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Calls `body` with the leader of a team of `size` real threads.
    fn with_team(size: usize, body: impl FnOnce(&mut Leader)) {
        let mut leader = Leader::new(Patience::for_threads(size));
        leader.set_size(size);
        std::thread::scope(|scope| {
            for thread in 1..size {
                let team = leader.team().clone();
                scope.spawn(move || team.follow(thread, || false));
            }
            body(&mut leader);
            drop(leader);
        });
    }

    #[test]
    fn every_item_runs_exactly_once() {
        let rounds = if cfg!(miri) { 4 } else { 200 };
        for size in [1, 2, 3, 8] {
            with_team(size, |leader| {
                for items in [0usize, 1, 2, 7, 64, 1001] {
                    for grain in [0, 1, 5, 5000] {
                        for _ in 0..rounds / 4 {
                            let hits: Vec<AtomicUsize> =
                                (0..items).map(|_| AtomicUsize::new(0)).collect();
                            let run = leader.run(items as u64, grain, &|begin, end, thread| {
                                assert!(begin < end && thread < size);
                                hits[begin as usize..end as usize]
                                    .iter()
                                    .for_each(|h| _ = h.fetch_add(1, Ordering::Relaxed));
                                0
                            });
                            assert_eq!(run, Ok(()));
                            assert!(
                                hits.iter().all(|h| h.load(Ordering::Relaxed) == 1),
                                "{size} {items} {grain}"
                            );
                        }
                    }
                }
            });
        }
    }

    #[test]
    fn a_failing_or_panicking_range_fails_the_job_and_the_team_lives_on() {
        with_team(3, |leader| {
            for _ in 0..20 {
                assert_eq!(
                    leader.run(100, 1, &|begin, _, _| 7
                        * (begin == 40 || begin > 60) as u32),
                    Err(JobFailure::Status(7))
                );
                let panicking = leader.run(100, 1, &|begin, end, _| {
                    assert!(!(begin..end).contains(&99), "item {} is bad", 99);
                    0
                });
                assert_eq!(
                    panicking,
                    Err(JobFailure::Panic("item 99 is bad".to_owned()))
                );
                assert_eq!(leader.run(100, 1, &|_, _, _| 0), Ok(()));
            }
        });
    }

    #[test]
    fn sleeping_followers_are_woken() {
        with_team(2, |leader| {
            for _ in 0..3 {
                std::thread::sleep(std::time::Duration::from_millis(5));
                leader.call_roll();
                // The leader's chunk waits for the follower's, so this ends only if the follower comes.
                let started = AtomicUsize::new(0);
                let run = leader.run(2, 1, &|_, _, _| {
                    started.fetch_add(1, Ordering::SeqCst);
                    while started.load(Ordering::SeqCst) < 2 {
                        std::thread::yield_now();
                    }
                    0
                });
                assert_eq!(run, Ok(()));
            }
        });
    }
}
