//! Handles that callers hold. Each is a number that is given out once, in the form of a pointer that is never followed,
//! so a call with a handle that is closed is an error, and a handle that is closed while it runs lives until its last
//! run has ended.

use crate::Model;
use gristmill_runtime::Error;
use gristmill_runtime::sync::{alone, shared};
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

/// Open handles by number.
struct Table {
    open: BTreeMap<usize, Arc<Model>>,
    /// The last number that was given out.
    last: usize,
}

static TABLE: RwLock<Table> = RwLock::new(Table {
    open: BTreeMap::new(),
    last: 0,
});

/// Handles are multiples of this, as addresses are, which some callers check.
const STEP: usize = 16;

/// Opens a handle.
pub fn open(model: Model) -> *mut Model {
    let mut table = alone(&TABLE);
    table.last += STEP;
    let number = table.last;
    table.open.insert(number, Arc::new(model));
    std::ptr::without_provenance_mut(number)
}

/// The model of a handle, which lives as long as the result.
pub fn find(handle: *const Model) -> Result<Arc<Model>, Error> {
    if handle.is_null() {
        return Err(Error::invalid("model is NULL"));
    }
    let table = shared(&TABLE);
    let found = table.open.get(&handle.addr()).cloned();
    found.ok_or_else(|| Error::invalid("the model is closed"))
}

/// Closes a handle. Its model is freed here, or by the thread whose run of it ends last.
pub fn close(handle: *const Model) -> Result<(), Error> {
    let mut table = alone(&TABLE);
    let closed = table.open.remove(&handle.addr());
    // Threads are joined without the lock.
    drop(table);
    closed
        .map(drop)
        .ok_or_else(|| Error::invalid("the model is closed"))
}
