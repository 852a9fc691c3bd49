//! Search for good placements: a portfolio of starts, refinement by moves, and branch and bound for
//! small problems.

pub mod exact;
pub mod fold;
pub mod pipeline;
pub mod portfolio;
pub mod refine;
pub mod singles;
pub mod slices;
pub mod symmetry;
