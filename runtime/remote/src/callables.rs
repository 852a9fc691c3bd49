//! The programs of a task's clients, by the digest of their text.

use crate::Limits;
use crate::contents::{Digest, Document};
use crate::master::Callable;
use crate::messages::Fault;
use gristmill_runtime::ErrorKind;
use std::collections::HashMap;
use std::sync::Arc;

/// Programs, with the number of their clients. Those without a client stay for the next one, up to a number.
#[derive(Default)]
pub(crate) struct Callables {
    entries: HashMap<Digest, Entry>,
    /// Number of times that a client let go.
    clock: u64,
}

struct Entry {
    callable: Arc<Callable>,
    n_clients: usize,
    /// The clock when the last client let go.
    idle_since: u64,
}

impl Callables {
    pub(crate) fn get(&self, digest: &Digest) -> Option<Arc<Callable>> {
        self.entries.get(digest).map(|entry| entry.callable.clone())
    }

    pub(crate) fn all(&self) -> Vec<Arc<Callable>> {
        let all = self.entries.values().map(|entry| entry.callable.clone());
        all.collect()
    }

    /// A known program, for one more client.
    pub(crate) fn hold(&mut self, digest: &Digest) -> Option<Arc<Callable>> {
        let entry = self.entries.get_mut(digest)?;
        entry.n_clients += 1;
        Some(entry.callable.clone())
    }

    /// A program for its first client, unless another one was faster. Errors when there are too many.
    pub(crate) fn add(
        &mut self,
        document: Document,
        limits: &Limits,
    ) -> Result<Arc<Callable>, Fault> {
        let digest = document.digest();
        if let Some(known) = self.hold(&digest) {
            return Ok(known);
        }
        let n_used = self.entries.values().filter(|e| e.n_clients > 0).count();
        if n_used >= limits.callables {
            let message = format!("the task has {n_used} programs of clients, and takes no more");
            let fault = Fault::new(ErrorKind::OutOfMemory, message);
            return Err(fault.with_hint("close sessions, or drop models of theirs"));
        }
        let state = Default::default();
        let callable = Arc::new(Callable { document, state });
        let entry = Entry {
            callable: callable.clone(),
            n_clients: 1,
            idle_since: 0,
        };
        self.entries.insert(digest, entry);
        Ok(callable)
    }

    /// Notes that a client needs a program no more.
    pub(crate) fn let_go(&mut self, digest: &Digest) {
        self.clock += 1;
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.n_clients = entry.n_clients.saturating_sub(1);
            entry.idle_since = self.clock;
        }
    }

    /// Takes out programs without a client but the `most` that were used last.
    pub(crate) fn take_idle(&mut self, most: usize) -> Vec<Arc<Callable>> {
        let idle = self.entries.iter().filter(|(_, e)| e.n_clients == 0);
        let mut idle: Vec<(u64, Digest)> = idle.map(|(d, e)| (e.idle_since, *d)).collect();
        idle.sort_unstable();
        let n = idle.len().saturating_sub(most);
        let taken = idle.into_iter().take(n);
        let taken = taken.filter_map(|(_, digest)| self.entries.remove(&digest));
        taken.map(|entry| entry.callable).collect()
    }
}
