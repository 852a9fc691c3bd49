//! Random numbers by name and position: words of [`gristmill_kernels::random`].
//!
//! A number depends on a key, a stream and its own position alone, so that it does not matter who draws it, and when.

use crate::ir::random::key;
use gristmill_kernels::random::{WORDS, block};

/// Numbers of a seed for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draws {
    key: u64,
    stream: u64,
}

impl Draws {
    /// The numbers of a stream; other names, seeds and streams have others.
    pub fn new(seed: u64, name: &str, stream: u64) -> Draws {
        Draws {
            key: key(seed, name),
            stream,
        }
    }

    /// The word at a position.
    pub fn bits(&self, position: u64) -> u32 {
        let words = WORDS as u64;
        block(self.key, self.stream, position / words)[(position % words) as usize]
    }

    /// A multiple of 2^-24 from 0 to below 1.
    pub fn uniform(&self, position: u64) -> f64 {
        f64::from(self.bits(position) >> 8) * 2f64.powi(-24)
    }

    /// Evenly from the middle of a 2^-32 of the interval from 0 to 1.
    pub fn open(&self, position: u64) -> f64 {
        (f64::from(self.bits(position)) + 0.5) * 2f64.powi(-32)
    }
}

/// A permutation of `0..n` (Fisher and Yates) for an epoch.
pub fn permutation(n: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let draws = Draws::new(seed, "order of examples", epoch);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        let [low, high] = [0, 1].map(|k| u64::from(draws.bits(2 * i as u64 + k)));
        // The bias of a remainder of 64 bits is below one in a billion for lists that fit in memory.
        let j = (low | high << 32) % (i as u64 + 1);
        order.swap(i, j as usize);
    }
    order
}
