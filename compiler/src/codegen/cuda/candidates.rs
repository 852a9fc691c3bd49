//! Kernels that divide work among blocks in several variants, and the choice between variants.

use super::emit::{Emitter, Value};
use crate::codegen::body::Body;
use crate::codegen::pull::Puller;
use crate::error::Result;
use crate::ir::ValueId;
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
    /// Predicted time, in that of a byte of memory: multiplying and loading overlap, and the last wave of blocks may leave multiprocessors idle.
    fn cost(&self, r: &Resources) -> f64 {
        let threads = (r.threads as usize).max(1);
        let registers = match r.per_multiprocessor as usize {
            0 => USUAL_REGISTERS,
            n => MOST_REGISTERS.min(REGISTERS / (threads * n)),
        };
        let by_shared = if r.shared_bytes == 0 {
            THREADS
        } else {
            SHARED_BYTES / r.shared_bytes as usize
        };
        let resident = (THREADS / threads)
            .min(REGISTERS / (threads * registers))
            .min(by_shared)
            .max(1);
        let slots = MULTIPROCESSORS * resident;
        let n_tiles = self.n_tiles.max(1);
        let busy = n_tiles as f64 / (n_tiles.div_ceil(slots) * slots) as f64;
        (self.bytes * CACHED).max(self.n_products / self.products_per_byte) / busy
            + 2.0 * self.partial_bytes
    }
}

/// All variants of a kernel, at least one, which read the same values from memory. The first is
/// taken without timing.
pub(super) struct Candidates(Vec<Box<dyn Candidate>>);

/// Forms of a kernel that are worth timing: no more than this, and none that is predicted to take so many times as long as the best.
const MOST_FORMS: usize = 6;
const FAR_WORSE: f64 = 3.0;

impl Candidates {
    /// The first of the given variants, then distinct ones that may be faster, best predicted
    /// first. `None` when there are none.
    pub(super) fn new<C: Candidate + 'static>(
        forms: impl IntoIterator<Item = C>,
    ) -> Option<Candidates> {
        let mut all: Vec<(f64, String, C)> = Vec::new();
        for form in forms {
            let words = form.words();
            if all.iter().all(|a| a.1 != words) {
                all.push((form.work().cost(&form.resources()), words, form));
            }
        }
        all.get_mut(1..)?.sort_by(|a, b| a.0.total_cmp(&b.0));
        let least = all.iter().map(|a| a.0).fold(f64::INFINITY, f64::min);
        let mut first = true;
        all.retain(|a| std::mem::take(&mut first) || a.0 <= FAR_WORSE * least);
        all.truncate(MOST_FORMS);
        Some(Candidates(
            all.into_iter()
                .map(|(_, _, form)| Box::new(form) as Box<dyn Candidate>)
                .collect(),
        ))
    }
}

/// Picks a variant of each of a cluster's kernels from one number: see [`crate::codegen::forms`].
pub(super) struct Chooser {
    form: usize,
    /// Forms of the cluster so far.
    pub(super) n: usize,
}

impl Chooser {
    pub(super) fn new(form: u8) -> Chooser {
        Chooser {
            form: form.into(),
            n: 1,
        }
    }

    /// Variant of the cluster's next kernel, its index, and the kernel's number of variants.
    pub(super) fn next<'c>(
        &mut self,
        Candidates(forms): &'c Candidates,
    ) -> (&'c dyn Candidate, usize, usize) {
        let others = forms.len() - 1;
        let own = self
            .form
            .checked_sub(self.n)
            .filter(|&i| i < others)
            .map_or(0, |i| i + 1);
        self.n += others;
        (&*forms[own], own, forms.len())
    }
}

/// Text of the number of blocks that share results.
pub(super) fn in_parts(n_parts: usize) -> String {
    if n_parts > 1 {
        format!(", in {n_parts} parts")
    } else {
        String::new()
    }
}
