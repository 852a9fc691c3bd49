//! Black-box tests: one binary of modules.

mod hostile;
mod cli;
mod house_rules;
mod models;
mod multi_device;
mod process;
mod onnx_cases;
