//! A `libcuda.so.1` made of the PTX emulator: tests put it where the driver backend looks for the real one.
//!
//! It has the functions of the CUDA driver API that gristmill uses, and is stricter than a GPU:
//!
//! - Work runs as late as the model allows. A request to a stream stays until something waits for it; then it runs, with its dependencies and
//!   nothing else. So an event or a synchronisation that is missing shows as wrong results. (A GPU makes progress by itself: requests are also
//!   done after a few milliseconds.)
//! - Copies from pinned memory read it when they run, as a GPU does; fresh device memory is all ones.
//! - Only PTX is taken. Machine code is refused with `CUDA_ERROR_NO_BINARY_FOR_GPU`, as a GPU refuses that of another.
//! - It is cuBLASLt, too, and refuses calls that the documentation of that does not allow.
//! - The null stream, functions of other contexts, and calls from host functions are refused.
//!
//! It is a `libnccl.so.2` as well ([`nccl`]), for all-reduces.
//!
//! `EMULATED_CUDA` configures devices and failures: [`world::Settings`]. `CUDA_VISIBLE_DEVICES` is honoured for lists of numbers.

mod calls;
mod capture;
mod codes;
mod cublaslt;
mod execute;
mod exports;
mod log;
mod memory;
mod modules;
mod nccl;
mod product;
mod progress;
mod streams;
mod world;
