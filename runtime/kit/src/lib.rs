//! A shared library that holds a compiled model, for C and all that calls it. `gristmill compile` fills its room for one and gives its
//! functions names of their own, so that one process can have several models; it writes a header that says how they are called.
//!
//! Functions return the exit codes of the command line, 0 for success, and leave a message for the thread that called. No panic crosses
//! them. The image is opened once, is never changed, and is shared by all handles; each handle has threads, memory and variables of its own.

#![expect(clippy::missing_safety_doc, reason = "the header has the contract")]

mod embedded;
mod handles;
mod host;
mod load;
mod message;

use gristmill_runtime::command::given::cpu_text;
use gristmill_runtime::command::state::{self, Variable, variables};
use gristmill_runtime::cpu::n_cores;
use gristmill_runtime::exec::{ExecOptions, Executor, Pool, Resources};
use gristmill_runtime::image::Image;
use gristmill_runtime::program::{IoSpec, Program};
use gristmill_runtime::{DType, Error, Tensor};
use host::{Host, Parallel};
use load::load;
use message::guarded;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The name of a function as a compiler finds it: the first 48 letters are room for the name of a model.
macro_rules! reserved {
    ($function:literal) => {
        concat!(
            "gristmill_room_for_the_name_of_a_compiled_model_",
            $function
        )
    };
}

/// Options of a handle. Later versions append fields, which callers of this one do not have.
#[repr(C)]
pub struct Options {
    /// Bytes that the caller has.
    size: usize,
    /// Threads, those of callers included; 0 for one per core.
    threads: u32,
    /// Of the host's threads, in place of the handle's own.
    parallel: Option<Parallel>,
    context: *mut c_void,
}

impl Options {
    /// Options of a caller; 0 for fields that it does not have.
    ///
    /// # Safety
    /// The pointer is NULL or that of as many bytes as the first field says.
    unsafe fn of(given: *const Options) -> Result<Options, Error> {
        let mut options = Options {
            size: 0,
            threads: 0,
            parallel: None,
            context: std::ptr::null_mut(),
        };
        if given.is_null() {
            return Ok(options);
        }
        // SAFETY: options begin with their size, which they have at least.
        let size = unsafe { (&raw const (*given).size).read() };
        if size < std::mem::offset_of!(Options, parallel) {
            let message = format!("options.size is {size}; set it to the size of the struct");
            return Err(Error::invalid(message));
        }
        let n = size.min(size_of::<Options>());
        // SAFETY: both have so many bytes, and any bits are those of options but for a function's.
        unsafe { given.cast::<u8>().copy_to((&raw mut options).cast(), n) };
        Ok(options)
    }
}

/// A handle: threads, memory and variables.
pub struct Model {
    image: &'static Image,
    options: ExecOptions,
    /// By variant; made when one first runs, but for the first.
    executors: Vec<OnceLock<Result<Executor, Error>>>,
    variables: Vec<Variable>,
    /// Of the variables.
    labels: Vec<CString>,
    description: CString,
}

/// The image of this library.
fn image() -> Result<&'static Image, Error> {
    static IMAGE: OnceLock<Result<Image, Error>> = OnceLock::new();
    IMAGE.get_or_init(load).as_ref().map_err(Error::clone)
}

impl Model {
    fn open(options: Options) -> Result<Model, Error> {
        let image = image()?;
        let threads = match options.threads {
            0 => n_cores(),
            n => n as usize,
        };
        let context = options.context;
        let pool = match options.parallel {
            None => Pool::new(threads),
            Some(parallel) => Pool::hosted(threads, Arc::new(Host { parallel, context })),
        };
        let options = ExecOptions {
            pool: Arc::new(pool),
            resources: Arc::new(Resources::default()),
            ..ExecOptions::validated()
        };
        let about = image.about();
        let text = format!(
            "{}: {} variants for {}, {}; gristmill {}",
            about.name,
            image.programs().len(),
            about.system,
            cpu_text(image),
            about.version
        );
        let executors = image.programs().iter().map(|_| OnceLock::new());
        let variables = all_variables(image);
        let model = Model {
            image,
            labels: variables.iter().map(|v| c_text(&v.label)).collect(),
            variables,
            options,
            executors: executors.collect(),
            description: c_text(&text),
        };
        // Errors come when a model is opened, and its variables have their initial values.
        model.executor(0)?;
        Ok(model)
    }

    fn executor(&self, variant: usize) -> Result<&Executor, Error> {
        let made = self.executors.get(variant).ok_or_else(|| {
            let n = self.executors.len();
            Error::invalid(format!("there is no variant {variant}, the model has {n}"))
        })?;
        let make = || Executor::new(self.image.programs()[variant].clone(), &self.options);
        made.get_or_init(make).as_ref().map_err(Error::clone)
    }
}

/// The variables of all variants.
fn all_variables(image: &Image) -> Vec<Variable> {
    let mut all: Vec<Variable> = Vec::new();
    for own in image.programs().iter().flat_map(|p| variables(p)) {
        if all.iter().all(|known| known.label != own.label) {
            all.push(own);
        }
    }
    all
}

/// A text for callers.
fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

fn null(name: &str) -> Error {
    Error::invalid(format!("{name} is NULL"))
}

/// # Safety
/// The pointer is NULL or that of a string.
unsafe fn text<'t>(name: &str, text: *const c_char) -> Result<&'t str, Error> {
    if text.is_null() {
        return Err(null(name));
    }
    // SAFETY: by contract.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str();
    text.map_err(|_| Error::invalid(format!("{name} is not UTF-8")))
}

/// Opens a handle, which `model` gets.
#[unsafe(export_name = reserved!("open"))]
pub unsafe extern "C" fn open(options: *const Options, model: *mut *mut Model) -> u32 {
    guarded(|| {
        if model.is_null() {
            return Err(null("model"));
        }
        // SAFETY: by the header's contract.
        let options = unsafe { Options::of(options)? };
        let made = handles::open(Model::open(options)?);
        // SAFETY: not NULL.
        unsafe { model.write(made) };
        Ok(())
    })
}

/// Closes a handle; its threads end with its last run.
#[unsafe(export_name = reserved!("close"))]
pub extern "C" fn close(model: *mut Model) -> u32 {
    guarded(|| match model.is_null() {
        true => Ok(()),
        false => handles::close(model),
    })
}

/// Runs a variant on tensors at these addresses.
#[unsafe(export_name = reserved!("run_variant"))]
pub unsafe extern "C" fn run(
    handle: *const Model,
    variant: u32,
    inputs: *const *const c_void,
    outputs: *const *mut c_void,
) -> u32 {
    guarded(|| {
        let model = handles::find(handle)?;
        let executor = model.executor(variant as usize)?;
        let program = executor.program();
        // SAFETY: as many addresses as the variant has inputs and outputs.
        let (inputs, outputs) = unsafe {
            (
                addresses("input", &program.inputs, inputs.cast::<*const u8>())?,
                addresses("output", &program.outputs, outputs.cast::<*mut u8>())?,
            )
        };
        // SAFETY: each has the bytes of its type.
        unsafe { check_truth(program, inputs)? };
        // SAFETY: as above; nobody else writes them.
        unsafe { executor.run_raw(inputs, outputs) }
    })
}

/// # Safety
/// There are as many addresses as values.
unsafe fn addresses<'a, T>(label: &str, specs: &[IoSpec], first: *const T) -> Result<&'a [T], Error>
where
    T: Copy + Into<Address>,
{
    if specs.is_empty() {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(null(&format!("{label}s")));
    }
    // SAFETY: by contract.
    let all = unsafe { std::slice::from_raw_parts(first, specs.len()) };
    for (spec, &address) in specs.iter().zip(all) {
        let is_empty = spec.shape.contains(&0);
        if address.into().0.is_null() && !is_empty {
            return Err(null(&format!("{label} {:?}", spec.name)));
        }
    }
    Ok(all)
}

/// An address of either kind.
struct Address(*const u8);

impl From<*const u8> for Address {
    fn from(p: *const u8) -> Address {
        Address(p)
    }
}

impl From<*mut u8> for Address {
    fn from(p: *mut u8) -> Address {
        Address(p)
    }
}

/// Errors for truth values that are neither 0 nor 1.
///
/// # Safety
/// Each address is that of an input.
unsafe fn check_truth(program: &Program, inputs: &[*const u8]) -> Result<(), Error> {
    for (spec, &address) in program.inputs.iter().zip(inputs) {
        let n = spec.shape.iter().product::<usize>();
        if spec.dtype != DType::Bool || n == 0 {
            continue;
        }
        // SAFETY: by contract; `bool` has one byte.
        let bytes = unsafe { std::slice::from_raw_parts(address, n) };
        if bytes.iter().any(|&b| b > 1) {
            let message = format!("input {:?}: a truth value is neither 0 nor 1", spec.name);
            return Err(Error::invalid(message));
        }
    }
    Ok(())
}

/// Sets a variable.
#[unsafe(export_name = reserved!("set"))]
pub unsafe extern "C" fn set(
    handle: *const Model,
    name: *const c_char,
    value: *const c_void,
    bytes: usize,
) -> u32 {
    guarded(|| {
        // SAFETY: by the header's contract.
        let (model, name) = (handles::find(handle)?, unsafe { text("name", name)? });
        let variable = state::variable(&model.variables, name)?;
        let shape: Vec<usize> = variable.dims.iter().flatten().copied().collect();
        check_size(variable, &shape, bytes)?;
        if value.is_null() && bytes > 0 {
            return Err(null("value"));
        }
        let value = match bytes {
            0 => &[],
            // SAFETY: the caller has so many bytes.
            _ => unsafe { std::slice::from_raw_parts(value.cast::<u8>(), bytes) },
        };
        let value = Tensor::from_bytes(variable.dtype, &shape, value)?;
        let resources = &model.options.resources;
        resources.set(&variable.container, &variable.name, &value)
    })
}

/// Copies the current value of a variable.
#[unsafe(export_name = reserved!("get"))]
pub unsafe extern "C" fn get(
    handle: *const Model,
    name: *const c_char,
    value: *mut c_void,
    bytes: usize,
) -> u32 {
    guarded(|| {
        // SAFETY: by the header's contract.
        let (model, name) = (handles::find(handle)?, unsafe { text("name", name)? });
        let variable = state::variable(&model.variables, name)?;
        let resources = &model.options.resources;
        let held = resources.get(&variable.container, &variable.name)?;
        let held = held.ok_or_else(|| {
            Error::invalid(format!("variable {name:?} is read before it was assigned"))
        })?;
        check_size(variable, held.shape(), bytes)?;
        if value.is_null() && bytes > 0 {
            return Err(null("value"));
        }
        if bytes > 0 {
            // SAFETY: the caller has room for so many bytes.
            unsafe { std::ptr::copy_nonoverlapping(held.as_ptr(), value.cast(), bytes) };
        }
        Ok(())
    })
}

fn check_size(variable: &Variable, shape: &[usize], bytes: usize) -> Result<(), Error> {
    let Variable { label, dtype, .. } = variable;
    let n = shape.iter().product::<usize>() * dtype.size_bytes();
    match n == bytes {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "variable {label:?}: {dtype}{shape:?} has {n} bytes, got {bytes}"
        ))),
    }
}

/// The label of a variable by number, NULL behind the last one.
#[unsafe(export_name = reserved!("variable"))]
pub extern "C" fn variable(handle: *const Model, number: u32) -> *const c_char {
    let model = handles::find(handle).ok();
    let label = model
        .as_ref()
        .and_then(|model| model.labels.get(number as usize));
    label.map_or(std::ptr::null(), |label| label.as_ptr())
}

/// Writes all variables to a file.
#[unsafe(export_name = reserved!("save"))]
pub unsafe extern "C" fn save(handle: *const Model, path: *const c_char) -> u32 {
    guarded(|| {
        // SAFETY: by the header's contract.
        let (model, path) = (handles::find(handle)?, unsafe { text("path", path)? });
        model.options.resources.save(path)
    })
}

/// Sets variables to the values of a file.
#[unsafe(export_name = reserved!("load"))]
pub unsafe extern "C" fn load_state(handle: *const Model, path: *const c_char) -> u32 {
    guarded(|| {
        // SAFETY: by the header's contract.
        let (model, path) = (handles::find(handle)?, unsafe { text("path", path)? });
        let resources = &model.options.resources;
        state::load(Path::new(path), &model.variables, resources).map(drop)
    })
}

/// Puts all variables back to their initial values.
#[unsafe(export_name = reserved!("reset"))]
pub extern "C" fn reset(handle: *const Model) -> u32 {
    guarded(|| {
        let model = handles::find(handle)?;
        let resources = &model.options.resources;
        let containers: BTreeSet<String> = resources.names().into_iter().map(|n| n.0).collect();
        containers.iter().for_each(|c| resources.reset(c));
        Ok(())
    })
}

/// The message of this thread's last error; it stays until the next one.
#[unsafe(export_name = reserved!("message"))]
pub extern "C" fn last_message() -> *const c_char {
    message::last()
}

/// One line about the model.
#[unsafe(export_name = reserved!("describe"))]
pub extern "C" fn describe(handle: *const Model) -> *const c_char {
    match handles::find(handle) {
        Ok(model) => model.description.as_ptr(),
        Err(_) => c"".as_ptr(),
    }
}
