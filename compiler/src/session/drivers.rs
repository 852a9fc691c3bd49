//! Drivers of devices with their own memory.

use super::Settings;
use crate::error::{Error, Result};
use crate::place::{emulated, gpus};
use gristmill_runtime::DeviceName;
use gristmill_runtime::cuda::{self, CudaGpu};
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::driver::Driver;
use gristmill_runtime::program::Program;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The drivers opened so far.
#[derive(Default)]
pub(super) struct Drivers(Mutex<BTreeMap<DeviceName, Arc<dyn Driver>>>);

impl Drivers {
    /// The drivers of a program's devices, opened when they are first used.
    pub(super) fn of(
        &self,
        program: &Program,
        settings: &Settings,
    ) -> Result<BTreeMap<DeviceName, Arc<dyn Driver>>> {
        let mut opened = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for device in program.partitions.iter().map(|p| &p.device) {
            if !opened.contains_key(device)
                && let Some(driver) = open(device, settings)?
            {
                opened.insert(device.clone(), driver);
            }
        }
        Ok(opened.clone())
    }
}

/// Opens the driver of a device, with the device's memory limit; `None` for a CPU.
///
/// Errors with `Unsupported` when the device is an absent GPU.
pub(crate) fn open(device: &DeviceName, settings: &Settings) -> Result<Option<Arc<dyn Driver>>> {
    let mut known = settings.devices.devices.iter();
    let limit = known
        .find(|d| d.name == *device)
        .and_then(|d| d.memory_limit);
    let limit_bytes = limit.map(|limit| limit.0 as usize);
    Ok(match device.kind {
        DeviceKind::Cpu => None,
        DeviceKind::Emu => Some(emulated::open(limit_bytes, settings.check_kernels)?),
        DeviceKind::Gpu => Some(open_gpu(device, limit_bytes, settings)?),
    })
}

fn open_gpu(
    device: &DeviceName,
    limit_bytes: Option<usize>,
    settings: &Settings,
) -> Result<Arc<dyn Driver>> {
    gpus::check_presence(device, &settings.gpus)?;
    let ordinal = gpus::ordinal(device, &settings.gpus)?;
    let of_gpu = cuda::Settings {
        limit_bytes,
        checks: settings.check_kernels,
    };
    let opened = CudaGpu::open(ordinal, of_gpu);
    Ok(Arc::new(
        opened.map_err(|e| Error::from(e).context(device))?,
    ))
}
