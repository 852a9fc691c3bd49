//! Plain passes `Graph -> Graph`: specialisation, constant folding, dead code, common
//! subexpressions, views of concatenations, merged products, products of integers, transposed convolutions by phases, lower precision, all-reduce as transfers
//! between devices.

mod all_reduce;
mod carried_state;
mod concat_views;
mod cse;
mod fold;
pub(crate) mod indexed;
mod merge_matmuls;
mod open_rules;
mod polyphase;
mod precision;
mod prune;
mod push_pull;
mod quantized;
mod rebuild;
mod region_constants;
mod scans;
mod segments;
mod specialise;
mod split;
mod state;
mod tables;

pub use all_reduce::expand_all_reduce;
pub use carried_state::keep;
pub use concat_views::concat_views;
pub use cse::{cse, dce};
pub use fold::fold_constants;
pub use merge_matmuls::merge_matmuls;
pub use open_rules::OpenRules;
pub use polyphase::{has_phases, polyphase};
pub use precision::lower_precision;
pub use prune::prune;
pub use push_pull::{PushPull, push_pull, without_assignment};
pub use quantized::{has_integer_form, integer_products, merge_quantization, transposed_bytes};
pub use rebuild::Rebuild;
pub use region_constants::constants_into_regions;
pub use scans::trim_scans;
pub use segments::{cut, decides_extents, has_run_time_extents, segments};
pub use specialise::{map_dims, specialise, specialise_node};
pub use split::{Machine, check_divisible, place_on_servers, split_batch};
pub use state::{check_scattered, forward_state};
pub use tables::byte_tables;

use crate::error::Result;
use crate::ir::Graph;

/// Constant folding, constants of regions, common subexpressions, smaller scans, dead code.
pub fn clean(g: &Graph) -> Result<Graph> {
    let shared = cse(&constants_into_regions(&fold_constants(g)?)?)?;
    dce(&trim_scans(&dce(&shared)?)?)
}

/// Merged products, views of concatenations, and what follows from them.
pub fn merge(g: &Graph) -> Result<Graph> {
    clean(&concat_views(&merge_matmuls(g)?)?)
}

#[cfg(test)]
mod tests;
