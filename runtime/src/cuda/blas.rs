//! cuBLASLt where it is found: the yardstick of products. Nothing else uses it, and nothing needs it.

use super::CudaGpu;
use crate::driver::Driver;
use crate::error::{Error, ErrorKind};
use libloading::Library;
use std::ffi::{OsString, c_int, c_void};
use std::ptr;
use std::time::Duration;

/// Names the library, instead of the places where the system's loader looks.
const VARIABLE: &str = "GRISTMILL_CUBLASLT";
/// What the loader is asked for.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Memory that a product may use beside its operands, as libraries ask on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// `CUDA_R_16BF`, `CUDA_R_32F`, `CUBLAS_COMPUTE_32F`.
const BF16: c_int = 14;
const F32: c_int = 0;
const COMPUTE_F32: c_int = 68;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
const MAX_WORKSPACE: c_int = 1;

type Status = c_int;
type Handle = *mut c_void;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! api {
    ($($field:ident = $symbol:literal fn($($ty:ty),*);)*) => {
        struct Api {
            $($field: unsafe extern "C" fn($($ty),*) -> Status,)*
            _library: Library,
        }

        impl Api {
            /// # Safety
            /// The library is cuBLASLt: its symbols have the signatures of `cublasLt.h`.
            unsafe fn resolve(library: Library) -> Result<Api, String> {
                $(
                    // SAFETY: by contract the symbol has this signature.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> Status>($symbol) };
                    let $field = *found.map_err(|_| format!("symbol {} is missing", $symbol))?;
                )*
                Ok(Api { $($field,)* _library: library })
            }
        }
    };
}

api! {
    create = "cublasLtCreate" fn(*mut Handle);
    destroy = "cublasLtDestroy" fn(Handle);
    create_product = "cublasLtMatmulDescCreate" fn(*mut Handle, c_int, c_int);
    destroy_product = "cublasLtMatmulDescDestroy" fn(Handle);
    create_layout = "cublasLtMatrixLayoutCreate" fn(*mut Handle, c_int, u64, u64, i64);
    destroy_layout = "cublasLtMatrixLayoutDestroy" fn(Handle);
    create_preference = "cublasLtMatmulPreferenceCreate" fn(*mut Handle);
    set_preference = "cublasLtMatmulPreferenceSetAttribute" fn(Handle, c_int, *const c_void, usize);
    destroy_preference = "cublasLtMatmulPreferenceDestroy" fn(Handle);
    heuristic = "cublasLtMatmulAlgoGetHeuristic" fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int);
    product = "cublasLtMatmul" fn(Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle, *const Heuristic, u64, usize, Handle);
}

fn open() -> Result<Api, String> {
    let names = match std::env::var_os(VARIABLE) {
        Some(path) => vec![path],
        None => NAMES.iter().map(OsString::from).collect(),
    };
    // SAFETY: loading the library runs its constructors, which is what opening it at run time means.
    let library = names.iter().find_map(|name| unsafe { Library::new(name) }.ok());
    let library = library.ok_or_else(|| {
        let names: Vec<_> = names.iter().map(|n| n.to_string_lossy()).collect();
        format!("cuBLASLt was not found ({}; {VARIABLE} names it)", names.join(", "))
    })?;
    // SAFETY: a library of one of these names is cuBLASLt, and so is what the user names as such.
    unsafe { Api::resolve(library) }
}

/// Objects of one product; each is destroyed with this, as far as it was made.
struct Product {
    api: Api,
    handle: Handle,
    product: Handle,
    layout: Handle,
    preference: Handle,
}

impl Product {
    /// A square product of bfloat16 with sums in `f32`: all three matrices are `n` by `n`, column by column.
    fn new(api: Api, n: usize) -> Result<Product, String> {
        let none = ptr::null_mut();
        let mut p = Product { api, handle: none, product: none, layout: none, preference: none };
        let (size, stride, workspace) = (n as u64, n as i64, WORKSPACE_BYTES);
        // SAFETY: each call writes one handle, or reads one number of the size that is stated.
        unsafe {
            check((p.api.create)(&mut p.handle), "cublasLtCreate")?;
            check((p.api.create_product)(&mut p.product, COMPUTE_F32, F32), "cublasLtMatmulDescCreate")?;
            check((p.api.create_layout)(&mut p.layout, BF16, size, size, stride), "cublasLtMatrixLayoutCreate")?;
            check((p.api.create_preference)(&mut p.preference), "cublasLtMatmulPreferenceCreate")?;
            let value = (&raw const workspace).cast();
            let set = (p.api.set_preference)(p.preference, MAX_WORKSPACE, value, size_of::<usize>());
            check(set, "cublasLtMatmulPreferenceSetAttribute")?;
        }
        Ok(p)
    }

    /// The algorithm that the library thinks best.
    fn best(&self) -> Result<Heuristic, String> {
        let mut best = Heuristic { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut n_found = 0;
        let (h, d, l) = (self.handle, self.product, self.layout);
        // SAFETY: the handles live; the library writes one result and its number.
        let code = unsafe { (self.api.heuristic)(h, d, l, l, l, l, self.preference, 1, &mut best, &mut n_found) };
        check(code, "cublasLtMatmulAlgoGetHeuristic")?;
        if n_found == 1 { Ok(best) } else { Err("cuBLASLt has no algorithm for this product".to_owned()) }
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        let destroy = |f: unsafe extern "C" fn(Handle) -> Status, handle: Handle| {
            if !handle.is_null() {
                // SAFETY: made by the library, destroyed once.
                unsafe { f(handle) };
            }
        };
        destroy(self.api.destroy_preference, self.preference);
        destroy(self.api.destroy_layout, self.layout);
        destroy(self.api.destroy_product, self.product);
        destroy(self.api.destroy, self.handle);
    }
}

fn check(status: Status, call: &str) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{call} failed with status {status}")) }
}

impl CudaGpu {
    /// Mean time of cuBLASLt's product of two `n` by `n` matrices of bfloat16 with sums in `f32`; `bits` fills the operands.
    ///
    /// Errors with `Unsupported` when the library is not found or does not do it, with `OutOfMemory` when there is no room.
    pub fn time_cublaslt(&self, n: usize, bits: &dyn Fn(usize) -> u16) -> Result<Duration, Error> {
        let unsupported = |why: String| Error::new(ErrorKind::Unsupported, why);
        let product = Product::new(open().map_err(unsupported)?, n).map_err(unsupported)?;
        let best = product.best().map_err(unsupported)?;
        let operand: Vec<u8> = (0..n * n).flat_map(|i| bits(i).to_ne_bytes()).collect();
        let [a, b, c] = [self.allocate(operand.len())?, self.allocate(operand.len())?, self.allocate(operand.len())?];
        let workspace = self.allocate(WORKSPACE_BYTES)?;
        self.write(a, &operand)?;
        self.write(b, &operand)?;
        let (one, zero) = (1f32, 0f32);
        let (one, zero): (*const f32, *const f32) = (&one, &zero);
        let (h, d, l) = (product.handle, product.product, product.layout);
        let time = self.time(&mut || {
            self.bind()?;
            // SAFETY: the handles live; the matrices have the layout's size, the workspace the size that is stated, and the factors are of the type
            // that the product was made for.
            let code = unsafe {
                let (one, zero, stream) = (one.cast(), zero.cast(), self.compute_stream());
                (product.api.product)(
                    h,
                    d,
                    one,
                    a,
                    l,
                    b,
                    l,
                    zero,
                    c,
                    l,
                    c,
                    l,
                    &best,
                    workspace,
                    WORKSPACE_BYTES,
                    stream,
                )
            };
            check(code, "cublasLtMatmul").map_err(|why| Error::new(ErrorKind::DeviceFailed, why))
        });
        [a, b, c, workspace].into_iter().for_each(|address| self.free(address));
        time
    }
}
