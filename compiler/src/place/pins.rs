//! Pins, and the device requests of pins and graph for each node.

use super::device::DeviceSet;
use super::plan::Plan;
use super::{Objective, Placement};
use crate::error::{Error, Result};
use crate::ir::{AskedBy, DeviceRequest, Graph, Node};
use crate::nearest::nearest;
use gristmill_runtime::device::{DeviceName, DeviceSpec};
use regex_lite::Regex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Prefix of a pin or group with another node in place of a device.
const COLOCATION_PREFIX: &str = "loc:@";

/// Puts all nodes with a matching path on a device, or together with another node.
#[derive(Clone, Debug)]
pub struct Pin {
    /// Searched in the node's path; anchor it with `^` and `$` to fit whole paths.
    pub pattern: Regex,
    /// Device of the nodes.
    pub target: PinTarget,
    /// True if a node of the model matches; set by [`apply_pins`].
    pub is_used: bool,
}

/// Device of the nodes of a pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinTarget {
    /// A device of this specification.
    Device(DeviceSpec),
    /// The device of the nodes of this path.
    With(Arc<str>),
}

impl Pin {
    /// Reads `REGEX=DEVICE` or `REGEX=loc:@PATH`; the last `=` separates.
    pub fn parse(text: &str) -> Result<Pin> {
        let fail = |why: String| {
            Error::invalid(format!("--pin {text:?}: {why}"))
                .hint("--pin '^/encoder/=/device:CPU:1'")
        };
        let (pattern, target) = text
            .rsplit_once('=')
            .ok_or_else(|| fail("no '=' between pattern and device".into()))?;
        let pattern = Regex::new(pattern).map_err(|e| fail(e.to_string().replace('\n', " ")))?;
        let target = match target.strip_prefix(COLOCATION_PREFIX) {
            Some("") => return Err(fail(format!("no node path after {COLOCATION_PREFIX}"))),
            Some(path) => PinTarget::With(path.into()),
            None => PinTarget::Device(DeviceSpec::parse(target).map_err(|e| fail(e.to_string()))?),
        };
        Ok(Pin {
            pattern,
            target,
            is_used: false,
        })
    }

    /// Its request, by its author.
    fn asked_by(&self) -> AskedBy {
        AskedBy::new(&format!("pin {:?}", self.to_string()))
    }

    fn device(&self) -> Option<&DeviceSpec> {
        match &self.target {
            PinTarget::Device(spec) => Some(spec),
            PinTarget::With(_) => None,
        }
    }

    fn finds(&self, path: &str) -> bool {
        !path.is_empty() && self.pattern.is_match(path)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            PinTarget::Device(spec) => write!(f, "{}={spec}", self.pattern),
            PinTarget::With(path) => write!(f, "{}={COLOCATION_PREFIX}{path}", self.pattern),
        }
    }
}

/// The treatment of a request that cannot be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Fallback {
    /// Refuse (hard placement).
    #[default]
    Error,
    /// Place the node elsewhere (soft placement), and warn.
    Warn,
    /// Place the node elsewhere; the placement's reasons and log still say so.
    Allow,
}

/// Requests for a placement. Pins and the requests in the graph (`Node::device`) always hold unless
/// `fallback` releases them.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The logical devices.
    pub devices: DeviceSet,
    /// Pins. The last pin that matches a node counts; it overrides the node's own request.
    pub pins: Vec<Pin>,
    /// The treatment of a request that cannot be met.
    pub fallback: Fallback,
    /// Existing variables by container and name, with their devices. Their users are always placed
    /// there, independent of `fallback`.
    pub state: BTreeMap<(String, String), DeviceName>,
    /// Devices of all nodes. Pins and requests still hold: a contradicting plan is an error.
    pub plan: Option<Plan>,
    /// The quantity to optimise.
    pub objective: Objective,
    /// Cache folder of placements decided by measured times, see [`Placement::keep`]. A matching one
    /// replaces the search, but not a plan.
    pub kept: Option<PathBuf>,
    /// An earlier placement of the same graph, the start of the search.
    pub previous: Option<Arc<Placement>>,
    /// Runs the portfolio only, without refinement and without a search for a proof.
    pub is_brief: bool,
}

/// Writes pins into the device requests of matching nodes, so no cluster joins nodes of different
/// devices.
///
/// Errors when a pin matches no node, naming the nearest paths, or names a device outside of the set
/// (unless `fallback` allows other devices).
pub fn apply_pins(g: &mut Graph, request: &mut Request) -> Result<()> {
    let mut errors = Vec::new();
    let ids: Vec<_> = g.nodes().map(|(id, _)| id).collect();
    for pin in &mut request.pins {
        if let Some(spec) = pin.device()
            && request.fallback == Fallback::Error
            && request.devices.matching(spec).is_empty()
        {
            errors.push(
                request
                    .devices
                    .unknown(spec)
                    .context(format!("--pin {:?}", pin.to_string())),
            );
        }
        let mut is_target_there = pin.device().is_some();
        for &id in &ids {
            let node = g.node_mut(id);
            let paths = paths(node);
            let is_target =
                matches!(&pin.target, PinTarget::With(path) if paths.iter().any(|p| **p == **path));
            let is_found = paths.iter().any(|p| pin.finds(p));
            is_target_there |= is_target;
            pin.is_used |= is_found;
            if is_found || is_target {
                ask(node, pin);
            }
        }
        if !pin.is_used {
            errors.push(unused(pin, g, pin.pattern.as_str()));
        } else if let PinTarget::With(path) = &pin.target
            && !is_target_there
        {
            errors.push(unused(pin, g, path));
        }
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(Error::join(errors))
    }
}

/// Writes a pin into a node's request: its device replaces the one there, a group is added.
fn ask(node: &mut Node, pin: &Pin) {
    let mut request = node.device.as_deref().cloned().unwrap_or_default();
    match &pin.target {
        PinTarget::Device(spec) => {
            (request.spec, request.asked_by) = (spec.clone(), pin.asked_by())
        }
        PinTarget::With(path) => drop(request.groups.insert(path.clone(), pin.asked_by())),
    }
    node.device = request.into_requested();
}

/// The error for a pin without a matching node or with an unknown target.
pub(super) fn unused(pin: &Pin, g: &Graph, wanted: &str) -> Error {
    let all: BTreeSet<String> = g
        .nodes()
        .flat_map(|(_, n)| paths(n))
        .filter(|p| !p.is_empty())
        .map(str::to_owned)
        .collect();
    let literal: String = wanted
        .chars()
        .filter(|c| !"^$.*+?()[]{}|\\".contains(*c))
        .collect();
    let near = nearest(&literal, all.iter().map(String::as_str), 3);
    let what = if wanted == pin.pattern.as_str() {
        String::new()
    } else {
        format!("{wanted:?} among ")
    };
    let finds = if what.is_empty() { "none of" } else { "no" };
    let error = Error::invalid(format!(
        "--pin {:?} finds {finds} {what}the model's {} node paths",
        pin.to_string(),
        all.len()
    ));
    if near.is_empty() {
        error.hint("gristmill dump MODEL --stage graph, which shows the paths")
    } else {
        error.hint(near.join(", "))
    }
}

/// Paths of a node and of all nodes of its regions.
pub(super) fn paths(node: &Node) -> Vec<&str> {
    let inner = node
        .regions
        .iter()
        .flat_map(|r| r.nodes().flat_map(|(_, n)| paths(n)));
    std::iter::once(node.origin.as_str()).chain(inner).collect()
}

/// Requests made of a node and of the nodes of its regions, each with its path.
///
/// A pin that [`apply_pins`] wrote into the graph is the request of its nodes already, and more
/// exact than paths: passes keep the request of a node, while a path may name a node that became
/// several.
pub(super) fn wishes<'g>(node: &'g Node, pins: &[Pin]) -> Vec<(&'g str, DeviceRequest)> {
    let mut own = node.device.as_deref().cloned().unwrap_or_default();
    let path = node.origin.as_str();
    for pin in pins
        .iter()
        .filter(|p| !(p.is_used && node.device.is_some()) && p.finds(path))
    {
        match &pin.target {
            PinTarget::Device(spec) => (own.spec, own.asked_by) = (spec.clone(), pin.asked_by()),
            PinTarget::With(path) => drop(own.groups.insert(path.clone(), pin.asked_by())),
        }
    }
    let inner = node
        .regions
        .iter()
        .flat_map(|r| r.nodes().flat_map(|(_, n)| wishes(n, pins)));
    std::iter::once((path, own))
        .chain(inner)
        .filter(|(_, wish)| !wish.is_open())
        .collect()
}

/// Name of a request in reasons and messages: by its author, if known.
pub(super) fn named(spec: &DeviceSpec, asked_by: &str) -> String {
    if asked_by.is_empty() {
        format!("requested device \"{spec}\"")
    } else {
        asked_by.to_owned()
    }
}
