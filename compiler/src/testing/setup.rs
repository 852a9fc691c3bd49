//! A session and options together, as most tests vary both.

use crate::compiled::{Compiled, Source};
use crate::error::Result;
use crate::options::Options;
use crate::pipeline::Config;
use crate::place::DeviceSet;
use crate::session::{Session, Settings};

/// Settings of a session, and options of a model.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Settings of the session.
    pub settings: Settings,
    /// Options of the model.
    pub options: Options,
}

impl Setup {
    /// Devices as `--devices` names them, which share some threads.
    pub fn on(devices: &str, n_threads: usize) -> Setup {
        let mut setup = Setup::with_threads(n_threads);
        setup.settings.devices = DeviceSet::parse(devices, n_threads).expect("devices of a test");
        setup
    }

    /// One CPU with a number of threads.
    pub fn with_threads(n: usize) -> Setup {
        let mut setup = Setup::default();
        setup.settings.threads = Some(n);
        setup
    }

    /// The same with other options.
    pub fn with(mut self, change: impl FnOnce(&mut Options)) -> Setup {
        change(&mut self.options);
        self
    }

    /// A new session.
    pub fn session(&self) -> Session {
        Session::new(&self.settings).expect("settings of a test")
    }

    /// The model in a session of its own.
    pub fn compile(&self, source: impl Into<Source>) -> Result<Compiled> {
        Session::new(&self.settings)?.compile(source, &self.options)
    }

    /// Both, for the stages of compilation.
    pub fn config(&self) -> Config<'_> {
        Config {
            settings: &self.settings,
            options: &self.options,
        }
    }
}
