//! What the CUDA driver of this machine says, when there is one. The driver is opened at run time; nothing links against it.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A CUDA device as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Product name.
    pub name: String,
    /// Device memory in bytes.
    pub memory_bytes: usize,
    /// Compute capability (major, minor): `(9, 0)` for sm_90.
    pub compute_capability: (u32, u32),
}

/// The CUDA devices in driver order, or in words why there are none. Never panics; a missing driver is an ordinary answer.
pub fn probe() -> Result<Vec<CudaDevice>, String> {
    // SAFETY: loading the driver library runs its constructors, which is what opening it at run time means.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver: libcuda.so.1 was not found".to_owned());
    }
    // cudarc panics on symbols that a library of this name but another age lacks.
    let listed = catch_unwind(AssertUnwindSafe(list));
    listed.unwrap_or_else(|_| {
        Err("the CUDA driver library lacks functions that are needed; update the driver".to_owned())
    })
}

fn list() -> Result<Vec<CudaDevice>, String> {
    let fail = |what: &str| {
        let what = what.to_owned();
        move |e: DriverError| format!("the CUDA driver was found, but {what} failed: {e:?}")
    };
    result::init().map_err(fail("cuInit"))?;
    let n = result::device::get_count().map_err(fail("counting devices"))?;
    (0..n).map(|i| describe(i).map_err(fail(&format!("describing device {i}")))).collect()
}

fn describe(ordinal: i32) -> Result<CudaDevice, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let device = result::device::get(ordinal)?;
    // SAFETY: `device` comes from `get`, and the driver is initialised.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) };
    Ok(CudaDevice {
        name: result::device::get_name(device)?,
        // SAFETY: as above.
        memory_bytes: unsafe { result::device::total_mem(device)? },
        compute_capability: (attribute(MAJOR)? as u32, attribute(MINOR)? as u32),
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
                assert!(devices.iter().all(|d| !d.name.is_empty() && d.memory_bytes > 0 && d.compute_capability.0 > 0));
            }
            Err(why) => {
                eprintln!("no CUDA device is tested: {why}");
                assert!(why.contains("CUDA driver"), "{why}");
            }
        }
    }
}
