//! Pins and device requests: which devices a node may be on, and why.

use super::Reason;
use super::device::{DeviceSet, DeviceSpec, lacks_kernels};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, Op};
use crate::nearest::nearest;
use regex::Regex;
use std::collections::BTreeSet;
use std::fmt;

/// Puts every node whose path the pattern finds on a device.
#[derive(Clone, Debug)]
pub struct Pin {
    /// Searched in the node's path; anchor it with `^` and `$` to fit whole paths.
    pub pattern: Regex,
    /// Where to.
    pub device: DeviceSpec,
    /// Set by [`apply_pins`]: some node of the model fits.
    pub is_used: bool,
}

impl Pin {
    /// Reads `REGEX=DEVICE`; the last `=` separates.
    pub fn parse(text: &str) -> Result<Pin> {
        let fail =
            |why: String| Error::invalid(format!("--pin {text:?}: {why}")).hint("--pin '^/encoder/=/device:CPU:1'");
        let (pattern, device) =
            text.rsplit_once('=').ok_or_else(|| fail("no '=' between pattern and device".into()))?;
        let pattern = Regex::new(pattern).map_err(|e| fail(e.to_string().replace('\n', " ")))?;
        Ok(Pin { pattern, device: DeviceSpec::parse(device).map_err(|e| fail(e.to_string()))?, is_used: false })
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.device)
    }
}

/// What to do when a request cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Fallback {
    /// Refuse.
    #[default]
    Error,
    /// Place the node elsewhere, and warn.
    Warn,
    /// Place the node elsewhere; the placement's reasons still say so.
    Allow,
}

/// What is asked of placement. Pins and the requests in the graph (`Node::device`) always hold unless `fallback` lets them go.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The logical devices.
    pub devices: DeviceSet,
    /// Pins; of several that find a node the last one counts. A pin goes before the node's own request.
    pub pins: Vec<Pin>,
    /// What to do when a request cannot be had.
    pub fallback: Fallback,
}

/// Writes the pins into the device requests of the nodes they find, so that no cluster joins nodes of different devices.
///
/// Errors when a pin finds no node, naming the nearest paths, or names a device that is not in the set (unless `fallback` lets it go).
pub fn apply_pins(g: &mut Graph, request: &mut Request) -> Result<()> {
    let mut errors = Vec::new();
    let ids: Vec<_> = g.nodes().map(|(id, _)| id).collect();
    for pin in &mut request.pins {
        if request.fallback == Fallback::Error && request.devices.matching(&pin.device).is_empty() {
            errors.push(request.devices.unknown(&pin.device).context(format!("--pin {:?}", pin.to_string())));
        }
        for &id in &ids {
            let node = g.node_mut(id);
            let finds = |path: &str| !path.is_empty() && pin.pattern.is_match(path);
            if paths(node).iter().any(|p| finds(p)) {
                node.device = Some(pin.device.to_string().into());
                pin.is_used = true;
            }
        }
        if !pin.is_used {
            errors.push(unused(pin, g));
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(Error::join(errors)) }
}

/// The error for a pin that finds nothing.
fn unused(pin: &Pin, g: &Graph) -> Error {
    let all: BTreeSet<String> = g.nodes().flat_map(|(_, n)| paths(n)).filter(|p| !p.is_empty()).collect();
    let literal: String = pin.pattern.as_str().chars().filter(|c| !"^$.*+?()[]{}|\\".contains(*c)).collect();
    let near = nearest(&literal, all.iter().map(String::as_str), 3);
    let error =
        Error::invalid(format!("--pin {:?} finds none of the model's {} node paths", pin.to_string(), all.len()));
    if near.is_empty() {
        error.hint("gristmill dump MODEL --stage graph, which shows the paths")
    } else {
        error.hint(near.join(", "))
    }
}

/// Paths of a node and of all nodes of its regions.
fn paths(node: &Node) -> Vec<String> {
    let inner = node.regions.iter().flat_map(|r| r.nodes().flat_map(|(_, n)| paths(n)));
    std::iter::once(node.origin.to_string()).chain(inner).collect()
}

/// Devices that a node may be on.
#[derive(Clone, Debug)]
pub(super) struct Allowed {
    /// By index into the device set; not empty.
    pub devices: Vec<usize>,
    /// What narrowed them.
    pub reason: Reason,
}

/// Allowed devices of every node but constants, and warnings about requests that were let go. All problems are reported at once.
pub(super) fn resolve(g: &Graph, request: &Request) -> Result<(Vec<Option<Allowed>>, Vec<String>)> {
    check_set(&request.devices)?;
    let (mut errors, mut warnings) = (Vec::new(), Vec::new());
    let mut used: Vec<bool> = request.pins.iter().map(|p| p.is_used).collect();
    let mut allowed = Vec::new();
    for (_, node) in g.nodes() {
        if matches!(node.op, Op::Constant { .. }) {
            mark_used(node, request, &mut used);
            allowed.push(None);
            continue;
        }
        match wish(node, request, &mut used).and_then(|wish| grant(node, wish, request, &mut warnings)) {
            Ok(a) => allowed.push(Some(a)),
            Err(e) => {
                errors.push(e.at_origin(&node.origin));
                allowed.push(None);
            }
        }
    }
    let pins = request.pins.iter().zip(used);
    errors.extend(pins.filter(|(_, used)| !used).map(|(pin, _)| unused(pin, g)));
    errors.dedup();
    if errors.is_empty() { Ok((allowed, warnings)) } else { Err(Error::join(errors)) }
}

/// One error instead of one per node when the whole set is of no use.
fn check_set(set: &DeviceSet) -> Result<()> {
    let lacking: Vec<String> =
        set.devices.iter().filter_map(|d| lacks_kernels(d.name.kind).map(|why| format!("{}: {why}", d.name))).collect();
    if lacking.len() < set.devices.len() {
        return Ok(());
    }
    Err(Error::unsupported(format!("no device of the set can run anything: {}", lacking.join(", ")))
        .hint("--devices with a CPU in it"))
}

fn mark_used(node: &Node, request: &Request, used: &mut [bool]) {
    for path in paths(node).iter().filter(|p| !p.is_empty()) {
        request.pins.iter().zip(&mut *used).for_each(|(pin, used)| *used |= pin.pattern.is_match(path));
    }
}

/// What is wanted of a node: by the pins that find it or a node of its body, else by its own request.
///
/// Pins that [`apply_pins`] wrote into the graph are its requests already, and more exact than paths: passes keep the request of a node, while
/// a path may name a node that became several.
fn wish(node: &Node, request: &Request, used: &mut [bool]) -> Result<Option<(DeviceSpec, Reason)>> {
    mark_used(node, request, used);
    let mut found: Option<(&Pin, String)> = None;
    for path in paths(node).into_iter().filter(|p| !p.is_empty()) {
        let Some(pin) = request.pins.iter().rev().find(|p| p.pattern.is_match(&path)) else { continue };
        if pin.is_used && node.device.is_some() {
            continue;
        }
        match &found {
            Some((other, at)) if other.device != pin.device => {
                return Err(Error::invalid(format!(
                    "one cluster holds {at:?}, pinned by {:?}, and {path:?}, pinned by {:?}",
                    other.to_string(),
                    pin.to_string()
                )));
            }
            _ => found = Some((pin, path)),
        }
    }
    match (found, &node.device) {
        (Some((pin, _)), _) => Ok(Some((pin.device.clone(), Reason::Pin(pin.to_string())))),
        (None, Some(text)) => Ok(Some((DeviceSpec::parse(text)?, Reason::Request(text.to_string())))),
        (None, None) => Ok(None),
    }
}

/// The devices that fit a wish and can run the node; without any, those that soft placement gives or an error.
fn grant(
    node: &Node,
    wish: Option<(DeviceSpec, Reason)>,
    request: &Request,
    warnings: &mut Vec<String>,
) -> Result<Allowed> {
    let set = &request.devices;
    let able = |devices: Vec<usize>| -> Vec<usize> {
        devices.into_iter().filter(|&d| lacks_kernels(set.devices[d].name.kind).is_none()).collect()
    };
    let Some((spec, reason)) = wish else {
        let devices = able((0..set.devices.len()).collect());
        let reason = if devices.len() == 1 { Reason::OnlyDevice } else { Reason::Chosen };
        return if devices.is_empty() {
            Err(no_kernel(node, set, &(0..set.devices.len()).collect::<Vec<_>>()))
        } else {
            Ok(Allowed { devices, reason })
        };
    };
    let fitting = set.matching(&spec);
    let devices = able(fitting.clone());
    if !devices.is_empty() {
        return Ok(Allowed { devices, reason });
    }
    let problem = match fitting.is_empty() {
        true => set.unknown(&spec),
        false => no_kernel(node, set, &fitting),
    };
    let problem = problem.context(&reason);
    let soft = able(set.matching(&spec.relaxed()));
    if request.fallback == Fallback::Error || soft.is_empty() {
        return Err(problem);
    }
    if request.fallback == Fallback::Warn {
        warnings.push(problem.at_origin(&node.origin).to_string());
    }
    Ok(Allowed { devices: soft, reason: Reason::Fallback(reason.to_string()) })
}

fn no_kernel(node: &Node, set: &DeviceSet, devices: &[usize]) -> Error {
    let why: BTreeSet<String> = devices.iter().filter_map(|&d| lacks_kernels(set.devices[d].name.kind)).collect();
    let names: Vec<String> = devices.iter().map(|&d| set.devices[d].name.to_string()).collect();
    let why: Vec<String> = why.into_iter().collect();
    Error::unsupported(format!("{} cannot run on {}: {}", node.op.name(), names.join(", "), why.join(", ")))
        .hint("--devices with a CPU in it, or --fallback allow")
}
