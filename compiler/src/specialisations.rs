//! The executables of a compiled model, one per set of input shapes, bounded by the bytes that they hold.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shapes, and contents of shape-determining inputs by position, that one executable was made for.
pub(crate) type Key = (Vec<Vec<usize>>, Vec<(usize, Vec<u8>)>);

/// Executables by shapes; beyond a number of bytes, the least recently used ones are evicted.
pub(crate) struct Specialisations<T> {
    limit_bytes: u64,
    entries: Mutex<Entries<T>>,
}

struct Entries<T> {
    by_key: BTreeMap<Key, Entry<T>>,
    /// Number of lookups so far: the time of an entry's last use.
    clock: u64,
    n_evicted: usize,
}

struct Entry<T> {
    value: Arc<T>,
    bytes: u64,
    last_use: u64,
}

impl<T> Specialisations<T> {
    pub(crate) fn new(limit_bytes: u64) -> Specialisations<T> {
        let entries = Entries {
            by_key: BTreeMap::new(),
            clock: 0,
            n_evicted: 0,
        };
        Specialisations {
            limit_bytes,
            entries: Mutex::new(entries),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of executables that are held.
    pub(crate) fn len(&self) -> usize {
        self.lock().by_key.len()
    }

    /// Number of executables that have been evicted so far.
    pub(crate) fn n_evicted(&self) -> usize {
        self.lock().n_evicted
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Arc<T>> {
        let mut entries = self.lock();
        entries.clock += 1;
        let now = entries.clock;
        let entry = entries.by_key.get_mut(key)?;
        entry.last_use = now;
        Some(entry.value.clone())
    }

    /// True when `bytes` more are beyond the limit while something can be evicted.
    pub(crate) fn must_evict(&self, bytes: u64) -> bool {
        let entries = self.lock();
        !entries.by_key.is_empty() && entries.bytes() + bytes > self.limit_bytes
    }

    /// Holds an executable, after evicting others until it fits. One that is alone is held whatever its size; runs that are in flight
    /// keep theirs until they end.
    pub(crate) fn insert(&self, key: Key, value: Arc<T>, bytes: u64) {
        let mut entries = self.lock();
        while !entries.by_key.is_empty() && entries.bytes() + bytes > self.limit_bytes {
            entries.evict_oldest();
        }
        entries.clock += 1;
        let last_use = entries.clock;
        let entry = Entry {
            value,
            bytes,
            last_use,
        };
        entries.by_key.insert(key, entry);
    }
}

impl<T> Entries<T> {
    fn bytes(&self) -> u64 {
        self.by_key.values().map(|e| e.bytes).sum()
    }

    fn evict_oldest(&mut self) {
        let oldest = self.by_key.iter().min_by_key(|(_, e)| e.last_use);
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.by_key.remove(&key);
            self.n_evicted += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: usize) -> Key {
        (vec![vec![n]], Vec::new())
    }

    #[test]
    fn the_least_recently_used_is_evicted() {
        let held: Specialisations<usize> = Specialisations::new(100);
        held.insert(key(1), Arc::new(1), 40);
        held.insert(key(2), Arc::new(2), 40);
        assert!(held.get(&key(1)).is_some());
        assert!(held.must_evict(40) && !held.must_evict(20));
        held.insert(key(3), Arc::new(3), 40);
        let left = [1, 2, 3].map(|n| held.get(&key(n)).is_some());
        assert_eq!(left, [true, false, true]);
        assert_eq!((held.len(), held.n_evicted()), (2, 1));
    }

    #[test]
    fn one_beyond_the_limit_is_held_alone() {
        let held: Specialisations<usize> = Specialisations::new(100);
        assert!(!held.must_evict(1000));
        held.insert(key(1), Arc::new(1), 1000);
        assert_eq!(held.len(), 1);
        held.insert(key(2), Arc::new(2), 10);
        assert!(held.get(&key(1)).is_none() && held.get(&key(2)).is_some());
    }
}
