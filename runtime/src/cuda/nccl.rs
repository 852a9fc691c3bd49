//! NCCL where it is found: all-reduces of GPUs, each of which has a communicator.
//!
//! Communicators are non-blocking: no call waits for other ranks, and a thread that has to wait polls, with an eye on whether the run is over. A
//! kernel of NCCL waits on its device until all ranks have come; when one does not come, because its device is lost or another part of the run has
//! failed, each of the others aborts its communicator, which ends its kernel.

use super::context::{Context, Event};
use super::library::{SystemLibrary, functions};
use crate::driver::{self, Group, Peer, Reduce, Reduction};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::sync::lock;
use std::ffi::{CStr, OsString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// There is none for other systems.
const NCCL: SystemLibrary = SystemLibrary {
    title: "NCCL",
    variable: "GRISTMILL_NCCL",
    names: &["libnccl.so.2", "libnccl.so"],
};
/// The first version with communicators that do not block, as `ncclGetVersion` gives it.
const LEAST: c_int = 21_400;
/// Making communicators takes seconds; after this, it is taken to hang.
const MAKING: Duration = Duration::from_secs(120);

/// `ncclResult_t`.
type Code = c_int;
const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;
/// `ncclComm_t`.
type Comm = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([c_char; 128]);

/// `ncclConfig_t` of version 2.14, which has all fields that are set here; later ones take it by its size and version.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

const NON_BLOCKING: Config = Config {
    size: size_of::<Config>(),
    magic: 0xcafe_beef,
    version: LEAST as c_uint,
    blocking: 0,
};

functions! {
    struct Functions, missing: |symbol| format!("NCCL lacks {symbol}; 2.14 or later is needed");
    get_version = "ncclGetVersion" fn(*mut c_int) -> Code;
    unique_id = "ncclGetUniqueId" fn(*mut UniqueId) -> Code;
    group_start = "ncclGroupStart" fn() -> Code;
    group_end = "ncclGroupEnd" fn() -> Code;
    init_rank = "ncclCommInitRankConfig" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
    abort = "ncclCommAbort" fn(Comm) -> Code;
    async_error = "ncclCommGetAsyncError" fn(Comm, *mut Code) -> Code;
    error_string = "ncclGetErrorString" fn(Code) -> *const c_char;
    /// From, to, number of elements, type, operation, communicator, stream.
    all_reduce = "ncclAllReduce" fn(
        *const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void,
    ) -> Code;
}

/// The library with its version.
struct Api {
    functions: Functions,
    version: (u32, u32, u32),
}

impl std::ops::Deref for Api {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

/// Version of the NCCL that is found: `(2, 28, 9)`; or in words why there is none.
pub fn version() -> Result<(u32, u32, u32), String> {
    get().map(|api| api.version)
}

/// Major, minor and patch level of an `NCCL_VERSION_CODE`.
fn parts(code: c_int) -> (u32, u32, u32) {
    let code = u32::try_from(code).unwrap_or(0);
    // Until 2.8 there was a digit less for each.
    if code < 10_000 {
        (code / 1000, code / 100 % 10, code % 100)
    } else {
        (code / 10_000, code / 100 % 100, code % 100)
    }
}

fn get() -> Result<&'static Api, String> {
    static OPENED: OnceLock<Result<Api, String>> = OnceLock::new();
    OPENED
        .get_or_init(|| open(std::env::var_os(NCCL.variable)))
        .as_ref()
        .map_err(String::clone)
}

fn open(file: Option<OsString>) -> Result<Api, String> {
    let variable = NCCL.variable;
    if file.as_ref().is_some_and(|f| f.is_empty()) {
        return Err(format!("{variable} is empty, so NCCL is not used"));
    }
    // SAFETY: a library of these names is NCCL, and so is one that the user names as such.
    let functions = unsafe { Functions::resolve(NCCL.open(file)?)? };
    let mut code = 0;
    // SAFETY: the library writes one number.
    let status = unsafe { (functions.get_version)(&mut code) };
    let version @ (major, minor, patch) = parts(code);
    if status != SUCCESS || code < LEAST {
        return Err(format!(
            "NCCL {major}.{minor}.{patch} was found; 2.14 or later is needed"
        ));
    }
    Ok(Api { functions, version })
}

impl Api {
    fn text(&self, code: Code) -> String {
        // SAFETY: the library gives a NUL-terminated text of its own.
        let text = unsafe { CStr::from_ptr((self.error_string)(code)) };
        format!("NCCL: {} ({code})", text.to_string_lossy())
    }
}

/// Communicators of GPUs that reduce together.
pub(super) struct Clique {
    api: &'static Api,
    ranks: Vec<Mutex<Rank>>,
    /// Each all-reduce is waited for at once.
    checks: bool,
}

/// One rank, used by one thread at a time.
struct Rank {
    context: Arc<Context>,
    /// The stream that computes.
    stream: u64,
    /// Null once it was aborted.
    comm: Comm,
    /// Marks the last all-reduce.
    asked: Event,
    /// True once that has been waited for.
    is_settled: bool,
}

// SAFETY: a communicator may be used from any thread, by one at a time, which the lock around each rank sees to.
unsafe impl Send for Rank {}

impl Clique {
    /// Communicators for GPUs, no two of which are one; each is used in the stream that its [`Peer`] names. Errors with `Unsupported` without NCCL.
    pub(super) fn new(peers: &[Peer], checks: bool) -> Result<Clique, Error> {
        let api = get().map_err(|why| Error::new(ErrorKind::Unsupported, why))?;
        let rank = |peer: &Peer| {
            let context = Context::open(peer.ordinal)?;
            let asked = Event::new(&context)?;
            Ok(Mutex::new(Rank {
                stream: peer.compute,
                comm: ptr::null_mut(),
                is_settled: true,
                asked,
                context,
            }))
        };
        let ranks = peers.iter().map(rank).collect::<Result<_, Error>>()?;
        let clique = Clique { api, ranks, checks };
        clique.renew()?;
        Ok(clique)
    }

    fn lock(&self, rank: usize) -> MutexGuard<'_, Rank> {
        lock(&self.ranks[rank])
    }
}

impl Group for Clique {
    fn all_reduce(
        &self,
        rank: usize,
        reduce: &Reduce,
        is_over: &dyn Fn() -> bool,
    ) -> Result<bool, Error> {
        let mut rank = self.lock(rank);
        let asked = rank.all_reduce(self.api, reduce, is_over);
        let done = match asked {
            Ok(true) if self.checks => rank.settle(self.api, is_over),
            asked => asked,
        };
        rank.abort_unless(done, self.api)
    }

    fn settle(&self, rank: usize, is_over: &dyn Fn() -> bool) -> Result<bool, Error> {
        let mut rank = self.lock(rank);
        let done = rank.settle(self.api, is_over);
        rank.abort_unless(done, self.api)
    }

    fn renew(&self) -> Result<(), Error> {
        let is_good = |rank: MutexGuard<'_, Rank>| !rank.comm.is_null() && rank.is_settled;
        if (0..self.ranks.len()).all(|rank| is_good(self.lock(rank))) {
            return Ok(());
        }
        let mut ranks: Vec<_> = (0..self.ranks.len()).map(|rank| self.lock(rank)).collect();
        ranks.iter_mut().for_each(|rank| rank.abort(self.api));
        // The device that is lost gives a better message than the failures it causes on others.
        let lost = |ranks: &[MutexGuard<'_, Rank>]| {
            ranks
                .iter()
                .try_for_each(|rank| rank.asked.is_done().map(drop))
        };
        let comms = init(self.api, &ranks).map_err(|e| lost(&ranks).err().unwrap_or(e))?;
        ranks
            .iter_mut()
            .zip(comms)
            .for_each(|(rank, comm)| (rank.comm, rank.is_settled) = (comm, true));
        Ok(())
    }
}

impl Drop for Clique {
    fn drop(&mut self) {
        (0..self.ranks.len()).for_each(|rank| self.lock(rank).abort(self.api));
    }
}

impl Rank {
    /// Errors with the device's own failure if it has one, or else with NCCL's message.
    fn check(&self, api: &Api, code: Code, what: &str) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        self.asked.is_done()?;
        let message = format!("{}: {what}: {}", self.context.device.name, api.text(code));
        Err(Error::new(ErrorKind::DeviceFailed, message))
    }

    fn all_reduce(
        &mut self,
        api: &Api,
        reduce: &Reduce,
        is_over: &dyn Fn() -> bool,
    ) -> Result<bool, Error> {
        let (dtype, reduction) = (data_type(reduce.dtype)?, operation(reduce.reduction));
        if self.comm.is_null() {
            return if is_over() {
                Ok(false)
            } else {
                Err(Error::internal("an all-reduce without communicator"))
            };
        }
        self.context.bind()?;
        let stream = ptr::with_exposed_provenance_mut::<c_void>(self.stream as usize);
        let from = ptr::with_exposed_provenance(reduce.from as usize);
        let to = ptr::with_exposed_provenance_mut(reduce.to as usize);
        // SAFETY: communicator and stream live; the executor gives addresses of buffers with so many elements, which are in use by this alone.
        let code = unsafe {
            (api.all_reduce)(
                from,
                to,
                reduce.n_elements,
                dtype,
                reduction,
                self.comm,
                stream,
            )
        };
        self.is_settled = false;
        self.check_started(api, code, "ncclAllReduce")?;
        // A later request comes after this one only once this one is in the stream.
        let mut pause = Pause::default();
        while !self.is_idle(api)? {
            if is_over() {
                return Ok(false);
            }
            pause.wait();
        }
        // SAFETY: event and stream live.
        let code = unsafe {
            let event = ptr::with_exposed_provenance_mut(driver::Event::raw(&self.asked) as usize);
            (self.context.api.record_event)(event, stream.cast())
        };
        self.context.check(code, "recording an event")?;
        Ok(true)
    }

    fn settle(&mut self, api: &Api, is_over: &dyn Fn() -> bool) -> Result<bool, Error> {
        let mut pause = Pause::default();
        while !self.is_settled {
            // It may be over for another reason when this is done, and then nothing has to be aborted.
            if self.asked.is_done()? {
                self.is_settled = true;
                break;
            }
            if is_over() || self.comm.is_null() {
                return Ok(false);
            }
            self.is_idle(api)?;
            pause.wait();
        }
        Ok(true)
    }

    /// True when no call is in progress. Errors with a failure since the last call.
    fn is_idle(&self, api: &Api) -> Result<bool, Error> {
        let mut state = SUCCESS;
        // SAFETY: the communicator lives; the library writes one number.
        let code = unsafe { (api.async_error)(self.comm, &mut state) };
        self.check(api, code, "ncclCommGetAsyncError")?;
        if state == IN_PROGRESS {
            Ok(false)
        } else {
            self.check(api, state, "waiting for other devices")
                .map(|()| true)
        }
    }

    /// As [`Rank::check`], for a call that may be in progress when it returns.
    fn check_started(&self, api: &Api, code: Code, call: &str) -> Result<(), Error> {
        if code == IN_PROGRESS {
            Ok(())
        } else {
            self.check(api, code, call)
        }
    }

    /// Returns `done`; unless it is a success, aborts the communicator, which releases the stream.
    fn abort_unless(&mut self, done: Result<bool, Error>, api: &Api) -> Result<bool, Error> {
        if !matches!(done, Ok(true)) {
            self.abort(api);
        }
        done
    }

    /// Ends the work in the stream, and the communicator.
    fn abort(&mut self, api: &Api) {
        let comm = std::mem::replace(&mut self.comm, ptr::null_mut());
        self.is_settled = true;
        if !comm.is_null() {
            // A lost device cannot be chosen; its communicator is given back all the same.
            let _ = self.context.bind();
            // SAFETY: made in `init`, aborted once: nothing else has this copy of the handle.
            unsafe { (api.abort)(comm) };
        }
    }
}

/// One communicator for each rank.
fn init(api: &Api, ranks: &[MutexGuard<'_, Rank>]) -> Result<Vec<Comm>, Error> {
    if ranks.is_empty() {
        return Ok(Vec::new());
    }
    // Threads of the library may write them later.
    let comms: Vec<AtomicPtr<c_void>> = ranks
        .iter()
        .map(|_| AtomicPtr::new(ptr::null_mut()))
        .collect();
    let made = start_init(api, ranks, &comms).and_then(|()| wait_for(api, ranks, &comms));
    let handles: Vec<Comm> = comms
        .iter()
        .map(|comm| comm.load(Ordering::Acquire))
        .collect();
    if let Err(e) = made {
        for &comm in handles.iter().filter(|comm| !comm.is_null()) {
            // SAFETY: this communicator was made, and is given back once.
            unsafe { (api.abort)(comm) };
        }
        // The library may still write.
        std::mem::forget(comms);
        return Err(e);
    }
    Ok(handles)
}

/// Asks for a communicator of each rank, which the library writes to `comms`, maybe after this returns.
fn start_init(
    api: &Api,
    ranks: &[MutexGuard<'_, Rank>],
    comms: &[AtomicPtr<c_void>],
) -> Result<(), Error> {
    let (first, n) = (&ranks[0], ranks.len() as c_int);
    let mut id = UniqueId([0; 128]);
    first.context.bind()?;
    // SAFETY: the library writes one id.
    first.check(api, unsafe { (api.unique_id)(&mut id) }, "ncclGetUniqueId")?;
    // SAFETY: each call has a communicator of its own to write, which `init` keeps until it is written, and a good configuration.
    unsafe {
        first.check(api, (api.group_start)(), "ncclGroupStart")?;
        let mut config = NON_BLOCKING;
        let init = |(i, rank): (usize, &MutexGuard<'_, Rank>)| {
            rank.context.bind()?;
            let code = (api.init_rank)(comms[i].as_ptr(), n, id, i as c_int, &mut config);
            rank.check_started(api, code, "ncclCommInitRankConfig")
        };
        let asked = ranks.iter().enumerate().try_for_each(init);
        let ended = first.check_started(api, (api.group_end)(), "ncclGroupEnd");
        asked.and(ended)
    }
}

/// Waits until all communicators are made.
fn wait_for(
    api: &Api,
    ranks: &[MutexGuard<'_, Rank>],
    comms: &[AtomicPtr<c_void>],
) -> Result<(), Error> {
    let (started, mut pause) = (Instant::now(), Pause::default());
    for (rank, comm) in ranks.iter().zip(comms) {
        loop {
            let (comm, mut state) = (comm.load(Ordering::Acquire), IN_PROGRESS);
            if !comm.is_null() {
                // SAFETY: the communicator lives; the library writes one number.
                let code = unsafe { (api.async_error)(comm, &mut state) };
                rank.check(api, code, "ncclCommGetAsyncError")?;
            }
            if state != IN_PROGRESS {
                rank.check(api, state, "making a communicator")?;
                break;
            }
            if started.elapsed() > MAKING {
                let message = format!(
                    "{}: making a communicator of NCCL takes more than {MAKING:?}",
                    rank.context.device.name
                );
                return Err(Error::new(ErrorKind::DeviceFailed, message));
            }
            pause.wait();
        }
    }
    Ok(())
}

/// Waits a little longer each time, up to a bound that no one notices.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn wait(&mut self) {
        self.0 += 1;
        match self.0 {
            ..1000 => std::hint::spin_loop(),
            1000..1200 => thread::yield_now(),
            _ => thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// `ncclDataType_t`.
fn data_type(dtype: DType) -> Result<c_int, Error> {
    Ok(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("NCCL does not reduce {dtype}"),
            ));
        }
    })
}

/// `ncclRedOp_t`.
fn operation(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Prod => 1,
        Reduction::Max => 2,
        Reduction::Min => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "looks for a shared library")]
    fn a_library_that_is_not_there_not_wanted_or_another_is_an_answer() {
        let why = |name: &str| open(Some(name.into())).err().unwrap();
        let absent = "no NCCL: libno-such.so was not found; set GRISTMILL_NCCL to its path";
        assert_eq!(why("libno-such.so"), absent);
        assert_eq!(why(""), "GRISTMILL_NCCL is empty, so NCCL is not used");
        if cfg!(target_os = "linux") {
            assert_eq!(
                why("libc.so.6"),
                "NCCL lacks ncclGetVersion; 2.14 or later is needed"
            );
        }
    }

    #[test]
    fn versions_of_both_forms_are_read() {
        assert_eq!(
            [22_809, 21_400, 2_708].map(parts),
            [(2, 28, 9), (2, 14, 0), (2, 7, 8)]
        );
    }
}
