//! The threads of a program in C.

use gristmill_runtime::exec::HostThreads;
use std::ffi::c_void;

/// One call that a host makes.
type Share = unsafe extern "C" fn(data: *mut c_void, index: u32);

/// Makes `n` calls and returns when all have returned.
pub type Parallel =
    unsafe extern "C" fn(context: *mut c_void, n: u32, share: Share, data: *mut c_void);

/// A host's function with its context.
pub struct Host {
    pub parallel: Parallel,
    pub context: *mut c_void,
}

// SAFETY: the header says that any thread may call the function with its context, several at once.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

/// The work of one job.
type Call<'a> = &'a (dyn Fn(usize) + Sync);

impl HostThreads for Host {
    fn parallel(&self, n: usize, mut share: Call) {
        /// # Safety
        /// The data is that of a [`Call`] whose job is not over.
        unsafe extern "C" fn call(data: *mut c_void, index: u32) {
            // SAFETY: by contract.
            unsafe { (*data.cast::<Call>())(index as usize) }
        }
        let data = (&raw mut share).cast();
        // SAFETY: the header's contract: calls are made before it returns.
        unsafe { (self.parallel)(self.context, n as u32, call, data) }
    }
}
