//! Device memory: buffers at made-up addresses, so that every access can be checked.

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    collections::BTreeMap,
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed},
};

use crate::fault::{Fault, FaultKind, Result};

/// Where the state spaces lie in the generic one.
pub(crate) mod window {
    /// Addresses that each of the windows below has.
    pub const SIZE: u64 = 1 << 40;
    pub const SHARED: u64 = 1 << 41;
    pub const LOCAL: u64 = 1 << 42;
    pub const PARAM: u64 = 3 << 41;
    /// First address of global memory, which ends nowhere.
    pub const GLOBAL: u64 = 1 << 44;
}

/// Buffers start at multiples of this, as `cudaMalloc`'s do.
const BUFFER_ALIGN: u64 = 256;
/// Addresses between two buffers that belong to neither.
const GAP: u64 = 4096;
/// Fresh memory holds this: NaN in every floating-point format.
pub(crate) const FRESH: u8 = 0xff;

/// The memory of one device.
pub(crate) struct Memory {
    buffers: BTreeMap<u64, Buffer>,
    next: u64,
    used_bytes: usize,
    limit_bytes: usize,
}

/// One allocation.
struct Buffer {
    storage: Storage,
    /// The module variable that it holds; allocations have no name.
    name: Option<String>,
    is_constant: bool,
}

/// Bytes aligned for every access, shared by all threads that run blocks.
struct Storage {
    pointer: NonNull<u8>,
    layout: Layout,
    size_bytes: usize,
}

// SAFETY: the bytes are reached through relaxed atomics only while kernels run; copies by the host hold the lock of
// `Device` exclusively.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Storage {
    fn new(size_bytes: usize) -> Result<Storage> {
        let layout =
            Layout::from_size_align(size_bytes.max(1), BUFFER_ALIGN as usize).map_err(|_| {
                Fault::new(
                    FaultKind::OutOfMemory,
                    format!("cannot allocate {size_bytes} bytes"),
                )
            })?;
        // SAFETY: the layout has at least one byte.
        let pointer = unsafe { alloc(layout) };
        let pointer = NonNull::new(pointer).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the allocation has `layout.size()` bytes.
        unsafe { pointer.write_bytes(FRESH, layout.size()) };
        Ok(Storage {
            pointer,
            layout,
            size_bytes,
        })
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed once.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
    }
}

/// A buffer as kernels see it.
#[derive(Clone, Copy)]
pub(crate) struct View {
    pub start: u64,
    pub size_bytes: u64,
    pub is_constant: bool,
    pointer: NonNull<u8>,
}

impl View {
    /// A view without bytes, before the first access.
    pub const EMPTY: View = View {
        start: 0,
        size_bytes: 0,
        is_constant: true,
        pointer: NonNull::dangling(),
    };

    /// True when `count` bytes from `address` on are inside.
    #[inline(always)]
    pub fn holds(&self, address: u64, count: u64) -> bool {
        let offset = address.wrapping_sub(self.start);
        offset < self.size_bytes && count <= self.size_bytes - offset
    }

    /// Pointer to an address, which must be inside together with the bytes that are accessed.
    #[inline(always)]
    pub fn pointer(&self, address: u64) -> *mut u8 {
        debug_assert!(self.holds(address, 1));
        // SAFETY: the callers have asked `holds`, so the offset is inside the allocation.
        unsafe { self.pointer.as_ptr().add((address - self.start) as usize) }
    }

    /// Reads 1, 2, 4 or 8 bytes at an aligned address that `holds`.
    #[inline(always)]
    pub fn load(&self, address: u64, size_bytes: usize) -> u64 {
        let p = self.pointer(address);
        debug_assert!(
            self.holds(address, size_bytes as u64) && address.is_multiple_of(size_bytes as u64)
        );
        // SAFETY: the bytes are inside the buffer and aligned, as buffers and the caller's address are; everyone uses
        // atomics while kernels run.
        unsafe {
            match size_bytes {
                1 => u64::from(AtomicU8::from_ptr(p).load(Relaxed)),
                2 => u64::from(AtomicU16::from_ptr(p.cast()).load(Relaxed)),
                4 => u64::from(AtomicU32::from_ptr(p.cast()).load(Relaxed)),
                _ => AtomicU64::from_ptr(p.cast()).load(Relaxed),
            }
        }
    }

    /// Writes 1, 2, 4 or 8 bytes at an aligned address that `holds`.
    #[inline(always)]
    pub fn store(&self, address: u64, size_bytes: usize, value: u64) {
        let p = self.pointer(address);
        debug_assert!(
            self.holds(address, size_bytes as u64) && address.is_multiple_of(size_bytes as u64)
        );
        // SAFETY: as in `load`.
        unsafe {
            match size_bytes {
                1 => AtomicU8::from_ptr(p).store(value as u8, Relaxed),
                2 => AtomicU16::from_ptr(p.cast()).store(value as u16, Relaxed),
                4 => AtomicU32::from_ptr(p.cast()).store(value as u32, Relaxed),
                _ => AtomicU64::from_ptr(p.cast()).store(value, Relaxed),
            }
        }
    }

    /// Replaces 4 or 8 bytes by `f` of them, atomically, and returns the old contents.
    pub fn update(&self, address: u64, size_bytes: usize, f: impl Fn(u64) -> u64) -> u64 {
        use std::sync::atomic::Ordering::{AcqRel, Acquire};
        let p = self.pointer(address);
        // SAFETY: as in `load`.
        unsafe {
            if size_bytes == 8 {
                let cell = AtomicU64::from_ptr(p.cast());
                return cell
                    .fetch_update(AcqRel, Acquire, |x| Some(f(x)))
                    .unwrap_or_else(|x| x);
            }
            let cell = AtomicU32::from_ptr(p.cast());
            u64::from(
                cell.fetch_update(AcqRel, Acquire, |x| Some(f(u64::from(x)) as u32))
                    .unwrap_or_else(|x| x),
            )
        }
    }
}

impl Memory {
    pub fn new(limit_bytes: usize) -> Memory {
        Memory {
            buffers: BTreeMap::new(),
            next: window::GLOBAL,
            used_bytes: 0,
            limit_bytes,
        }
    }

    pub fn allocate(
        &mut self,
        size_bytes: usize,
        name: Option<&str>,
        is_constant: bool,
    ) -> Result<u64> {
        let used = self.used_bytes.saturating_add(size_bytes);
        if used > self.limit_bytes {
            let message = format!(
                "out of device memory: {size_bytes} bytes asked for, {} of {} in use",
                self.used_bytes, self.limit_bytes
            );
            return Err(Fault::new(FaultKind::OutOfMemory, message));
        }
        let storage = Storage::new(size_bytes)?;
        let start = self.next;
        self.next = (start + size_bytes as u64 + GAP).next_multiple_of(BUFFER_ALIGN);
        self.used_bytes = used;
        self.buffers.insert(
            start,
            Buffer {
                storage,
                name: name.map(str::to_owned),
                is_constant,
            },
        );
        Ok(start)
    }

    pub fn free(&mut self, address: u64) -> Result<()> {
        let Some(buffer) = self.buffers.remove(&address) else {
            let message = format!(
                "free of {address:#x}, which is not the start of a buffer{}",
                self.nearest(address)
            );
            return Err(Fault::new(FaultKind::InvalidCall, message));
        };
        self.used_bytes -= buffer.storage.size_bytes;
        Ok(())
    }

    pub fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// The buffer that `address` is in.
    pub fn view(&self, address: u64) -> Option<View> {
        let (start, buffer) = self.buffers.range(..=address).next_back()?;
        let view = View {
            start: *start,
            size_bytes: buffer.storage.size_bytes as u64,
            is_constant: buffer.is_constant,
            pointer: buffer.storage.pointer,
        };
        view.holds(address, 1).then_some(view)
    }

    /// `count` bytes for the host; the caller has the memory to itself.
    fn host_range(&self, address: u64, count: usize, what: &str) -> Result<*mut u8> {
        match self
            .view(address)
            .filter(|view| view.holds(address, count as u64))
        {
            Some(view) => Ok(view.pointer(address)),
            None if count == 0 => Ok(NonNull::dangling().as_ptr()),
            None => {
                let message = format!(
                    "{what} of {count} bytes at {address:#x} is outside every buffer{}",
                    self.nearest(address)
                );
                Err(Fault::new(FaultKind::OutOfBounds, message))
            }
        }
    }

    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let to = self.host_range(address, bytes.len(), "a copy to the device")?;
        // SAFETY: `host_range` has checked the length, and `&mut self` excludes kernels.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    pub fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let from = self.host_range(address, bytes.len(), "a copy from the device")?;
        // SAFETY: as in `write`.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    pub fn copy_within(&mut self, to: u64, from: u64, count: usize) -> Result<()> {
        let from = self.host_range(from, count, "a copy from the device")?;
        let to = self.host_range(to, count, "a copy to the device")?;
        // SAFETY: as in `write`; the ranges may overlap.
        unsafe { to.copy_from(from, count) };
        Ok(())
    }

    pub fn fill(&mut self, address: u64, value: u8, count: usize) -> Result<()> {
        let to = self.host_range(address, count, "a fill")?;
        // SAFETY: as in `write`.
        unsafe { to.write_bytes(value, count) };
        Ok(())
    }

    /// `; the nearest buffer is ..`, for messages.
    pub fn nearest(&self, address: u64) -> String {
        let below = self.buffers.range(..=address).next_back();
        let above = self.buffers.range(address..).next();
        let distance = |(start, buffer): &(&u64, &Buffer)| {
            let end = **start + buffer.storage.size_bytes as u64;
            if address < **start {
                **start - address
            } else {
                (address + 1).saturating_sub(end)
            }
        };
        let Some((start, buffer)) = below.into_iter().chain(above).min_by_key(distance) else {
            return "; the device has no buffers".to_owned();
        };
        let size = buffer.storage.size_bytes as u64;
        let name = buffer
            .name
            .as_ref()
            .map(|n| format!(" `{n}`"))
            .unwrap_or_default();
        let place = match address {
            a if a < *start => format!("{} bytes before", start - a),
            a if a >= start + size => format!("{} bytes behind the end of", a - start - size),
            a => format!("at byte {} of", a - start),
        };
        format!("; that is {place} the buffer{name} of {size} bytes at {start:#x}")
    }
}
