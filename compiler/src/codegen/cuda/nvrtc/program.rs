//! The thin safe layer over NVRTC's C interface: statuses become errors, a program is destroyed with its owner.

use super::sys::{Api, Handle, SUCCESS, Status};
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

/// A failed call, with NVRTC's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) call: &'static str,
    pub(super) message: String,
}

type Call<T> = Result<T, Failure>;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> Status;
type Fill = unsafe extern "C" fn(Handle, *mut c_char) -> Status;

impl Api {
    fn done(&self, call: &'static str, status: Status) -> Call<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the function takes any status and gives a string that is never freed, or null.
        let text = unsafe {
            let text = (self.error_string)(status);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let message = text.unwrap_or_else(|| format!("NVRTC error {status}"));
        Err(Failure { call, message })
    }

    /// Major and minor number.
    pub(super) fn get_version(&self) -> Call<(u32, u32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to integers of this frame.
        self.done("nvrtcVersion", unsafe {
            (self.version)(&mut major, &mut minor)
        })?;
        Ok((major as u32, minor as u32))
    }

    /// Architectures that it compiles for: 90 for `sm_90`.
    pub(super) fn get_archs(&self) -> Call<Vec<u32>> {
        let mut n: c_int = 0;
        // SAFETY: points to an integer of this frame.
        self.done("nvrtcGetNumSupportedArchs", unsafe {
            (self.n_archs)(&mut n)
        })?;
        let mut archs = vec![0; n.max(0) as usize];
        // SAFETY: as many integers as the library said it would write.
        self.done("nvrtcGetSupportedArchs", unsafe {
            (self.archs)(archs.as_mut_ptr())
        })?;
        Ok(archs.into_iter().map(|a| a as u32).collect())
    }
}

/// One translation unit.
pub(super) struct Program<'a> {
    api: &'a Api,
    handle: Handle,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and destroyed only here.
        unsafe { (self.api.destroy)(&mut self.handle) };
    }
}

impl<'a> Program<'a> {
    /// A program of one source; messages call it `name`.
    pub(super) fn new(api: &'a Api, source: &CStr, name: &CStr) -> Call<Program<'a>> {
        let mut handle = ptr::null_mut();
        let (source, name) = (source.as_ptr(), name.as_ptr());
        // SAFETY: the strings outlive the call, which copies them; no headers are passed.
        let status =
            unsafe { (api.create)(&mut handle, source, name, 0, ptr::null(), ptr::null()) };
        api.done("nvrtcCreateProgram", status)?;
        Ok(Program { api, handle })
    }

    /// Compiles. The log is available afterwards, after failures too.
    pub(super) fn compile(&self, options: &[CString]) -> Call<()> {
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the handle is alive, and the strings outlive the call.
        let status =
            unsafe { (self.api.compile)(self.handle, options.len() as c_int, options.as_ptr()) };
        self.api.done("nvrtcCompileProgram", status)
    }

    fn bytes(&self, call: &'static str, size: Size, fill: Fill) -> Call<Vec<u8>> {
        let mut n = 0;
        // SAFETY: the handle is alive.
        self.api.done(call, unsafe { size(self.handle, &mut n) })?;
        let mut bytes = vec![0u8; n];
        if n > 0 {
            // SAFETY: as many bytes as the library said it would write.
            self.api.done(call, unsafe {
                fill(self.handle, bytes.as_mut_ptr().cast())
            })?;
        }
        Ok(bytes)
    }

    fn text(&self, call: &'static str, size: Size, fill: Fill) -> Call<String> {
        let mut bytes = self.bytes(call, size, fill)?;
        // Texts end in NUL.
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn log(&self) -> Call<String> {
        self.text("nvrtcGetProgramLog", self.api.log_size, self.api.log)
    }

    pub(super) fn ptx(&self) -> Call<String> {
        self.text("nvrtcGetPTX", self.api.ptx_size, self.api.ptx)
    }

    /// Empty when the options named a virtual architecture.
    pub(super) fn cubin(&self) -> Call<Vec<u8>> {
        self.bytes("nvrtcGetCUBIN", self.api.cubin_size, self.api.cubin)
    }
}
