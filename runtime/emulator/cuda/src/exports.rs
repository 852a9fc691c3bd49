//! The border between the C interfaces and the functions behind them. All of the libraries return 0 for success.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Result of an exported function. A panic is ours, and must not unwind into C: it is `internal_error`.
pub fn code(internal_error: c_int, run: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => internal_error,
    }
}

/// Writes a result to the address that the caller gave; `null` is the error for none.
pub fn give<T>(to: *mut T, value: T, null: c_int) -> Result<(), c_int> {
    if to.is_null() {
        return Err(null);
    }
    // SAFETY: the caller of the C function promised a pointer to a `T`.
    unsafe { to.write(value) };
    Ok(())
}

/// Exports functions of a library: bodies give `Result<(), c_int>`, and a panic is the code in front.
macro_rules! exports {
    ($internal_error:expr; $($name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_int {
            $crate::exports::code($internal_error, || $body)
        }
    )*};
}

pub(crate) use exports;
