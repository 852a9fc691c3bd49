//! Random numbers by position: Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).
//!
//! A number depends on a key, a stream and its own position alone, so that it does not matter who draws it, and when.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Philox4x32-10: four random words of a counter and a key.
pub fn philox([mut a, mut b, mut c, mut d]: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [low, high] =
            [(a, MULTIPLIERS[0]), (c, MULTIPLIERS[1])].map(|(x, m)| u64::from(x) * u64::from(m));
        [a, b, c, d] = [
            (high >> 32) as u32 ^ b ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ d ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    [a, b, c, d]
}

/// Numbers of a seed for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draws {
    key: [u32; 2],
    stream: u64,
}

impl Draws {
    /// The numbers of a stream; other names, seeds and streams have others.
    pub fn new(seed: u64, name: &str, stream: u64) -> Draws {
        let key = seed ^ fnv1a(name);
        Draws {
            key: [key as u32, (key >> 32) as u32],
            stream,
        }
    }

    /// The word at a position.
    pub fn bits(&self, position: u64) -> u32 {
        let block = position / 4;
        let counter = [block, self.stream].map(|x| [x as u32, (x >> 32) as u32]);
        let [[a, b], [c, d]] = counter;
        philox([a, b, c, d], self.key)[(position % 4) as usize]
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

/// A hash of a name that stays the same from version to version (Fowler, Noll and Vo, 64 bits, "1a").
fn fnv1a(name: &str) -> u64 {
    let start = 0xCBF2_9CE4_8422_2325u64;
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
    name.bytes().fold(start, step)
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
