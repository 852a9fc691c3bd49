//! The choice among the forms (variants) of a kernel, and its reason.
//!
//! Forms differ in tile shape, main loop or number of threads. They are numbered per cluster: in
//! form 0 all kernels are as predicted times choose, and each further number stands for another
//! form of one of them, the others being as predicted. Libraries that compute the whole cluster
//! have the last numbers.

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

/// The requested form of a cluster. A number that does not exist stands for the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preferred {
    /// Number of the form.
    pub form: u8,
    /// Why it is preferred.
    pub why: Why,
    /// The library that computes the cluster, if it is not our own kernels.
    pub library: Option<LibraryForm>,
}

impl Preferred {
    /// A form of our own kernels, for no reason.
    pub fn of(form: u8) -> Preferred {
        Preferred {
            form,
            ..Preferred::default()
        }
    }
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
    /// Number among the forms of this kernel, from 0.
    pub number: usize,
    /// Number of forms of this kernel.
    pub n: usize,
    /// Description.
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
