//! CPU micro-kernels of gristmill, with the instruction set chosen at run time.
//!
//! # Calling convention
//!
//! A *task kernel* is a [`TaskFn`]: `fn(desc, ptrs, begin, end) -> status`. `desc` is a
//! [`Descriptor`], plain `#[repr(C)]` data that is fixed when code is generated. `ptrs` is an array
//! of addresses, indexed by [`LHS`], [`RHS`], [`OUT`], [`WORKSPACE`] and, from [`OPERANDS`] on, the
//! epilogue's operands. Work is a range of items, `0..desc.n_items()`; callers split that range
//! over threads as they like, since items write disjoint memory. Kernels never allocate, never
//! panic on a valid descriptor, and start no threads. A kernel with `workspace_bytes()` wants that
//! much memory, 64-byte aligned, per concurrent call.
//!
//! A *leaf kernel* takes raw pointers and lengths, for use from generated loops.
//!
//! All entries are `extern "C"` under stable names, listed in [`symbols`]. [`calls`] pairs each task
//! kernel with its descriptor.

pub mod attention;
mod blocked;
pub mod columns;
pub mod conv;
pub mod convert;
pub mod copy;
pub mod cuda;
pub mod depthwise;
mod descriptor;
pub mod epilogue;
pub mod float8;
pub mod gemm;
mod isa;
pub mod pack;
pub mod pool;
pub mod pool_gradient;
pub mod quantize;
pub mod random;
pub mod range;
pub mod roi;
pub mod rows;
pub mod sample;
pub mod scalar_math;
pub(crate) mod simd;
pub mod sorting;
pub mod standardize;
mod symbols;
pub mod table;
#[cfg(test)]
mod testing;
pub mod transpose;
pub mod vmath;
pub mod window;
pub mod winograd;

// Every task kernel and its descriptor.
symbols::task_kernels!(
    attention::gm_attention_f32(AttentionDesc),
    columns::gm_reduce_columns_f32(ColumnsDesc),
    conv::gm_conv_f32(ConvDesc),
    copy::gm_copy(CopyDesc),
    depthwise::gm_depthwise_f32(DepthwiseDesc),
    gemm::gm_gemm_f32(GemmDesc),
    pack::gm_pack_b_f32(PackBDesc),
    pool::gm_pool_f32(PoolDesc),
    pool_gradient::gm_max_pool_grad_f32(MaxPoolGradDesc),
    quantize::gm_quantize_f32(QuantizeDesc),
    random::gm_random_bits(RandomBitsDesc),
    range::gm_range_f32(RangeDesc),
    roi::gm_roi_align(RoiAlignDesc),
    rows::gm_norm_f32(NormDesc),
    rows::gm_reduce_f32(ReduceDesc),
    rows::gm_softmax_f32(SoftmaxDesc),
    sample::gm_sample_f32(SampleDesc),
    standardize::gm_column_moments_f32(StandardizeDesc),
    standardize::gm_standardize_f32(StandardizeDesc),
    table::gm_table_bytes(TableDesc),
    winograd::gm_winograd2_f32(WinogradDesc),
    winograd::gm_winograd4_f32(WinogradDesc),
);

pub use blocked::{Blocked, Division};
pub use descriptor::{Descriptor, Plain};
pub use isa::Isa;
pub use symbols::{Symbol, TaskCall, symbols};

/// Done.
pub const OK: u32 = 0;
/// The descriptor contradicts itself: an unknown kind, a zero block.
pub const INVALID: u32 = 1;
/// The descriptor names an instruction set that this CPU lacks.
pub const UNSUPPORTED_ISA: u32 = 2;
/// A number that the kernel reads from memory, such as an index, is out of range.
pub const OUT_OF_RANGE: u32 = 3;

/// Index in `ptrs` of the input, or the left-hand side.
pub const LHS: usize = 0;
/// Index in `ptrs` of the right-hand side, or the weights.
pub const RHS: usize = 1;
/// Index in `ptrs` of the output.
pub const OUT: usize = 2;
/// Index in `ptrs` of the workspace; may be null if the descriptor asks for none.
pub const WORKSPACE: usize = 3;
/// Index in `ptrs` of the first epilogue operand.
pub const OPERANDS: usize = 4;

/// A task kernel; `D` is its descriptor.
pub type TaskFn<D> =
    unsafe extern "C" fn(desc: *const D, ptrs: *const *mut u8, begin: usize, end: usize) -> u32;

/// # Safety
/// `ptrs` has an entry `idx`.
#[inline]
pub(crate) unsafe fn pointer(ptrs: *const *mut u8, idx: usize) -> *mut f32 {
    // SAFETY: by contract.
    unsafe { *ptrs.add(idx) }.cast()
}

/// The element `offset` of an output, whose elements have the size that `quantize` says.
///
/// # Safety
/// `ptrs` has an entry [`OUT`].
#[inline]
pub(crate) unsafe fn output(
    ptrs: *const *mut u8,
    quantize: quantize::Quantize,
    offset: isize,
) -> *mut f32 {
    // SAFETY: by contract.
    unsafe { *ptrs.add(OUT) }
        .wrapping_offset(offset * quantize.size_bytes() as isize)
        .cast()
}
