//! Common parts of warp-group kernels (`sm_90a`): a group whose first thread asks for tiles, and
//! two that compute with the registers it gives up.

use super::candidates::{MULTIPROCESSORS, Resources};
use super::emit::{Emitter, Value};
use crate::codegen::pull::Puller;
use crate::error::Result;

/// A group that fetches and two that compute.
const THREADS: u64 = 384;
/// Tiles from which blocks of this size keep the GPU busier than smaller ones.
pub(super) const LEAST_TILES: usize = 64;
/// A barrier in shared memory.
pub(super) const BARRIER_BYTES: usize = 8;

/// Blocks that stay, and go through the tiles.
pub(super) fn resources(n_tiles: usize, shared_bytes: usize, cluster: usize) -> Resources {
    let (blocks, shared_bytes) = (n_tiles.min(MULTIPROCESSORS) as u64, shared_bytes as u32);
    Resources {
        blocks,
        threads: THREADS,
        shared_bytes,
        per_multiprocessor: 1,
        cluster: cluster as u32,
    }
}

/// Opens the function of the fetching thread for a tile of an operand.
pub(super) fn open_fetch(e: &mut Emitter, name: &str) {
    e.open(&format!(
        "const auto {name} = [&](u32 to, u32 barrier, bool shares, int first, int k0)"
    ));
}

/// Writes the code of the fetching thread and of the computing groups; `of` is the prelude's type
/// that tells a thread its group.
pub(super) fn split(
    p: &mut Puller<Value>,
    e: &mut Emitter,
    of: &str,
    fetch: impl FnOnce(&mut Puller<Value>, &mut Emitter) -> Result<()>,
    compute: impl FnOnce(&mut Puller<Value>, &mut Emitter) -> Result<()>,
) -> Result<()> {
    e.open(&format!("if ({of}::group() < 0)"));
    e.line("gm_fewer_registers();");
    e.open("if (threadIdx.x == 0)");
    fetch(p, e)?;
    e.close();
    e.close_with("} else {");
    e.indent();
    e.line("gm_more_registers();");
    compute(p, e)?;
    e.close();
    Ok(())
}
