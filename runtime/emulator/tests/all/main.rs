//! Black-box tests of the emulator: kernels in CUDA compiled by NVRTC, single instructions, planted bugs, broken text.

mod faults;
mod formats;
mod instructions;
mod kernels;
mod malformed;
mod math;
mod pixels;
mod products;
mod support;
mod tensor;
mod warps;
