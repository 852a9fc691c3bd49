//! Threads of the program that uses a session.

use gristmill_runtime::exec::{HostThreads, Spawning, Task};
use rayon::ThreadPool;
use std::fmt;
use std::sync::Arc;

/// A pool of the host program, whose threads run kernels instead of threads of the session.
///
/// The caller of a run works too, and never waits for a free thread of the pool: a run may start inside of the pool. The session's own
/// threads spin between the kernels of a run and start sooner; a host pool is for programs whose cores are busy with other work of that pool.
#[derive(Clone)]
pub struct HostPool {
    n_threads: usize,
    threads: Arc<dyn HostThreads>,
}

impl HostPool {
    /// A pool of `n_threads` threads.
    pub fn new(n_threads: usize, threads: Arc<dyn HostThreads>) -> HostPool {
        HostPool { n_threads, threads }
    }

    /// A rayon pool.
    pub fn rayon(pool: &Arc<ThreadPool>) -> HostPool {
        let own = pool.clone();
        let spawn = move |task: Task| own.spawn(task);
        HostPool::new(pool.current_num_threads(), Arc::new(Spawning::new(spawn)))
    }

    /// Number of threads.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    pub(super) fn threads(&self) -> &Arc<dyn HostThreads> {
        &self.threads
    }
}

impl fmt::Debug for HostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPool of {} threads", self.n_threads)
    }
}
