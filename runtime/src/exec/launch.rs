//! Launches of GPU kernels.

use super::frame::Addresses;
use super::memory::{Block, Memory};
use super::step::Stop;
use crate::driver::{Driver, Loaded};
use crate::error::{Error, ErrorKind};
use crate::gpu::{EncodedTensorMap, GpuArg, GpuCode, GpuKernel, GpuParam, Launch, TensorMap};
use crate::status;
use std::sync::Arc;

/// A launch with all but its buffers resolved.
pub(crate) struct PreparedLaunch {
    code: Arc<dyn Loaded>,
    entry: String,
    launch: Launch,
    params: Vec<GpuParam>,
    /// Range in [`Addresses::args`].
    first_arg: usize,
    /// Its word among the frame's [`Statuses`], if it can fail.
    status: Option<usize>,
    /// Room for the arguments.
    args: Vec<GpuArg>,
    /// The last encoding of each parameter that is a tensor map, with the address that it is for.
    encoded: Vec<Option<(u64, EncodedTensorMap)>>,
}

impl PreparedLaunch {
    pub(crate) fn new(
        kernel: &GpuKernel,
        code: &[Arc<dyn Loaded>],
        first_arg: usize,
        statuses: &mut Statuses,
    ) -> PreparedLaunch {
        let reports = kernel.params.contains(&GpuParam::Status);
        PreparedLaunch {
            code: code[kernel.code].clone(),
            entry: kernel.entry.clone(),
            launch: kernel.launch,
            params: kernel.params.clone(),
            first_arg,
            status: reports.then(|| statuses.reserve()),
            args: Vec::with_capacity(kernel.params.len()),
            encoded: vec![None; kernel.params.len()],
        }
    }

    /// Starts the kernel.
    pub(crate) fn start(&mut self, addresses: &Addresses, statuses: &Statuses) -> Result<(), Error> {
        self.args.clear();
        let address = |i: u32| addresses.args[self.first_arg + i as usize].addr() as u64;
        for (param, encoded) in self.params.iter().zip(&mut self.encoded) {
            self.args.push(match param {
                GpuParam::Buffer(i) => GpuArg::Address(address(*i)),
                GpuParam::Status => GpuArg::Address(statuses.address(self.status.unwrap_or_default())),
                GpuParam::TensorMap(map) => encode(&addresses.memory, map, address(map.buffer), encoded)?,
            });
        }
        self.code.launch(&self.entry, &self.launch, &self.args)
    }

    /// The word that tells whether it failed.
    pub(crate) fn status(&self) -> Option<usize> {
        self.status
    }
}

/// A tensor map for the buffer at `address`, from the last launch if that was for the same.
fn encode(
    memory: &Memory,
    map: &TensorMap,
    address: u64,
    last: &mut Option<(u64, EncodedTensorMap)>,
) -> Result<GpuArg, Error> {
    if let Some((_, encoded)) = last.filter(|l| l.0 == address) {
        return Ok(GpuArg::TensorMap(encoded));
    }
    let Memory::Device(driver) = memory else {
        return Err(Error::new(ErrorKind::Internal, "a tensor map for a device without memory of its own"));
    };
    let encoded = driver.encode(map, address)?;
    *last = Some((address, encoded));
    Ok(GpuArg::TensorMap(encoded))
}

/// Loads the code of a partition.
pub(crate) fn load(driver: &dyn Driver, code: &[GpuCode]) -> Result<Vec<Arc<dyn Loaded>>, Error> {
    code.iter().map(|c| Ok(driver.load(c)?.into())).collect()
}

/// The status words of a frame's launches, which are looked at once at the end of a run: until then the device need not be waited for.
#[derive(Default)]
pub(crate) struct Statuses {
    words: Option<Block>,
    /// Copies on the host, in bytes.
    host: Vec<u8>,
}

const WORD_BYTES: usize = size_of::<u32>();

impl Statuses {
    /// The index of one more word.
    fn reserve(&mut self) -> usize {
        self.host.extend([0; WORD_BYTES]);
        self.host.len() / WORD_BYTES - 1
    }

    /// Allocates all that were reserved.
    pub(crate) fn allocate(&mut self, memory: &Memory) -> Result<(), Error> {
        self.words = if self.host.is_empty() { None } else { Some(memory.allocate(self.host.len())?) };
        Ok(())
    }

    fn address(&self, index: usize) -> u64 {
        self.words.as_ref().map_or(0, |b| b.as_ptr().addr() as u64) + (index * WORD_BYTES) as u64
    }

    /// Says that no launch has failed.
    pub(crate) fn clear(&mut self, memory: &Memory) -> Result<(), Error> {
        let Some(words) = &self.words else { return Ok(()) };
        self.host.fill(0);
        // SAFETY: the block has this size, and only launches, none of which is under way, use it.
        unsafe { memory.write(words.as_ptr(), &self.host) }
    }

    /// The first word that says that its launch failed, and the error.
    pub(crate) fn failure(&mut self, memory: &Memory) -> Result<Option<(usize, Error)>, Stop> {
        let Some(words) = &self.words else { return Ok(None) };
        // SAFETY: the block has this size; reading waits for the launches that write it.
        unsafe { memory.read(words.as_ptr(), &mut self.host)? };
        let words = self.host.chunks_exact(WORD_BYTES).map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        Ok(words.enumerate().find_map(|(i, word)| Some((i, status::to_error(word)?))))
    }
}
