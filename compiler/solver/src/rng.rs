//! Pseudo-random numbers that are the same on every machine, for search and for tests.

/// A small generator of pseudo-random numbers (splitmix64: Steele, Lea and Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An index in `0..n`; 0 when `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.number(n as u64) as usize
    }

    /// A number in `0..n`; 0 when `n` is 0.
    pub fn number(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of the items, which must not be empty.
    pub fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }

    /// A number of the standard normal distribution, by adding twelve uniform ones.
    pub fn normal(&mut self) -> f64 {
        let scale = 1.0 / (1u64 << 53) as f64;
        (0..12)
            .map(|_| (self.bits() >> 11) as f64 * scale)
            .sum::<f64>()
            - 6.0
    }
}
