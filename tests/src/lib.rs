//! All tests of the workspace that use public API only; one binary, in `tests/all.rs`.
