//! Everything that is there: devices, streams, events, modules, pools. One lock is around it.

use crate::capture::{Capture, Graph};
use crate::codes::*;
use crate::memory::{PinnedMemory, Pool};
use crate::modules::{Function, LoadedModule};
use crate::nccl::Clique;
use crate::streams::{Event, Stream};
use gristmill_emulator::{Device, Limits};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Contents of `EMULATED_CUDA`: `name=value` separated by commas.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// `devices`: how many there are; 1.
    pub n_devices: usize,
    /// `memory`: bytes of each; 1 GiB.
    pub memory_bytes: usize,
    /// `capability`: compute capability, times ten; 90.
    pub capability: i32,
    /// `driver`: version as `cuDriverGetVersion` gives it, or 0 for a stub of the toolkit; 13000.
    pub driver: i32,
    /// `peers`: 0 when devices cannot reach each other's memory; 1.
    pub peers: bool,
    /// `pools`: 0 when devices have no pools of memory; 1.
    pub pools: bool,
    /// `nccl`: version as `ncclGetVersion` gives it; 22809.
    pub nccl: i32,
    /// `lose=D:N`: device D is lost when it comes to its launch N, counted from 1; a rank of a collective is a launch.
    pub lose: Option<(usize, u64)>,
    /// `delay`: milliseconds after which a request is done although nothing waits for it; 3.
    pub delay: Duration,
    /// `clock`: `host`, or `threads`, by which each launch takes a microsecond for each of its threads, and all else nothing; `host`.
    pub counts_threads: bool,
    /// `graphs`: 0 when streams cannot be captured; 1.
    pub graphs: bool,
    /// `log=PATH`: a file to which every call is added, one a line, as [`crate::log`] says.
    pub log: Option<PathBuf>,
    /// `fault=D:N`: launch N of device D accesses an address that it must not.
    pub fault: Option<(usize, u64)>,
    /// `product`: how many threads the clock that counts them takes for a product of cuBLASLt; one for each element.
    pub product_threads: Option<u64>,
    /// `wrong_product=sum` when cuBLASLt's sums are wrong, `relu` when it takes NaN for negative.
    pub wrong_product: Option<ProductError>,
}

/// An error that a library makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductError {
    Sum,
    Relu,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            n_devices: 1,
            memory_bytes: 1 << 30,
            capability: 90,
            driver: 13000,
            nccl: 22809,
            peers: true,
            pools: true,
            delay: Duration::from_millis(3),
            lose: None,
            counts_threads: false,
            graphs: true,
            log: None,
            fault: None,
            product_threads: None,
            wrong_product: None,
        }
    }
}

impl Settings {
    /// Settings from the environment. Errors with `INVALID_VALUE` when they are malformed.
    pub fn of_process() -> Outcome<Settings> {
        Settings::parse(&std::env::var("EMULATED_CUDA").unwrap_or_default()).map_err(|why| {
            eprintln!("{why}");
            INVALID_VALUE
        })
    }

    /// Errors with the part that cannot be read.
    pub fn parse(text: &str) -> Result<Settings, String> {
        let mut settings = Settings::default();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            settings
                .set(part)
                .ok_or_else(|| format!("EMULATED_CUDA: {part:?} is not understood"))?;
        }
        Ok(settings)
    }

    fn set(&mut self, part: &str) -> Option<()> {
        let (name, value) = part.split_once('=')?;
        let switch = || Some(value.parse::<u8>().ok()? != 0);
        match name {
            "devices" => self.n_devices = value.parse().ok()?,
            "memory" => self.memory_bytes = value.parse().ok()?,
            "capability" => self.capability = value.parse().ok()?,
            "driver" => self.driver = value.parse().ok()?,
            "nccl" => self.nccl = value.parse().ok()?,
            "peers" => self.peers = switch()?,
            "graphs" => self.graphs = switch()?,
            "log" => self.log = Some(value.into()),
            "pools" => self.pools = switch()?,
            "delay" => self.delay = Duration::from_millis(value.parse().ok()?),
            "clock" => self.counts_threads = one_of(value, [("host", false), ("threads", true)])?,
            "lose" => self.lose = Some(launch_of(value)?),
            "fault" => self.fault = Some(launch_of(value)?),
            "product" => self.product_threads = Some(value.parse().ok()?),
            "wrong_product" => {
                let errors = [("sum", ProductError::Sum), ("relu", ProductError::Relu)];
                self.wrong_product = Some(one_of(value, errors)?);
            }
            _ => return None,
        }
        Some(())
    }
}

fn one_of<T>(word: &str, values: [(&str, T); 2]) -> Option<T> {
    let mut values = values.into_iter();
    values
        .find(|(name, _)| *name == word)
        .map(|(_, value)| value)
}

/// `DEVICE:LAUNCH`, as numbers.
fn launch_of(value: &str) -> Option<(usize, u64)> {
    let (device, launch) = value.split_once(':')?;
    Some((device.parse().ok()?, launch.parse().ok()?))
}

/// A device and its primary context.
pub struct Gpu {
    /// Its number before `CUDA_VISIBLE_DEVICES` renumbered.
    pub number: usize,
    pub device: Device,
    pub n_launches: u64,
    /// Threads of all launches so far.
    pub n_threads: u64,
    /// Result of every later call, once one has failed.
    pub broken: Option<Code>,
    /// Devices whose memory this one may reach.
    pub peers: BTreeSet<usize>,
    /// Users of the primary context.
    pub n_retained: usize,
}

pub struct World {
    pub settings: Settings,
    pub gpus: Vec<Gpu>,
    pub streams: BTreeMap<usize, Stream>,
    pub events: BTreeMap<usize, Event>,
    pub modules: BTreeMap<usize, LoadedModule>,
    pub functions: BTreeMap<usize, Function>,
    pub pools: BTreeMap<usize, Pool>,
    pub pinned: BTreeMap<usize, PinnedMemory>,
    pub captures: BTreeMap<usize, Capture>,
    pub graphs: BTreeMap<usize, Graph>,
    /// Communicators of NCCL.
    pub cliques: BTreeMap<usize, Clique>,
    /// Streams whose first request is being looked at.
    pub stepping: BTreeSet<usize>,
    /// The last failure, for `cuGetErrorString`.
    pub fault: Option<(Code, CString)>,
    last_handle: usize,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

thread_local! {
    /// The context that calls of this thread are for: the number of its device, plus 1.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// True while this thread runs a host function.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

fn lock() -> MutexGuard<'static, Option<World>> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the world, once. Errors with `INVALID_VALUE` when the settings are not understood, with `NO_DEVICE` when there are none.
pub fn init() -> Outcome {
    let mut world = lock();
    if world.is_some() {
        return Ok(());
    }
    let settings = Settings::of_process()?;
    let gpu = |number| Gpu {
        number,
        device: Device::new(Limits {
            memory_bytes: settings.memory_bytes,
            ..Limits::default()
        }),
        n_launches: 0,
        n_threads: 0,
        broken: None,
        peers: BTreeSet::new(),
        n_retained: 0,
    };
    let gpus: Vec<Gpu> = visible(settings.n_devices).into_iter().map(gpu).collect();
    if gpus.is_empty() {
        return Err(NO_DEVICE);
    }
    *world = Some(World {
        settings,
        gpus,
        streams: BTreeMap::new(),
        events: BTreeMap::new(),
        modules: BTreeMap::new(),
        functions: BTreeMap::new(),
        pools: BTreeMap::new(),
        pinned: BTreeMap::new(),
        captures: BTreeMap::new(),
        graphs: BTreeMap::new(),
        cliques: BTreeMap::new(),
        stepping: BTreeSet::new(),
        fault: None,
        last_handle: 0x1000,
    });
    drop(world);
    crate::progress::start();
    Ok(())
}

/// The devices that `CUDA_VISIBLE_DEVICES` leaves, in its order; it ends at the first that is not there.
fn visible(n_devices: usize) -> Vec<usize> {
    let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") else {
        return (0..n_devices).collect();
    };
    let numbers = list
        .split(',')
        .map(|n| n.trim().parse::<usize>().ok().filter(|&n| n < n_devices));
    numbers.map_while(|n| n).collect()
}

/// Gives the world to a call.
pub fn with<T>(call: impl FnOnce(&mut World) -> Outcome<T>) -> Outcome<T> {
    if IN_HOST_FUNCTION.get() {
        return Err(NOT_PERMITTED);
    }
    call(lock().as_mut().ok_or(NOT_INITIALIZED)?)
}

/// The same for a call that is for the current context: gives its device, which must not be broken.
pub fn with_context<T>(call: impl FnOnce(&mut World, usize) -> Outcome<T>) -> Outcome<T> {
    with(|world| {
        let gpu = CURRENT.get().checked_sub(1).ok_or(INVALID_CONTEXT)?;
        world.check(gpu)?;
        call(world, gpu)
    })
}

/// The same for a call about a stream of the current context.
pub fn with_stream<T>(
    stream: usize,
    call: impl FnOnce(&mut World, usize) -> Outcome<T>,
) -> Outcome<T> {
    with_context(|world, gpu| {
        let found = world.streams.get(&stream).ok_or(INVALID_HANDLE)?;
        if found.gpu == gpu {
            call(world, gpu)
        } else {
            Err(INVALID_CONTEXT)
        }
    })
}

/// Calls until it is done, and lets other calls come in between: streams may wait for a request that another thread has still to make.
pub fn until(mut call: impl FnMut() -> Outcome<bool>) -> Outcome {
    while !call()? {
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// Sets the context of this thread: the number of its device, plus 1; 0 for none.
pub fn set_current(context: usize) {
    CURRENT.set(context);
}

pub fn current() -> usize {
    CURRENT.get()
}

/// Runs a host function, during which calls are refused.
pub fn in_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

impl World {
    /// A number that nothing else has.
    pub fn handle(&mut self) -> usize {
        self.last_handle += 0x10;
        self.last_handle
    }

    pub fn gpu(&mut self, gpu: usize) -> Outcome<&mut Gpu> {
        self.gpus.get_mut(gpu).ok_or(INVALID_DEVICE)
    }

    /// Errors with the failure that broke the device.
    pub fn check(&mut self, gpu: usize) -> Outcome {
        self.gpu(gpu)?.broken.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read() {
        let read =
            Settings::parse("devices=4, memory=1000,capability=80,peers=0,lose=1:3").unwrap();
        assert_eq!(
            (
                read.n_devices,
                read.memory_bytes,
                read.capability,
                read.peers
            ),
            (4, 1000, 80, false)
        );
        assert_eq!((read.lose, read.fault), (Some((1, 3)), None));
        assert_eq!(Settings::parse("").unwrap(), Settings::default());
        for bad in ["devices", "devices=x", "lose=1", "speed=1"] {
            assert!(Settings::parse(bad).unwrap_err().contains(bad));
        }
    }
}
