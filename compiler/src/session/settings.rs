//! Settings of a session.

use super::HostPool;
use crate::place::DeviceSet;
use std::path::PathBuf;
use std::sync::Arc;

/// Settings of a [`Session`](super::Session): the machine, and bounds for all models of the session together.
///
/// Fields are added from time to time: write `Settings { threads: Some(2), ..Settings::default() }`. With `#[non_exhaustive]`, other
/// crates could not write this expression.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Logical devices with their memory limits; one CPU by default.
    pub devices: DeviceSet,
    /// The driver's numbers of `/device:GPU:0` and so on. A number may occur more than once: logical devices then share a GPU.
    /// Empty: numbered as the driver does.
    pub gpus: Vec<u32>,
    /// CPU threads over all logical CPU devices and all runs in flight; `None`: as many as the host pool has, or one per
    /// available core.
    pub threads: Option<usize>,
    /// Threads of the host program for kernels: see [`Settings::rayon`]. `None`: the session starts threads.
    pub host_pool: Option<HostPool>,
    /// Memory limit of all caches of the session in bytes: code, graphs, weights and device memory of all models, for all
    /// shapes, segments and structures of their inputs. Beyond this limit, the least recently used entries are dropped, and compiled
    /// again when they are needed. Shared weights count once. A single entry is held at any size.
    pub specialisation_bytes: u64,
    /// Folder of placements decided by measured times and kept by earlier processes ([`crate::place::Placement::keep`]). A placement decided
    /// by the current times replaces a search. `None`: always search.
    pub kept: Option<PathBuf>,
    /// Choice among the variants of kernels on GPUs.
    pub tuning: Tuning,
    /// Look for races in emulated kernels, and wait for each launch on a GPU to name the kernel of a fault (on by default in debug builds).
    pub check_kernels: bool,
    /// Record the device of every op of every compiled program: see [`Session::placement_log`](super::Session::placement_log).
    pub log_device_placement: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            devices: DeviceSet::default(),
            gpus: Vec::new(),
            threads: None,
            host_pool: None,
            specialisation_bytes: 2 << 30,
            kept: None,
            tuning: Tuning::default(),
            check_kernels: cfg!(debug_assertions),
            log_device_placement: false,
        }
    }
}

impl Settings {
    /// Threads for kernels and for compilation: as given, of the host's pool, or one per core.
    pub(crate) fn n_threads(&self) -> usize {
        let of_host = self.host_pool.as_ref().map(HostPool::n_threads);
        let given = self.threads.or(of_host);
        given.unwrap_or_else(gristmill_runtime::cpu::n_cores).max(1)
    }

    /// Default settings with kernels on the threads of a rayon pool.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use gristmill::{Session, Settings};
    /// use std::sync::Arc;
    ///
    /// let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build()?);
    /// let session = Session::new(&Settings::rayon(&pool))?;
    /// # drop(session);
    /// # Ok(())
    /// # }
    /// ```
    pub fn rayon(pool: &Arc<rayon::ThreadPool>) -> Settings {
        Settings {
            host_pool: Some(HostPool::rayon(pool)),
            ..Settings::default()
        }
    }
}

/// Choice of kernel variants by their measured times: see [`crate::tune`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Folder in which winners are cached. Winners of earlier processes are used.
    pub folder: Option<PathBuf>,
    /// Time all variants of each kernel without a cached winner, on its GPU.
    pub measures: bool,
    /// Time libraries of the GPU's maker (cuBLASLt) as well. They are never needed, and only used where they were faster.
    pub libraries: bool,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            folder: None,
            measures: false,
            libraries: true,
        }
    }
}
