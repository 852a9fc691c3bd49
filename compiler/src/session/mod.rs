//! The session: devices, threads, memory, code, constants and variables, shared by its models.
//!
//! It knows nothing of models: they are compiled into it by [`crate::compiled`], which adds [`Session::compile`].

pub(crate) mod cache;
pub(crate) mod cluster;
pub(crate) mod drivers;
mod host_pool;
mod settings;
mod variables;

pub use host_pool::HostPool;
pub use settings::{Settings, Tuning};

use crate::codegen::cpu::CodeStore;
use crate::codegen::store::ConstantStore;
use crate::codegen::workers::Workers;
use crate::error::{Error, Result};
use crate::place::gpus;
use cache::CacheMemory;
use cluster::Cluster;
use drivers::Drivers;
use gristmill_runtime::DeviceName;
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::driver::Driver;
use gristmill_runtime::exec::{Pool, Resources};
use gristmill_runtime::image::Spool;
use gristmill_runtime::program::Program;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use variables::Variables;

/// Owner of devices, threads, memory, code, constants, and variables in containers. Models are compiled into a session and run in it.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/digits/model.onnx");
/// use gristmill::{Options, Session, Settings, onnx};
///
/// let session = Session::new(&Settings { threads: Some(2), ..Settings::default() })?;
/// let model = onnx::load(path)?;
/// let small = session.compile(&model, &Options { dims: [("batch".to_owned(), 1)].into(), ..Options::default() })?;
/// let large = session.compile(&model, &Options { dims: [("batch".to_owned(), 64)].into(), ..Options::default() })?;
/// // Both run on the same two threads, and each weight is in memory once.
/// # drop((small, large));
/// # Ok(())
/// # }
/// ```
///
/// Models of one session share threads, machine code, and weights with equal contents. They also share variables with equal names:
/// [`Options::container`](crate::Options::container) keeps the variables of a model apart. [`Settings::specialisation_bytes`] bounds the memory of all
/// models together.
///
/// Clones are the same session. It lives as long as a clone, or a model compiled into it, does.
#[derive(Clone)]
pub struct Session(Arc<Parts>);

struct Parts {
    settings: Settings,
    drivers: Drivers,
    constants: Arc<ConstantStore>,
    code: Arc<CodeStore>,
    /// Threads and arenas.
    pool: Arc<Pool>,
    variables: Variables,
    /// Memory of all caches by shapes.
    caches: Arc<CacheMemory>,
    /// Threads of compilation.
    workers: Workers,
    placements: Mutex<Vec<String>>,
    /// The tasks that compile and run models in place of this machine.
    cluster: Option<Arc<dyn Cluster>>,
}

impl Session {
    /// A session on this machine. Threads start, and GPUs are opened, when a model first needs them.
    ///
    /// Errors with `InvalidInput` when there is no device, or when [`Settings::gpus`] has no number for a GPU.
    pub fn new(settings: &Settings) -> Result<Session> {
        Session::with_constants(settings, ConstantStore::default(), settings.n_threads())
    }

    /// A session on a cluster.
    #[cfg(feature = "distributed")]
    pub(crate) fn on_cluster(settings: &Settings, cluster: Arc<dyn Cluster>) -> Result<Session> {
        let mut parts = Parts::new(settings, ConstantStore::default(), 1)?;
        parts.cluster = Some(cluster);
        Ok(Session(Arc::new(parts)))
    }

    /// The same with weights in a file instead of memory, and a number of threads for compilation.
    pub(crate) fn spooled(settings: &Settings, spool: Spool, n_workers: usize) -> Result<Session> {
        Session::with_constants(settings, ConstantStore::spooled(spool), n_workers)
    }

    fn with_constants(
        settings: &Settings,
        constants: ConstantStore,
        n_workers: usize,
    ) -> Result<Session> {
        let parts = Parts::new(settings, constants, n_workers)?;
        Ok(Session(Arc::new(parts)))
    }

    /// The tasks of another place that run the models of this session.
    pub(crate) fn cluster(&self) -> Option<&Arc<dyn Cluster>> {
        self.0.cluster.as_ref()
    }

    /// Errors with `Unsupported` in a session on a cluster, for what these do not do.
    pub(crate) fn check_here(&self, what: &str) -> Result<()> {
        match &self.0.cluster {
            None => Ok(()),
            Some(cluster) => {
                let message = format!("{what} in a session on a cluster ({})", cluster.target());
                Err(Error::unsupported(message).hint("use a session of this process"))
            }
        }
    }

    /// The settings of the session.
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// The variables of all models, by container and name.
    pub fn resources(&self) -> &Arc<Resources> {
        &self.0.variables.values
    }

    /// Number of threads started by the session. Threads of callers do not count.
    pub fn n_threads(&self) -> usize {
        self.0.pool.n_started()
    }

    /// Bytes of weights, code, graphs and device memory in all caches. Shared weights count once.
    pub fn held_bytes(&self) -> u64 {
        self.0.caches.bytes()
    }

    /// Number of cache entries evicted to keep [`Settings::specialisation_bytes`].
    pub fn evictions(&self) -> usize {
        self.0.caches.n_evicted()
    }

    /// The device of every op of the programs compiled so far, `name: (op): device` in each line, if [`Settings::log_device_placement`] asks for it.
    /// The placements of a model at several shapes are listed once where they agree.
    pub fn placement_log(&self) -> String {
        self.logged().concat()
    }

    /// Adds a placement to the log, unless it is there. `text` is not called if there is no log.
    pub(crate) fn log_placement(&self, text: impl FnOnce() -> String) {
        if self.0.settings.log_device_placement {
            let (text, mut logged) = (text(), self.logged());
            if !logged.contains(&text) {
                logged.push(text);
            }
        }
    }

    fn logged(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        let logged = self.0.placements.lock();
        logged.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn constants(&self) -> &Arc<ConstantStore> {
        &self.0.constants
    }

    pub(crate) fn code(&self) -> &Arc<CodeStore> {
        &self.0.code
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.0.pool
    }

    pub(crate) fn workers(&self) -> Workers {
        self.0.workers
    }

    pub(crate) fn caches(&self) -> &Arc<CacheMemory> {
        &self.0.caches
    }

    pub(crate) fn variables(&self) -> &Variables {
        &self.0.variables
    }

    /// The drivers of a program's devices with their own memory.
    #[doc(hidden)]
    pub fn drivers(&self, program: &Program) -> Result<BTreeMap<DeviceName, Arc<dyn Driver>>> {
        self.0.drivers.of(program, &self.0.settings)
    }
}

fn pool(settings: &Settings) -> Pool {
    match &settings.host_pool {
        None => Pool::new(settings.threads.unwrap_or(0)),
        Some(host) => Pool::hosted(settings.n_threads(), host.threads().clone()),
    }
}

impl Parts {
    fn new(settings: &Settings, constants: ConstantStore, n_workers: usize) -> Result<Parts> {
        if settings.devices.devices.is_empty() {
            return Err(Error::invalid("a session needs a device").hint("DeviceSet::default()"));
        }
        let names = settings.devices.devices.iter().map(|d| &d.name);
        for gpu in names.filter(|name| name.kind == DeviceKind::Gpu) {
            gpus::ordinal(gpu, &settings.gpus)?;
        }
        Ok(Parts {
            settings: settings.clone(),
            drivers: Drivers::default(),
            constants: Arc::new(constants),
            code: Arc::default(),
            pool: Arc::new(pool(settings)),
            variables: Variables::default(),
            caches: CacheMemory::new(settings.specialisation_bytes),
            workers: Workers::new(n_workers),
            placements: Mutex::default(),
            cluster: None,
        })
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.0.settings.devices.devices.iter();
        let devices: Vec<String> = devices.map(|d| d.name.to_string()).collect();
        write!(f, "Session on {}", devices.join(", "))
    }
}
