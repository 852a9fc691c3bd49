//! Black-box tests of the emulator: kernels in CUDA compiled by NVRTC, single instructions, planted bugs, broken text.

mod faults;
mod kernels;
mod malformed;
mod math;
mod support;
mod tensor;
