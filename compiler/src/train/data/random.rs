//! Random numbers of examples.

use super::Epoch;
use crate::train::philox::Draws;

/// The random numbers of an example in an epoch. They depend on the seed, the epoch and the place of the example alone.
#[derive(Clone, Debug)]
pub struct Random {
    draws: Draws,
    next: u64,
}

/// Numbers of an example: 2^20.
const PER_EXAMPLE: u32 = 20;

impl Random {
    /// The numbers of an example for the data set with this [number](super::Dataset::n_random).
    pub(super) fn new(epoch: Epoch, n_random: u32, place: usize) -> Random {
        let name = format!("examples {n_random}");
        Random {
            draws: Draws::new(epoch.seed, &name, epoch.number),
            next: (place as u64) << PER_EXAMPLE,
        }
    }

    /// The same for another example.
    pub(super) fn at(&self, place: usize) -> Random {
        Random {
            next: (place as u64) << PER_EXAMPLE,
            ..self.clone()
        }
    }

    /// 32 random bits.
    pub fn bits(&mut self) -> u32 {
        self.next += 1;
        self.draws.bits(self.next - 1)
    }

    /// A multiple of 2^-24 from 0 to below 1.
    pub fn uniform(&mut self) -> f64 {
        f64::from(self.bits() >> 8) * 2f64.powi(-24)
    }

    /// From `low` to below `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.uniform()
    }

    /// One of `0..n`; 0 of none. The bias is below `n / 2^32`.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 32) as usize
    }

    /// True with a probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }
}
