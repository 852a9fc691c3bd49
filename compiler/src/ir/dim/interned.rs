//! Atoms, of which equal ones are one allocation.
//!
//! Expressions over sizes share most of their parts: an extent that is padded to a multiple contains the extent
//! twice, so its text doubles with each layer of a model while its different parts grow by a few. As each part is
//! there once, comparing, hashing and copying take constant time, and walks remember what they have seen.

use super::{Atom, Dim};
use gristmill_runtime::sync::lock;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, Weak};

/// An atom; those that are equal are one allocation.
#[derive(Clone)]
pub(super) struct Interned(Arc<Entry>);

struct Entry {
    atom: Atom,
    facts: Facts,
}

/// Properties of an atom, found once.
struct Facts {
    /// Of the structure: the same in every process.
    hash: u64,
    /// Atoms in its text, repeated ones too.
    n_atoms: u32,
    /// Atoms on the longest path into it.
    depth: u32,
    has_extreme: bool,
    /// Names of all symbols, sorted, each once.
    symbols: Arc<[Arc<str>]>,
}

/// All atoms in use, by their hash. Entries of atoms that are gone are swept away when the table has doubled.
struct Table {
    by_hash: HashMap<u64, Vec<Weak<Entry>>>,
    n_entries: usize,
    /// Number of entries at which to sweep.
    sweep_at: usize,
}

/// Smallest table that is worth sweeping.
const LEAST_SWEEP: usize = 4096;

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(|| {
    Mutex::new(Table {
        by_hash: HashMap::new(),
        n_entries: 0,
        sweep_at: LEAST_SWEEP,
    })
});

impl Table {
    fn find(&self, hash: u64, atom: &Atom) -> Option<Interned> {
        let candidates = self.by_hash.get(&hash)?.iter();
        let mut alive = candidates.filter_map(Weak::upgrade);
        alive.find(|entry| entry.atom == *atom).map(Interned)
    }

    fn insert(&mut self, made: &Interned) {
        if self.n_entries >= self.sweep_at {
            self.sweep();
        }
        let same_hash = self.by_hash.entry(made.0.facts.hash).or_default();
        same_hash.push(Arc::downgrade(&made.0));
        self.n_entries += 1;
    }

    fn sweep(&mut self) {
        self.by_hash.retain(|_, entries| {
            entries.retain(|entry| entry.strong_count() > 0);
            !entries.is_empty()
        });
        self.n_entries = self.by_hash.values().map(Vec::len).sum();
        self.sweep_at = (2 * self.n_entries).max(LEAST_SWEEP);
    }
}

impl Interned {
    pub(super) fn new(atom: Atom) -> Interned {
        let mut hasher = DefaultHasher::new();
        atom.hash(&mut hasher);
        let hash = hasher.finish();
        // A panic cannot leave the table half changed: each change is one call.
        let mut table = lock(&TABLE);
        if let Some(known) = table.find(hash, &atom) {
            return known;
        }
        let facts = Facts::of(&atom, hash);
        let made = Interned(Arc::new(Entry { atom, facts }));
        table.insert(&made);
        made
    }

    /// Atoms in its text, repeated ones too; saturates.
    pub(super) fn n_atoms(&self) -> u32 {
        self.0.facts.n_atoms
    }

    pub(super) fn depth(&self) -> u32 {
        self.0.facts.depth
    }

    pub(super) fn has_extreme(&self) -> bool {
        self.0.facts.has_extreme
    }

    /// Names of all symbols, sorted, each once.
    pub(super) fn symbols(&self) -> &[Arc<str>] {
        &self.0.facts.symbols
    }
}

impl Facts {
    fn of(atom: &Atom, hash: u64) -> Facts {
        let parts = atom.parts();
        let inner = || parts.iter().flat_map(|d| &d.terms).map(|(a, _)| a);
        Facts {
            hash,
            n_atoms: inner().fold(1, |n: u32, a| n.saturating_add(a.n_atoms())),
            depth: 1 + inner().map(Interned::depth).max().unwrap_or(0),
            has_extreme: matches!(atom, Atom::Min(_) | Atom::Max(_))
                || inner().any(Interned::has_extreme),
            symbols: symbols_of(atom, inner()),
        }
    }
}

fn symbols_of<'a>(atom: &Atom, inner: impl Iterator<Item = &'a Interned>) -> Arc<[Arc<str>]> {
    if let Atom::Symbol(name) = atom {
        return [name.clone()].into();
    }
    let sets: Vec<&Arc<[Arc<str>]>> = inner.map(|a| &a.0.facts.symbols).collect();
    let largest = sets.iter().max_by_key(|s| s.len());
    let is_within = |s: &[Arc<str>]| {
        let all = largest.map_or(&[][..], |l| &l[..]);
        s.iter().all(|name| all.binary_search(name).is_ok())
    };
    if let Some(&largest) = largest.filter(|_| sets.iter().all(|s| is_within(s))) {
        return largest.clone();
    }
    let mut all: Vec<Arc<str>> = sets.iter().flat_map(|s| s.iter().cloned()).collect();
    all.sort_unstable();
    all.dedup();
    all.into()
}

impl Atom {
    /// The dims that it is made of.
    pub(super) fn parts(&self) -> Vec<&Dim> {
        match self {
            Atom::Symbol(_) => vec![],
            Atom::FloorDiv(d, _) => vec![d],
            Atom::Mul(a, b) => vec![a, b],
            Atom::Min(all) | Atom::Max(all) => all.iter().collect(),
        }
    }
}

impl Deref for Interned {
    type Target = Atom;
    fn deref(&self) -> &Atom {
        &self.0.atom
    }
}

impl PartialEq for Interned {
    fn eq(&self, other: &Interned) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Interned {}

impl Hash for Interned {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.facts.hash);
    }
}

/// By structure, so that the order is the same in every process. Parts that are equal are passed over, so one path
/// into the atoms is walked.
impl Ord for Interned {
    fn cmp(&self, other: &Interned) -> Ordering {
        match self == other {
            true => Ordering::Equal,
            false => self.0.atom.cmp(&other.0.atom),
        }
    }
}

impl PartialOrd for Interned {
    fn partial_cmp(&self, other: &Interned) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for Interned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.atom.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_atoms_are_one_and_those_out_of_use_are_swept_away() {
        let symbol = |i: usize| Interned::new(Atom::Symbol(format!("swept {i}").into()));
        let (a, b) = (symbol(0), symbol(0));
        assert_eq!(a, b);
        assert_ne!(a, symbol(1));
        for i in 0..40 * LEAST_SWEEP {
            symbol(i);
        }
        // Other tests have atoms of their own in use.
        let n_entries = TABLE.lock().unwrap().n_entries;
        assert!(n_entries < 20 * LEAST_SWEEP, "{n_entries}");
        assert_eq!(a, symbol(0));
    }
}
