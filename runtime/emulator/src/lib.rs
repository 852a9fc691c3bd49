//! Runs the PTX of CUDA kernels on the CPU: a device for machines without a GPU, and a checker for kernels.
//!
//! The text that NVRTC writes is parsed ([`Module`]), decoded into actions over arrays of 32 lanes, and interpreted warp by
//! warp; blocks run in parallel on the threads of the host ([`Device::launch`]). Every access is checked for bounds and
//! alignment, `.sync` instructions for divergence, and waits for deadlock; races in shared memory on request ([`Checks`]).
//! Asynchronous copies and products finish as late as the model allows, so that a missing wait shows in the results.
//!
//! ```
//! use gristmill_emulator::{Args, Checks, Device, LaunchConfig, Limits, Module};
//!
//! # fn main() -> Result<(), gristmill_emulator::Fault> {
//! let module = Module::parse(
//!     ".version 9.0
//!      .target sm_90a
//!      .address_size 64
//!      .visible .entry store_lane(.param .u64 to) {
//!          .reg .b32 %r<2>;
//!          .reg .b64 %rd<4>;
//!          ld.param.u64 %rd1, [to];
//!          mov.u32 %r1, %tid.x;
//!          mul.wide.u32 %rd2, %r1, 4;
//!          add.s64 %rd3, %rd1, %rd2;
//!          st.global.u32 [%rd3], %r1;
//!          ret;
//!      }",
//! )?;
//! let device = Device::new(Limits::default());
//! let to = device.alloc(64 * 4)?;
//! let config = LaunchConfig { block: [64, 1, 1], ..LaunchConfig::default() };
//! device.launch(&module, "store_lane", &config, Args::new().u64(to).bytes(), &Checks::default())?;
//! let mut bytes = [0; 64 * 4];
//! device.copy_out(&mut bytes, to)?;
//! assert_eq!(bytes[63 * 4], 63);
//! # Ok(())
//! # }
//! ```
//!
//! Not modelled: the rounding of tensor cores inside a product, the exact bits of approximate functions, weak memory
//! order, occupancy and time.

mod args;
mod decode;
mod device;
mod driver;
mod exec;
mod fault;
mod lanes;
mod memory;
mod numeric;
mod parse;
mod special;
mod tensor_map;
mod types;

pub use args::Args;
pub use device::{Checks, Device, LaunchConfig, Limits, Module};
pub use driver::EmulatedGpu;
pub use exec::Stats;
pub use fault::{Fault, FaultKind};
pub use gristmill_runtime::gpu::{Pixels, Swizzle};
pub use tensor_map::{TENSOR_MAP_BYTES, TensorElement, TensorMap, encode_tensor_map};
