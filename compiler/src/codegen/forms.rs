//! Which of its forms a kernel gets, and why.
//!
//! A kernel can have several forms: tiles of other shapes, other main loops, more or fewer threads. They are numbered per cluster: 0 is what
//! predicted times choose for all of its kernels, and each further number stands for another form of one of them, the others being as predicted.
//! A library that computes all of the cluster comes after them.

use std::collections::BTreeMap;
use std::fmt;

/// Why a kernel has its form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Why {
    /// Predicted times choose it.
    #[default]
    Predicted,
    /// It was timed on this GPU.
    Tuned(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Predicted => f.write_str("predicted"),
            Why::Tuned(gpu) => write!(f, "tuned on {gpu}"),
        }
    }
}

/// The form that a cluster is to have. One that is not there stands for the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preferred {
    /// Number of the form.
    pub form: u8,
    /// Why it is preferred.
    pub why: Why,
    /// The library that the form is, where it is none of ours.
    pub library: Option<LibraryForm>,
}

/// A library that computes a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryForm {
    /// Name and version.
    pub name: String,
    /// Workspace that it uses.
    pub workspace_bytes: usize,
    /// Time that it took.
    pub ns: u64,
}

/// Forms of the clusters of one device, by [`crate::cost::signature`]; all others are as predicted.
pub type Forms = BTreeMap<u64, Preferred>;

/// The form that a kernel has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kernel's name.
    pub kernel: String,
    /// Its number among those of this kernel, from 0, and how many these are.
    pub number: usize,
    /// How many forms there are.
    pub n: usize,
    /// In words.
    pub form: String,
    /// Why it was chosen.
    pub why: Why,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "form {} of {}, {}: {}",
            self.number + 1,
            self.n,
            self.why,
            self.form
        )
    }
}
