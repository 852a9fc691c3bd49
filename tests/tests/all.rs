//! Black-box tests: one binary of modules.

mod house_rules;
