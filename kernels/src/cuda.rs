//! Device code in CUDA C++ that every generated GPU kernel begins with. It includes nothing: NVRTC
//! needs no headers for it.

/// Types, conversions, floats of 8 bits and the primitive ops that C++ has no operator for, with
/// the meaning that the op tables give them; then access to several elements at a time, products of
/// tiles, reductions over groups of threads, products by tensor cores, attention, running sums and
/// sorting, and products and attention by warp groups.
pub const PRELUDE: &str = concat!(
    include_str!("cuda/prelude.cuh"),
    include_str!("cuda/float8.cuh"),
    "\n",
    include_str!("cuda/vector.cuh"),
    "\n",
    include_str!("cuda/contract.cuh"),
    "\n",
    include_str!("cuda/rows.cuh"),
    "\n",
    include_str!("cuda/mma.cuh"),
    "\n",
    include_str!("cuda/attention.cuh"),
    "\n",
    include_str!("cuda/lines.cuh"),
    "\n",
    include_str!("cuda/wgmma.cuh"),
    "\n",
    include_str!("cuda/group_attention.cuh")
);
