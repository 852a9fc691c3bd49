//! A `libcuda.so.1` made of the PTX emulator: tests put it where the driver backend looks for the real one.
//!
//! It has the functions of the CUDA driver API that gristmill uses, and is stricter than a GPU:
//!
//! - Work runs as late as the model allows. What is asked of a stream waits until something waits for it; then that runs, what it waits for,
//!   and nothing else. So an event or a synchronisation that is missing shows as wrong results. (A GPU gets on by itself: what has been asked
//!   for is also done after a few milliseconds.)
//! - Copies from pinned memory read it when they run, as a GPU does; fresh device memory is all ones.
//! - Only PTX is taken. Machine code is refused with `CUDA_ERROR_NO_BINARY_FOR_GPU`, as a GPU refuses that of another.
//! - It is cuBLASLt, too, and refuses what the documentation of that does not promise.
//! - The null stream, functions of other contexts, and calls from host functions are refused.
//!
//! It is a `libnccl.so.2` as well ([`nccl`]), for all-reduces.
//!
//! `EMULATED_CUDA` says what is there and what goes wrong: [`world::Settings`]. `CUDA_VISIBLE_DEVICES` is honoured for lists of numbers.

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
