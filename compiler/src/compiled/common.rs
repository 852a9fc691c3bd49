//! A model's share of a session.

use crate::options::Options;
use crate::pipeline::Config;
use crate::session::{Session, Settings};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A model's share of a session, common to its specialisations, segments and forms.
pub(crate) struct Common {
    pub(crate) session: Session,
    /// The session's settings, with the rates of the target CPU.
    settings: Settings,
    /// Warnings of all compilations, each once.
    warnings: Mutex<Vec<String>>,
}

impl Common {
    pub(crate) fn new(session: &Session, options: &Options) -> Arc<Common> {
        let mut settings = session.settings().clone();
        // Code for another CPU is planned by that CPU's rates, here as in files.
        settings.devices.assume_cpus(options.target_cpu.isa());
        Arc::new(Common {
            session: session.clone(),
            settings,
            warnings: Mutex::default(),
        })
    }

    pub(crate) fn config<'a>(&'a self, options: &'a Options) -> Config<'a> {
        Config {
            settings: &self.settings,
            options,
        }
    }

    /// Adds the warnings that are new.
    pub(super) fn add_warnings(&self, new: &[String]) {
        let mut warnings = self.warnings();
        for warning in new {
            if !warnings.contains(warning) {
                warnings.push(warning.clone());
            }
        }
    }

    pub(crate) fn warnings(&self) -> MutexGuard<'_, Vec<String>> {
        let warnings = self.warnings.lock();
        warnings.unwrap_or_else(PoisonError::into_inner)
    }
}
