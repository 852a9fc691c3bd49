//! The heap of a program that ends with an exit code, and not with a signal, when memory runs out.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;

/// The system's allocator. An allocation that fails ends the process with the exit code `CODE`, after a message on standard error.
///
/// Callers that could do with a failed allocation (`try_reserve`) do not get to know of it.
pub struct ExitingHeap<const CODE: i32>;

impl<const CODE: i32> ExitingHeap<CODE> {
    /// The address, unless it is null.
    fn checked(address: *mut u8, n_bytes: usize) -> *mut u8 {
        if address.is_null() {
            // Nothing here allocates.
            let _ = writeln!(
                std::io::stderr(),
                "error: out of memory: {n_bytes} bytes cannot be allocated"
            );
            std::process::exit(CODE);
        }
        address
    }
}

// SAFETY: all methods pass the caller's arguments, for which the caller keeps `GlobalAlloc`'s contract, to the system's allocator, and
// return its results. Where it fails they do not return, and do not unwind.
unsafe impl<const CODE: i32> GlobalAlloc for ExitingHeap<CODE> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        Self::checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        Self::checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        // SAFETY: the caller's contract.
        Self::checked(unsafe { System.realloc(address, layout, n_bytes) }, n_bytes)
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(address, layout) }
    }
}
