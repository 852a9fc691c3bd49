//! Scopes of the graph builder: devices, colocation and order asked for all nodes that are added inside.
//!
//! They follow TensorFlow's: device scopes apply to a node when it is added, innermost first. A specification fills the fields that are still
//! open, a function replaces the result of inner scopes, and [`DeviceScope::Clear`] keeps outer scopes away. Constants are not placed, so no
//! device scope sees them.

use super::builder::GraphBuilder;
use super::graph::{Def, NodeId, ValueId};
use super::ops::Op;
use super::request::{AskedBy, DeviceRequest};
use super::types::Type;
use crate::error::{Error, Result};
use gristmill_runtime::device::DeviceSpec;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::sync::Arc;

/// A node that is being added, as device functions see it.
#[derive(Clone, Copy, Debug)]
pub struct NewNode<'a> {
    /// The op.
    pub op: &'a Op,
    /// Where it comes from.
    pub origin: &'a str,
    /// Types of its results.
    pub results: &'a [Type],
    /// Request of the inner scopes.
    pub device: &'a DeviceSpec,
}

/// Gives the device of a node; the answer replaces [`NewNode::device`], so a function merges itself where it wants to.
pub type DeviceFunction = Box<dyn FnMut(NewNode<'_>) -> Result<DeviceSpec> + Send>;

/// Request of a device scope. Texts such as `"/gpu:1"` convert.
pub enum DeviceScope {
    /// Fills the fields that inner scopes left open.
    Spec(DeviceSpec),
    /// Replaces the request of inner scopes.
    Function(DeviceFunction),
    /// Outer scopes are ignored.
    Clear,
}

impl DeviceScope {
    /// A scope of a function.
    pub fn function(
        f: impl FnMut(NewNode<'_>) -> Result<DeviceSpec> + Send + 'static,
    ) -> DeviceScope {
        DeviceScope::Function(Box::new(f))
    }
}

impl TryFrom<&str> for DeviceScope {
    type Error = Error;

    fn try_from(spec: &str) -> Result<DeviceScope> {
        Ok(DeviceScope::Spec(DeviceSpec::parse(spec)?))
    }
}

impl From<DeviceSpec> for DeviceScope {
    fn from(spec: DeviceSpec) -> DeviceScope {
        DeviceScope::Spec(spec)
    }
}

/// Names an open scope, so that scopes are closed in the order in which they were opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a scope stays open until exit_scope"]
pub struct ScopeToken(u64);

enum Frame {
    /// The scope, and `file:line` that opened it.
    Device(DeviceScope, String),
    /// The group, who asked, and whether outer groups are ignored. Device scopes outside are.
    Colocate {
        group: Option<Arc<str>>,
        asked_by: AskedBy,
        ignore_existing: bool,
    },
    /// The nodes to wait for; `None` ignores outer ones.
    After(Option<Vec<NodeId>>),
}

/// The open scopes of a builder, outermost first.
#[derive(Default)]
pub(super) struct Scopes {
    frames: Vec<(Frame, ScopeToken)>,
    next_token: u64,
}

impl Scopes {
    fn push(&mut self, frame: Frame) -> ScopeToken {
        self.next_token += 1;
        self.frames.push((frame, ScopeToken(self.next_token)));
        ScopeToken(self.next_token)
    }

    /// True while a scope is open.
    pub(super) fn is_any(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Request of the scopes for a new node whose own is still open.
    pub(super) fn request(&mut self, node: NewNode<'_>) -> Result<DeviceRequest> {
        let mut request = DeviceRequest {
            groups: self.groups(),
            ..DeviceRequest::default()
        };
        let mut asked_by = Vec::new();
        for (frame, _) in self.frames.iter_mut().rev() {
            let (scope, at) = match frame {
                Frame::Device(scope, at) => (scope, at),
                Frame::Colocate { .. } => break,
                Frame::After(_) => continue,
            };
            match scope {
                DeviceScope::Clear => break,
                DeviceScope::Spec(spec) => {
                    let filled = request.spec.clone().fill(spec);
                    if filled != request.spec {
                        asked_by.push(format!("scope \"{spec}\" at {at}"));
                    }
                    request.spec = filled;
                }
                DeviceScope::Function(f) => {
                    let given = f(NewNode {
                        device: &request.spec,
                        ..node
                    })
                    .map_err(|e| e.context(format!("device function at {at}")))?;
                    if given != request.spec {
                        asked_by.push(format!("device function at {at}"));
                    }
                    request.spec = given;
                }
            }
        }
        request.asked_by = AskedBy::new(&asked_by.join(", "));
        Ok(request)
    }

    fn groups(&self) -> BTreeMap<Arc<str>, AskedBy> {
        let mut groups = BTreeMap::new();
        for (frame, _) in self.frames.iter().rev() {
            let Frame::Colocate {
                group,
                asked_by,
                ignore_existing,
            } = frame
            else {
                continue;
            };
            groups.extend(group.clone().map(|g| (g, asked_by.clone())));
            if *ignore_existing {
                break;
            }
        }
        groups
    }

    /// Nodes that a new node must wait for.
    pub(super) fn after(&self) -> Vec<NodeId> {
        let mut nodes = BTreeSet::new();
        for (frame, _) in self.frames.iter().rev() {
            match frame {
                Frame::After(None) => break,
                Frame::After(Some(ids)) => nodes.extend(ids.iter().copied()),
                _ => {}
            }
        }
        nodes.into_iter().collect()
    }
}

fn place_of(at: &Location<'_>) -> String {
    format!("{}:{}", at.file(), at.line())
}

/// The scopes. Those with a closure open before it and close after it; a closure's error is passed on.
impl GraphBuilder {
    /// Runs `f` with a device for all nodes it adds: a text such as `"/gpu:1"`, a [`DeviceScope`], or a form that the module doc names.
    ///
    /// Errors when the text cannot be read, or scopes were left open inside.
    #[track_caller]
    pub fn with_device<T, S>(
        &mut self,
        scope: S,
        f: impl FnOnce(&mut GraphBuilder) -> Result<T>,
    ) -> Result<T>
    where
        S: TryInto<DeviceScope>,
        Error: From<S::Error>,
    {
        let token = self.enter_device(scope)?;
        self.inside(token, f)
    }

    /// Opens a device scope; see [`GraphBuilder::with_device`].
    #[track_caller]
    pub fn enter_device<S>(&mut self, scope: S) -> Result<ScopeToken>
    where
        S: TryInto<DeviceScope>,
        Error: From<S::Error>,
    {
        let at = place_of(Location::caller());
        let scope = scope
            .try_into()
            .map_err(|e| Error::from(e).context(format!("device scope at {at}")))?;
        Ok(self.scopes.push(Frame::Device(scope, at)))
    }

    /// Runs `f` with all nodes that it adds on the device of the node that makes `value`. Device scopes outside are ignored.
    ///
    /// Errors when `value` is a graph input or a constant, which have no device of their own.
    #[track_caller]
    pub fn colocate_with<T>(
        &mut self,
        value: ValueId,
        f: impl FnOnce(&mut GraphBuilder) -> Result<T>,
    ) -> Result<T> {
        let token = self.enter_colocation(Some(value), false)?;
        self.inside(token, f)
    }

    /// Opens a colocation scope; see [`GraphBuilder::colocate_with`]. With `ignore_existing`, outer ones are ignored; without a value, there is
    /// none inside, which only `ignore_existing` allows.
    #[track_caller]
    pub fn enter_colocation(
        &mut self,
        value: Option<ValueId>,
        ignore_existing: bool,
    ) -> Result<ScopeToken> {
        let at = place_of(Location::caller());
        let asked_by = AskedBy::new(&format!("colocate_with at {at}"));
        let group = match value {
            Some(value) => Some(
                self.group_of(value, &asked_by)
                    .map_err(|e| e.context(asked_by.as_str()))?,
            ),
            None if ignore_existing => None,
            None => {
                return Err(Error::invalid(format!(
                    "{}: trying to reset colocation (no value) but ignore_existing is not set",
                    asked_by.as_str()
                )));
            }
        };
        Ok(self.scopes.push(Frame::Colocate {
            group,
            asked_by,
            ignore_existing,
        }))
    }

    /// The colocation group named after the node that makes `value`, which is made a member.
    fn group_of(&mut self, value: ValueId, asked_by: &AskedBy) -> Result<Arc<str>> {
        let id = self.placed_node(value)?;
        let node = self.graph.node_mut(id);
        let name: Arc<str> = format!("{}#{}", node.origin, id.0).into();
        let mut request = node.device.as_deref().cloned().unwrap_or_default();
        request
            .groups
            .entry(name.clone())
            .or_insert_with(|| asked_by.clone());
        node.device = request.into_requested();
        Ok(name)
    }

    /// The node that makes a value; none for graph inputs. Errors when the value is of another graph.
    fn node_of(&self, value: ValueId) -> Result<Option<NodeId>> {
        self.own(value).map_err(Error::invalid)?;
        match self.graph.value(value).def {
            Def::Input(_) => Ok(None),
            Def::Node(id, _) => Ok(Some(id)),
        }
    }

    fn placed_node(&self, value: ValueId) -> Result<NodeId> {
        let id = self
            .node_of(value)?
            .ok_or_else(|| Error::invalid("a graph input has no node to be with"))?;
        match self.graph.node(id).op {
            Op::Constant { .. } => {
                Err(Error::invalid("a constant is on every device that uses it"))
            }
            _ => Ok(id),
        }
    }

    /// Runs `f` with all nodes that it adds waiting for the nodes that make `values`. These run even when nothing reads their results, as
    /// in TensorFlow. Inputs and constants are there from the start.
    pub fn with_control_dependencies<T>(
        &mut self,
        values: &[ValueId],
        f: impl FnOnce(&mut GraphBuilder) -> Result<T>,
    ) -> Result<T> {
        let mut ids = Vec::new();
        for &v in values {
            ids.extend(
                self.node_of(v)?
                    .filter(|&id| !matches!(self.graph.node(id).op, Op::Constant { .. })),
            );
        }
        let token = self.scopes.push(Frame::After(Some(ids)));
        self.inside(token, f)
    }

    /// Runs `f` without the control dependencies of outer scopes.
    pub fn without_control_dependencies<T>(
        &mut self,
        f: impl FnOnce(&mut GraphBuilder) -> Result<T>,
    ) -> Result<T> {
        let token = self.scopes.push(Frame::After(None));
        self.inside(token, f)
    }

    /// Runs `f` and closes the scope, and with an error all that `f` left open.
    fn inside<T>(
        &mut self,
        token: ScopeToken,
        f: impl FnOnce(&mut GraphBuilder) -> Result<T>,
    ) -> Result<T> {
        let made = f(self);
        self.leave(token, made)
    }

    /// Closes the scope of `token` with what was made in it; after an error, with all scopes inside.
    pub(crate) fn leave<T>(&mut self, token: ScopeToken, made: Result<T>) -> Result<T> {
        match made {
            Ok(result) => self.exit_scope(token).map(|()| result),
            Err(e) => {
                let own = self.scopes.frames.iter().position(|(_, t)| *t == token);
                self.scopes.frames.truncate(own.unwrap_or(usize::MAX));
                Err(e)
            }
        }
    }

    /// Closes the innermost scope. Errors when that is not the one of `token`.
    pub fn exit_scope(&mut self, token: ScopeToken) -> Result<()> {
        if self
            .scopes
            .frames
            .last()
            .is_none_or(|(_, innermost)| *innermost != token)
        {
            return Err(Error::invalid(
                "Exiting device scope without proper scope nesting",
            ));
        }
        self.scopes.frames.pop();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
