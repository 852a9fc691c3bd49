//! The executables of a compiled model, one per set of input shapes, bounded by the bytes that they
//! hold, and by number where they can be made again within milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Shapes, and contents of shape-determining inputs by position, that one executable was made for.
pub(crate) type Key = (Vec<Vec<usize>>, Vec<(usize, Vec<u8>)>);

/// Executables by shapes; beyond a number of bytes, the least recently used ones are evicted.
pub(crate) struct Specialisations<T> {
    limit_bytes: u64,
    entries: Mutex<Entries<T>>,
    /// Told when an executable was made, or could not be.
    made: Condvar,
}

struct Entries<T> {
    by_key: BTreeMap<Key, Entry<T>>,
    /// Memory of all of them.
    ledger: Ledger,
    /// Executables that some caller makes now.
    in_making: BTreeSet<Key>,
    /// Number of lookups so far: the time of an entry's last use.
    clock: u64,
    n_evicted: usize,
}

struct Entry<T> {
    value: Arc<T>,
    held: Held,
    last_use: u64,
}

/// Executables that can be made again within milliseconds and are held at the same time: those of
/// BERT-base take 30 MiB.
const MAX_CHEAP: usize = 64;

/// Memory that an executable holds.
#[derive(Clone, Default)]
pub(crate) struct Held {
    /// True when the executable can be made again within milliseconds.
    pub(crate) is_cheap: bool,
    /// Bytes of its own.
    pub(crate) own_bytes: u64,
    /// Bytes of what it may share with others, by address.
    pub(crate) shared: BTreeMap<usize, u64>,
}

impl Held {
    /// The memory of something that takes milliseconds and little of it.
    pub(crate) fn cheap() -> Held {
        Held {
            is_cheap: true,
            ..Held::default()
        }
    }
}

impl<T> Specialisations<T> {
    pub(crate) fn new(limit_bytes: u64) -> Specialisations<T> {
        let entries = Entries {
            by_key: BTreeMap::new(),
            ledger: Ledger::default(),
            in_making: BTreeSet::new(),
            clock: 0,
            n_evicted: 0,
        };
        Specialisations {
            limit_bytes,
            entries: Mutex::new(entries),
            made: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of executables that are held.
    pub(crate) fn len(&self) -> usize {
        self.lock().by_key.len()
    }

    /// True when there is an executable of a key.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.lock().by_key.contains_key(key)
    }

    /// All executables that are held.
    pub(crate) fn values(&self) -> Vec<Arc<T>> {
        let entries = self.lock();
        entries.by_key.values().map(|e| e.value.clone()).collect()
    }

    /// Bytes that they hold; what several share counts once.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().ledger.bytes
    }

    /// Number of executables that have been evicted so far.
    pub(crate) fn n_evicted(&self) -> usize {
        self.lock().n_evicted
    }

    /// The executable of a key; `make` makes it, unless it is there or another caller makes it now,
    /// who is waited for. `warn` is called on one for which others must go, with the bytes that all
    /// take together.
    ///
    /// Errors with that of `make`; every caller that waited then tries for itself.
    pub(crate) fn get_or_make<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<(T, Held), E>,
        warn: impl FnOnce(&mut T, u64),
    ) -> Result<Arc<T>, E> {
        let mut entries = self.lock();
        loop {
            if let Some(found) = entries.get(&key) {
                return Ok(found);
            }
            if entries.in_making.insert(key.clone()) {
                break;
            }
            entries = self
                .made
                .wait(entries)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(entries);
        let in_making = InMaking {
            all: self,
            key: &key,
        };
        let (mut value, held) = make()?;
        if let Some(bytes) = self.bytes_beyond_limit(&held) {
            warn(&mut value, bytes);
        }
        let value = Arc::new(value);
        self.insert(key.clone(), value.clone(), held);
        drop(in_making);
        Ok(value)
    }

    /// The bytes of all with one more, where they are beyond the limit and something can be
    /// evicted.
    fn bytes_beyond_limit(&self, held: &Held) -> Option<u64> {
        let entries = self.lock();
        let bytes = entries.ledger.bytes_with(held);
        (!entries.by_key.is_empty() && bytes > self.limit_bytes).then_some(bytes)
    }

    /// Holds an executable, after evicting others until it fits. One that is alone is held whatever its size; runs that are in flight
    /// keep theirs until they end.
    fn insert(&self, key: Key, value: Arc<T>, held: Held) {
        let mut entries = self.lock();
        entries.make_room_for_cheap(&held);
        while !entries.by_key.is_empty() && entries.ledger.bytes_with(&held) > self.limit_bytes {
            entries.evict_oldest();
        }
        entries.clock += 1;
        entries.ledger.add(&held);
        let last_use = entries.clock;
        let entry = Entry {
            value,
            held,
            last_use,
        };
        entries.by_key.insert(key, entry);
    }
}

/// Marks a key as in making until it is dropped, be it by a panic.
struct InMaking<'a, T> {
    all: &'a Specialisations<T>,
    key: &'a Key,
}

impl<T> Drop for InMaking<'_, T> {
    fn drop(&mut self) {
        self.all.lock().in_making.remove(self.key);
        self.all.made.notify_all();
    }
}

impl<T> Entries<T> {
    fn get(&mut self, key: &Key) -> Option<Arc<T>> {
        self.clock += 1;
        let entry = self.by_key.get_mut(key)?;
        entry.last_use = self.clock;
        Some(entry.value.clone())
    }

    fn evict_oldest(&mut self) {
        let oldest = self.by_key.iter().min_by_key(|(_, e)| e.last_use);
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.remove(&key);
            self.n_evicted += 1;
        }
    }

    /// Drops the oldest one that is cheap, where one more would be too many of them.
    fn make_room_for_cheap(&mut self, more: &Held) {
        let cheap = || self.by_key.iter().filter(|(_, e)| e.held.is_cheap);
        if more.is_cheap && cheap().count() >= MAX_CHEAP {
            let oldest = cheap().min_by_key(|(_, e)| e.last_use);
            let key = oldest.map(|(key, _)| key.clone());
            key.iter().for_each(|key| self.remove(key));
        }
    }

    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.by_key.remove(key) {
            self.ledger.remove(&entry.held);
        }
    }
}

/// Bytes of several executables; what they share counts once.
#[derive(Default)]
struct Ledger {
    bytes: u64,
    /// Number of executables that have what is at an address.
    n_users: BTreeMap<usize, usize>,
}

impl Ledger {
    /// Bytes of an executable that none of those counted has.
    fn unshared(&self, held: &Held) -> u64 {
        let shared = held.shared.iter();
        let unshared = shared.filter(|(at, _)| !self.n_users.contains_key(at));
        held.own_bytes + unshared.map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// Bytes with one more executable.
    fn bytes_with(&self, more: &Held) -> u64 {
        self.bytes + self.unshared(more)
    }

    fn add(&mut self, held: &Held) {
        self.bytes = self.bytes_with(held);
        for &at in held.shared.keys() {
            *self.n_users.entry(at).or_default() += 1;
        }
    }

    fn remove(&mut self, held: &Held) {
        for at in held.shared.keys() {
            if let Some(n) = self.n_users.get_mut(at) {
                *n -= 1;
            }
        }
        self.n_users.retain(|_, n| *n > 0);
        self.bytes -= self.unshared(held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn key(n: usize) -> Key {
        (vec![vec![n]], Vec::new())
    }

    /// An executable with `own_bytes`, and the bytes at some addresses.
    fn held(own_bytes: u64, shared: &[(usize, u64)]) -> Held {
        Held {
            is_cheap: false,
            own_bytes,
            shared: shared.iter().copied().collect(),
        }
    }

    /// Adds the executable `n`; gives the bytes that a warning names.
    fn add(all: &Specialisations<usize>, n: usize, held: Held) -> Option<u64> {
        let mut warned = None;
        let made = all.get_or_make(
            key(n),
            || Ok::<_, ()>((n, held)),
            |_, bytes| warned = Some(bytes),
        );
        assert_eq!(made.as_deref(), Ok(&n));
        warned
    }

    fn is_there(all: &Specialisations<usize>, n: usize) -> bool {
        all.get_or_make(key(n), || Err(()), |_, _| ()).is_ok()
    }

    #[test]
    fn the_least_recently_used_is_evicted() {
        let all = Specialisations::new(100);
        assert_eq!(add(&all, 1, held(40, &[])), None);
        assert_eq!(add(&all, 2, held(40, &[])), None);
        assert!(is_there(&all, 1));
        assert_eq!(add(&all, 3, held(40, &[])), Some(120));
        assert_eq!([1, 2, 3].map(|n| is_there(&all, n)), [true, false, true]);
        assert_eq!((all.len(), all.n_evicted()), (2, 1));
    }

    #[test]
    fn one_beyond_the_limit_is_held_alone() {
        let all = Specialisations::new(100);
        assert_eq!(add(&all, 1, held(1000, &[])), None);
        assert_eq!(all.len(), 1);
        assert_eq!(add(&all, 2, held(10, &[])), Some(1010));
        assert_eq!([1, 2].map(|n| is_there(&all, n)), [false, true]);
    }

    #[test]
    fn shared_memory_counts_once() {
        let all = Specialisations::new(100);
        let weights = [(0x1000, 50), (0x2000, 20)];
        for n in 1..=3 {
            assert_eq!(add(&all, n, held(10, &weights)), None);
        }
        assert_eq!(add(&all, 4, held(10, &[(0x3000, 5)])), Some(115));
    }

    #[test]
    fn cheap_ones_are_bounded_by_number() {
        let all = Specialisations::new(1 << 30);
        let cheap = || Held {
            is_cheap: true,
            ..held(10, &[(0x1000, 50)])
        };
        add(&all, 1000, held(10, &[]));
        for n in 0..MAX_CHEAP + 3 {
            assert_eq!(add(&all, n, cheap()), None);
        }
        assert_eq!((all.len(), all.n_evicted()), (MAX_CHEAP + 1, 0));
        assert_eq!([1000, 2, 3].map(|n| is_there(&all, n)), [true, false, true]);
        assert_eq!(all.bytes(), 10 * (MAX_CHEAP as u64 + 1) + 50);
    }

    #[test]
    fn callers_of_one_new_key_make_it_once() {
        let all = Specialisations::new(100);
        let (n_made, together) = (AtomicUsize::new(0), Barrier::new(4));
        let make = || {
            n_made.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_millis(20));
            Ok::<_, ()>((7, held(1, &[])))
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    let made = all.get_or_make(key(7), make, |_, _| ());
                    assert_eq!(made.as_deref(), Ok(&7));
                });
            }
        });
        assert_eq!(n_made.load(Ordering::SeqCst), 1);
    }

    /// Neither an error nor a panic leaves the key in making.
    #[test]
    fn one_that_could_not_be_made_may_be_tried_again() {
        let all = Specialisations::new(100);
        assert!(!is_there(&all, 1));
        let panicking = || all.get_or_make(key(1), || -> Result<_, ()> { panic!("no") }, |_, _| ());
        let panicking = std::panic::AssertUnwindSafe(panicking);
        assert!(std::panic::catch_unwind(panicking).is_err());
        assert_eq!(add(&all, 1, held(1, &[])), None);
        assert!(is_there(&all, 1));
    }
}
