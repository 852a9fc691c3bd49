//! Threads and memory shared by executors: of all shapes of a model, and of all its runs in flight.
//!
//! # Threads
//!
//! A pool for `n` threads has `n - 1` followers, which help teams of workers with parallel kernels. The caller of a run leads one team itself, so a run uses followers and its caller's
//! thread. Runs in flight share the threads evenly: the `k`th run in flight gets at most
//! `n / k` of them, and only free ones. With as many callers as threads, each run stays on the
//! thread of its caller, which gives the best total throughput. A follower stays with its team until
//! another team needs it, so one caller's runs find warm followers. A pool on the threads of a host has no followers: kernels ask the host.
//!
//! Leaders of further devices, and emulated links, run on helpers: threads started when none is idle.
//!
//! # Memory
//!
//! Arenas and workspaces of the host are leased for a run, unless they are small. There are as
//! many blocks as runs were ever in flight, each as large as its largest lease, for any number of
//! shapes.

use super::host::HostThreads;
use super::team::{MAX_THREADS, Team};
use super::wait::{Event, Patience};
use crate::error::{Error, ErrorKind};
use crate::sync::lock;
use crate::tensor::AlignedBytes;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

impl Default for Pool {
    fn default() -> Pool {
        Pool::new(0)
    }
}

/// Threads and memory for any number of executors; see [`super::ExecOptions::pool`].
pub struct Pool {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The process of the threads; a forked child has none of them.
    process: u32,
}

/// The state shared by executors and threads of a pool.
pub(crate) struct Core {
    n_threads: usize,
    n_cores: usize,
    /// Whose threads take the place of followers.
    host: Option<Arc<dyn HostThreads>>,
    n_in_flight: AtomicUsize,
    followers: Mutex<Vec<Follower>>,
    blocks: Mutex<Vec<AlignedBytes>>,
    /// Helpers without an errand, and the number of all.
    idle: Mutex<Vec<Helper>>,
    n_helpers: AtomicUsize,
    /// Threads that have started, and where their starter waits for them.
    n_started: AtomicUsize,
    started: Event,
}

/// One call, for a helper to make.
pub(crate) trait Errand: Send + Sync {
    fn run(&self);
}

/// A thread for errands.
pub(crate) struct Helper(Arc<Seat<Arc<dyn Errand>>>);

/// A thread that helps teams.
struct Follower {
    seat: Arc<Seat<Arc<Team>>>,
    /// Its team.
    team: Option<Arc<Team>>,
    /// True while a run of that team counts on it.
    is_hired: bool,
}

/// Where a thread of the pool finds its next order.
struct Seat<T> {
    order: Mutex<Option<T>>,
    /// Number of orders so far.
    version: AtomicU64,
    changed: Event,
}

impl<T: Clone> Seat<T> {
    fn new() -> Arc<Seat<T>> {
        Arc::new(Seat {
            order: Mutex::new(None),
            version: AtomicU64::new(0),
            changed: Event::default(),
        })
    }

    /// Gives the thread an order in place of the last one; `None` ends it.
    fn give(&self, order: Option<T>) {
        let mut place = lock(&self.order);
        *place = order;
        self.version.fetch_add(1, Ordering::Release);
        drop(place);
        self.changed.notify();
    }

    fn has_changed(&self, seen: u64) -> bool {
        self.version.load(Ordering::Acquire) != seen
    }

    /// Waits for an order other than number `seen`, which it counts up.
    fn next(&self, seen: &mut u64, patience: Patience) -> Option<T> {
        let last = *seen;
        self.changed.wait_until(patience, || self.has_changed(last));
        let order = lock(&self.order);
        *seen = self.version.load(Ordering::Acquire);
        order.clone()
    }
}

impl Helper {
    /// Starts an errand. The errand given before may still be about to return.
    pub(crate) fn start(&self, errand: &Arc<dyn Errand>) {
        self.0.give(Some(errand.clone()));
    }
}

impl Pool {
    /// For kernels on `threads` threads, those of callers included; 0 = one per core that this
    /// process may use. Threads are started when the first executor is made.
    pub fn new(threads: usize) -> Pool {
        Pool::of(threads, None)
    }

    /// The same on the threads of a host program in place of followers. Devices of a program beside
    /// its first are led by threads of the pool all the same.
    pub fn hosted(threads: usize, host: Arc<dyn HostThreads>) -> Pool {
        Pool::of(threads, Some(host))
    }

    fn of(threads: usize, host: Option<Arc<dyn HostThreads>>) -> Pool {
        let n_cores = crate::cpu::n_cores();
        let threads = if threads == 0 { n_cores } else { threads };
        let core = Core {
            n_threads: threads.min(MAX_THREADS),
            n_cores,
            host,
            n_in_flight: AtomicUsize::new(0),
            followers: Mutex::default(),
            blocks: Mutex::default(),
            idle: Mutex::default(),
            n_helpers: AtomicUsize::new(0),
            n_started: AtomicUsize::new(0),
            started: Event::default(),
        };
        Pool {
            core: Arc::new(core),
            threads: Mutex::default(),
            process: std::process::id(),
        }
    }

    /// Number of threads for kernels.
    pub fn n_threads(&self) -> usize {
        self.core.n_threads
    }

    /// Number of started threads.
    pub fn n_started(&self) -> usize {
        lock(&self.threads).len()
    }

    /// Bytes of idle blocks.
    pub fn idle_bytes(&self) -> usize {
        lock(&self.core.blocks).iter().map(AlignedBytes::len).sum()
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Starts the followers, if there are none yet, and helpers until `n_helpers` are there.
    pub(crate) fn start(&self, n_helpers: usize) -> Result<(), Error> {
        self.start_followers()?;
        while self.core.n_helpers.load(Ordering::Relaxed) < n_helpers {
            let helper = self.start_helper()?;
            lock(&self.core.idle).push(helper);
        }
        // A run must not find threads that are still setting themselves up (and allocate while they
        // do).
        let n = self.n_started();
        let has_started = || self.core.n_started.load(Ordering::Acquire) >= n;
        self.core
            .started
            .wait_until(Patience::for_threads(n), has_started);
        Ok(())
    }

    fn start_followers(&self) -> Result<(), Error> {
        if self.core.host.is_some() {
            return Ok(());
        }
        let mut followers = lock(&self.core.followers);
        while followers.len() + 1 < self.core.n_threads {
            let thread = followers.len() + 1;
            let (seat, patience) = (Seat::new(), Patience::for_threads(self.core.n_threads));
            let own = seat.clone();
            self.spawn(move || follow(&own, thread, patience))?;
            followers.push(Follower {
                seat,
                team: None,
                is_hired: false,
            });
        }
        Ok(())
    }

    /// A helper that is idle, or a new one.
    ///
    /// Errors in a forked child of their process.
    pub(crate) fn helper(&self) -> Result<Helper, Error> {
        if self.process != std::process::id() {
            let message =
                "a model on several devices that was opened before a fork runs in the parent alone";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let idle = lock(&self.core.idle).pop();
        idle.map_or_else(|| self.start_helper(), Ok)
    }

    /// Takes a helper back. Its errand is over, or about to return.
    pub(crate) fn give_back(&self, helper: Helper) {
        lock(&self.core.idle).push(helper);
    }

    fn start_helper(&self) -> Result<Helper, Error> {
        let seat = Seat::new();
        let (own, core) = (seat.clone(), self.core.clone());
        self.spawn(move || run_errands(&own, &core))?;
        let n = self.core.n_helpers.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.core.idle).reserve(n);
        Ok(Helper(seat))
    }

    fn spawn(&self, life: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let mut threads = lock(&self.threads);
        let core = self.core.clone();
        let begin = move || {
            core.n_started.fetch_add(1, Ordering::Release);
            core.started.notify();
            drop(core);
            life();
        };
        let builder = std::thread::Builder::new().name(format!("gristmill-{}", threads.len()));
        let thread = builder.spawn(begin).map_err(|e| {
            let n = threads.len() + 1;
            let message = format!("cannot start thread {n} of the pool: {e}; ask for fewer");
            Error::new(ErrorKind::OutOfMemory, message)
        })?;
        threads.push(thread);
        Ok(())
    }
}

/// Ends the threads. No executor uses the pool any more, since each holds it.
impl Drop for Pool {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Detaching a thread that is not there would be undefined, as joining it is.
            std::mem::forget(std::mem::take(&mut *lock(&self.threads)));
            return;
        }
        for follower in lock(&self.core.followers).drain(..) {
            follower.seat.give(None);
            follower.team.iter().for_each(|team| team.wake());
        }
        for helper in lock(&self.core.idle).drain(..) {
            helper.0.give(None);
        }
        for thread in lock(&self.threads).drain(..) {
            // Panics of kernels are caught, and a thread that ended by another one is of no use any
            // more.
            let _ = thread.join();
        }
    }
}

/// The life of a follower.
fn follow(seat: &Seat<Arc<Team>>, thread: usize, patience: Patience) {
    let mut seen = 0;
    while let Some(team) = seat.next(&mut seen, patience) {
        team.follow(thread, || seat.has_changed(seen));
    }
}

/// The life of a helper.
fn run_errands(seat: &Seat<Arc<dyn Errand>>, core: &Core) {
    let mut seen = 0;
    // Where there are more leaders than cores, waiting ones leave these to others.
    let patience = || {
        let n_leaders = core.n_helpers.load(Ordering::Relaxed) + 1;
        Patience::on_cores(core.n_threads.max(n_leaders), core.n_cores)
    };
    while let Some(errand) = seat.next(&mut seen, patience()) {
        errand.run();
    }
}

/// A run that has begun; dropped, it has ended.
pub(crate) struct InFlight<'a> {
    core: &'a Core,
    /// Number of runs in flight, this one included, when it began.
    pub(crate) n: usize,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.core.n_in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Followers of a team, until the drop of this.
pub(crate) struct Hired<'a> {
    core: &'a Core,
    team: Option<Arc<Team>>,
    /// Number of them.
    pub(crate) n: usize,
}

impl Drop for Hired<'_> {
    fn drop(&mut self) {
        if let Some(team) = &self.team {
            let mut followers = lock(&self.core.followers);
            let own = followers.iter_mut().filter(|f| f.is_with(team));
            own.for_each(|f| f.is_hired = false);
        }
    }
}

impl Follower {
    fn is_with(&self, team: &Arc<Team>) -> bool {
        self.team.as_ref().is_some_and(|own| Arc::ptr_eq(own, team))
    }

    fn hire(&mut self, team: &Arc<Team>) {
        self.is_hired = true;
        if self.is_with(team) {
            return;
        }
        self.seat.give(Some(team.clone()));
        // It may sleep where its last team waits for work.
        let last = self.team.replace(team.clone());
        last.iter().for_each(|last| last.wake());
    }
}

impl Core {
    /// Whose threads take the place of followers.
    pub(crate) fn host(&self) -> Option<Arc<dyn HostThreads>> {
        self.host.clone()
    }

    /// Counts a run that begins.
    pub(crate) fn begin(&self) -> InFlight<'_> {
        InFlight {
            core: self,
            n: self.n_in_flight.fetch_add(1, Ordering::Relaxed) + 1,
        }
    }

    /// Gives a team up to `n` free followers; a host schedules its own threads.
    pub(crate) fn hire(&self, team: &Arc<Team>, n: usize) -> Hired<'_> {
        let is_hosted = self.host.is_some();
        let mut hired = if is_hosted { n } else { 0 };
        if n > 0 && !is_hosted {
            let mut followers = lock(&self.followers);
            let free = followers.iter_mut().filter(|f| !f.is_hired);
            hired = free.take(n).map(|f| f.hire(team)).count();
        }
        Hired {
            core: self,
            team: (hired > 0 && !is_hosted).then(|| team.clone()),
            n: hired,
        }
    }

    /// A block of at least `size_bytes`, with undefined contents: the smallest that is large
    /// enough. Where there is none, the largest one gives way to a new one.
    pub(crate) fn lease(&self, size_bytes: usize) -> Result<AlignedBytes, Error> {
        let mut blocks = lock(&self.blocks);
        let lengths = blocks.iter().map(AlignedBytes::len).enumerate();
        let fitting = lengths.clone().filter(|&(_, len)| len >= size_bytes);
        if let Some((best, _)) = fitting.min_by_key(|&(_, len)| len) {
            return Ok(blocks.swap_remove(best));
        }
        let largest = lengths.max_by_key(|&(_, len)| len);
        let outgrown = largest.map(|(i, _)| blocks.swap_remove(i));
        drop(blocks);
        drop(outgrown);
        AlignedBytes::zeroed(size_bytes)
    }

    /// Takes back a leased block.
    pub(crate) fn return_block(&self, block: AlignedBytes) {
        lock(&self.blocks).push(block);
    }
}
