//! CPU micro-kernels of gristmill.
