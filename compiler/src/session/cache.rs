//! Caches by the shapes of a model's inputs: executables of the model and of its segments, and models cut or closed for some
//! inputs. One [`CacheMemory`] bounds the bytes of all caches of a session, and each cache has a bounded number of entries which can
//! be made again within milliseconds.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Key of an entry: shapes, and contents of shape-determining inputs by position.
pub(crate) type Key = (Vec<Vec<usize>>, Vec<(usize, Vec<u8>)>);

/// Entries of all caches of a session; beyond a number of bytes, the least recently used ones are evicted, whichever cache they are of.
pub(crate) struct CacheMemory {
    limit_bytes: u64,
    entries: Mutex<Entries>,
}

/// A cache by number, and a key in it.
type Place = (u64, Key);

#[derive(Default)]
struct Entries {
    by_place: BTreeMap<Place, Entry>,
    /// Memory of all of them.
    ledger: Ledger,
    /// Number of lookups so far: the time of an entry's last use.
    clock: u64,
    n_evicted: usize,
    n_caches: u64,
}

struct Entry {
    value: Arc<dyn Any + Send + Sync>,
    held: Held,
    last_use: u64,
}

/// Evicted values, to be dropped without the lock: they may have caches of their own.
type Dropped = Vec<Arc<dyn Any + Send + Sync>>;

/// Most cheap entries of one cache at a time: those of
/// BERT-base take 30 MiB.
const MAX_CHEAP: usize = 64;

/// Memory of an entry.
#[derive(Clone, Default)]
pub(crate) struct Held {
    /// True when it can be made again within milliseconds.
    pub(crate) is_cheap: bool,
    /// Bytes of its own.
    pub(crate) own_bytes: u64,
    /// Bytes of memory shared with other entries, by address.
    pub(crate) shared: BTreeMap<usize, u64>,
}

impl CacheMemory {
    pub(crate) fn new(limit_bytes: u64) -> Arc<CacheMemory> {
        Arc::new(CacheMemory {
            limit_bytes,
            entries: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all entries; shared memory counts once.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().ledger.bytes
    }

    /// Number of entries evicted so far.
    pub(crate) fn n_evicted(&self) -> usize {
        self.lock().n_evicted
    }

    /// The bytes of all with one more, where they are beyond the limit and something can be
    /// evicted.
    fn bytes_beyond_limit(&self, held: &Held) -> Option<u64> {
        let entries = self.lock();
        let bytes = entries.ledger.bytes_with(held);
        (!entries.by_place.is_empty() && bytes > self.limit_bytes).then_some(bytes)
    }

    /// Holds an entry, after evicting others until it fits. A single entry is held at any size; runs in flight
    /// keep theirs until they end.
    fn insert(&self, place: Place, value: Arc<dyn Any + Send + Sync>, held: Held) {
        let mut entries = self.lock();
        let mut dropped = Dropped::new();
        dropped.extend(entries.make_room_for_cheap(place.0, &held));
        while !entries.by_place.is_empty() && entries.ledger.bytes_with(&held) > self.limit_bytes {
            dropped.extend(entries.evict_oldest());
        }
        entries.clock += 1;
        entries.ledger.add(&held);
        let last_use = entries.clock;
        let entry = Entry {
            value,
            held,
            last_use,
        };
        entries.by_place.insert(place, entry);
        drop(entries);
        drop(dropped);
    }
}

impl Entries {
    fn get(&mut self, place: &Place) -> Option<Arc<dyn Any + Send + Sync>> {
        self.clock += 1;
        let entry = self.by_place.get_mut(place)?;
        entry.last_use = self.clock;
        Some(entry.value.clone())
    }

    fn of_cache(&self, cache: u64) -> impl Iterator<Item = (&Place, &Entry)> {
        self.by_place
            .range((cache, Key::default())..(cache + 1, Key::default()))
    }

    fn evict_oldest(&mut self) -> Option<Arc<dyn Any + Send + Sync>> {
        let oldest = self.by_place.iter().min_by_key(|(_, e)| e.last_use);
        let place = oldest.map(|(place, _)| place.clone())?;
        self.n_evicted += 1;
        self.remove(&place)
    }

    /// Removes the oldest cheap entry of a cache if one more would exceed [`MAX_CHEAP`].
    fn make_room_for_cheap(
        &mut self,
        cache: u64,
        more: &Held,
    ) -> Option<Arc<dyn Any + Send + Sync>> {
        let cheap = || self.of_cache(cache).filter(|(_, e)| e.held.is_cheap);
        if !more.is_cheap || cheap().count() < MAX_CHEAP {
            return None;
        }
        let oldest = cheap().min_by_key(|(_, e)| e.last_use);
        let place = oldest.map(|(place, _)| place.clone())?;
        self.remove(&place)
    }

    fn remove(&mut self, place: &Place) -> Option<Arc<dyn Any + Send + Sync>> {
        let entry = self.by_place.remove(place)?;
        self.ledger.remove(&entry.held);
        Some(entry.value)
    }
}

/// A cache of values by shapes. Its entries go with it.
pub(crate) struct Specialisations<T> {
    memory: Arc<CacheMemory>,
    /// Its number.
    cache: u64,
    /// Keys whose values some caller makes now.
    in_making: Mutex<BTreeSet<Key>>,
    /// Told when a value was made, or could not be.
    made: Condvar,
    values: PhantomData<fn() -> T>,
}

impl<T> Drop for Specialisations<T> {
    fn drop(&mut self) {
        let mut entries = self.memory.lock();
        let own: Vec<Place> = entries
            .of_cache(self.cache)
            .map(|(p, _)| p.clone())
            .collect();
        let dropped: Dropped = own
            .iter()
            .filter_map(|place| entries.remove(place))
            .collect();
        drop(entries);
        drop(dropped);
    }
}

impl<T: Send + Sync + 'static> Specialisations<T> {
    /// An empty cache.
    pub(crate) fn new(memory: &Arc<CacheMemory>) -> Specialisations<T> {
        let mut entries = memory.lock();
        entries.n_caches += 1;
        let cache = entries.n_caches;
        drop(entries);
        Specialisations {
            memory: memory.clone(),
            cache,
            in_making: Mutex::default(),
            made: Condvar::new(),
            values: PhantomData,
        }
    }

    fn place(&self, key: &Key) -> Place {
        (self.cache, key.clone())
    }

    fn making(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.in_making
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.memory.lock().of_cache(self.cache).count()
    }

    /// True when there is an entry of a key.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.memory.lock().by_place.contains_key(&self.place(key))
    }

    /// All values.
    pub(crate) fn values(&self) -> Vec<Arc<T>> {
        let entries = self.memory.lock();
        let values = entries.of_cache(self.cache).map(|(_, e)| e.value.clone());
        values.map(typed).collect()
    }

    fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.memory.lock().get(&self.place(key)).map(typed)
    }

    /// The value of a key, made by `make` unless it is there. If another caller makes it now, waits for that caller. Calls `warn` with
    /// the bytes of all entries when others must go.
    ///
    /// Errors with the error of `make`; every waiting caller then tries for itself.
    pub(crate) fn get_or_make<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<(T, Held), E>,
        warn: impl FnOnce(&mut T, u64),
    ) -> Result<Arc<T>, E> {
        let mut making = self.making();
        loop {
            if let Some(found) = self.get(&key) {
                return Ok(found);
            }
            if making.insert(key.clone()) {
                break;
            }
            making = self
                .made
                .wait(making)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(making);
        let in_making = InMaking {
            all: self,
            key: &key,
        };
        let (mut value, held) = make()?;
        if let Some(bytes) = self.memory.bytes_beyond_limit(&held) {
            warn(&mut value, bytes);
        }
        let value = Arc::new(value);
        self.memory.insert(self.place(&key), value.clone(), held);
        drop(in_making);
        Ok(value)
    }
}

/// A value of a cache: its entries have one type.
fn typed<T: Send + Sync + 'static>(value: Arc<dyn Any + Send + Sync>) -> Arc<T> {
    value
        .downcast()
        .expect("a cache puts values of its type into its places")
}

/// Marks a key as in making until it is dropped, be it by a panic.
struct InMaking<'a, T> {
    all: &'a Specialisations<T>,
    key: &'a Key,
}

impl<T> Drop for InMaking<'_, T> {
    fn drop(&mut self) {
        let making = self.all.in_making.lock();
        making
            .unwrap_or_else(PoisonError::into_inner)
            .remove(self.key);
        self.all.made.notify_all();
    }
}

/// Bytes of several executables; shared memory counts once.
#[derive(Default)]
struct Ledger {
    bytes: u64,
    /// Number of users of the memory at an address.
    n_users: BTreeMap<usize, usize>,
}

impl Ledger {
    /// Bytes of an executable not shared with a counted one.
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

    fn cache(limit_bytes: u64) -> Specialisations<usize> {
        Specialisations::new(&CacheMemory::new(limit_bytes))
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
        let all = cache(100);
        assert_eq!(add(&all, 1, held(40, &[])), None);
        assert_eq!(add(&all, 2, held(40, &[])), None);
        assert!(is_there(&all, 1));
        assert_eq!(add(&all, 3, held(40, &[])), Some(120));
        assert_eq!([1, 2, 3].map(|n| is_there(&all, n)), [true, false, true]);
        assert_eq!((all.len(), all.memory.n_evicted()), (2, 1));
    }

    #[test]
    fn one_beyond_the_limit_is_held_alone() {
        let all = cache(100);
        assert_eq!(add(&all, 1, held(1000, &[])), None);
        assert_eq!(all.len(), 1);
        assert_eq!(add(&all, 2, held(10, &[])), Some(1010));
        assert_eq!([1, 2].map(|n| is_there(&all, n)), [false, true]);
    }

    #[test]
    fn shared_memory_counts_once() {
        let all = cache(100);
        let weights = [(0x1000, 50), (0x2000, 20)];
        for n in 1..=3 {
            assert_eq!(add(&all, n, held(10, &weights)), None);
        }
        assert_eq!(add(&all, 4, held(10, &[(0x3000, 5)])), Some(115));
    }

    #[test]
    fn cheap_ones_are_bounded_by_number() {
        let all = cache(1 << 30);
        let cheap = || Held {
            is_cheap: true,
            ..held(10, &[(0x1000, 50)])
        };
        add(&all, 1000, held(10, &[]));
        for n in 0..MAX_CHEAP + 3 {
            assert_eq!(add(&all, n, cheap()), None);
        }
        assert_eq!((all.len(), all.memory.n_evicted()), (MAX_CHEAP + 1, 0));
        assert_eq!([1000, 2, 3].map(|n| is_there(&all, n)), [true, false, true]);
        assert_eq!(all.memory.bytes(), 10 * (MAX_CHEAP as u64 + 1) + 50);
    }

    #[test]
    fn callers_of_one_new_key_make_it_once() {
        let all = cache(100);
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
        let all = cache(100);
        assert!(!is_there(&all, 1));
        let panicking = || all.get_or_make(key(1), || -> Result<_, ()> { panic!("no") }, |_, _| ());
        let panicking = std::panic::AssertUnwindSafe(panicking);
        assert!(std::panic::catch_unwind(panicking).is_err());
        assert_eq!(add(&all, 1, held(1, &[])), None);
        assert!(is_there(&all, 1));
    }

    /// Caches of one memory are bounded together, and one in a value of another goes with it.
    #[test]
    fn caches_share_their_memory() {
        let memory = CacheMemory::new(100);
        let (first, second) = (Specialisations::new(&memory), Specialisations::new(&memory));
        add(&first, 1, held(40, &[]));
        add(&second, 1, held(40, &[]));
        assert!(is_there(&first, 1));
        assert_eq!(add(&first, 2, held(40, &[])), Some(120));
        assert_eq!((is_there(&first, 1), is_there(&second, 1)), (true, false));
        let outer = Specialisations::<Specialisations<usize>>::new(&memory);
        let make = || Ok::<_, ()>((Specialisations::new(&memory), held(10, &[])));
        let inner = outer.get_or_make(key(1), make, |_, _| ()).unwrap();
        assert_eq!(add(&inner, 1, held(5, &[])), None);
        assert_eq!(memory.bytes(), 95);
        drop(inner);
        add(&first, 3, held(90, &[]));
        assert_eq!(memory.bytes(), 90);
        drop(first);
        assert_eq!((memory.bytes(), outer.len()), (0, 0));
    }
}
