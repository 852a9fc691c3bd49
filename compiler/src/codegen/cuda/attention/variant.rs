//! Tile shapes of attention, and the layout of scores and results in threads.

use super::super::emit::Emitter;
use super::super::groups::BARRIER_BYTES;
use super::super::mapped::COLUMNS;
use crate::target::Arch;
use gristmill_runtime::DType;

/// Most 32-bit registers for a thread's share of the result.
const RESULT_REGISTERS: usize = 96;
/// Shared memory that a block may declare, bytes, and that one of warp groups can have.
const SHARED_BYTES: usize = 48 << 10;
const GROUP_BYTES: usize = 227 << 10;
/// Multiplications in the time in which memory moves a byte.
const BY_ELEMENTS: f64 = 8.0;
const BY_FRAGMENTS: f64 = 50.0;
const BY_GROUPS: f64 = 90.0;
/// Depth of the steps in which products of tiles are unrolled; that of a tensor core's product.
pub(super) const STEP: usize = 16;
/// First architecture with tensor cores for both half types and with asynchronous copies.
const TENSOR_CAPABILITY: u32 = 80;
/// Queries of a warp that uses tensor cores.
const PER_WARP: usize = 16;

/// Queries of a block of warp groups, and keys of a tile.
pub(super) const ROWS: usize = 128;

/// Instructions and tile shape of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// Each thread has `thread_m x thread_n` scores of an `m x n` tile, and multiplies elements.
    Simt {
        m: usize,
        n: usize,
        thread_m: usize,
        thread_n: usize,
    },
    /// Each warp has 16 queries, in fragments of tensor cores. The block has `n` keys at a time.
    Tensor { warps: usize, n: usize },
    /// Two groups of four warps have 64 queries each, in fragments like those of [`Variant::Tensor`].
    /// A tile has 128 keys; `stages` tiles of keys or values are on chip at a time.
    Groups { stages: usize },
}

/// Warps and keys of tensor-core variants, then stages of warp-group variants. The first is taken
/// by prediction.
const TENSOR: [[usize; 2]; 5] = [[4, 64], [4, 32], [8, 64], [8, 32], [2, 64]];
const STAGES: [usize; 3] = [4, 3, 6];

const SIMT: [Variant; 4] = [
    Variant::Simt {
        m: 16,
        n: 64,
        thread_m: 4,
        thread_n: 4,
    },
    Variant::Simt {
        m: 64,
        n: 32,
        thread_m: 8,
        thread_n: 4,
    },
    Variant::Simt {
        m: 32,
        n: 32,
        thread_m: 4,
        thread_n: 4,
    },
    Variant::Simt {
        m: 16,
        n: 32,
        thread_m: 4,
        thread_n: 4,
    },
];

/// Dtype and extents of an attention: they decide which variants exist.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub(super) dtype: DType,
    pub(super) n_queries: usize,
    pub(super) n_keys: usize,
    pub(super) depth: usize,
    pub(super) value_depth: usize,
}

/// A thread's array of registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Registers {
    Scores,
    Result,
}

impl Registers {
    /// Name of the array.
    pub(super) fn name(self) -> &'static str {
        match self {
            Registers::Scores => "scores",
            Registers::Result => "result",
        }
    }
}

/// Accumulator dtype of scores, sums and results.
pub(super) fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

impl Extents {
    /// Variants whose tiles fit on chip, best predicted first. Empty when no tile fits.
    pub(super) fn variants(&self, arch: Arch) -> Vec<Variant> {
        let is_half = matches!(self.dtype, DType::F16 | DType::BF16);
        let is_tensor = is_half && self.fills() && arch.capability() >= TENSOR_CAPABILITY;
        let tensor: &[[usize; 2]] = if is_tensor { &TENSOR } else { &[] };
        let tensor = tensor
            .iter()
            .map(|&[warps, n]| Variant::Tensor { warps, n });
        let few = |v: &Variant| v.n_keys() == 32 || self.n_queries <= v.n_queries();
        let (best, others): (Vec<Variant>, Vec<Variant>) = SIMT.into_iter().partition(few);
        let all = tensor.chain(best).chain(others);
        all.filter(|v| v.fits(self)).collect()
    }

    /// False where most of a tensor core's tile would be padding, so that elements are multiplied.
    fn fills(&self) -> bool {
        let sides = [self.n_queries, self.n_keys, self.depth, self.value_depth];
        sides.iter().all(|&n| n >= PER_WARP)
    }

    /// Warp-group variants whose ring of tiles fits in shared memory.
    pub(super) fn group_variants(&self) -> Vec<Variant> {
        let variants = STAGES.map(|stages| Variant::Groups { stages });
        variants
            .into_iter()
            .filter(|f| f.group_bytes(self) <= GROUP_BYTES)
            .collect()
    }
}

impl Variant {
    /// Name of the instructions, for the listing.
    pub(super) fn words(&self) -> &'static str {
        match self {
            Variant::Simt { .. } => "threads",
            Variant::Tensor { .. } => "mma.sync",
            Variant::Groups { .. } => "warp groups",
        }
    }

    /// Multiplications in the time of a byte.
    pub(super) fn products_per_byte(&self) -> f64 {
        match self {
            Variant::Simt { .. } => BY_ELEMENTS,
            Variant::Tensor { .. } => BY_FRAGMENTS,
            Variant::Groups { .. } => BY_GROUPS,
        }
    }

    /// Shared memory of a block of warp groups: its queries, the ring, and barriers of both.
    pub(super) fn group_bytes(&self, x: &Extents) -> usize {
        let Variant::Groups { stages } = self else {
            return 0;
        };
        let [depth, value_depth] = [x.depth, x.value_depth].map(|d| self.padded_value_depth(d));
        let tiles = depth + stages * depth.max(value_depth);
        tiles * ROWS * x.dtype.size_bytes() + (2 * stages + 2) * BARRIER_BYTES
    }

    /// Queries of a tile.
    pub(super) fn n_queries(&self) -> usize {
        match self {
            Variant::Simt { m, .. } => *m,
            Variant::Tensor { warps, .. } => warps * PER_WARP,
            Variant::Groups { .. } => ROWS,
        }
    }

    /// Keys of a tile.
    pub(super) fn n_keys(&self) -> usize {
        match self {
            Variant::Simt { n, .. } | Variant::Tensor { n, .. } => *n,
            Variant::Groups { .. } => ROWS,
        }
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> usize {
        match self {
            Variant::Simt { m, thread_m, .. } => m / thread_m * self.per_query(),
            Variant::Tensor { warps, .. } => warps * 32,
            Variant::Groups { .. } => 3 * 128,
        }
    }

    /// Threads that share a query.
    pub(super) fn per_query(&self) -> usize {
        match self {
            Variant::Simt { n, thread_n, .. } => n / thread_n,
            Variant::Tensor { .. } | Variant::Groups { .. } => 4,
        }
    }

    /// The values' depth as the threads divide it.
    pub(super) fn padded_value_depth(&self, value_depth: usize) -> usize {
        value_depth.next_multiple_of(match self {
            Variant::Simt { .. } => 4 * self.per_query(),
            Variant::Tensor { .. } => STEP,
            Variant::Groups { .. } => COLUMNS,
        })
    }

    /// Element type of tiles in shared memory.
    pub(super) fn shared_dtype(&self, dtype: DType) -> DType {
        match self {
            Variant::Simt { .. } => accumulator(dtype),
            Variant::Tensor { .. } | Variant::Groups { .. } => dtype,
        }
    }

    /// Distance of rows of `n` elements in shared memory. Runs of 16 bytes stay aligned, and those of neighbouring rows fall into different banks.
    pub(super) fn pitch(&self, n: usize) -> usize {
        match self {
            Variant::Simt { .. } => n + 4,
            Variant::Tensor { .. } | Variant::Groups { .. } => n + 8,
        }
    }

    /// Name and number of elements of each array in shared memory.
    pub(super) fn shared(&self, depth: usize, value_depth: usize) -> Vec<(&'static str, usize)> {
        let (depth, value_depth) = (
            depth.next_multiple_of(STEP),
            self.padded_value_depth(value_depth),
        );
        let (m, n) = (self.n_queries(), self.n_keys());
        match self {
            Variant::Simt { .. } => {
                let keys = (depth * self.pitch(n)).max(n * self.pitch(value_depth));
                vec![
                    ("queries", depth * self.pitch(m)),
                    ("keys", keys),
                    ("weights", n * self.pitch(m)),
                ]
            }
            Variant::Tensor { .. } => {
                let (row, value_row) = (self.pitch(depth), self.pitch(value_depth));
                vec![
                    ("queries", m * row),
                    ("keys", n * row),
                    ("values", n * value_row),
                ]
            }
            Variant::Groups { .. } => Vec::new(),
        }
    }

    /// True if a tile fits shared memory and registers.
    fn fits(&self, x: &Extents) -> bool {
        let arrays = self.shared(x.depth, x.value_depth);
        let n_shared: usize = arrays.iter().map(|s| s.1).sum();
        let shared_bytes = n_shared * self.shared_dtype(x.dtype).size_bytes();
        let [a, b] = self.registers(Registers::Result, x.value_depth);
        let results = a * b * accumulator(x.dtype).size_bytes() / 4;
        let queries = match self {
            Variant::Tensor { .. } => x.depth / 4,
            Variant::Simt { .. } | Variant::Groups { .. } => 0,
        };
        shared_bytes <= SHARED_BYTES && results + queries <= RESULT_REGISTERS
    }

    /// Extents of a thread's array of scores or results.
    pub(super) fn registers(&self, which: Registers, value_depth: usize) -> [usize; 2] {
        let columns = match which {
            Registers::Scores => self.n_keys(),
            Registers::Result => self.padded_value_depth(value_depth),
        };
        match self {
            Variant::Simt { thread_m, .. } => [*thread_m, columns / self.per_query()],
            Variant::Tensor { .. } | Variant::Groups { .. } => [columns / 8, 4],
        }
    }

    /// Queries that a thread has a part of.
    pub(super) fn per_thread(&self) -> usize {
        match self {
            Variant::Simt { thread_m, .. } => *thread_m,
            Variant::Tensor { .. } | Variant::Groups { .. } => 2,
        }
    }

    /// Expressions of the row and column in the tile of element `[i][j]` of a thread's array, and of the number of its query in the thread.
    pub(super) fn place(
        &self,
        which: Registers,
        value_depth: usize,
        [i, j]: [&str; 2],
    ) -> [String; 3] {
        // The first group of warps has no queries.
        let warp = match self {
            Variant::Simt { m, thread_m, .. } => {
                let (per_query, [_, n]) = (self.per_query(), self.registers(which, value_depth));
                let all = n * per_query;
                let row = format!("gm_of_tile<{m}, {thread_m}>(threadIdx.x / {per_query}, {i})");
                let column = format!("gm_of_tile<{all}, {n}>(threadIdx.x % {per_query}, {j})");
                return [row, column, i.to_owned()];
            }
            Variant::Tensor { .. } => "threadIdx.x / 32",
            Variant::Groups { .. } => "(threadIdx.x / 32 - 4)",
        };
        [
            format!("{warp} * {PER_WARP} + threadIdx.x % 32 / 4 + {j} / 2 * 8"),
            format!("{i} * 8 + threadIdx.x % 4 * 2 + {j} % 2"),
            format!("{j} / 2"),
        ]
    }

    /// `c += a * b` of tiles of elements with `depth` outermost.
    pub(super) fn multiply(
        &self,
        e: &mut Emitter,
        which: Registers,
        value_depth: usize,
        depth: usize,
    ) {
        let (m, [tm, tn]) = (self.n_queries(), self.registers(which, value_depth));
        let (n, c) = (tn * self.per_query(), which.name());
        let a = match which {
            Registers::Scores => "queries",
            Registers::Result => "weights",
        };
        e.line("#pragma unroll 1");
        e.open(&format!("for (int d = 0; d < {depth}; d += {STEP})"));
        e.line(&format!(
            "gm_multiply<{m}, {n}, {STEP}, {tm}, {tn}>({a} + d * gm_pitch<{m}>(), keys + d * gm_pitch<{n}>(), {c});"
        ));
        e.close();
    }
}
