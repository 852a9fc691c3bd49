//! The gristmill tensor compiler.
