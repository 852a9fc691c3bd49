//! cuBLASLt where it is found: products that a compiler has chosen it for, and the yardstick of ours. Nothing needs it.
//!
//! Matrices are column-major there. A row-major result is the transpose of a column-major one, so the library is asked for that: its first
//! operand is our right-hand side, its second our left-hand side, its rows are our columns; and a bias along its rows is one along our columns.

use super::CudaGpu;
use super::context::Context;
use super::gpu::Streams;
use super::library::{SystemLibrary, functions};
use crate::driver::{Driver, LoadedProduct, ProductArgs};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::product::{Compute, MOST_WORKSPACE_BYTES, Matrix, Order, Product};
use crate::sync::lock;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

const CUBLASLT: SystemLibrary = SystemLibrary {
    title: "cuBLASLt",
    variable: "GRISTMILL_CUBLASLT",
    names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
};

type Status = c_int;
/// Any object of the library.
type Object = *mut c_void;

/// `CUBLAS_STATUS_ALLOC_FAILED` and so on.
const ALLOC_FAILED: Status = 3;
const ARCH_MISMATCH: Status = 8;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

/// `cublasLtMatmulDescAttributes_t`.
const TRANSPOSE_A: c_int = 3;
const TRANSPOSE_B: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// `CUBLASLT_EPILOGUE_RELU` and `_BIAS` are bits, `_DEFAULT` is neither.
const EPILOGUE_DEFAULT: u32 = 1;
const EPILOGUE_RELU: u32 = 2;
const EPILOGUE_BIAS: u32 = 4;
/// `cublasLtMatrixLayoutAttribute_t`.
const BATCH_COUNT: c_int = 5;
const BATCH_STRIDE: c_int = 6;
/// `cublasLtMatmulPreferenceAttributes_t`; alignments of the four matrices follow each other.
const MAX_WORKSPACE: c_int = 1;
const MIN_ALIGNMENT: c_int = 5;

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

functions! {
    struct Api, missing: |symbol| format!("cuBLASLt lacks {symbol}; version 12 or later is needed");
    version = "cublasLtGetVersion" fn() -> usize;
    status_name = "cublasLtGetStatusName" fn(Status) -> *const c_char;
    create = "cublasLtCreate" fn(*mut Object) -> Status;
    destroy = "cublasLtDestroy" fn(Object) -> Status;
    /// Compute type, then the type of the factors.
    create_product = "cublasLtMatmulDescCreate" fn(*mut Object, c_int, c_int) -> Status;
    set_product = "cublasLtMatmulDescSetAttribute" fn(
        Object, c_int, *const c_void, usize,
    ) -> Status;
    destroy_product = "cublasLtMatmulDescDestroy" fn(Object) -> Status;
    /// Element type, rows, columns, leading dimension.
    create_layout = "cublasLtMatrixLayoutCreate" fn(*mut Object, c_int, u64, u64, i64) -> Status;
    set_layout = "cublasLtMatrixLayoutSetAttribute" fn(
        Object, c_int, *const c_void, usize,
    ) -> Status;
    destroy_layout = "cublasLtMatrixLayoutDestroy" fn(Object) -> Status;
    create_preference = "cublasLtMatmulPreferenceCreate" fn(*mut Object) -> Status;
    set_preference = "cublasLtMatmulPreferenceSetAttribute" fn(
        Object, c_int, *const c_void, usize,
    ) -> Status;
    destroy_preference = "cublasLtMatmulPreferenceDestroy" fn(Object) -> Status;
    /// Handle, product, layouts of A, B, C and D, preference, how many are wanted, results, how many there are.
    heuristic = "cublasLtMatmulAlgoGetHeuristic" fn(
        Object, Object, Object, Object, Object, Object, Object, c_int, *mut Heuristic, *mut c_int,
    ) -> Status;
    /// Handle, product, alpha, A, B, beta, C, D, each matrix with its layout, algorithm, workspace, its size, stream.
    product = "cublasLtMatmul" fn(
        Object, Object, *const c_void, u64, Object, u64, Object, *const c_void, u64, Object, u64,
        Object, *const [u64; 8], u64, usize, Object,
    ) -> Status;
}

/// The library of this machine, opened once; or in words why there is none.
fn get() -> Result<&'static Api, String> {
    static OPENED: OnceLock<Result<Api, String>> = OnceLock::new();
    OPENED.get_or_init(open).as_ref().map_err(String::clone)
}

fn open() -> Result<Api, String> {
    let library = CUBLASLT.open(std::env::var_os(CUBLASLT.variable))?;
    // SAFETY: a library of these names is cuBLASLt, and so is one that the user names as such.
    unsafe { Api::resolve(library) }
}

/// Name and version of the library that computes [`Product`]s on CUDA devices, `cuBLASLt 13.1.0`; or in words why there is none.
pub fn product_library() -> Result<String, String> {
    // SAFETY: the function takes nothing and reads a constant.
    let version = unsafe { (get()?.version)() };
    Ok(format!(
        "cuBLASLt {}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    ))
}

impl Api {
    fn check(&self, status: Status, call: &str) -> Result<(), Error> {
        let kind = match status {
            0 => return Ok(()),
            ALLOC_FAILED => ErrorKind::OutOfMemory,
            EXECUTION_FAILED => ErrorKind::DeviceFailed,
            ARCH_MISMATCH | NOT_SUPPORTED => ErrorKind::Unsupported,
            _ => ErrorKind::Internal,
        };
        // SAFETY: the library gives a NUL-terminated text of its own, or null.
        let name = unsafe {
            let name = (self.status_name)(status);
            if name.is_null() {
                "an unknown status".into()
            } else {
                CStr::from_ptr(name).to_string_lossy()
            }
        };
        Err(Error::new(
            kind,
            format!("{call} failed: {name} ({status})"),
        ))
    }
}

/// The library on a device.
pub(super) struct Blas {
    api: &'static Api,
    context: Arc<Context>,
    handle: Object,
}

// SAFETY: the library's functions are thread-safe, and so are handles; the context is made current where they are used.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Blas {
    /// Errors with `Unsupported` when there is no library.
    pub(super) fn new(context: &Arc<Context>) -> Result<Blas, Error> {
        let api = get().map_err(|why| Error::new(ErrorKind::Unsupported, why))?;
        context.bind()?;
        let mut blas = Blas {
            api,
            context: context.clone(),
            handle: ptr::null_mut(),
        };
        // SAFETY: the library writes one handle.
        api.check(unsafe { (api.create)(&mut blas.handle) }, "cublasLtCreate")?;
        Ok(blas)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if !self.handle.is_null() && self.context.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once.
            unsafe { (self.api.destroy)(self.handle) };
        }
    }
}

/// Objects that describe a product; each is destroyed with this, as far as it was made.
struct ProductDescriptors {
    api: &'static Api,
    product: Object,
    /// Of A, B and D.
    layouts: [Object; 3],
    preference: Object,
}

// SAFETY: objects of the library belong to no thread; a lock is around their use.
unsafe impl Send for ProductDescriptors {}

impl ProductDescriptors {
    fn new(api: &'static Api, p: &Product) -> Result<ProductDescriptors, Error> {
        let none = ptr::null_mut();
        let mut d = ProductDescriptors {
            api,
            product: none,
            layouts: [none; 3],
            preference: none,
        };
        let (compute, factors) = compute(p.compute);
        // SAFETY: each call writes one object.
        unsafe {
            api.check(
                (api.create_product)(&mut d.product, compute, factors),
                "cublasLtMatmulDescCreate",
            )?;
            api.check(
                (api.create_preference)(&mut d.preference),
                "cublasLtMatmulPreferenceCreate",
            )?;
        }
        d.describe_epilogue(p)?;
        d.describe_matrices(p)?;
        d.describe_preference(p)?;
        Ok(d)
    }

    fn describe_epilogue(&self, p: &Product) -> Result<(), Error> {
        let epilogue = if p.relu { EPILOGUE_RELU } else { 0 }
            | if p.bias.is_some() { EPILOGUE_BIAS } else { 0 };
        self.set_product(
            EPILOGUE,
            &(if epilogue == 0 {
                EPILOGUE_DEFAULT
            } else {
                epilogue
            }),
        )?;
        if p.bias.is_some() {
            // Until the real one is known: algorithms are chosen by the alignment that they see.
            self.set_product(BIAS_POINTER, &(p.out.align_bytes as u64))?;
        }
        Ok(())
    }

    fn describe_matrices(&mut self, p: &Product) -> Result<(), Error> {
        let matrices = [
            (&p.rhs, [p.k, p.n]),
            (&p.lhs, [p.m, p.k]),
            (&p.out, [p.m, p.n]),
        ];
        for (i, (matrix, shape)) in matrices.into_iter().enumerate() {
            let is_transposed = matrix.order == Order::Column;
            if is_transposed {
                self.set_product([TRANSPOSE_A, TRANSPOSE_B][i], &TRANSPOSED)?;
            }
            self.layouts[i] = layout(self.api, matrix, shape, p.n_batch)?;
        }
        Ok(())
    }

    fn describe_preference(&self, p: &Product) -> Result<(), Error> {
        self.set_preference(MAX_WORKSPACE, &(p.workspace_bytes as u64))?;
        // C is D, whose former elements count for nothing.
        for (i, matrix) in [&p.rhs, &p.lhs, &p.out, &p.out].into_iter().enumerate() {
            self.set_preference(MIN_ALIGNMENT + i as c_int, &(matrix.align_bytes as u32))?;
        }
        Ok(())
    }

    fn set_product<T>(&self, attribute: c_int, value: &T) -> Result<(), Error> {
        // SAFETY: the object lives; the library reads a value of the size that is stated, which it checks against the attribute's.
        let set = unsafe {
            (self.api.set_product)(
                self.product,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        self.api.check(set, "cublasLtMatmulDescSetAttribute")
    }

    fn set_preference<T>(&self, attribute: c_int, value: &T) -> Result<(), Error> {
        // SAFETY: as in `set_product`.
        let set = unsafe {
            (self.api.set_preference)(
                self.preference,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        self.api.check(set, "cublasLtMatmulPreferenceSetAttribute")
    }

    /// The algorithm that the library thinks best. Errors with `Unsupported` when it has none.
    fn best(&self, handle: Object) -> Result<Heuristic, Error> {
        let mut best = Heuristic {
            algorithm: [0; 8],
            workspace_bytes: 0,
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let (mut n_found, [a, b, d]) = (0, self.layouts);
        // SAFETY: the objects live; the library writes one result and how many there are.
        let status = unsafe {
            (self.api.heuristic)(
                handle,
                self.product,
                a,
                b,
                d,
                d,
                self.preference,
                1,
                &mut best,
                &mut n_found,
            )
        };
        self.api.check(status, "cublasLtMatmulAlgoGetHeuristic")?;
        match n_found {
            0 => Err(Error::new(
                ErrorKind::Unsupported,
                "cublasLtMatmulAlgoGetHeuristic found no algorithm",
            )),
            _ => self
                .api
                .check(best.state, "cublasLtMatmulAlgoGetHeuristic")
                .map(|()| best),
        }
    }
}

impl Drop for ProductDescriptors {
    fn drop(&mut self) {
        let destroy = |f: unsafe extern "C" fn(Object) -> Status, object: Object| {
            if !object.is_null() {
                // SAFETY: made by the library, destroyed once.
                unsafe { f(object) };
            }
        };
        destroy(self.api.destroy_preference, self.preference);
        self.layouts
            .into_iter()
            .for_each(|layout| destroy(self.api.destroy_layout, layout));
        destroy(self.api.destroy_product, self.product);
    }
}

/// The layout of `n_batch` matrices of a shape: of their transposes where they are row-major.
fn layout(
    api: &Api,
    matrix: &Matrix,
    [rows, columns]: [usize; 2],
    n_batch: usize,
) -> Result<Object, Error> {
    let [rows, columns] = if matrix.order == Order::Row {
        [columns, rows]
    } else {
        [rows, columns]
    };
    let mut made = ptr::null_mut();
    let element = element(matrix.dtype)?;
    // SAFETY: the library writes one object.
    let status = unsafe {
        (api.create_layout)(
            &mut made,
            element,
            rows as u64,
            columns as u64,
            matrix.pitch as i64,
        )
    };
    api.check(status, "cublasLtMatrixLayoutCreate")?;
    let (count, stride) = (n_batch as i32, matrix.batch_stride as i64);
    // SAFETY: the object was just made; the library reads values of the sizes that are stated.
    let set = unsafe {
        let set =
            |attribute, value: *const c_void, size| (api.set_layout)(made, attribute, value, size);
        match set(BATCH_COUNT, (&raw const count).cast(), size_of::<i32>()) {
            0 => set(BATCH_STRIDE, (&raw const stride).cast(), size_of::<i64>()),
            status => status,
        }
    };
    api.check(set, "cublasLtMatrixLayoutSetAttribute")
        .map(|()| made)
        .inspect_err(|_| {
            // SAFETY: it was made, and nobody else has it.
            unsafe { (api.destroy_layout)(made) };
        })
}

/// `cudaDataType_t`. Errors with `Unsupported` for those of which the library has no products here.
fn element(dtype: DType) -> Result<c_int, Error> {
    Ok(match dtype {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::I8 => 3,
        DType::I32 => 10,
        DType::BF16 => 14,
        _ => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("cuBLASLt has no products of {dtype} here"),
            ));
        }
    })
}

/// `cublasComputeType_t`, and the type of the factors.
fn compute(compute: Compute) -> (c_int, c_int) {
    match compute {
        Compute::F32 => (68, 0),
        Compute::Tf32 => (77, 0),
        Compute::F64 => (70, 1),
        Compute::I32 => (72, 10),
    }
}

/// The number one as a factor: its bits, of which a shorter type reads the first. Hosts of CUDA devices are little-endian.
fn one(compute: Compute) -> u64 {
    match compute {
        Compute::F32 | Compute::Tf32 => u64::from(1f32.to_bits()),
        Compute::F64 => 1f64.to_bits(),
        Compute::I32 => 1,
    }
}

/// A product ready to be computed: described, with its algorithm chosen.
pub(super) struct CudaProduct {
    streams: Arc<Streams>,
    blas: Arc<Blas>,
    /// Locked while the library looks at it, since the address of the bias is part of it.
    described: Mutex<ProductDescriptors>,
    best: Heuristic,
    one: u64,
    /// Bytes from the beginning of each buffer: left-hand side, right-hand side, bias, result.
    offsets: [u64; 4],
    /// Wait for each.
    checks: bool,
}

impl CudaProduct {
    /// Errors with `Unsupported` when the library cannot compute it.
    pub(super) fn new(
        streams: Arc<Streams>,
        blas: Arc<Blas>,
        p: &Product,
        checks: bool,
    ) -> Result<CudaProduct, Error> {
        streams.context.bind()?;
        let described = ProductDescriptors::new(blas.api, p)?;
        let best = described.best(blas.handle)?;
        let bytes = |offset: usize, dtype: DType| (offset * dtype.size_bytes()) as u64;
        let of = |matrix: &Matrix| bytes(matrix.offset, matrix.dtype);
        let bias = p.bias.map_or(0, |offset| bytes(offset, p.out.dtype));
        let offsets = [of(&p.lhs), of(&p.rhs), bias, of(&p.out)];
        let (described, one) = (Mutex::new(described), one(p.compute));
        Ok(CudaProduct {
            streams,
            blas,
            described,
            best,
            one,
            offsets,
            checks,
        })
    }
}

impl LoadedProduct for CudaProduct {
    fn start(&self, args: &ProductArgs) -> Result<(), Error> {
        let (api, stream) = (self.blas.api, self.streams.compute());
        self.streams.context.bind()?;
        let described = lock(&self.described);
        let ([lhs, rhs, bias, out], [a, b, d]) = (self.offsets, described.layouts);
        if args.bias != 0 {
            described.set_product(BIAS_POINTER, &(args.bias + bias))?;
        }
        let zero = 0u64;
        // SAFETY: the objects live; the buffers are those that the product was made for, by the maker of the program, and in use by this step
        // alone; the factors are of the product's type, and read before this returns.
        let status = unsafe {
            let (one, zero) = ((&raw const self.one).cast(), (&raw const zero).cast());
            let (lhs, rhs, out) = (args.lhs + lhs, args.rhs + rhs, args.out + out);
            let Heuristic {
                algorithm,
                workspace_bytes,
                ..
            } = &self.best;
            let (h, p, to) = (self.blas.handle, described.product, stream.handle.cast());
            (api.product)(
                h,
                p,
                one,
                rhs,
                a,
                lhs,
                b,
                zero,
                out,
                d,
                out,
                d,
                algorithm,
                args.workspace,
                *workspace_bytes,
                to,
            )
        };
        api.check(status, "cublasLtMatmul")
            .map_err(|e| match e.kind() {
                // It was possible when the algorithm was chosen.
                ErrorKind::Unsupported | ErrorKind::Internal => {
                    Error::new(ErrorKind::DeviceFailed, e.to_string())
                }
                _ => e,
            })?;
        if self.checks {
            stream.synchronize()
        } else {
            Ok(())
        }
    }

    fn workspace_bytes(&self) -> usize {
        self.best.workspace_bytes
    }
}

impl CudaGpu {
    /// Mean time of cuBLASLt's product of two `n` by `n` matrices of bfloat16 with sums in `f32`; `bits` fills the operands.
    ///
    /// Errors with `Unsupported` when the library is not found or does not do it, with `OutOfMemory` when there is no room.
    pub fn time_cublaslt(&self, n: usize, bits: &dyn Fn(usize) -> u16) -> Result<Duration, Error> {
        let square = Matrix::dense(DType::BF16, n);
        let product = self.product(&Product {
            name: "yardstick".to_owned(),
            m: n,
            n,
            k: n,
            n_batch: 1,
            lhs: square,
            rhs: square,
            out: square,
            compute: Compute::F32,
            bias: None,
            relu: false,
            workspace_bytes: MOST_WORKSPACE_BYTES,
        })?;
        let operand: Vec<u8> = (0..n * n).flat_map(|i| bits(i).to_ne_bytes()).collect();
        let [lhs, rhs, out] = [
            self.allocate(operand.len())?,
            self.allocate(operand.len())?,
            self.allocate(operand.len())?,
        ];
        let workspace = self.allocate(MOST_WORKSPACE_BYTES)?;
        self.write(lhs, &operand)?;
        self.write(rhs, &operand)?;
        let args = ProductArgs {
            lhs,
            rhs,
            bias: 0,
            out,
            workspace,
        };
        let time = self.time(&mut || product.start(&args));
        [lhs, rhs, out, workspace]
            .into_iter()
            .for_each(|address| self.free(address));
        time
    }
}
