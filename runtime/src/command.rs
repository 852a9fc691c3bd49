//! Parts that the command lines of the compiler and of executables share.

pub mod accuracy;
pub mod given;
pub mod output;
pub mod state;
pub mod summary;
pub mod times;
