//! Benches of gristmill.
