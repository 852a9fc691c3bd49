//! Random graphs with symbolic dims.

use crate::error::{Error, Result};
use crate::ir::{Dim, Graph};
use crate::passes::map_dims;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// The graph with symbols in the place of some extents: each multiple of an extent, in inputs and
/// attributes, becomes the same multiple of its symbol.
///
/// Errors where that contradicts a type rule (an axis that was split at another place, for
/// example), and where no input has a symbol that an attribute has.
pub fn with_symbols(g: &Graph, symbols: &[(usize, &str)]) -> Result<Graph> {
    let used = RefCell::new(BTreeSet::new());
    let symbolic = map_dims(g, &|dim| {
        let divided = |&(extent, symbol): &(usize, &str)| {
            let n = dim
                .as_usize()
                .filter(|n| *n > 0 && n.is_multiple_of(extent))?;
            used.borrow_mut().insert(symbol.to_owned());
            Some(Dim::symbol(symbol).scale((n / extent) as i64))
        };
        let found = symbols.iter().find_map(divided);
        found.unwrap_or_else(|| dim.clone())
    })?;
    let known: BTreeSet<String> = symbolic.symbols().into_iter().collect();
    match used.borrow().difference(&known).next() {
        Some(symbol) => Err(Error::invalid(format!("no input has the symbol {symbol}"))),
        None => Ok(symbolic),
    }
}
