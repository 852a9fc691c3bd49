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

/// A kernel of one entry: it reads the instruction set from its descriptor.
macro_rules! tasks {
    ($($path:path as $ty:ty = $name:literal;)*) => {
        static TASKS: &[Symbol] = &[$(
            Symbol { name: $name, address: $path as $ty as *const u8 }
        ),*];
    };
}

/// A kernel with an entry for each instruction set.
macro_rules! leaves {
    ($($symbol:ident in $module:ident as $ty:ty;)*) => {
        static LEAVES: &[[Symbol; Isa::ALL.len()]] = &[$([
            Symbol { name: stringify!($symbol), address: crate::$module::$symbol::<1> as $ty as *const u8 },
            Symbol { name: stringify!($symbol), address: crate::$module::$symbol::<2> as $ty as *const u8 },
            Symbol { name: stringify!($symbol), address: crate::$module::$symbol::<3> as $ty as *const u8 },
        ]),*];
    };
}

/// Every exported kernel. Those that have no descriptor are of an instruction set, which this CPU must have when they run: so the
/// same code gives the same bits on every CPU that has it.
pub fn symbols(isa: Isa) -> impl Iterator<Item = Symbol> {
    let leaves = LEAVES.iter().map(move |by_isa| by_isa[isa as usize - 1]);
    let functions = FUNCTIONS.iter().map(move |f| Symbol {
        name: f.symbol,
        address: f.kernel(isa) as *const u8,
    });
    TASKS.iter().copied().chain(leaves).chain(functions)
}

use crate::TaskFn;
use crate::convert::{NarrowFn, WidenFn};
use crate::isa::Isa;
use crate::transpose::TransposeFn;
use crate::vmath::{BinaryFn, FUNCTIONS};

tasks! {
    crate::gemm::gm_gemm_f32 as TaskFn<crate::gemm::GemmDesc> = "gm_gemm_f32";
    crate::pack::gm_pack_b_f32 as TaskFn<crate::pack::PackBDesc> = "gm_pack_b_f32";
    crate::columns::gm_reduce_columns_f32
        as TaskFn<crate::columns::ColumnsDesc> = "gm_reduce_columns_f32";
    crate::standardize::gm_column_moments_f32
        as TaskFn<crate::standardize::StandardizeDesc> = "gm_column_moments_f32";
    crate::standardize::gm_standardize_f32
        as TaskFn<crate::standardize::StandardizeDesc> = "gm_standardize_f32";
    crate::conv::gm_conv_f32 as TaskFn<crate::conv::ConvDesc> = "gm_conv_f32";
    crate::winograd::gm_winograd2_f32
        as TaskFn<crate::winograd::WinogradDesc> = "gm_winograd2_f32";
    crate::winograd::gm_winograd4_f32
        as TaskFn<crate::winograd::WinogradDesc> = "gm_winograd4_f32";
    crate::depthwise::gm_depthwise_f32
        as TaskFn<crate::depthwise::DepthwiseDesc> = "gm_depthwise_f32";
    crate::pool::gm_pool_f32 as TaskFn<crate::pool::PoolDesc> = "gm_pool_f32";
    crate::pool_gradient::gm_max_pool_grad_f32
        as TaskFn<crate::pool_gradient::MaxPoolGradDesc> = "gm_max_pool_grad_f32";
    crate::random::gm_random_bits
        as TaskFn<crate::random::RandomBitsDesc> = "gm_random_bits";
    crate::roi::gm_roi_align as TaskFn<crate::roi::RoiAlignDesc> = "gm_roi_align";
    crate::rows::gm_softmax_f32 as TaskFn<crate::rows::SoftmaxDesc> = "gm_softmax_f32";
    crate::rows::gm_norm_f32 as TaskFn<crate::rows::NormDesc> = "gm_norm_f32";
    crate::rows::gm_reduce_f32 as TaskFn<crate::rows::ReduceDesc> = "gm_reduce_f32";
    crate::copy::gm_copy as TaskFn<crate::copy::CopyDesc> = "gm_copy";
    crate::attention::gm_attention_f32
        as TaskFn<crate::attention::AttentionDesc> = "gm_attention_f32";
}

leaves! {
    gm_transpose_f32 in transpose as TransposeFn;
    gm_f16_to_f32 in convert as WidenFn;
    gm_bf16_to_f32 in convert as WidenFn;
    gm_f32_to_f16 in convert as NarrowFn;
    gm_f32_to_bf16 in convert as NarrowFn;
    gm_vpow_f32 in vmath as BinaryFn;
}

#[cfg(test)]
mod tests {
    use super::symbols;
    use crate::isa::Isa;

    #[test]
    fn names_are_distinct_and_prefixed() {
        let mut names: Vec<&str> = symbols(Isa::Avx2).map(|symbol| symbol.name).collect();
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
            include_str!("columns.rs"),
            include_str!("conv/mod.rs"),
            include_str!("convert.rs"),
            include_str!("copy.rs"),
            include_str!("depthwise.rs"),
            include_str!("gemm/mod.rs"),
            include_str!("pack.rs"),
            include_str!("pool.rs"),
            include_str!("pool_gradient.rs"),
            include_str!("random.rs"),
            include_str!("roi.rs"),
            include_str!("rows/norm.rs"),
            include_str!("rows/reduce.rs"),
            include_str!("rows/softmax.rs"),
            include_str!("transpose.rs"),
            include_str!("winograd/mod.rs"),
        ];
        let exported = sources
            .iter()
            .flat_map(|source| source.split("extern \"C\" fn ").skip(1));
        let exported = exported
            .filter_map(|rest| rest.split(['(', '<']).next())
            .filter(|name| name.starts_with("gm_"));
        for name in exported {
            assert!(
                symbols(Isa::Portable).any(|symbol| symbol.name == name),
                "{name} is not in the table"
            );
        }
    }
}
