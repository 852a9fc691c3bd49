//! Plain passes `Graph -> Graph`: specialisation, constant folding, dead code, common subexpressions.

mod cse;
mod fold;
mod rebuild;
mod specialise;

pub use cse::{cse, dce};
pub use fold::fold_constants;
pub use rebuild::Rebuild;
pub use specialise::specialise;

#[cfg(test)]
mod tests;
