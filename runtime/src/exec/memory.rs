//! The memory that a partition's buffers are in: the host's, or a device's own.

use crate::driver::{Driver, HostMemory};
use crate::error::Error;
use crate::tensor::AlignedBytes;
use std::ptr;
use std::sync::Arc;

/// Where buffers are. Addresses of either kind are kept as pointers; those of a device are never dereferenced.
#[derive(Clone)]
pub(crate) enum Memory {
    Host,
    Device(Arc<dyn Driver>),
}

/// An owned piece of memory.
pub(crate) enum Block {
    Host(AlignedBytes),
    Device {
        driver: Arc<dyn Driver>,
        address: u64,
    },
}

impl Block {
    /// Its first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        match self {
            Block::Host(bytes) => bytes.as_ptr(),
            Block::Device { address, .. } => pointer(*address),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Block::Device { driver, address } = self {
            driver.free(*address);
        }
    }
}

/// A device address as the executor keeps it.
pub(crate) fn pointer(address: u64) -> *mut u8 {
    ptr::without_provenance_mut(address as usize)
}

impl Memory {
    /// The driver of a device's own memory.
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        match self {
            Memory::Host => None,
            Memory::Device(driver) => Some(driver),
        }
    }

    /// Memory of the host that this memory's device, if it is one, copies from and to; zero.
    pub(crate) fn pin(&self, size_bytes: usize) -> Result<Box<dyn HostMemory>, Error> {
        match self {
            Memory::Host => Ok(Box::new(AlignedBytes::zeroed(size_bytes)?)),
            Memory::Device(driver) => driver.pin(size_bytes),
        }
    }

    /// New memory, zero on the host, undefined on a device.
    pub(crate) fn allocate(&self, size_bytes: usize) -> Result<Block, Error> {
        Ok(match self {
            Memory::Host => Block::Host(AlignedBytes::zeroed(size_bytes)?),
            Memory::Device(driver) => {
                let address = driver.allocate(size_bytes.max(1))?;
                Block::Device {
                    driver: driver.clone(),
                    address,
                }
            }
        })
    }

    /// Copies to the host.
    ///
    /// # Safety
    ///
    /// `from` is the address of `out.len()` readable bytes of this memory, and no one writes them meanwhile.
    pub(crate) unsafe fn read(&self, from: *mut u8, out: &mut [u8]) -> Result<(), Error> {
        match self {
            // SAFETY: the caller's promise; `out` is borrowed for writing, so the ranges are apart.
            Memory::Host => unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) },
            Memory::Device(driver) => driver.read(from.addr() as u64, out)?,
        }
        Ok(())
    }

    /// Copies from the host.
    ///
    /// # Safety
    ///
    /// `to` is the address of `bytes.len()` bytes of this memory that no one else uses meanwhile.
    pub(crate) unsafe fn write(&self, to: *mut u8, bytes: &[u8]) -> Result<(), Error> {
        match self {
            // SAFETY: the caller's promise; `bytes` is borrowed and `to` is used by no one else, so the ranges are apart.
            Memory::Host => unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) },
            Memory::Device(driver) => driver.write(to.addr() as u64, bytes)?,
        }
        Ok(())
    }

    /// Copies within this memory; the ranges may be the same or apart.
    ///
    /// # Safety
    ///
    /// Both are addresses of `size_bytes` bytes of this memory; no one writes the source or uses the target meanwhile.
    pub(crate) unsafe fn copy(
        &self,
        from: *mut u8,
        to: *mut u8,
        size_bytes: usize,
    ) -> Result<(), Error> {
        match self {
            // SAFETY: the caller's promise.
            Memory::Host => unsafe { ptr::copy(from, to, size_bytes) },
            Memory::Device(driver) => {
                driver.copy(from.addr() as u64, to.addr() as u64, size_bytes)?
            }
        }
        Ok(())
    }
}
