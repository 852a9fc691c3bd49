//! Threads of the program that uses a model, in place of those of a [`Pool`](super::Pool).

/// Threads of the host program: anything that makes calls side by side, such as its own pool.
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
