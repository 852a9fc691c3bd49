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

/// A task kernel and the descriptor of a call.
#[derive(Clone, Copy, Debug)]
pub struct TaskCall<'d> {
    /// The kernel's linker name.
    pub symbol: &'static str,
    /// The descriptor's bytes.
    pub descriptor: &'d [u8],
}

/// Makes the symbols of task kernels, the hash of their descriptors, and [`calls`](crate::calls).
macro_rules! task_kernels {
    ($($module:ident::$symbol:ident($desc:ident)),* $(,)?) => {
        /// Kernels of one entry, which read the instruction set from their descriptors.
        static TASKS: &[Symbol] = &[$(Symbol {
            name: stringify!($symbol),
            address: $module::$symbol as TaskFn<$module::$desc> as *const u8,
        }),*];

        /// A hash of the layouts of all descriptors, which stored programs hold as bytes: programs
        /// of another one are not run.
        pub const LAYOUT: u64 =
            descriptor::layout_of_all(&[$(<$module::$desc as Descriptor>::LAYOUT),*]);

        /// Task kernels by name, each with its own descriptor.
        pub mod calls {
            $(
                #[doc = concat!("A call of `", stringify!($symbol), "`.")]
                pub fn $symbol(desc: &crate::$module::$desc) -> crate::TaskCall<'_> {
                    crate::TaskCall {
                        symbol: stringify!($symbol),
                        descriptor: crate::Descriptor::bytes(desc),
                    }
                }
            )*
        }
    };
}

pub(crate) use task_kernels;

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

use crate::TASKS;
use crate::convert::{NarrowFn, WidenFn};
use crate::isa::Isa;
use crate::transpose::TransposeFn;
use crate::vmath::{BinaryFn, FUNCTIONS};

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
    use crate::testing::sources;

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
        // A function that is missing from the tables would show only at link time.
        let listed: Vec<&str> = symbols(Isa::Portable)
            .chain(crate::scalar_math::symbols().copied())
            .chain(crate::sorting::symbols().copied())
            .map(|symbol| symbol.name)
            .collect();
        for text in sources() {
            let exported = text.split("extern \"C\" fn ").skip(1);
            let names = exported.filter_map(|rest| rest.split(['(', '<']).next());
            for name in names.filter(|name| name.starts_with("gm_")) {
                assert!(listed.contains(&name), "{name} is not in a table");
            }
        }
    }
}
