//! Black-box tests: one binary of modules.

mod api;
mod cli;
mod cuda;
mod cuda_calls;
mod decoding;
mod emulated;
mod fallbacks;
mod guide;
mod hostile;
mod house_rules;
mod ir_cases;
mod libraries;
mod memory;
mod models;
mod multi_device;
mod nccl;
mod onnx_cases;
mod placement;
mod placement_files;
mod placement_objectives;
mod placement_page;
mod placement_scale;
mod process;
mod run_time;
mod serving;
mod shapes;
