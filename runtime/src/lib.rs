//! Executes compiled gristmill programs.
