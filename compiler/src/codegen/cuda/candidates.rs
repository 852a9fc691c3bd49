//! Kernels whose blocks share the work in a form of their own, and the forms that there are to choose from.

use super::emit::{Emitter, Value};
use crate::codegen::body::Body;
use crate::codegen::pull::Puller;
use crate::error::Result;
use crate::ir::ValueId;
use gristmill_runtime::DType;
use gristmill_runtime::gpu::TensorMap;

/// What a kernel takes of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) blocks: u64,
    pub(super) threads: u64,
    /// Shared memory of a block, beyond what the code declares.
    pub(super) shared_bytes: u32,
    /// Blocks that a multiprocessor must have registers for: 1 lets threads take all. 0 leaves that to ptxas, which may spill some to fit more blocks.
    pub(super) per_multiprocessor: u32,
    /// Blocks that run at the same time and see each other's shared memory; 0 and 1 for none.
    pub(super) cluster: u32,
}

impl Resources {
    /// So many blocks of so many threads.
    pub(super) fn new(blocks: usize, threads: usize) -> Resources {
        Resources { blocks: blocks as u64, threads: threads as u64, ..Resources::default() }
    }
}

/// One form of a kernel whose blocks each compute a part of one result; a second kernel joins their parts where several share an element.
pub(super) trait Candidate {
    /// Name of the kernel.
    fn name(&self) -> &'static str;

    /// What tells it from the other forms, in words.
    fn words(&self) -> String;

    /// What it writes.
    fn result(&self) -> ValueId;

    fn resources(&self) -> Resources;

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

    /// Joins partial results for item `item`, in order, and stores what follows.
    fn join(&self, p: &mut Puller<Value>, e: &mut Emitter, item: Value, buffers: [Value; 2]) -> Result<()>;
}

/// All forms of a kernel, at least one; the first is what predicted times choose. They read the same values from memory.
pub(super) struct Candidates(Vec<Box<dyn Candidate>>);

impl Candidates {
    /// `None` when there are none.
    pub(super) fn new<C: Candidate + 'static>(forms: impl IntoIterator<Item = C>) -> Option<Candidates> {
        let forms: Vec<Box<dyn Candidate>> = forms.into_iter().map(|f| Box::new(f) as Box<dyn Candidate>).collect();
        (!forms.is_empty()).then_some(Candidates(forms))
    }
}

/// Chooses among the forms of a cluster's kernels by one number: see [`crate::codegen::forms`].
pub(super) struct Chooser {
    form: usize,
    /// Forms of the cluster so far.
    pub(super) n: usize,
}

impl Chooser {
    pub(super) fn new(form: u8) -> Chooser {
        Chooser { form: form.into(), n: 1 }
    }

    /// The form of the cluster's next kernel, its number among the kernel's, and how many these are.
    pub(super) fn next<'c>(&mut self, Candidates(forms): &'c Candidates) -> (&'c dyn Candidate, usize, usize) {
        let others = forms.len() - 1;
        let own = self.form.checked_sub(self.n).filter(|&i| i < others).map_or(0, |i| i + 1);
        self.n += others;
        (&*forms[own], own, forms.len())
    }
}

/// How many blocks share results, in words.
pub(super) fn in_parts(n_parts: usize) -> String {
    if n_parts > 1 { format!(", in {n_parts} parts") } else { String::new() }
}
