//! CUDA devices through their driver, which is opened at run time: nothing links against it, and without one everything else works.
//!
//! Three floors: the C interface (`api`), its objects with their errors (`context`), and [`CudaGpu`], which the executor drives.
//! `GRISTMILL_CUDA` names the driver library where the system's loader does not find it; `CUDA_VISIBLE_DEVICES` is the driver's own affair.
//! `GRISTMILL_NCCL` names NCCL, for all-reduces (`nccl`); empty, it is not used.

mod api;
mod bindings;
mod blas;
mod code;
mod context;
mod gpu;
mod library;
mod nccl;
mod rates;
mod ring;

pub use bindings::Bindings;
pub use blas::product_library;
pub use gpu::{CudaGpu, Settings};
pub use nccl::version as nccl_version;
pub use rates::CopyTimes;

use crate::error::Error;
use api::Api;
use std::ffi::{CStr, c_int};

/// A CUDA device as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Product name.
    pub name: String,
    /// Device memory in bytes.
    pub memory_bytes: usize,
    /// Compute capability (major, minor): `(9, 0)` for sm_90.
    pub compute_capability: (u32, u32),
    /// Number of multiprocessors. 0 where the driver does not tell, as for all that follow.
    pub multiprocessors: u32,
    /// Clock of the multiprocessors in kHz.
    pub clock_khz: u32,
    /// Clock of the memory in kHz; two transfers per cycle.
    pub memory_clock_khz: u32,
    /// Width of the memory's bus in bits.
    pub memory_bus_bits: u32,
    /// Second-level cache in bytes.
    pub cache_bytes: u32,
    /// True when memory comes from pools, in the order of a stream; otherwise each allocation waits for the device.
    pub has_pools: bool,
}

/// The CUDA devices in driver order, or in words why there are none. Never panics; a missing driver is an ordinary answer.
pub fn probe() -> Result<Vec<CudaDevice>, String> {
    let api = api::get()?;
    let mut n = 0;
    // SAFETY: the driver writes one number.
    let code = unsafe { (api.device_count)(&mut n) };
    api.check(code, "counting devices")?;
    (0..n).map(|i| describe(api, i)).collect()
}

/// Version of CUDA that the driver is for: `(13, 0)`. There may be a driver and no device.
pub fn driver_version() -> Result<(u32, u32), String> {
    api::opened()?.version()
}

fn describe(api: &Api, ordinal: c_int) -> Result<CudaDevice, String> {
    use cudarc::driver::sys::CUdevice_attribute as A;
    let what = format!("describing device {ordinal}");
    let (mut device, mut memory_bytes, mut name) = (0, 0, [0; 256]);
    // SAFETY: the driver writes one number, one number, and a text with its NUL into as many bytes as it is told.
    unsafe {
        api.check((api.device)(&mut device, ordinal), &what)?;
        api.check((api.total_memory)(&mut memory_bytes, device), &what)?;
        api.check(
            (api.device_name)(name.as_mut_ptr(), name.len() as c_int - 1, device),
            &what,
        )?;
    }
    let attribute = |which: A| {
        let mut value = 0;
        // SAFETY: the driver writes one number.
        let code = unsafe { (api.device_attribute)(&mut value, which as c_int, device) };
        api.check(code, &what)?;
        Ok::<_, String>(u32::try_from(value).unwrap_or(0))
    };
    let told = |which: A| attribute(which).unwrap_or(0);
    Ok(CudaDevice {
        // SAFETY: the last byte is 0 in any case.
        name: unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned(),
        memory_bytes,
        compute_capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: told(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        clock_khz: told(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        memory_clock_khz: told(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
        memory_bus_bits: told(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
        cache_bytes: told(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        has_pools: told(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) != 0,
    })
}

/// Devices by the driver's numbers. Errors with `Unsupported` when there is no such device, or no driver.
fn device(ordinal: u32) -> Result<CudaDevice, Error> {
    let unsupported = |message: String| Error::new(crate::error::ErrorKind::Unsupported, message);
    let devices = probe().map_err(unsupported)?;
    let n = devices.len();
    devices.into_iter().nth(ordinal as usize).ok_or_else(|| {
        unsupported(format!(
            "there is no CUDA device {ordinal}: the driver shows {n}, counted from 0"
        ))
    })
}

#[cfg(test)]
mod tests {
    /// With a driver the devices must make sense; without one the answer says so. Either way nothing panics.
    #[test]
    #[cfg_attr(miri, ignore = "loads a shared library")]
    fn probing_never_panics() {
        match super::probe() {
            Ok(devices) => {
                eprintln!("CUDA devices: {devices:?}");
                assert!(devices.iter().all(|d| !d.name.is_empty()
                    && d.memory_bytes > 0
                    && d.compute_capability.0 > 0));
            }
            Err(why) => {
                eprintln!("no CUDA device is tested: {why}");
                assert!(why.contains("CUDA driver"), "{why}");
            }
        }
    }
}
