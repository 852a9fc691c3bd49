//! Settings and options together, as all stages read them.

use crate::options::Options;
use crate::session::Settings;

/// The settings of a session and the options of a model.
#[derive(Clone, Copy)]
pub struct Config<'a> {
    /// Settings of the session.
    pub settings: &'a Settings,
    /// Options of the model.
    pub options: &'a Options,
}
