//! The `gristmill` command line.

fn main() {}
