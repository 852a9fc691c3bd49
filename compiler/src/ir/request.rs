//! Device requests: which devices a node may be on, which nodes it must be with, and who asked for it.

use crate::error::Result;
use gristmill_runtime::device::{DeviceName, DeviceSpec};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Who asked, for messages: `scope "/gpu:1" at src/model.rs:12`. May be empty.
///
/// Any two are equal, so that nodes with the same wish from different places can be joined; the one that stays is the first.
#[derive(Clone, Debug, Default)]
pub struct AskedBy(pub Option<Arc<str>>);

impl AskedBy {
    /// Who asked, as a text.
    pub fn new(text: &str) -> AskedBy {
        AskedBy((!text.is_empty()).then(|| text.into()))
    }

    /// The text, empty when unknown.
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or("")
    }
}

impl PartialEq for AskedBy {
    fn eq(&self, _: &AskedBy) -> bool {
        true
    }
}

impl Eq for AskedBy {}

impl Hash for AskedBy {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl PartialOrd for AskedBy {
    fn partial_cmp(&self, other: &AskedBy) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for AskedBy {
    fn cmp(&self, _: &AskedBy) -> Ordering {
        Ordering::Equal
    }
}

/// Request for a node's device. Passes join only nodes of equal requests, and keep them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceRequest {
    /// The devices that fit.
    pub spec: DeviceSpec,
    /// Colocation groups by name, each with who put the node into it; all nodes of a group are on one device.
    pub groups: BTreeMap<Arc<str>, AskedBy>,
    /// Who asked for `spec`.
    pub asked_by: AskedBy,
}

/// A node's request, if any.
pub type Requested = Option<Arc<DeviceRequest>>;

impl DeviceRequest {
    /// A request for devices.
    pub fn of(spec: DeviceSpec, asked_by: AskedBy) -> DeviceRequest {
        DeviceRequest {
            spec,
            groups: BTreeMap::new(),
            asked_by,
        }
    }

    /// A request for the devices that a specification such as `/device:CPU:1` fits. Errors when it cannot be read.
    pub fn parse(spec: &str) -> Result<DeviceRequest> {
        Ok(DeviceRequest::of(
            DeviceSpec::parse(spec)?,
            AskedBy::default(),
        ))
    }

    /// True when nothing is asked for.
    pub fn is_open(&self) -> bool {
        self.spec.is_open() && self.groups.is_empty()
    }

    /// The request as a node has it: none when nothing is asked for.
    pub fn into_requested(self) -> Requested {
        (!self.is_open()).then(|| Arc::new(self))
    }
    /// `on "/device:CPU:1" by "who" with "group" by "who"`, as in the text form of graphs; absent parts are left out.
    pub fn to_text(&self, asked_by: bool) -> String {
        let by = |who: &AskedBy| match who.as_str() {
            who if asked_by && !who.is_empty() => format!(" by {who:?}"),
            _ => String::new(),
        };
        let on = (!self.spec.is_open() || self.groups.is_empty())
            .then(|| format!("on {:?}{}", self.spec.to_string(), by(&self.asked_by)));
        let with = self
            .groups
            .iter()
            .map(|(group, who)| format!("with {group:?}{}", by(who)));
        on.into_iter().chain(with).collect::<Vec<_>>().join(" ")
    }
}

impl From<&DeviceName> for DeviceRequest {
    fn from(name: &DeviceName) -> DeviceRequest {
        DeviceRequest::of(name.into(), AskedBy::default())
    }
}
