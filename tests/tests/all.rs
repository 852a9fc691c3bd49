//! Black-box tests: one binary of modules.
