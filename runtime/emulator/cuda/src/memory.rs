//! Memory of devices and pinned memory of the host, and copies between them.

use crate::codes::*;
use crate::execute::Op;
use crate::log;
use crate::world::{self, World};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::slice;

/// A stream-ordered pool of a device.
pub struct Pool {
    pub gpu: usize,
    /// 0: as much as the device has.
    max_bytes: usize,
    used_bytes: usize,
    /// Size of each allocation.
    sizes: BTreeMap<u64, usize>,
    pub release_threshold: u64,
}

impl Pool {
    fn has_room(&self, size_bytes: usize) -> bool {
        self.max_bytes == 0 || self.used_bytes + size_bytes <= self.max_bytes
    }

    fn new(gpu: usize, max_bytes: usize) -> Pool {
        Pool {
            gpu,
            max_bytes,
            used_bytes: 0,
            sizes: BTreeMap::new(),
            release_threshold: 0,
        }
    }
}

/// Pinned memory by its first address.
pub struct PinnedMemory {
    layout: Layout,
}

/// Pages of the host.
const PAGE: usize = 4096;

pub fn create_pool(gpu: usize, max_bytes: usize) -> Outcome<usize> {
    world::with(|world| {
        world.check(gpu)?;
        if !world.settings.pools {
            return Err(NOT_SUPPORTED);
        }
        let handle = world.handle();
        world.pools.insert(handle, Pool::new(gpu, max_bytes));
        Ok(handle)
    })
}

pub fn destroy_pool(pool: usize) -> Outcome {
    world::with(|world| world.pools.remove(&pool).map(drop).ok_or(INVALID_HANDLE))
}

pub fn allocate(pool: usize, size_bytes: usize, stream: usize) -> Outcome<u64> {
    world::with_stream(stream, |world, gpu| {
        world.refuse_in_capture(stream)?;
        let found = world.pools.get(&pool).ok_or(INVALID_HANDLE)?;
        if size_bytes == 0 || found.gpu != gpu {
            return Err(INVALID_VALUE);
        }
        if !found.has_room(size_bytes)
            || world.gpus[gpu].device.used_bytes() + size_bytes > world.settings.memory_bytes
        {
            // Memory that is given back late may be enough.
            world.finish_gpu(gpu);
            world.check(gpu)?;
        }
        let found = world.pools.get_mut(&pool).ok_or(INVALID_HANDLE)?;
        if !found.has_room(size_bytes) {
            return Err(OUT_OF_MEMORY);
        }
        let address = world.gpus[gpu]
            .device
            .alloc(size_bytes)
            .map_err(|_| OUT_OF_MEMORY)?;
        found.used_bytes += size_bytes;
        found.sizes.insert(address, size_bytes);
        Ok(address)
    })
}

/// Gives memory back once the stream comes to it.
pub fn free(address: u64, stream: usize) -> Outcome {
    world::with_stream(stream, |world, gpu| {
        let mut pools = world.pools.values_mut().filter(|p| p.gpu == gpu);
        let pool = pools
            .find(|p| p.sizes.contains_key(&address))
            .ok_or(INVALID_VALUE)?;
        pool.used_bytes -= pool.sizes.remove(&address).unwrap_or(0);
        world.ask(stream, Op::Free { address })
    })
}

/// Memory of the current device without a pool.
pub fn allocate_at_once(size_bytes: usize) -> Outcome<u64> {
    world::with_context(|world, gpu| {
        if size_bytes == 0 {
            return Err(INVALID_VALUE);
        }
        world.gpus[gpu]
            .device
            .alloc(size_bytes)
            .map_err(|_| OUT_OF_MEMORY)
    })
}

/// As the real one, waits for the device first.
pub fn free_at_once(address: u64) -> Outcome {
    world::until(|| {
        world::with_context(|world, gpu| {
            world.finish_gpu(gpu);
            world.check(gpu)?;
            Ok(world.is_idle(gpu))
        })
    })?;
    world::with_context(|world, gpu| {
        world.gpus[gpu]
            .device
            .free(address)
            .map_err(|_| INVALID_VALUE)
    })
}

/// Bytes in use in a pool.
pub fn used_bytes(pool: usize) -> Outcome<u64> {
    world::with(|world| {
        world
            .pools
            .get(&pool)
            .map(|p| p.used_bytes as u64)
            .ok_or(INVALID_HANDLE)
    })
}

/// Free and total bytes of the current device.
pub fn info() -> Outcome<(usize, usize)> {
    world::with_context(|world, gpu| {
        let total = world.settings.memory_bytes;
        Ok((
            total.saturating_sub(world.gpus[gpu].device.used_bytes()),
            total,
        ))
    })
}

pub fn allocate_pinned(size_bytes: usize) -> Outcome<usize> {
    world::with_context(|world, _| {
        let layout = Layout::from_size_align(size_bytes, PAGE)
            .ok()
            .filter(|l| l.size() > 0)
            .ok_or(INVALID_VALUE)?;
        // SAFETY: the layout has at least one byte.
        let pointer = unsafe { alloc_zeroed(layout) };
        if pointer.is_null() {
            return Err(OUT_OF_MEMORY);
        }
        world
            .pinned
            .insert(pointer.expose_provenance(), PinnedMemory { layout });
        Ok(pointer.expose_provenance())
    })
}

/// As the real one, waits for everything first.
pub fn free_pinned(address: usize) -> Outcome {
    world::until(|| {
        world::with(|world| {
            (0..world.gpus.len()).for_each(|gpu| world.finish_gpu(gpu));
            Ok((0..world.gpus.len()).all(|gpu| world.is_idle(gpu)))
        })
    })?;
    world::with(|world| {
        let pinned = world.pinned.remove(&address).ok_or(INVALID_VALUE)?;
        // SAFETY: allocated above with this layout, and removed from the list, so freed once.
        unsafe {
            dealloc(
                std::ptr::with_exposed_provenance_mut(address),
                pinned.layout,
            )
        };
        Ok(())
    })
}

pub fn to_device(to: u64, from: usize, size_bytes: usize, stream: usize) -> Outcome {
    world::with_stream(stream, |world, _| {
        if world.is_pinned(from, size_bytes) {
            return world.ask(
                stream,
                Op::ToDevice {
                    from,
                    to,
                    size_bytes,
                },
            );
        }
        log::note("pageable", "cuMemcpyHtoDAsync_v2");
        world.refuse_in_capture(stream)?;
        // SAFETY: the caller's promise: `from` is the address of so many bytes. Pageable memory is read before the call returns.
        let bytes =
            unsafe { slice::from_raw_parts(std::ptr::with_exposed_provenance(from), size_bytes) };
        world.ask(
            stream,
            Op::Write {
                to,
                bytes: bytes.to_vec(),
            },
        )
    })
}

pub fn to_host(to: usize, from: u64, size_bytes: usize, stream: usize) -> Outcome {
    world::with_stream(stream, |world, gpu| {
        let is_pinned = world.is_pinned(to, size_bytes);
        if !is_pinned {
            log::note("pageable", "cuMemcpyDtoHAsync_v2");
            world.refuse_in_capture(stream)?;
        }
        world.ask(
            stream,
            Op::ToHost {
                from,
                to,
                size_bytes,
            },
        )?;
        world.check(gpu)?;
        Ok(is_pinned)
    })
    // Copies to pageable memory are done when the call returns.
    .and_then(|is_pinned| {
        if is_pinned {
            Ok(())
        } else {
            crate::streams::synchronize_stream(stream)
        }
    })
}

pub fn copy(to: u64, from: u64, size_bytes: usize, stream: usize) -> Outcome {
    world::with_stream(stream, |world, _| {
        world.ask(
            stream,
            Op::Copy {
                from,
                to,
                size_bytes,
            },
        )
    })
}

pub fn copy_peer(
    to: (usize, u64),
    from: (usize, u64),
    size_bytes: usize,
    stream: usize,
) -> Outcome {
    world::with_stream(stream, |world, _| {
        world.check(from.0)?;
        world.check(to.0)?;
        world.ask(
            stream,
            Op::Peer {
                from,
                to,
                size_bytes,
            },
        )
    })
}

pub fn fill(to: u64, value: u8, size_bytes: usize, stream: usize) -> Outcome {
    world::with_stream(stream, |world, _| {
        world.ask(
            stream,
            Op::Fill {
                to,
                value,
                size_bytes,
            },
        )
    })
}

impl World {
    fn is_pinned(&self, address: usize, size_bytes: usize) -> bool {
        let found = self.pinned.range(..=address).next_back();
        found.is_some_and(|(start, p)| address + size_bytes <= start + p.layout.size())
    }
}
