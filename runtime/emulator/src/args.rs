//! Parameters of a launch as bytes.

/// Builds the parameter bytes of a kernel: each value at the next multiple of its alignment, as C lays out a struct.
///
/// ```
/// let args = gristmill_emulator::Args::new().u32(7).u64(0x1000);
/// assert_eq!(args.bytes().len(), 16);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Args {
    bytes: Vec<u8>,
}

impl Args {
    /// No parameters yet.
    pub fn new() -> Args {
        Args::default()
    }

    /// A pointer, or any other 64-bit integer.
    #[must_use]
    pub fn u64(self, value: u64) -> Args {
        self.value(8, &value.to_le_bytes())
    }

    /// A 32-bit integer; signed ones by `as u32`.
    #[must_use]
    pub fn u32(self, value: u32) -> Args {
        self.value(4, &value.to_le_bytes())
    }

    /// A `float`.
    #[must_use]
    pub fn f32(self, value: f32) -> Args {
        self.value(4, &value.to_le_bytes())
    }

    /// A `double`.
    #[must_use]
    pub fn f64(self, value: f64) -> Args {
        self.value(8, &value.to_le_bytes())
    }

    /// Any value by its bytes and its alignment, a power of two.
    #[must_use]
    pub fn value(mut self, align: usize, bytes: &[u8]) -> Args {
        let at = self.bytes.len().next_multiple_of(align.max(1));
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Parameters for [`Device::launch`](crate::Device::launch).
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
