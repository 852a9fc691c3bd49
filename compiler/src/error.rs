//! The error of the compiler: a category, the place in the user's model, a message, and the chain of causes.

use std::fmt;

/// Category of an error, for callers to act on; the command line maps each to an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Our bug.
    Internal,
    /// The model, file, flag or argument is wrong.
    InvalidInput,
    /// The model is correct but needs an unsupported op, dtype or device.
    Unsupported,
    /// Results differ from the expected ones.
    Mismatch,
    /// Memory ran out, or a declared limit was passed.
    OutOfMemory,
    /// A checked value is NaN or infinite, such as the loss of a training step.
    NotFinite,
    /// A device failed while running.
    DeviceFailed,
}

impl ErrorKind {
    /// Exit code of the `gristmill` binary for this category.
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorKind::Internal => 1,
            ErrorKind::InvalidInput | ErrorKind::NotFinite => 2,
            ErrorKind::Unsupported => 3,
            ErrorKind::Mismatch => 4,
            ErrorKind::OutOfMemory => 5,
            ErrorKind::DeviceFailed => 6,
        }
    }
}

/// The remedy for an error inside of the crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mark {
    #[default]
    None,
    /// Compile the sizes by themselves.
    Sizes,
    /// Cut the graph into segments.
    Extents,
    /// Give values of inputs.
    Values,
}

/// Error of `gristmill`. Several problems found together are joined by [`Error::join`].
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    node: Option<String>,
    message: String,
    hint: Option<String>,
    mark: Mark,
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with a category and a message (lowercase, no final period).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error {
            kind,
            node: None,
            message: message.into(),
            hint: None,
            mark: Mark::None,
        }
    }

    /// Marks an error of sizes against decisions made for all sizes. Only contradictions and
    /// unsupported features can be marked.
    pub(crate) fn of_sizes(mut self) -> Error {
        if self.is_refusal() {
            self.mark = Mark::Sizes;
        }
        self
    }

    /// True for an error of sizes: these are to be compiled by themselves.
    pub(crate) fn is_of_sizes(&self) -> bool {
        self.mark == Mark::Sizes
    }

    /// Marks the error of a graph with extents known only at run time.
    pub(crate) fn of_extents(mut self) -> Error {
        self.mark = Mark::Extents;
        self
    }

    /// True for an error of extents: the graph is to be cut into segments.
    pub(crate) fn is_of_extents(&self) -> bool {
        self.mark == Mark::Extents
    }

    /// Marks the error of a graph that needs values of inputs.
    pub(crate) fn of_values(mut self) -> Error {
        self.mark = Mark::Values;
        self
    }

    /// True for an error of values: with these there may be none.
    #[doc(hidden)]
    pub fn is_of_values(&self) -> bool {
        self.mark == Mark::Values
    }

    /// True when the model or its sizes are refused; false when something failed.
    #[doc(hidden)]
    pub fn is_refusal(&self) -> bool {
        matches!(self.kind, ErrorKind::InvalidInput | ErrorKind::Unsupported)
    }

    /// The user's model, file or argument is wrong.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidInput, message)
    }

    /// The model needs something unsupported.
    pub fn unsupported(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Unsupported, message)
    }

    /// Our bug: an invariant between stages was broken.
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Internal, message)
    }

    /// Names the node of the user's model at which the error arose; the innermost name stays.
    pub fn at(mut self, node: impl fmt::Display) -> Error {
        self.node.get_or_insert_with(|| node.to_string());
        self
    }

    /// Puts the attempted action before the message.
    pub fn context(mut self, what: impl fmt::Display) -> Error {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Puts a detail behind the message.
    #[doc(hidden)]
    pub fn detail(mut self, what: impl fmt::Display) -> Error {
        self.message = format!("{}: {what}", self.message);
        self
    }

    /// Puts a further fact behind the message.
    pub(crate) fn addition(mut self, what: impl fmt::Display) -> Error {
        self.message = format!("{}; {what}", self.message);
        self
    }

    /// One thing to try.
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint.get_or_insert(hint.into());
        self
    }

    /// The message, without node and hint.
    #[cfg(feature = "distributed")]
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The hint.
    #[cfg(feature = "distributed")]
    pub(crate) fn remedy(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// One error out of several; the most severe category (lowest exit code) wins. `errors` must not be empty.
    pub fn join(errors: Vec<Error>) -> Error {
        if errors.len() == 1 {
            return errors.into_iter().next().expect("one error");
        }
        let kind = errors
            .iter()
            .map(|e| e.kind)
            .min()
            .unwrap_or(ErrorKind::Internal);
        let lines: Vec<String> = errors.iter().map(|e| format!("  - {e}")).collect();
        Error::new(
            kind,
            format!("{} problems:\n{}", errors.len(), lines.join("\n")),
        )
    }

    /// The category.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Path of the node in the user's model, if known.
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(node) = &self.node {
            write!(f, "in node {node:?}: ")?;
        }
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " (try: {hint})"),
            None => Ok(()),
        }
    }
}

/// As [`fmt::Display`]: `fn main() -> Result<()>` prints errors this way.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

/// Lets infallible conversions stand in for fallible ones.
impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Error {
        match never {}
    }
}

impl From<gristmill_runtime::Error> for Error {
    fn from(e: gristmill_runtime::Error) -> Error {
        use gristmill_runtime::ErrorKind as Rt;
        let kind = match e.kind() {
            Rt::InvalidInput => ErrorKind::InvalidInput,
            Rt::Unsupported => ErrorKind::Unsupported,
            Rt::OutOfMemory => ErrorKind::OutOfMemory,
            Rt::NotFinite => ErrorKind::NotFinite,
            Rt::DeviceFailed => ErrorKind::DeviceFailed,
            _ => ErrorKind::Internal,
        };
        let node = e.node().map(str::to_owned);
        let text = e.to_string();
        let message = match &node {
            Some(n) => text
                .strip_prefix(&format!("in node {n:?}: "))
                .unwrap_or(&text)
                .to_owned(),
            None => text,
        };
        Error {
            kind,
            node,
            message,
            hint: None,
            mark: Mark::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_reads_as_display() {
        let e = Error::invalid("no dim \"bach\"").at("/a").hint("batch");
        assert_eq!(format!("{e:?}"), e.to_string());
        let e = Error::from(gristmill_runtime::Error::invalid("no input"));
        assert_eq!(format!("{e:?}"), "no input");
    }
}
