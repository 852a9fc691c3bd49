//! The functions of `cublasLt.h` that gristmill uses, so that the same library stands for cuBLASLt. As strict as the documentation of the real one:
//! it refuses types that do not combine, layouts that do not fit each other, integers but in the one form that tensor cores take, operands
//! that are less aligned than was said, and algorithms for another product. Products run in their streams, and can be captured.

use crate::codes::{self, Outcome as DriverOutcome};
use crate::execute::Op;
use crate::exports::{self, exports};
use crate::product::{Epilogue, Matrix, ProductCall};
use crate::world;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `cublasStatus_t`.
type Status = c_int;
type Outcome<T = ()> = Result<T, Status>;
type Handle = usize;

const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const INTERNAL_ERROR: Status = 14;
const NOT_SUPPORTED: Status = 15;

const NAMES: [(Status, &str); 6] = [
    (SUCCESS, "CUBLAS_STATUS_SUCCESS\0"),
    (NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED\0"),
    (INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE\0"),
    (EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED\0"),
    (INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR\0"),
    (NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED\0"),
];

/// As the version 13.0.0 gives it.
const VERSION: usize = 130_000;
/// Workspaces begin at multiples of this.
const WORKSPACE_ALIGN_BYTES: u64 = 256;
/// Workspace of an algorithm for a long sum, if it may have one.
const WORKSPACE_BYTES: u64 = 1000;
/// From so many terms on a sum is long.
const LONG_SUM: u64 = 48;

#[derive(Clone)]
enum Object {
    Library { context: usize },
    Product(Descriptor),
    Layout(Layout),
    Preference(Preference),
}

/// `cublasLtMatmulDesc_t`.
#[derive(Clone, Copy, Hash)]
struct Descriptor {
    compute: c_int,
    factors: c_int,
    transposes: [bool; 2],
    epilogue: u32,
    bias: u64,
}

/// `cublasLtMatrixLayout_t`.
#[derive(Clone, Copy, PartialEq, Hash)]
struct Layout {
    element: c_int,
    rows: u64,
    columns: u64,
    leading: i64,
    n_batch: i32,
    batch_stride: i64,
}

/// `cublasLtMatmulPreference_t`, with the documented values at the start.
#[derive(Clone, Copy)]
struct Preference {
    workspace_bytes: u64,
    /// Of A, B, C and D.
    alignments: [u32; 4],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct Heuristic {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// `cublasLtMatmulAlgo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Algorithm {
    /// Hash of the product that it is for.
    product: u64,
    workspace_bytes: u64,
    /// Alignments of A, B, C and D in bytes.
    alignments: [u32; 4],
    /// The same of the bias, as it was seen; 0 when there was none.
    bias_alignment: u64,
    rest: [u64; 3],
}

static OBJECTS: Mutex<(usize, BTreeMap<Handle, Object>)> = Mutex::new((0x10, BTreeMap::new()));

fn objects() -> MutexGuard<'static, (usize, BTreeMap<Handle, Object>)> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes an object, and writes its handle where the caller wants it.
fn create(to: *mut Handle, object: Object) -> Outcome {
    let mut objects = objects();
    objects.0 += 0x10;
    let handle = objects.0;
    objects.1.insert(handle, object);
    give(to, handle)
}

fn give<T>(to: *mut T, value: T) -> Outcome {
    exports::give(to, value, INVALID_VALUE)
}

/// The value of an attribute, of which the caller states the size.
fn value<T: Copy>(from: *const c_void, size: usize) -> Outcome<T> {
    if from.is_null() || size != size_of::<T>() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise: so many bytes.
    Ok(unsafe { from.cast::<T>().read_unaligned() })
}

fn destroy(handle: Handle, is_it: fn(&Object) -> bool) -> Outcome {
    let mut objects = objects();
    if !objects.1.get(&handle).is_some_and(is_it) {
        return Err(INVALID_VALUE);
    }
    objects.1.remove(&handle);
    Ok(())
}

macro_rules! getters {
    ($($name:ident($object:ident) -> $ty:ty;)*) => {$(
        fn $name(handle: Handle) -> Outcome<$ty> {
            match objects().1.get(&handle) {
                Some(Object::$object(found)) => Ok(found.clone()),
                _ => Err(INVALID_VALUE),
            }
        }
    )*};
}

getters! {
    described(Product) -> Descriptor;
    layout(Layout) -> Layout;
    preference(Preference) -> Preference;
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetStatusName(status: Status) -> *const c_char {
    let found = NAMES.iter().find(|(s, _)| *s == status);
    found.map_or(c"CUBLAS_STATUS_UNKNOWN".as_ptr(), |(_, name)| {
        name.as_ptr().cast()
    })
}

exports! {
    INTERNAL_ERROR;
    cublasLtCreate(handle: *mut Handle) => {
        let context = world::current();
        if context == 0 { Err(NOT_INITIALIZED) } else { create(handle, Object::Library { context }) }
    };
    cublasLtDestroy(handle: Handle) => destroy(handle, |o| matches!(o, Object::Library { .. }));
    cublasLtMatmulDescCreate(product: *mut Handle, compute: c_int, factors: c_int) => {
        let described = Descriptor { compute, factors, transposes: [false; 2], epilogue: EPILOGUE_DEFAULT, bias: 0 };
        create(product, Object::Product(described))
    };
    cublasLtMatmulDescSetAttribute(product: Handle, attribute: c_int, from: *const c_void, size: usize) => {
        match objects().1.get_mut(&product) {
            Some(Object::Product(found)) => found.set(attribute, from, size),
            _ => Err(INVALID_VALUE),
        }
    };
    cublasLtMatmulDescDestroy(product: Handle) => destroy(product, |o| matches!(o, Object::Product(_)));
    cublasLtMatrixLayoutCreate(made: *mut Handle, element: c_int, rows: u64, columns: u64, leading: i64) => {
        let layout = Layout { element, rows, columns, leading, n_batch: 1, batch_stride: 0 };
        create(made, Object::Layout(layout))
    };
    cublasLtMatrixLayoutSetAttribute(layout: Handle, attribute: c_int, from: *const c_void, size: usize) => {
        match objects().1.get_mut(&layout) {
            Some(Object::Layout(found)) => found.set(attribute, from, size),
            _ => Err(INVALID_VALUE),
        }
    };
    cublasLtMatrixLayoutDestroy(layout: Handle) => destroy(layout, |o| matches!(o, Object::Layout(_)));
    cublasLtMatmulPreferenceCreate(made: *mut Handle) => {
        create(made, Object::Preference(Preference { workspace_bytes: 0, alignments: [256; 4] }))
    };
    cublasLtMatmulPreferenceSetAttribute(preference: Handle, attribute: c_int, from: *const c_void, size: usize) => {
        match objects().1.get_mut(&preference) {
            Some(Object::Preference(found)) => found.set(attribute, from, size),
            _ => Err(INVALID_VALUE),
        }
    };
    cublasLtMatmulPreferenceDestroy(preference: Handle) => destroy(preference, |o| matches!(o, Object::Preference(_)));
    cublasLtMatmulAlgoGetHeuristic(
        library: Handle, product: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preferred: Handle, n_wanted: c_int,
        results: *mut Heuristic, n_found: *mut c_int,
    ) => {
        check_library(library)?;
        if n_wanted < 1 || results.is_null() {
            return Err(INVALID_VALUE);
        }
        let product = Problem { described: described(product)?, layouts: [layout(a)?, layout(b)?, layout(c)?, layout(d)?] };
        let Preference { workspace_bytes, alignments } = preference(preferred)?;
        product.check()?;
        if product.is_integer() && alignments.iter().any(|a| a % 4 != 0) {
            return Err(NOT_SUPPORTED);
        }
        let is_long = product.sizes()[2] >= LONG_SUM && workspace_bytes >= WORKSPACE_BYTES;
        let workspace_bytes = if is_long { WORKSPACE_BYTES } else { 0 };
        let algorithm = Algorithm {
            product: product.hash(),
            workspace_bytes,
            alignments,
            bias_alignment: product.described.bias & product.described.bias.wrapping_neg(),
            rest: [0; 3],
        };
        let workspace_bytes = workspace_bytes as usize;
        give(results, Heuristic { algorithm, workspace_bytes, state: SUCCESS, waves: 1.0, reserved: [0; 4] })?;
        give(n_found, 1)
    };
    cublasLtMatmul(
        library: Handle, product: Handle, alpha: *const c_void, a: u64, a_layout: Handle, b: u64, b_layout: Handle,
        beta: *const c_void, c: u64, c_layout: Handle, d: u64, d_layout: Handle, algorithm: *const Algorithm, workspace: u64,
        workspace_bytes: usize, stream: Handle,
    ) => {
        check_library(library)?;
        let layouts = [layout(a_layout)?, layout(b_layout)?, layout(c_layout)?, layout(d_layout)?];
        let product = Problem { described: described(product)?, layouts };
        product.check()?;
        // SAFETY: the caller's promise: an algorithm, or null.
        let algorithm = unsafe { algorithm.as_ref() }.ok_or(NOT_SUPPORTED)?;
        product.check_call(algorithm, [a, b, c, d], (workspace, workspace_bytes))?;
        // Only the factors that gristmill has are computed with.
        if product.factor(alpha)? != 1.0 || product.factor(beta)? != 0.0 {
            return Err(NOT_SUPPORTED);
        }
        let call = product.call([a, b, d], (workspace, algorithm.workspace_bytes));
        world::with_stream(stream, |w, _| w.ask(stream, Op::Product(Box::new(call)))).map_err(of_driver)
    };
}

/// Status of the library for a failed call of the driver.
fn of_driver(code: codes::Code) -> Status {
    match code {
        codes::INVALID_HANDLE | codes::INVALID_CONTEXT => INVALID_VALUE,
        _ => EXECUTION_FAILED,
    }
}

/// A handle is for the context that was current when it was made.
fn check_library(handle: Handle) -> Outcome {
    let here =
        world::with_context(|_, gpu| -> DriverOutcome<usize> { Ok(gpu + 1) }).map_err(of_driver)?;
    match objects().1.get(&handle) {
        Some(Object::Library { context }) if *context == here => Ok(()),
        Some(Object::Library { .. }) => Err(INVALID_VALUE),
        _ => Err(NOT_INITIALIZED),
    }
}

const EPILOGUE_DEFAULT: u32 = 1;
const EPILOGUE_RELU: u32 = 2;
const EPILOGUE_BIAS: u32 = 4;

impl Descriptor {
    fn set(&mut self, attribute: c_int, from: *const c_void, size: usize) -> Outcome {
        match attribute {
            3 | 4 => {
                self.transposes[attribute as usize - 3] = match value::<i32>(from, size)? {
                    0 => false,
                    1 => true,
                    _ => return Err(INVALID_VALUE),
                }
            }
            7 => self.epilogue = value(from, size)?,
            8 => self.bias = value(from, size)?,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }
}

impl Layout {
    fn set(&mut self, attribute: c_int, from: *const c_void, size: usize) -> Outcome {
        match attribute {
            5 => self.n_batch = value(from, size)?,
            6 => self.batch_stride = value(from, size)?,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    /// The matrix from an address on.
    fn at(&self, address: u64) -> Matrix {
        Matrix {
            address,
            element: self.element,
            leading: self.leading as u64,
            batch_stride: self.batch_stride as u64,
        }
    }
}

impl Preference {
    fn set(&mut self, attribute: c_int, from: *const c_void, size: usize) -> Outcome {
        match attribute {
            1 => self.workspace_bytes = value(from, size)?,
            5..=8 => {
                let alignment: u32 = value(from, size)?;
                self.alignments[attribute as usize - 5] = if alignment.is_power_of_two() {
                    alignment
                } else {
                    return Err(INVALID_VALUE);
                };
            }
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }
}

/// A product and the layouts of A, B, C and D.
struct Problem {
    described: Descriptor,
    layouts: [Layout; 4],
}

const F32: c_int = 0;
const F64: c_int = 1;
const F16: c_int = 2;
const I8: c_int = 3;
const I32: c_int = 10;
const BF16: c_int = 14;
const COMPUTE_F32: c_int = 68;
const COMPUTE_F64: c_int = 70;
const COMPUTE_I32: c_int = 72;
const COMPUTE_TF32: c_int = 77;

impl Problem {
    /// Rows and columns of D, and the extent of the sums.
    fn sizes(&self) -> [u64; 3] {
        let [a, _, _, d] = &self.layouts;
        [
            d.rows,
            d.columns,
            if self.described.transposes[0] {
                a.rows
            } else {
                a.columns
            },
        ]
    }

    fn is_integer(&self) -> bool {
        self.described.compute == COMPUTE_I32
    }

    fn check(&self) -> Outcome {
        let d = &self.layouts[3];
        let is_good = |l: &Layout| {
            let is_matrix = l.rows > 0 && l.columns > 0 && l.leading >= l.rows as i64;
            is_matrix && l.n_batch >= 1 && l.n_batch == d.n_batch && l.batch_stride >= 0
        };
        let is_apart =
            d.n_batch == 1 || d.batch_stride >= (d.columns as i64 - 1) * d.leading + d.rows as i64;
        if !self.fits() || !self.layouts.iter().all(is_good) || !is_apart {
            return Err(INVALID_VALUE);
        }
        if self.combines() {
            Ok(())
        } else {
            Err(NOT_SUPPORTED)
        }
    }

    /// True when the shapes are those of one product.
    fn fits(&self) -> bool {
        let [a, b, c, d] = &self.layouts;
        let [m, n, k] = self.sizes();
        let turned = |transposed: bool, rows, columns| {
            if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            }
        };
        let [of_a, of_b] = self.described.transposes;
        (a.rows, a.columns) == turned(of_a, m, k)
            && (b.rows, b.columns) == turned(of_b, k, n)
            && c == d
    }

    /// The table of supported types, as far as it has real numbers of 8 bits and more; and the rules for integers.
    fn combines(&self) -> bool {
        let Descriptor {
            compute,
            factors,
            transposes,
            epilogue,
            ..
        } = self.described;
        let [a, b, _, d] = &self.layouts;
        let is_plain = epilogue == EPILOGUE_DEFAULT;
        let is_known =
            is_plain || epilogue & !(EPILOGUE_RELU | EPILOGUE_BIAS) == 0 && epilogue != 0;
        let by_fours = |l: &Layout| l.leading % 4 == 0 && l.batch_stride % 4 == 0;
        let [m, _, k] = self.sizes();
        let types = match (compute, factors, a.element) {
            (COMPUTE_F32, F32, F16 | BF16) => d.element == a.element || d.element == F32,
            (COMPUTE_F32, F32, I8) => d.element == F32 && is_plain,
            (COMPUTE_F32 | COMPUTE_TF32, F32, F32) => d.element == F32,
            (COMPUTE_F64, F64, F64) => d.element == F64,
            (COMPUTE_I32, I32, I8) => {
                let is_aligned = m % 4 == 0 && k % 4 == 0 && self.layouts.iter().all(by_fours);
                d.element == I32 && is_plain && transposes == [true, false] && is_aligned
            }
            _ => false,
        };
        types && is_known && a.element == b.element
    }

    /// Of all but the address of the bias.
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (
            Descriptor {
                bias: 0,
                ..self.described
            },
            self.layouts,
        )
            .hash(&mut hasher);
        hasher.finish()
    }

    fn check_call(
        &self,
        algorithm: &Algorithm,
        matrices: [u64; 4],
        (workspace, bytes): (u64, usize),
    ) -> Outcome {
        let Descriptor { bias, epilogue, .. } = self.described;
        let needs_bias = epilogue & EPILOGUE_BIAS != 0;
        let is_bias_good =
            bias != 0 && algorithm.bias_alignment != 0 && bias % algorithm.bias_alignment == 0;
        let is_aligned = |(address, alignment): (&u64, &u32)| {
            *address != 0 && address % u64::from(*alignment) == 0
        };
        let good = algorithm.product == self.hash()
            && matrices.iter().zip(&algorithm.alignments).all(is_aligned)
            && algorithm.workspace_bytes <= bytes as u64
            && (algorithm.workspace_bytes == 0
                || workspace != 0 && workspace % WORKSPACE_ALIGN_BYTES == 0)
            && matrices[2] == matrices[3]
            && (!needs_bias || is_bias_good);
        if good { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// A factor, in the type that the product was made for.
    fn factor(&self, from: *const c_void) -> Outcome<f64> {
        Ok(match self.described.factors {
            F32 => f64::from(value::<f32>(from, 4)?),
            F64 => value::<f64>(from, 8)?,
            I32 => f64::from(value::<i32>(from, 4)?),
            _ => return Err(NOT_SUPPORTED),
        })
    }

    fn call(&self, [a, b, d]: [u64; 3], workspace: (u64, u64)) -> ProductCall {
        let Descriptor {
            compute,
            transposes,
            epilogue,
            bias,
            ..
        } = self.described;
        let [of_a, of_b, _, of_d] = &self.layouts;
        ProductCall {
            sizes: self.sizes(),
            n_batch: of_d.n_batch as u64,
            a: of_a.at(a),
            b: of_b.at(b),
            d: of_d.at(d),
            transposes,
            rounds: compute == COMPUTE_TF32,
            epilogue: Epilogue {
                bias: (epilogue & EPILOGUE_BIAS != 0).then_some(bias),
                relu: epilogue & EPILOGUE_RELU != 0,
            },
            workspace,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout_of(element: c_int, rows: u64, columns: u64) -> Layout {
        Layout {
            element,
            rows,
            columns,
            leading: rows as i64,
            n_batch: 1,
            batch_stride: 0,
        }
    }

    /// A transposed product of bytes, 8 x 12 by 12 x 5.
    fn bytes() -> Problem {
        let [a, b, d] = [
            layout_of(I8, 12, 8),
            layout_of(I8, 12, 5),
            layout_of(I32, 8, 5),
        ];
        let transposes = [true, false];
        let described = Descriptor {
            compute: COMPUTE_I32,
            factors: I32,
            transposes,
            epilogue: EPILOGUE_DEFAULT,
            bias: 0,
        };
        Problem {
            described,
            layouts: [a, b, d, d],
        }
    }

    #[test]
    fn products_that_the_library_does_not_have() {
        assert_eq!(bytes().check(), Ok(()));
        let check = |change: fn(&mut Problem), expected: Status| {
            let mut p = bytes();
            change(&mut p);
            assert_eq!(p.check(), Err(expected));
        };
        check(|p| p.described.transposes = [false, false], INVALID_VALUE);
        check(|p| p.layouts[0].leading = 14, NOT_SUPPORTED);
        check(|p| p.layouts[0].leading = 11, INVALID_VALUE);
        check(|p| p.described.epilogue = EPILOGUE_RELU, NOT_SUPPORTED);
        check(|p| p.described.compute = COMPUTE_F32, NOT_SUPPORTED);
        check(|p| p.layouts[1].n_batch = 2, INVALID_VALUE);
        check(
            |p| p.layouts.iter_mut().for_each(|l| l.n_batch = 2),
            INVALID_VALUE,
        );
        check(|p| p.layouts[3].rows = 7, INVALID_VALUE);
        check(
            |p| p.layouts[2..].iter_mut().for_each(|l| l.element = F32),
            NOT_SUPPORTED,
        );
    }

    #[test]
    fn structs_have_the_sizes_of_the_header() {
        assert_eq!((size_of::<Algorithm>(), size_of::<Heuristic>()), (64, 96));
    }
}
