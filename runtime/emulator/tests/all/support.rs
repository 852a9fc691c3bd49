//! What the tests share: committed PTX, buffers, launches, random numbers.

use gristmill_emulator::{Args, Checks, Device, Fault, LaunchConfig, Limits, Module};

/// Races are checked in every test.
pub const CHECKS: Checks = Checks { races: true };

/// The PTX of `tests/data/NAME.ptx`.
pub fn ptx(name: &str) -> String {
    let path = format!("{}/tests/data/{name}.ptx", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The module of `tests/data/NAME.ptx`.
pub fn module(name: &str) -> Module {
    Module::parse(&ptx(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// A small device.
pub fn device() -> Device {
    Device::new(Limits {
        memory_bytes: 1 << 30,
        ..Limits::default()
    })
}

/// A one-dimensional launch.
pub fn line(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        ..LaunchConfig::default()
    }
}

/// A type with a fixed size in memory.
pub trait Plain: Copy {
    /// Little-endian.
    fn bytes(self) -> Vec<u8>;
    /// From as many bytes as the type has.
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($ty:ty),*) => {
        $(impl Plain for $ty {
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn read(bytes: &[u8]) -> $ty {
                <$ty>::from_le_bytes(bytes.try_into().expect("bytes of one value"))
            }
        })*
    };
}

plain!(u8, u16, u32, u64, i32, i64, f32, f64);

/// A buffer with these values.
pub fn upload<T: Plain>(device: &Device, values: &[T]) -> u64 {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.bytes()).collect();
    let address = device.alloc(bytes.len()).expect("the device has room");
    device
        .copy_in(address, &bytes)
        .expect("the buffer is that long");
    address
}

/// The first `count` values of a buffer.
pub fn download<T: Plain>(device: &Device, address: u64, count: usize) -> Vec<T> {
    let mut bytes = vec![0; count * size_of::<T>()];
    device
        .copy_out(&mut bytes, address)
        .expect("the buffer is that long");
    bytes.chunks_exact(size_of::<T>()).map(T::read).collect()
}

/// Launches with all checks.
pub fn try_run(
    device: &Device,
    module: &Module,
    kernel: &str,
    config: &LaunchConfig,
    args: &Args,
) -> Result<(), Fault> {
    device
        .launch(module, kernel, config, args.bytes(), &CHECKS)
        .map(drop)
}

/// The same where nothing may go wrong.
pub fn run(device: &Device, module: &Module, kernel: &str, config: &LaunchConfig, args: &Args) {
    try_run(device, module, kernel, config, args).unwrap_or_else(|e| panic!("{kernel}: {e}"));
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Random(pub u64);

impl Random {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// From -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Several of them.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

/// Frobenius norm of the difference, relative to that of `expected`.
pub fn relative_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let error: f64 = found
        .iter()
        .zip(expected)
        .map(|(f, e)| square(f64::from(*f) - e))
        .sum();
    let norm: f64 = expected.iter().map(|e| square(*e)).sum();
    assert!(error.is_finite(), "a result is not a finite number");
    (error / norm).sqrt()
}
