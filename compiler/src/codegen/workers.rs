//! Threads of compilation.

use gristmill_runtime::sync::lock;
use rayon::ThreadPoolBuilder;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread;

/// Number of threads for parts of compilation which do not depend on each other. Results never depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Workers(usize);

impl Default for Workers {
    /// The caller's thread.
    fn default() -> Workers {
        Workers(1)
    }
}

impl Workers {
    /// At most `n` threads, and no more than this process has cores.
    pub fn new(n: usize) -> Workers {
        Workers(n.min(gristmill_runtime::cpu::n_cores()).max(1))
    }

    /// Number of threads.
    pub fn n(self) -> usize {
        self.0
    }

    /// The results of `f` for all items, in their order.
    ///
    /// The pool ends with the call, so compilation leaves no threads behind. The caller waits on a thread of its own. If it is a thread of another
    /// rayon pool, that pool could otherwise give it other work while it waits, which may need the result of this call.
    pub fn map<T: Send, R: Send>(self, items: Vec<T>, f: impl Fn(T) -> R + Sync) -> Vec<R> {
        let n = self.0.min(items.len());
        if n <= 1 {
            return items.into_iter().map(f).collect();
        }
        let items = Mutex::new(items);
        let all = || {
            let items = std::mem::take(&mut *lock(&items)).into_par_iter();
            items.with_max_len(1).map(&f).collect()
        };
        let pool = ThreadPoolBuilder::new().num_threads(n).build();
        let made = pool.ok().and_then(|pool| {
            thread::scope(|scope| {
                let spawned = thread::Builder::new().spawn_scoped(scope, || pool.install(all));
                let made = spawned.ok()?.join();
                Some(made.unwrap_or_else(|panic| resume_unwind(panic)))
            })
        });
        // A system without further threads leaves the caller's.
        made.unwrap_or_else(|| {
            std::mem::take(&mut *lock(&items))
                .into_iter()
                .map(&f)
                .collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_for_any_number_of_threads() {
        for n in [1, 2, 7] {
            for n_items in [0, 1, 2, 100] {
                let items: Vec<usize> = (0..n_items).collect();
                let made = Workers(n).map(items, |i| i * i);
                let expected: Vec<usize> = (0..n_items).map(|i| i * i).collect();
                assert_eq!(made, expected);
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let panics = || Workers(2).map(vec![1, 2, 3], |i| assert_ne!(i, 2, "no two"));
        let caught = std::panic::catch_unwind(panics);
        assert!(caught.is_err());
    }

    /// A job that waits inside of a pool of one thread does not start other jobs of that pool.
    #[test]
    fn callers_of_another_pool_get_no_other_work() {
        let pool = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let is_inside = std::sync::atomic::AtomicBool::new(false);
        pool.scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|_| {
                    use std::sync::atomic::Ordering::SeqCst;
                    assert!(!is_inside.swap(true, SeqCst), "another job began");
                    Workers(2).map(vec![(); 4], |()| thread::yield_now());
                    is_inside.store(false, SeqCst);
                });
            }
        });
    }
}
