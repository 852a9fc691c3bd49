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
            static SYMBOLS: &[Symbol] = &[$(
                Symbol { name: $name, address: $path as $ty as *const u8 }
            ),*];
            SYMBOLS
        }
    };
}

use crate::TaskFn;
use crate::convert::{NarrowFn, WidenFn};
use crate::vmath::{BinaryFn, UnaryFn};

symbols! {
    crate::gemm::gm_gemm_f32 as TaskFn<crate::gemm::GemmDesc> = "gm_gemm_f32";
    crate::pack::gm_pack_b_f32 as TaskFn<crate::pack::PackBDesc> = "gm_pack_b_f32";
    crate::conv::gm_conv_f32 as TaskFn<crate::conv::ConvDesc> = "gm_conv_f32";
    crate::winograd::gm_winograd2_f32
        as TaskFn<crate::winograd::WinogradDesc> = "gm_winograd2_f32";
    crate::winograd::gm_winograd4_f32
        as TaskFn<crate::winograd::WinogradDesc> = "gm_winograd4_f32";
    crate::depthwise::gm_depthwise_f32
        as TaskFn<crate::depthwise::DepthwiseDesc> = "gm_depthwise_f32";
    crate::pool::gm_pool_f32 as TaskFn<crate::pool::PoolDesc> = "gm_pool_f32";
    crate::roi::gm_roi_align as TaskFn<crate::roi::RoiAlignDesc> = "gm_roi_align";
    crate::rows::gm_softmax_f32 as TaskFn<crate::rows::SoftmaxDesc> = "gm_softmax_f32";
    crate::rows::gm_norm_f32 as TaskFn<crate::rows::NormDesc> = "gm_norm_f32";
    crate::rows::gm_reduce_f32 as TaskFn<crate::rows::ReduceDesc> = "gm_reduce_f32";
    crate::copy::gm_copy as TaskFn<crate::copy::CopyDesc> = "gm_copy";
    crate::transpose::gm_transpose_f32 as crate::transpose::TransposeFn = "gm_transpose_f32";
    crate::convert::gm_f16_to_f32 as WidenFn = "gm_f16_to_f32";
    crate::convert::gm_bf16_to_f32 as WidenFn = "gm_bf16_to_f32";
    crate::convert::gm_f32_to_f16 as NarrowFn = "gm_f32_to_f16";
    crate::convert::gm_f32_to_bf16 as NarrowFn = "gm_f32_to_bf16";
    crate::attention::gm_attention_f32
        as TaskFn<crate::attention::AttentionDesc> = "gm_attention_f32";
    crate::vmath::gm_vexp_f32 as UnaryFn = "gm_vexp_f32";
    crate::vmath::gm_vexp2_f32 as UnaryFn = "gm_vexp2_f32";
    crate::vmath::gm_vexpm1_f32 as UnaryFn = "gm_vexpm1_f32";
    crate::vmath::gm_vlog_f32 as UnaryFn = "gm_vlog_f32";
    crate::vmath::gm_vlog2_f32 as UnaryFn = "gm_vlog2_f32";
    crate::vmath::gm_vlog1p_f32 as UnaryFn = "gm_vlog1p_f32";
    crate::vmath::gm_vtanh_f32 as UnaryFn = "gm_vtanh_f32";
    crate::vmath::gm_verf_f32 as UnaryFn = "gm_verf_f32";
    crate::vmath::gm_vsigmoid_f32 as UnaryFn = "gm_vsigmoid_f32";
    crate::vmath::gm_vsilu_f32 as UnaryFn = "gm_vsilu_f32";
    crate::vmath::gm_vgelu_f32 as UnaryFn = "gm_vgelu_f32";
    crate::vmath::gm_vgelu_tanh_f32 as UnaryFn = "gm_vgelu_tanh_f32";
    crate::vmath::gm_vsoftplus_f32 as UnaryFn = "gm_vsoftplus_f32";
    crate::vmath::gm_vmish_f32 as UnaryFn = "gm_vmish_f32";
    crate::vmath::gm_vsin_f32 as UnaryFn = "gm_vsin_f32";
    crate::vmath::gm_vcos_f32 as UnaryFn = "gm_vcos_f32";
    crate::vmath::gm_vtan_f32 as UnaryFn = "gm_vtan_f32";
    crate::vmath::gm_vasin_f32 as UnaryFn = "gm_vasin_f32";
    crate::vmath::gm_vacos_f32 as UnaryFn = "gm_vacos_f32";
    crate::vmath::gm_vatan_f32 as UnaryFn = "gm_vatan_f32";
    crate::vmath::gm_vsinh_f32 as UnaryFn = "gm_vsinh_f32";
    crate::vmath::gm_vcosh_f32 as UnaryFn = "gm_vcosh_f32";
    crate::vmath::gm_vasinh_f32 as UnaryFn = "gm_vasinh_f32";
    crate::vmath::gm_vacosh_f32 as UnaryFn = "gm_vacosh_f32";
    crate::vmath::gm_vatanh_f32 as UnaryFn = "gm_vatanh_f32";
    crate::vmath::gm_vsqrt_f32 as UnaryFn = "gm_vsqrt_f32";
    crate::vmath::gm_vrsqrt_f32 as UnaryFn = "gm_vrsqrt_f32";
    crate::vmath::gm_vrecip_f32 as UnaryFn = "gm_vrecip_f32";
    crate::vmath::gm_vpow_f32 as BinaryFn = "gm_vpow_f32";
}

#[cfg(test)]
mod tests {
    use super::symbols;

    #[test]
    fn names_are_distinct_and_prefixed() {
        let mut names: Vec<&str> = symbols().iter().map(|symbol| symbol.name).collect();
        let n = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n);
        assert!(
            names.iter().all(|name| name.starts_with("gm_")),
            "{names:?}"
        );
    }

    #[test]
    fn every_exported_function_is_listed() {
        // A function that is missing from the table would show only at link time.
        let sources = [
            include_str!("attention.rs"),
            include_str!("conv/mod.rs"),
            include_str!("convert.rs"),
            include_str!("copy.rs"),
            include_str!("depthwise.rs"),
            include_str!("gemm/mod.rs"),
            include_str!("pack.rs"),
            include_str!("pool.rs"),
            include_str!("roi.rs"),
            include_str!("rows/norm.rs"),
            include_str!("rows/reduce.rs"),
            include_str!("rows/softmax.rs"),
            include_str!("transpose.rs"),
        ];
        let exported = sources
            .iter()
            .flat_map(|source| source.split("extern \"C\" fn ").skip(1));
        let exported = exported
            .filter_map(|rest| rest.split('(').next())
            .filter(|name| name.starts_with("gm_"));
        for name in exported.chain(
            crate::vmath::FUNCTIONS
                .iter()
                .map(|function| function.symbol),
        ) {
            assert!(
                symbols().iter().any(|symbol| symbol.name == name),
                "{name} is not in the table"
            );
        }
    }
}
