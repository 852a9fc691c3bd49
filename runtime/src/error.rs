//! The error of this crate.

use std::fmt;

/// Category of an error, for callers to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A tensor, file or argument given by the caller does not fit the request.
    InvalidInput,
    /// The program needs something that this runtime does not have.
    Unsupported,
    /// Memory ran out, or a declared limit was passed.
    OutOfMemory,
    /// A value that is checked is NaN or infinite.
    NotFinite,
    /// A kernel or a device worker failed while running.
    DeviceFailed,
    /// Our bug.
    Internal,
}

impl ErrorKind {
    /// Exit code of a command line that fails with this category.
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorKind::Internal => 1,
            ErrorKind::InvalidInput | ErrorKind::NotFinite => 2,
            ErrorKind::Unsupported => 3,
            ErrorKind::OutOfMemory => 5,
            ErrorKind::DeviceFailed => 6,
        }
    }
}

/// Error of `gristmill-runtime`: a category, a message, and the path of the model's node where one is known.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    node: Option<String>,
    message: String,
}

impl Error {
    /// An error with a category and a message (lowercase, no final period).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error {
            kind,
            node: None,
            message: message.into(),
        }
    }

    /// [`ErrorKind::InvalidInput`].
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidInput, message)
    }

    /// [`ErrorKind::Internal`].
    pub(crate) fn internal(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Internal, message)
    }

    /// Names the node of the user's model at which the error arose; the innermost name stays.
    pub fn at(mut self, node: impl Into<String>) -> Error {
        self.node.get_or_insert(node.into());
        self
    }

    /// Puts `place` in front of the message: `on /device:CPU:0: index out of range`.
    pub fn context(mut self, place: impl fmt::Display) -> Error {
        self.message = format!("{place}: {}", self.message);
        self
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
        f.write_str(&self.message)
    }
}

/// As [`fmt::Display`]: `fn main() -> Result<()>` prints errors this way.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
