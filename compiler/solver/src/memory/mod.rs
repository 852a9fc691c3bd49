//! Memory limits: bytes in use while a schedule grows, repair of schedules that are over a limit,
//! rematerialisation and offloading.

pub mod remat;
pub mod repair;
pub(crate) mod usage;
