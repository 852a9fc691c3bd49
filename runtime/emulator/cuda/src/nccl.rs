//! The functions of `nccl.h` that all-reduces need, over streams of the emulated driver.
//!
//! As strict as NCCL, and stricter: a rank's part is done only once the streams of all ranks have come to theirs, each rank's result is written no
//! sooner than its stream is waited for, and elements are summed around a ring. Communicators must not block; a request is in progress for a
//! few polls (the first all-reduce until all ranks have asked for it), and in the stream only then. Ranks that ask for different operations in the
//! same place break their devices.

use crate::codes::{self, DEVICE_UNAVAILABLE, LAUNCH_FAILED};
use crate::execute::Op;
use crate::exports::exports;
use crate::world::{self, World};
use half::{bf16, f16};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_uint};

/// `ncclResult_t`.
type Code = c_int;
const SUCCESS: Code = 0;
const UNHANDLED_CUDA_ERROR: Code = 1;
const INTERNAL_ERROR: Code = 3;
const INVALID_ARGUMENT: Code = 4;
const INVALID_USAGE: Code = 5;
const IN_PROGRESS: Code = 7;

const TEXTS: [&str; 8] = [
    "no error\0",
    "unhandled cuda error\0",
    "unhandled system error\0",
    "internal error\0",
    "invalid argument\0",
    "invalid usage\0",
    "remote process exited or there was a network error\0",
    "NCCL operation in progress\0",
];

/// Polls that find a request in progress before it is in its stream.
const LOOKS: u32 = 3;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// `ncclConfig_t`, as far as it is looked at.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

/// Communicators that were made together.
pub struct Clique {
    ranks: Vec<Rank>,
    /// All-reduces in flight, by number.
    collectives: BTreeMap<u64, Collective>,
}

struct Rank {
    gpu: usize,
    /// Looks left until it is not in progress.
    looks: u32,
    /// The request that will be in the stream then.
    pending: Option<(usize, Part)>,
    n_asked: u64,
    is_aborted: bool,
}

/// An all-reduce that some ranks have come to.
struct Collective {
    what: Reduction,
    from: BTreeMap<usize, u64>,
    /// Result of all ranks, once all have come.
    result: Option<Vec<u8>>,
    n_taken: usize,
}

/// Description of an all-reduce, the same for all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Reduction {
    n: usize,
    dtype: DType,
    operation: c_int,
}

impl Reduction {
    fn element_bytes(self) -> usize {
        let found = DTYPES.iter().find(|d| d.0 == self.dtype);
        found.map_or(1, |d| d.1)
    }
}

impl Rank {
    fn new(gpu: usize) -> Rank {
        Rank {
            gpu,
            looks: LOOKS,
            pending: None,
            n_asked: 0,
            is_aborted: false,
        }
    }
}

/// One rank's part.
#[derive(Clone)]
pub struct Part {
    clique: usize,
    rank: usize,
    number: u64,
    what: Reduction,
    from: u64,
    to: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum DType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

/// In the order of `ncclDataType_t`.
const DTYPES: [(DType, usize); 10] = [
    (DType::I8, 1),
    (DType::U8, 1),
    (DType::I32, 4),
    (DType::U32, 4),
    (DType::I64, 8),
    (DType::U64, 8),
    (DType::F16, 2),
    (DType::F32, 4),
    (DType::F64, 8),
    (DType::Bf16, 2),
];

/// A rank that a thread wants in the group that it has begun.
struct RankRequest {
    comm: *mut usize,
    n: usize,
    id: [u8; 128],
    rank: usize,
    gpu: usize,
}

thread_local! {
    /// Depth of groups, and their requests.
    static GROUP: RefCell<(usize, Vec<RankRequest>)> = const { RefCell::new((0, Vec::new())) };
}

/// Ranks of a clique are numbered from its handle on.
const MOST_RANKS: usize = 0x10;

exports! {
    INTERNAL_ERROR;
    ncclGetVersion(version: *mut c_int) => {
        // SAFETY: the caller's promise: room for a number.
        unsafe { version.write(world::Settings::of_process().map_err(|_| INVALID_USAGE)?.nccl) };
        Ok(())
    };
    ncclGetUniqueId(id: *mut UniqueId) => {
        let handle = with(|world| Ok(world.handle()))?;
        let mut bytes = [7; 128];
        bytes[..8].copy_from_slice(&handle.to_ne_bytes());
        // SAFETY: the caller's promise: room for an id.
        unsafe { id.write(UniqueId(bytes)) };
        Ok(())
    };
    ncclGroupStart() => {
        GROUP.with_borrow_mut(|group| group.0 += 1);
        Ok(())
    };
    ncclGroupEnd() => {
        let wanted = GROUP.with_borrow_mut(|group| {
            group.0 = group.0.checked_sub(1).ok_or(INVALID_USAGE)?;
            Ok::<_, Code>(if group.0 == 0 { std::mem::take(&mut group.1) } else { Vec::new() })
        })?;
        if wanted.is_empty() { Ok(()) } else { make(wanted) }
    };
    ncclCommInitRankConfig(comm: *mut usize, n: c_int, id: UniqueId, rank: c_int, config: *const Config) => {
        // SAFETY: the caller's promise: a configuration.
        let config = unsafe { config.as_ref() }.ok_or(INVALID_ARGUMENT)?;
        let is_good = config.magic == 0xcafe_beef && config.size >= size_of::<Config>() && config.version >= 21_400;
        let (n, rank) = (usize::try_from(n).unwrap_or(0), usize::try_from(rank).unwrap_or(usize::MAX));
        if !is_good || config.blocking != 0 || rank >= n || n > MOST_RANKS {
            return Err(INVALID_ARGUMENT);
        }
        let gpu = world::current().checked_sub(1).ok_or(INVALID_USAGE)?;
        GROUP.with_borrow_mut(|group| match group.0 {
            // Alone it would wait for the other ranks.
            0 => Err(INVALID_USAGE),
            _ => {
                group.1.push(RankRequest { comm, n, id: id.0, rank, gpu });
                Err(IN_PROGRESS)
            }
        })
    };
    ncclCommGetAsyncError(comm: usize, state: *mut Code) => {
        let found = with_rank(comm, look)?;
        // SAFETY: the caller's promise: room for a result.
        unsafe { state.write(found) };
        Ok(())
    };
    ncclCommAbort(comm: usize) => with_rank(comm, |world, clique, rank| {
        let aborted = &mut world.cliques.get_mut(&clique).ok_or(INVALID_ARGUMENT)?.ranks[rank];
        (aborted.is_aborted, aborted.pending) = (true, None);
        // Its stream goes on; those of the other ranks do not.
        let is_its = |op: &Op| matches!(op, Op::Collective(part) if (part.clique, part.rank) == (clique, rank));
        world.streams.values_mut().for_each(|s| s.queue.retain(|(_, op)| !is_its(op)));
        Ok(())
    });
    ncclAllReduce(
        from: u64, to: u64, n: usize, dtype: c_int, operation: c_int, comm: usize, stream: usize,
    ) => with_rank(comm, |world, clique, rank| {
        let dtype = usize::try_from(dtype).ok().and_then(|d| DTYPES.get(d)).ok_or(INVALID_ARGUMENT)?.0;
        let gpu = world.streams.get(&stream).ok_or(INVALID_ARGUMENT)?.gpu;
        if world.streams[&stream].capture.is_some() {
            return Err(INVALID_USAGE);
        }
        world.check(gpu).map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let own = &mut world.cliques.get_mut(&clique).ok_or(INVALID_ARGUMENT)?.ranks[rank];
        if own.gpu != gpu || world::current() != gpu + 1 || !(0..4).contains(&operation) || own.looks > 0 {
            return Err(INVALID_USAGE);
        }
        let part = Part { clique, rank, number: own.n_asked, what: Reduction { n, dtype, operation }, from, to };
        own.n_asked += 1;
        (own.looks, own.pending) = (LOOKS, Some((stream, part)));
        Err(IN_PROGRESS)
    });
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = usize::try_from(code)
        .ok()
        .and_then(|c| TEXTS.get(c))
        .unwrap_or(&"unknown result code\0");
    text.as_ptr().cast()
}

/// Gives the world to a call.
fn with<T>(call: impl FnOnce(&mut World) -> Result<T, Code>) -> Result<T, Code> {
    let mut result = Err(INTERNAL_ERROR);
    let found = world::with(|world| {
        result = call(world);
        Ok(())
    });
    found.map_err(|_| UNHANDLED_CUDA_ERROR)?;
    result
}

/// The same for a call about a communicator: gives its clique and rank.
fn with_rank<T>(
    comm: usize,
    call: impl FnOnce(&mut World, usize, usize) -> Result<T, Code>,
) -> Result<T, Code> {
    with(|world| {
        let (&clique, found) = world
            .cliques
            .range(..=comm)
            .next_back()
            .ok_or(INVALID_ARGUMENT)?;
        let rank = comm - clique;
        if found.ranks.get(rank).is_none_or(|r| r.is_aborted) {
            return Err(INVALID_ARGUMENT);
        }
        call(world, clique, rank)
    })
}

/// Makes the communicators of a group.
fn make(wanted: Vec<RankRequest>) -> Result<(), Code> {
    let n = wanted.len();
    let gpus: BTreeSet<usize> = wanted.iter().map(|w| w.gpu).collect();
    let ranks: BTreeMap<usize, usize> = wanted.iter().map(|w| (w.rank, w.gpu)).collect();
    // As NCCL: no two ranks on one device.
    if gpus.len() != n
        || ranks.len() != n
        || wanted.iter().any(|w| w.n != n || w.id != wanted[0].id)
    {
        return Err(INVALID_USAGE);
    }
    let first = with(|world| {
        gpus.iter()
            .try_for_each(|&gpu| world.check(gpu))
            .map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let first = world.handle();
        let clique = Clique {
            ranks: ranks.values().map(|&gpu| Rank::new(gpu)).collect(),
            collectives: BTreeMap::new(),
        };
        world.cliques.insert(first, clique);
        Ok(first)
    })?;
    for w in wanted {
        // SAFETY: the caller's promise of `ncclCommInitRankConfig`: room for a handle until it is written.
        unsafe { w.comm.write(first + w.rank) };
    }
    Err(IN_PROGRESS)
}

/// The state of a communicator; its request makes progress by being polled.
fn look(world: &mut World, clique: usize, rank: usize) -> Result<Code, Code> {
    let found = world.cliques.get_mut(&clique).ok_or(INVALID_ARGUMENT)?;
    let have_begun = found.ranks.iter().all(|r| r.n_asked > 0);
    let own = &mut found.ranks[rank];
    let gpu = own.gpu;
    // The first time, ranks connect.
    let is_connecting = own.pending.is_some() && own.n_asked == 1 && !have_begun;
    own.looks = if is_connecting {
        own.looks
    } else {
        own.looks.saturating_sub(1)
    };
    let is_busy = own.looks > 0;
    let pending = if is_busy { None } else { own.pending.take() };
    if world.check(gpu).is_err() {
        return Ok(UNHANDLED_CUDA_ERROR);
    }
    if let Some((stream, part)) = pending {
        world
            .ask(stream, Op::Collective(part))
            .map_err(|_| UNHANDLED_CUDA_ERROR)?;
    }
    Ok(if is_busy { IN_PROGRESS } else { SUCCESS })
}

impl World {
    /// A device's stream has come to its part of a collective: whether it may go on, since all ranks have come.
    pub fn come_to(&mut self, gpu: usize, part: &Part) -> Result<bool, (codes::Code, String)> {
        let lost = |text: &str| (DEVICE_UNAVAILABLE, text.to_owned());
        let Some(clique) = self.cliques.get_mut(&part.clique) else {
            return Err(lost("no such communicator"));
        };
        let n = clique.ranks.len();
        let new = Collective {
            what: part.what,
            from: BTreeMap::new(),
            result: None,
            n_taken: 0,
        };
        let found = clique.collectives.entry(part.number).or_insert(new);
        if found.what != part.what {
            let text = format!(
                "rank {} of a collective does {:?}, another {:?}",
                part.rank, part.what, found.what
            );
            return Err((LAUNCH_FAILED, text));
        }
        if found.from.insert(part.rank, part.from).is_none() {
            self.count_launch(gpu)?;
        }
        let others: Vec<usize> = (0..n).filter(|&r| r != part.rank).collect();
        others.into_iter().for_each(|rank| self.bring(rank, part));
        self.reduce(part)
    }

    fn collective(&mut self, part: &Part) -> Option<&mut Collective> {
        self.cliques
            .get_mut(&part.clique)?
            .collectives
            .get_mut(&part.number)
    }

    /// Does the requests of another rank's stream up to its part, as far as they were made.
    fn bring(&mut self, rank: usize, part: &Part) {
        let is_its = |op: &Op| matches!(op, Op::Collective(p) if (p.clique, p.number, p.rank) == (part.clique, part.number, rank));
        while self
            .collective(part)
            .is_some_and(|c| c.result.is_none() && !c.from.contains_key(&rank))
        {
            let holder = self.stream_with(is_its);
            if !holder.is_some_and(|stream| self.step(stream)) {
                return;
            }
        }
    }

    /// Reduces once all ranks have come.
    fn reduce(&mut self, part: &Part) -> Result<bool, (codes::Code, String)> {
        let Some(clique) = self.cliques.get(&part.clique) else {
            return Ok(false);
        };
        let Some(found) = clique.collectives.get(&part.number) else {
            return Ok(false);
        };
        if found.result.is_some() {
            return Ok(true);
        }
        let is_gone = |r: &Rank| r.is_aborted || self.gpus[r.gpu].broken.is_some();
        if found.from.len() < clique.ranks.len() || clique.ranks.iter().any(is_gone) {
            return Ok(false);
        }
        let size = part.what.element_bytes();
        let mut all = Vec::new();
        for (rank, from) in &found.from {
            let mut bytes = vec![0; part.what.n * size];
            let gpu = clique.ranks[*rank].gpu;
            let read = self.gpus[gpu].device.copy_out(&mut bytes, *from);
            read.map_err(|fault| (codes::ILLEGAL_ADDRESS, format!("all-reduce: {fault}")))?;
            all.push(bytes);
        }
        let result = reduce(part.what, size, &all);
        if let Some(found) = self.collective(part) {
            found.result = Some(result);
        }
        Ok(true)
    }

    /// Where the result of a rank goes, and the result.
    pub fn take_result(&mut self, part: &Part) -> (u64, Vec<u8>) {
        let n = self.cliques.get(&part.clique).map_or(0, |c| c.ranks.len());
        let Some(found) = self.collective(part) else {
            return (part.to, Vec::new());
        };
        let result = found.result.clone().unwrap_or_default();
        found.n_taken += 1;
        if found.n_taken == n
            && let Some(clique) = self.cliques.get_mut(&part.clique)
        {
            clique.collectives.remove(&part.number);
        }
        (part.to, result)
    }
}

/// Elements of all ranks as one: share `i` of them is reduced around the ring from rank `i + 1` on.
fn reduce(what: Reduction, size: usize, all: &[Vec<u8>]) -> Vec<u8> {
    let ranks = all.len();
    let element = |i: usize| {
        let share = i * ranks / what.n.max(1);
        let of = |step: usize| &all[(share + 1 + step) % ranks][i * size..(i + 1) * size];
        let first = of(0).to_vec();
        (1..ranks).fold(first, |sum, step| join(what, &sum, of(step)))
    };
    (0..what.n).flat_map(element).collect()
}

fn join(what: Reduction, a: &[u8], b: &[u8]) -> Vec<u8> {
    macro_rules! read {
        ($ty:ty, $bytes:expr) => {
            <$ty>::from_le_bytes($bytes.try_into().expect("an element has its size"))
        };
    }
    macro_rules! integers {
        ($ty:ty) => {{
            let (a, b) = (read!($ty, a), read!($ty, b));
            let joined = match what.operation {
                0 => a.wrapping_add(b),
                1 => a.wrapping_mul(b),
                2 => a.max(b),
                _ => a.min(b),
            };
            joined.to_le_bytes().to_vec()
        }};
    }
    macro_rules! floats {
        ($ty:ty) => {{
            let (a, b) = (read!($ty, a), read!($ty, b));
            let joined = match what.operation {
                0 => a + b,
                1 => a * b,
                // A NaN may be lost.
                2 => a.max(b),
                _ => a.min(b),
            };
            joined.to_le_bytes().to_vec()
        }};
    }
    match what.dtype {
        DType::I8 => integers!(i8),
        DType::U8 => integers!(u8),
        DType::I32 => integers!(i32),
        DType::U32 => integers!(u32),
        DType::I64 => integers!(i64),
        DType::U64 => integers!(u64),
        DType::F16 => floats!(f16),
        DType::F32 => floats!(f32),
        DType::F64 => floats!(f64),
        DType::Bf16 => floats!(bf16),
    }
}
