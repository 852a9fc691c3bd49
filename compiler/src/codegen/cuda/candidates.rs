//! Kernels that divide work among blocks in several variants, and the choice between variants.

use super::emit::{Emitter, Value};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Puller};
use crate::error::Result;
use crate::ir::{ScalarOp, ValueId};
use gristmill_runtime::DType;
use gristmill_runtime::gpu::TensorMap;

/// Launch extents and on-chip resources of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) blocks: u64,
    pub(super) threads: u64,
    /// Dynamic shared memory of a block, beyond the arrays that the code declares.
    pub(super) shared_bytes: u32,
    /// Blocks that a multiprocessor must have registers for: 1 lets threads take all. 0 leaves that to ptxas, which may spill some to fit more blocks.
    pub(super) per_multiprocessor: u32,
    /// Blocks that run at the same time and see each other's shared memory; 0 and 1 for none.
    pub(super) cluster: u32,
}

impl Resources {
    /// So many blocks of so many threads.
    pub(super) fn new(blocks: usize, threads: usize) -> Resources {
        Resources {
            blocks: blocks as u64,
            threads: threads as u64,
            ..Resources::default()
        }
    }

    /// Blocks that a multiprocessor of sm_90 runs at a time, as far as can be known before the code is compiled.
    fn resident_blocks(&self) -> usize {
        let threads = (self.threads as usize).max(1);
        let registers = match self.per_multiprocessor as usize {
            0 => USUAL_REGISTERS,
            n => MOST_REGISTERS.min(REGISTERS / (threads * n)),
        };
        let by_registers = REGISTERS / (threads * registers);
        let by_shared = SHARED_BYTES.checked_div(self.shared_bytes as usize);
        let most = by_registers.min(by_shared.unwrap_or(THREADS));
        most.min(THREADS / threads).max(1)
    }
}

/// One variant of a kernel whose blocks each compute a part of one result. Where several blocks
/// share an element, a second kernel joins their partial results.
pub(super) trait Candidate {
    /// Name of the kernel.
    fn name(&self) -> &'static str;

    /// Description that distinguishes it from the other variants.
    fn words(&self) -> String;

    /// The value that the kernel writes.
    fn result(&self) -> ValueId;

    fn resources(&self) -> Resources;

    /// Work of all blocks together.
    fn work(&self) -> Work;

    /// Tensor maps that the kernel takes, of values in memory; their buffers are the caller's affair.
    fn maps(&self) -> Vec<(ValueId, TensorMap)> {
        Vec::new()
    }

    /// Where several blocks share results: dtype and number of the elements of all partial ones.
    fn partial(&self, body: &Body) -> Option<(DType, usize)>;

    /// Items of the kernel that joins partial results.
    fn n_results(&self) -> usize;

    /// Writes the kernel's body; the result, or partial results if there are any, go to `out`.
    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()>;

    /// Joins partial results for item `item`, in order, and stores the epilogue.
    fn join(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        buffers: [Value; 2],
    ) -> Result<()>;
}

/// Work of all blocks together, with padding and repeated loads: the terms by which the times of
/// variants differ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Parts that blocks share evenly.
    pub(super) n_tiles: usize,
    /// Bytes loaded.
    pub(super) bytes: f64,
    /// Multiplications, and the number that the GPU does in the time in which its memory moves a
    /// byte.
    pub(super) n_products: f64,
    pub(super) products_per_byte: f64,
    /// Bytes of partial results.
    pub(super) partial_bytes: f64,
}

/// Resources of a multiprocessor of sm_90. Other architectures differ by less than the error of the
/// prediction.
pub(super) const MULTIPROCESSORS: usize = 132;
const REGISTERS: usize = 65536;
const THREADS: usize = 2048;
const SHARED_BYTES: usize = 227 << 10;
/// Registers of a thread at most, and where nothing is said.
const MOST_REGISTERS: usize = 255;
const USUAL_REGISTERS: usize = 64;
/// Time of a byte that comes from the second-level cache, as most that are loaded again do, against one of memory.
const CACHED: f64 = 0.4;

impl Work {
    fn cost(&self, r: &Resources) -> f64 {
        let slots = MULTIPROCESSORS * r.resident_blocks();
        let n_tiles = self.n_tiles.max(1);
        let busy = n_tiles as f64 / (n_tiles.div_ceil(slots) * slots) as f64;
        let slowest = (self.bytes * CACHED).max(self.n_products / self.products_per_byte);
        slowest / busy + 2.0 * self.partial_bytes
    }
}

/// All variants of a kernel, at least one, which read the same values from memory. The first is
/// taken without timing.
pub(super) struct Candidates(Vec<Box<dyn Candidate>>);

/// Forms of a kernel that are worth timing: no more than this, and none that is predicted to take so many times as long as the best.
const MOST_VARIANTS: usize = 6;
const FAR_WORSE: f64 = 3.0;

impl Candidates {
    /// The first of the given variants, then distinct ones that may be faster, best predicted
    /// first. `None` when there are none.
    pub(super) fn new<C: Candidate + 'static>(
        variants: impl IntoIterator<Item = C>,
    ) -> Option<Candidates> {
        let boxed = |variant| Box::new(variant) as Box<dyn Candidate>;
        Candidates::of(variants.into_iter().map(boxed))
    }

    /// The same of several kinds.
    pub(super) fn of(variants: impl IntoIterator<Item = Box<dyn Candidate>>) -> Option<Candidates> {
        let mut all: Vec<(f64, String, Box<dyn Candidate>)> = Vec::new();
        for variant in variants {
            let words = variant.words();
            if all.iter().all(|a| a.1 != words) {
                let cost = variant.work().cost(&variant.resources());
                all.push((cost, words, variant));
            }
        }
        all.get_mut(1..)?.sort_by(|a, b| a.0.total_cmp(&b.0));
        let best = all.iter().map(|a| a.0).fold(f64::INFINITY, f64::min);
        let others = all.split_off(1);
        all.extend(others.into_iter().filter(|a| a.0 <= FAR_WORSE * best));
        all.truncate(MOST_VARIANTS);
        Some(Candidates(all.into_iter().map(|a| a.2).collect()))
    }
}

/// Picks a variant of each of a cluster's kernels from one number: see [`crate::codegen::kernel_forms`].
pub(super) struct Chooser {
    variant: usize,
    /// Forms of the cluster so far, and kernels with several.
    pub(super) n: usize,
    pub(super) n_kernels: usize,
}

impl Chooser {
    pub(super) fn new(variant: u8) -> Chooser {
        Chooser {
            variant: variant.into(),
            n: 1,
            n_kernels: 0,
        }
    }

    /// Variant of the cluster's next kernel, its index, and the kernel's number of variants.
    pub(super) fn next<'c>(
        &mut self,
        Candidates(variants): &'c Candidates,
    ) -> (&'c dyn Candidate, usize, usize) {
        let others = variants.len() - 1;
        let own = self
            .variant
            .checked_sub(self.n)
            .filter(|&i| i < others)
            .map_or(0, |i| i + 1);
        self.n += others;
        self.n_kernels += usize::from(others > 0);
        (&*variants[own], own, variants.len())
    }
}

/// Blocks that keep every GPU of today busy, where blocks share sums.
const ENOUGH_BLOCKS: usize = 256;

/// Numbers of blocks that may share each of the sums of `n_tiles` blocks, best predicted first: half
/// and twice as many follow. A sum takes so many `steps` of a block; a share has at least `least`, a
/// quarter of which is worth a try.
pub(super) fn numbers_of_parts(steps: usize, n_tiles: usize, least: usize) -> Vec<usize> {
    let most = steps / least;
    let usual = (ENOUGH_BLOCKS / n_tiles.max(1)).min(most).max(1);
    let others = [usual / 2, 2 * usual].into_iter();
    let others = others.filter(|&n| n > 0 && steps / n >= least / 4);
    std::iter::once(usual).chain(others).collect()
}

/// Start and end of share number `part` of an axis, in whole steps.
pub(super) fn share_of(
    e: &mut Emitter,
    part: Ix<Value>,
    n_parts: usize,
    (length, step): (usize, usize),
) -> [Ix<Value>; 2] {
    let per_part = length.div_ceil(n_parts).next_multiple_of(step) as i64;
    let start = e.mul(part, per_part);
    let mut end = Ix::C(length as i64);
    if n_parts > 1 {
        let own = e.add(start, Ix::C(per_part));
        end = e.smaller(own, end);
    }
    [start, end]
}

/// Text of the number of blocks that share results.
pub(super) fn in_parts(n_parts: usize) -> String {
    if n_parts > 1 {
        format!(", in {n_parts} parts")
    } else {
        String::new()
    }
}

/// Partial results: `n_parts` times `n_elements` elements of a dtype, and the op that combines them.
pub(super) struct Partials {
    pub(super) n_parts: usize,
    pub(super) n_elements: usize,
    pub(super) dtype: DType,
    pub(super) op: ScalarOp,
    /// Bits of the op's identity.
    pub(super) identity: u64,
}

impl Partials {
    /// Combines the parts of element `item`, in order.
    pub(super) fn join(&self, e: &mut Emitter, partial: Value, item: Value) -> Result<Value> {
        let identity = e.constant(self.dtype, self.identity);
        let (first, end) = (Ix::C(0), Ix::C(self.n_parts as i64));
        let joined = e.for_loop(first, end, 1, &[identity], |e, part, carried| {
            let from = e.mul(Ix::V(part), self.n_elements as i64);
            let at = e.add(from, Ix::V(item));
            let own = e.load(self.dtype, partial, at);
            Ok(vec![e.combine(self.op, carried[0], own)?])
        })?;
        Ok(joined[0])
    }
}
