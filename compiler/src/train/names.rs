//! Unique names, numbered as TensorFlow's are.

use std::collections::{BTreeMap, BTreeSet};

/// Names in use.
#[derive(Default)]
pub(super) struct Names {
    used: BTreeSet<String>,
    /// Nodes by wanted name so far.
    counts: BTreeMap<String, usize>,
}

impl Names {
    /// A name, with a number behind it where it is in use.
    pub(super) fn unique(&mut self, wanted: &str) -> String {
        loop {
            let n = self.counts.entry(wanted.to_owned()).or_default();
            *n += 1;
            let name = match *n {
                1 => wanted.to_owned(),
                n => format!("{wanted}_{}", n - 1),
            };
            if self.used.insert(name.clone()) {
                return name;
            }
        }
    }
}
