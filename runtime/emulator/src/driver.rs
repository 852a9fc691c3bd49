//! The emulator as a device that the executor of `gristmill-runtime` runs partitions on.

use crate::{Args, Checks, Device, Fault, FaultKind, LaunchConfig, Limits, Module};
use crate::{TensorElement, TensorMap, encode_tensor_map};
use gristmill_runtime::driver::{DeviceCode, Driver};
use gristmill_runtime::gpu::{self, EncodedTensorMap, GpuArg, GpuCode, Launch};
use gristmill_runtime::{DType, Error, ErrorKind};
use std::sync::Arc;

/// An emulated GPU with a memory of its own. Everything is done when a call returns.
pub struct EmulatedGpu {
    device: Arc<Device>,
    checks: Checks,
}

impl EmulatedGpu {
    /// A device without buffers, whose launches are checked as `checks` says.
    pub fn new(limits: Limits, checks: Checks) -> EmulatedGpu {
        EmulatedGpu {
            device: Arc::new(Device::new(limits)),
            checks,
        }
    }
}

fn error(fault: Fault) -> Error {
    let kind = match fault.kind() {
        FaultKind::OutOfMemory => ErrorKind::OutOfMemory,
        FaultKind::Unsupported => ErrorKind::Unsupported,
        FaultKind::Syntax | FaultKind::InvalidCall => ErrorKind::Internal,
        _ => ErrorKind::DeviceFailed,
    };
    Error::new(kind, format!("PTX emulator: {fault}"))
}

impl Driver for EmulatedGpu {
    fn describe(&self) -> String {
        "PTX emulator".to_owned()
    }

    fn allocate(&self, size_bytes: usize) -> Result<u64, Error> {
        self.device.alloc(size_bytes).map_err(error)
    }

    fn free(&self, address: u64) {
        // The address is of `allocate`, and comes here once.
        let _ = self.device.free(address);
    }

    fn write(&self, to: u64, bytes: &[u8]) -> Result<(), Error> {
        self.device.copy_in(to, bytes).map_err(error)
    }

    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.device.copy_out(bytes, from).map_err(error)
    }

    fn copy(&self, from: u64, to: u64, size_bytes: usize) -> Result<(), Error> {
        self.device.copy_within(to, from, size_bytes).map_err(error)
    }

    fn encode(&self, map: &gpu::TensorMap, buffer: u64) -> Result<EncodedTensorMap, Error> {
        let map = TensorMap::of_buffer(map, buffer);
        encode_tensor_map(&map).map(EncodedTensorMap).map_err(error)
    }

    fn load(&self, code: &GpuCode) -> Result<Box<dyn DeviceCode>, Error> {
        let module = Module::parse(&code.ptx).map_err(error)?;
        module.check().map_err(error)?;
        Ok(Box::new(LoadedModule {
            device: self.device.clone(),
            module,
            checks: self.checks,
        }))
    }
}

impl TensorMap {
    /// A kernel's parameter, for the buffer at this address.
    pub fn of_buffer(map: &gpu::TensorMap, buffer: u64) -> TensorMap {
        TensorMap {
            element: element(map.dtype),
            address: buffer.saturating_add(map.offset_bytes),
            sizes: map.sizes.clone(),
            strides_bytes: map.strides_bytes.clone(),
            tile: map.tile.clone(),
            swizzle: map.swizzle,
            fills_with_nan: false,
            pixels: map.pixels.clone(),
        }
    }
}

/// CUDA has no type of bytes with a sign, nor of short integers with one: only the bits are copied.
fn element(dtype: DType) -> TensorElement {
    match dtype {
        DType::Bool | DType::U8 | DType::I8 => TensorElement::U8,
        DType::F8E4M3FN | DType::F8E4M3FNUZ | DType::F8E5M2 | DType::F8E5M2FNUZ => {
            TensorElement::U8
        }
        DType::U16 | DType::I16 => TensorElement::U16,
        DType::U32 => TensorElement::U32,
        DType::I32 => TensorElement::S32,
        DType::U64 => TensorElement::U64,
        DType::I64 => TensorElement::S64,
        DType::F16 => TensorElement::F16,
        DType::BF16 => TensorElement::Bf16,
        DType::F32 => TensorElement::F32,
        DType::F64 => TensorElement::F64,
    }
}

struct LoadedModule {
    device: Arc<Device>,
    module: Module,
    checks: Checks,
}

impl DeviceCode for LoadedModule {
    fn launch(&self, entry: &str, launch: &Launch, args: &[GpuArg]) -> Result<(), Error> {
        let config = LaunchConfig {
            grid: launch.grid,
            block: launch.block,
            dynamic_shared_bytes: launch.shared_bytes as usize,
            ..LaunchConfig::default()
        };
        let args = args.iter().fold(Args::new(), |list, arg| match arg {
            GpuArg::Address(address) => list.u64(*address),
            GpuArg::TensorMap(map) => list.value(align_of::<EncodedTensorMap>(), &map.0),
        });
        let stats = self
            .device
            .launch(&self.module, entry, &config, args.bytes(), &self.checks);
        stats
            .map(drop)
            .map_err(|fault| error(fault).context(format!("kernel {entry}")))
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // The variables of a module are the device's last trace of it.
        let _ = self.device.unload(&self.module);
    }
}
