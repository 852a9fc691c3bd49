//! Sizes of symbols by which choices for all sizes are priced.

use super::Config;
use crate::ir::{Bindings, Dim, Graph, Op};
use crate::options::DimRange;
use crate::passes::{self, OpenRules};
use std::collections::{BTreeMap, BTreeSet};

/// Extents of dims without a range: odd, so that kernels are not chosen for tiles that happen to be
/// full, and different, so that dims do not happen to be equal.
const EXTENTS: [usize; 8] = [31, 37, 41, 43, 47, 53, 59, 61];

/// Extents for the dims of a rule that those contradict. Multiples fit models that halve an axis and double it again, large ones
/// fit windows over samples of sound, and small ones tables that are short.
const OTHERS: [usize; 15] = [
    32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 16, 8, 4, 2, 1, 0,
];

/// Sizes of the symbols of a graph: the geometric mean of a declared range, some tens of elements otherwise. Where such sizes
/// contradict each other, as those of a slice and of what it is cut from may, others are tried.
pub(super) fn representative(g: &Graph, first: &Bindings, config: Config) -> Bindings {
    let symbols = g.symbols();
    let sized = |size: &dyn Fn(usize, &str) -> usize| sizes(&symbols, config, size);
    let different = sized(&|i, _| different(i));
    if fits(g, &different) {
        return different;
    }
    let starts = starts(g);
    let alike = sized(&|_, symbol| match starts.contains(symbol) {
        true => 0,
        false => EXTENTS[0],
    });
    let given = sized(&|i, symbol| first.get(symbol).copied().unwrap_or(self::different(i)));
    let known = [alike, given].into_iter().find(|sizes| fits(g, sizes));
    let mended = || mended(g, &different, config).filter(|sizes| fits(g, sizes));
    known.or_else(mended).unwrap_or(different)
}

/// The extent of symbol `i` where all differ.
fn different(i: usize) -> usize {
    EXTENTS[i % EXTENTS.len()]
}

fn fits(g: &Graph, sizes: &Bindings) -> bool {
    passes::specialise(g, sizes).is_ok()
}

/// Sizes by number and name of the symbols, for those without a declared range.
fn sizes(symbols: &[String], config: Config, size: &dyn Fn(usize, &str) -> usize) -> Bindings {
    let of = |(i, symbol): (usize, &String)| {
        let range = config.options.ranges.get(symbol);
        let size = range.map_or_else(|| size(i, symbol), middle);
        (symbol.clone(), size)
    };
    symbols.iter().enumerate().map(of).collect()
}

/// The sizes with others for the symbols of each rule that they contradict; `None` if all of [`OTHERS`] were tried in vain.
fn mended(g: &Graph, sizes: &Bindings, config: Config) -> Option<Bindings> {
    let rules = OpenRules::of(g);
    let mut sizes = sizes.clone();
    // The next of `OTHERS` for each symbol.
    let mut next: BTreeMap<String, usize> = BTreeMap::new();
    while let Some(mut symbols) = rules.contradicted(&sizes) {
        symbols.retain(|symbol| !config.options.ranges.contains_key(symbol));
        // Symbols of one rule are often to be equal.
        let index = symbols.iter().filter_map(|s| next.get(s)).max();
        let index = index.copied().unwrap_or(0);
        let size = *OTHERS.get(index).filter(|_| !symbols.is_empty())?;
        for symbol in symbols {
            sizes.insert(symbol.clone(), size);
            next.insert(symbol, index + 1);
        }
    }
    Some(sizes)
}

/// Symbols that slices begin at.
fn starts(g: &Graph) -> BTreeSet<String> {
    let mut symbols = BTreeSet::new();
    for (_, node) in g.nodes() {
        if let Op::Slice { starts: from, .. } = &node.op {
            symbols.extend(from.iter().filter_map(Dim::as_symbol).map(str::to_owned));
        }
        symbols.extend(node.regions.iter().flat_map(starts));
    }
    symbols
}

fn middle(range: &DimRange) -> usize {
    let product = range.min.max(1) as f64 * range.max.max(1) as f64;
    product.sqrt().round() as usize
}
