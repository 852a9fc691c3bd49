//! Launches of GPU kernels, and of a library's.

use super::frame::{Addresses, Frame, PreparedStep};
use super::memory::{Block, Memory};
use super::transfer::bytes_of;
use crate::driver::{DeviceCode, Driver, Event, HostMemory, LoadedProduct, ProductArgs, Stamps};
use crate::error::Error;
use crate::gpu::{EncodedTensorMap, GpuArg, GpuCode, GpuKernel, GpuParam, Launch, TensorMap};
use crate::product::{Product, WORKSPACE_ALIGN_BYTES};
use crate::status;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A launch with all but its buffers resolved.
pub(crate) struct PreparedLaunch {
    entry: String,
    /// Range in [`Addresses::args`].
    first_arg: usize,
    /// Its word among the frame's [`Statuses`], if it can fail.
    status: Option<usize>,
    work: Work,
}

/// Code of a launch.
enum Work {
    Kernel(KernelWork),
    Product(ProductWork),
}

struct KernelWork {
    code: Arc<dyn DeviceCode>,
    launch: Launch,
    params: Vec<GpuParam>,
    /// Room for the arguments.
    args: Vec<GpuArg>,
    /// The last encoding of each parameter that is a tensor map, with the address that it is for.
    encoded: Vec<Option<(u64, EncodedTensorMap)>>,
}

struct ProductWork {
    loaded: Box<dyn LoadedProduct>,
    has_bias: bool,
    has_workspace: bool,
}

impl PreparedLaunch {
    pub(crate) fn new(
        kernel: &GpuKernel,
        code: &[Arc<dyn DeviceCode>],
        first_arg: usize,
        statuses: &mut Statuses,
    ) -> PreparedLaunch {
        let reports = kernel.params.contains(&GpuParam::Status);
        let work = KernelWork {
            code: code[kernel.code].clone(),
            launch: kernel.launch,
            params: kernel.params.clone(),
            args: Vec::with_capacity(kernel.params.len()),
            encoded: vec![None; kernel.params.len()],
        };
        let status = reports.then(|| statuses.reserve());
        PreparedLaunch {
            entry: kernel.entry.clone(),
            first_arg,
            status,
            work: Work::Kernel(work),
        }
    }

    /// Errors as [`Driver::product`] does, naming the product.
    pub(crate) fn of_product(
        product: &Product,
        memory: &Memory,
        first_arg: usize,
    ) -> Result<PreparedLaunch, Error> {
        let Some(driver) = memory.driver() else {
            return Err(Error::internal(
                "a library's product for a device without memory of its own",
            ));
        };
        let loaded = driver
            .product(product)
            .map_err(|e| e.context(format!("product {}", product.name)))?;
        let (has_bias, has_workspace) = (product.bias.is_some(), product.workspace_bytes > 0);
        let work = Work::Product(ProductWork {
            loaded,
            has_bias,
            has_workspace,
        });
        Ok(PreparedLaunch {
            entry: product.name.clone(),
            first_arg,
            status: None,
            work,
        })
    }

    /// Starts the kernel.
    pub(crate) fn start(
        &mut self,
        addresses: &Addresses,
        statuses: &Statuses,
    ) -> Result<(), Error> {
        let first_arg = self.first_arg;
        let address = |i: u32| addresses.args[first_arg + i as usize].addr() as u64;
        let kernel = match &mut self.work {
            Work::Kernel(kernel) => kernel,
            Work::Product(product) => {
                return product
                    .start(&address)
                    .map_err(|e| e.context(format!("product {}", self.entry)));
            }
        };
        kernel.args.clear();
        for (param, encoded) in kernel.params.iter().zip(&mut kernel.encoded) {
            kernel.args.push(match param {
                GpuParam::Buffer(i) => GpuArg::Address(address(*i)),
                GpuParam::Status => {
                    GpuArg::Address(statuses.address(self.status.unwrap_or_default()))
                }
                GpuParam::TensorMap(map) => {
                    encode(&addresses.memory, map, address(map.buffer), encoded)?
                }
            });
        }
        kernel
            .code
            .launch(&self.entry, &kernel.launch, &kernel.args)
    }

    /// Its entry point.
    pub(crate) fn entry(&self) -> &str {
        &self.entry
    }

    /// The word that tells whether it failed.
    pub(crate) fn status(&self) -> Option<usize> {
        self.status
    }
}

impl ProductWork {
    fn start(&self, address: &dyn Fn(u32) -> u64) -> Result<(), Error> {
        let out = 2 + u32::from(self.has_bias);
        self.loaded.start(&ProductArgs {
            lhs: address(0),
            rhs: address(1),
            bias: if self.has_bias { address(2) } else { 0 },
            out: address(out),
            workspace: if self.has_workspace {
                address(out + 1).next_multiple_of(WORKSPACE_ALIGN)
            } else {
                0
            },
        })
    }
}

const WORKSPACE_ALIGN: u64 = WORKSPACE_ALIGN_BYTES as u64;

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
    let Some(driver) = memory.driver() else {
        return Err(Error::internal(
            "a tensor map for a device without memory of its own",
        ));
    };
    let encoded = driver.encode(map, address)?;
    *last = Some((address, encoded));
    Ok(GpuArg::TensorMap(encoded))
}

impl Frame {
    /// Time of each launch outside of sub-programs, by step: the median of several series of launches, by the device's own clock if it has one.
    pub(crate) fn time_launches(
        &mut self,
        at_least: Duration,
    ) -> Result<Vec<(usize, Duration)>, Error> {
        let Some(driver) = self.addresses.memory.driver().cloned() else {
            return Ok(Vec::new());
        };
        let stamps = driver.stamps(2)?;
        let mut times = Vec::new();
        for (i, step) in self.steps.iter_mut().enumerate() {
            let PreparedStep::Launch(launch) = step else {
                continue;
            };
            let mut series = |n: u32| {
                let ask = || (0..n).try_for_each(|_| launch.start(&self.addresses, &self.statuses));
                time_series(&*driver, stamps.as_deref(), ask)
            };
            // The first may load code.
            series(1)?;
            let mut n = 1;
            let mut taken = series(n)?;
            while taken * N_SERIES < at_least && n < MOST_LAUNCHES {
                n *= 2;
                taken = series(n)?;
            }
            let mut all = [taken; N_SERIES as usize];
            all[1..]
                .iter_mut()
                .try_for_each(|t| series(n).map(|taken| *t = taken))?;
            all.sort_unstable();
            times.push((i, all[all.len() / 2] / n));
        }
        Ok(times)
    }
}

/// Time of the requests that `ask` makes of the queue that computes.
fn time_series(
    driver: &dyn Driver,
    stamps: Option<&dyn Stamps>,
    ask: impl FnOnce() -> Result<(), Error>,
) -> Result<Duration, Error> {
    let started = Instant::now();
    stamps.map_or(Ok(()), |s| s.stamp(0))?;
    ask()?;
    stamps.map_or(Ok(()), |s| s.stamp(1))?;
    driver.finish()?;
    stamps.map_or_else(|| Ok(started.elapsed()), |s| s.between(0, 1))
}

/// Series of launches, of which the median counts.
const N_SERIES: u32 = 5;
/// Launches of one kernel that are timed together.
const MOST_LAUNCHES: u32 = 1 << 16;

/// Loads the code of a partition.
pub(crate) fn load(
    driver: &dyn Driver,
    code: &[GpuCode],
) -> Result<Vec<Arc<dyn DeviceCode>>, Error> {
    code.iter().map(|c| Ok(driver.load(c)?.into())).collect()
}

/// The status words of a frame's launches, which are looked at once at the end of a run: until then the device need not be waited for.
#[derive(Default)]
pub(crate) struct Statuses {
    n_words: usize,
    words: Option<Words>,
}

struct Words {
    words: Block,
    /// As many bytes, all zero.
    zeros: Block,
    /// Status words as [`Statuses::ask`] copied them.
    found: Box<dyn HostMemory>,
    asked: Arc<dyn Event>,
}

const WORD_BYTES: usize = size_of::<u32>();

impl Statuses {
    /// The index of one more word.
    fn reserve(&mut self) -> usize {
        self.n_words += 1;
        self.n_words - 1
    }

    /// Allocates all that were reserved.
    pub(crate) fn allocate(&mut self, memory: &Memory) -> Result<(), Error> {
        let (Some(driver), n_bytes) = (memory.driver(), self.n_words * WORD_BYTES) else {
            return Ok(());
        };
        if n_bytes == 0 {
            return Ok(());
        }
        let zeros = memory.allocate(n_bytes)?;
        // SAFETY: the block is new and has this size.
        unsafe { memory.write(zeros.as_ptr(), &vec![0; n_bytes])? };
        let (words, found, asked) = (
            memory.allocate(n_bytes)?,
            driver.pin(n_bytes)?,
            driver.event()?,
        );
        self.words = Some(Words {
            words,
            zeros,
            found,
            asked,
        });
        Ok(())
    }

    fn address(&self, index: usize) -> u64 {
        self.words
            .as_ref()
            .map_or(0, |w| w.words.as_ptr().addr() as u64)
            + (index * WORD_BYTES) as u64
    }

    /// Says that no launch has failed, in the queue that computes.
    pub(crate) fn clear(&self, memory: &Memory) -> Result<(), Error> {
        let Some(w) = &self.words else { return Ok(()) };
        // SAFETY: both blocks have this size; only launches, which come after, use the words.
        unsafe {
            memory.copy(
                w.zeros.as_ptr(),
                w.words.as_ptr(),
                self.n_words * WORD_BYTES,
            )
        }
    }

    /// Asks for the words; false when there are none. They are there when the device has finished.
    pub(crate) fn ask(&self, memory: &Memory) -> Result<bool, Error> {
        let (Some(w), Some(driver)) = (&self.words, memory.driver()) else {
            return Ok(false);
        };
        // SAFETY: the words live as long as the frame, which outlives its runs; they are looked at when the device has finished.
        unsafe { driver.send(w.words.as_ptr().addr() as u64, &*w.found, &*w.asked, None)? };
        Ok(true)
    }

    /// The first word that says that its launch failed, and the error. The device has finished since [`Statuses::ask`].
    pub(crate) fn failure(&self) -> Option<(usize, Error)> {
        // SAFETY: no copy is under way.
        let found = unsafe { bytes_of(&*self.words.as_ref()?.found) };
        let words = found
            .chunks_exact(WORD_BYTES)
            .map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        words
            .enumerate()
            .find_map(|(i, word)| Some((i, status::to_error(word)?)))
    }
}
