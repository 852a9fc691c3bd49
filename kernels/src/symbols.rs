//! The table of entries that generated code links against.

/// An exported kernel.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Its linker name.
    pub name: &'static str,
    /// Its code.
    pub address: *const u8,
}

// SAFETY: the address is that of a function, never written through.
unsafe impl Sync for Symbol {}
// SAFETY: as above.
unsafe impl Send for Symbol {}

macro_rules! symbols {
    ($($path:path as $ty:ty = $name:literal;)*) => {
        /// Every exported kernel.
        pub fn symbols() -> &'static [Symbol] {
            static SYMBOLS: &[Symbol] = &[$(Symbol { name: $name, address: $path as $ty as *const u8 }),*];
            SYMBOLS
        }
    };
}

use crate::TaskFn;

symbols! {
    crate::gemm::gm_gemm_f32 as TaskFn<crate::gemm::GemmDesc> = "gm_gemm_f32";
    crate::pack::gm_pack_b_f32 as TaskFn<crate::pack::PackBDesc> = "gm_pack_b_f32";
}
