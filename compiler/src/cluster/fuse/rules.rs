//! Growth of cones: named rules, each within the limits of code generation.

use super::Fuser;
use super::cone::Cone;
use crate::cluster::{bytes, gpu, legal};
use crate::cost::Picos;
use crate::ir::{ClusterKind, NodeId, Op, OpClass, ValueId};
use gristmill_runtime::DType;

/// Result of a rule: `None` when the term has another form, an error when the form is right but a
/// condition fails.
type RuleResult = Option<Result<Cone, String>>;

/// A rule that adds e-nodes.
#[derive(Clone, Copy)]
enum Step {
    /// The reader of a cone's root joins it: (cone, the value read, reader).
    Extend(fn(&Fuser, &Cone, ValueId, NodeId) -> RuleResult),
    /// A cone absorbs a producer: (cone, cone of a producer that it reads).
    Absorb(fn(&Fuser, &Cone, &Cone) -> RuleResult),
}

/// A named rule of the fuse phase.
struct FuseRule {
    name: &'static str,
    doc: &'static str,
    step: Step,
}

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $name:literal $step:expr;)*) => {
        const RULES: &[FuseRule] = &[$(FuseRule { name: $name, doc: concat!($($doc),*), step: $step }),*];
    };
}

rules! {
    /// Element-wise ops run on the result tile of a matrix product or convolution.
    "epilogue-onto-contraction" Step::Extend(epilogue_onto_contraction);
    /// A reshape, or a transpose that keeps the rows of a product, follows on the tile.
    "view-after-contraction" Step::Extend(view_after_contraction);
    /// Element-wise ops run on each reduced element.
    "epilogue-onto-reduction" Step::Extend(epilogue_onto_reduction);
    /// A product or attention reads its operand through views, by strides.
    "views-into-contraction" Step::Absorb(views_into_contraction);
    /// A concatenation copies its operands from where they are, by strides.
    "views-into-concat" Step::Absorb(views_into_concat);
    /// A reshape of a concatenation is the same memory.
    "reshape-after-concat" Step::Extend(reshape_after_concat);
    /// A product of 8-bit integers reads bytes, and takes the zero point off the sums; a lookup reads
    /// bytes too.
    "bytes-into-contraction" Step::Absorb(bytes_into_contraction);
    /// An element-wise loop computes a producer that has no other reader.
    "producer-into-map" Step::Absorb(producer_into_map);
    /// A reduction computes a producer that has no other reader.
    "prologue-into-reduction" Step::Absorb(prologue_into_reduction);
    /// Each reader of a shared producer recomputes it instead of reading it.
    "recompute-in-each-reader" Step::Absorb(recompute_in_each_reader);
}

/// Names and docs of the rules of this phase.
pub fn fuse_rules() -> impl Iterator<Item = (&'static str, &'static str)> {
    RULES.iter().map(|r| (r.name, r.doc))
}

/// Name and outcome of each rule for which the term had the right form.
type Outcomes = Vec<(&'static str, Result<Cone, String>)>;

fn outcomes(apply: impl Fn(Step) -> RuleResult) -> Outcomes {
    let named = |r: &FuseRule| Some((r.name, apply(r.step)?));
    RULES.iter().filter_map(named).collect()
}

impl Fuser<'_> {
    /// The cones of a node, about `limit`; none that another one of the same kind is never worse than.
    pub(super) fn cones_at(&mut self, id: NodeId, limit: usize) -> Vec<Cone> {
        let operands = self.produced_operands(id);
        let mut cones = vec![self.plain(id)];
        for &(v, p) in &operands {
            let producers = self.cones_of(p);
            let outcomes = producers.flat_map(|c| self.extensions(c, v, id)).collect();
            cones.extend(self.record(p, id, outcomes));
        }
        for &(v, p) in &operands {
            self.absorb(&mut cones, v, p, id);
            self.keep_best(&mut cones, limit);
        }
        cones
    }

    /// Operands of a node that fusible nodes define, and these nodes.
    fn produced_operands(&self, id: NodeId) -> Vec<(ValueId, NodeId)> {
        let inputs = self.g.node(id).inputs.iter();
        let produced = inputs.filter_map(|&v| Some((v, self.producer(v)?)));
        let mut operands: Vec<_> = produced.collect();
        operands.sort_unstable_by_key(|(v, p)| (*p, *v));
        operands.dedup();
        operands
    }

    /// Adds cones of `id` that absorb the producer `p` of its operand `v`.
    fn absorb(&mut self, cones: &mut Vec<Cone>, v: ValueId, p: NodeId, id: NodeId) {
        let kind = legal::kind_of(&self.g.node(id).op);
        let readers = cones.iter().filter(|c| c.reads(v));
        let outcomes = readers
            .flat_map(|c| self.cones_of(p).flat_map(|q| self.absorptions(c, q)))
            .collect();
        let grown = self.record(p, id, outcomes);
        if self.has_no_choice(p, id) && grown.iter().any(|c| Some(c.kind) == kind) {
            cones.retain(|c| !c.reads(v) || Some(c.kind) != kind);
        }
        cones.extend(grown);
    }

    fn extensions(&self, cone: &Cone, v: ValueId, reader: NodeId) -> Outcomes {
        outcomes(|step| match step {
            Step::Extend(rule) => rule(self, cone, v, reader),
            Step::Absorb(_) => None,
        })
    }

    fn absorptions(&self, cone: &Cone, producer: &Cone) -> Outcomes {
        outcomes(|step| match step {
            Step::Absorb(rule) => rule(self, cone, producer),
            Step::Extend(_) => None,
        })
    }

    /// Counts fired rules, notes refusals, and returns the new cones.
    fn record(&mut self, p: NodeId, reader: NodeId, outcomes: Outcomes) -> Vec<Cone> {
        let mut cones: Vec<Cone> = Vec::new();
        for (rule, outcome) in outcomes {
            match outcome {
                Ok(cone) if !cones.contains(&cone) => {
                    *self.report.fired.entry(rule).or_insert(0) += 1;
                    cones.push(cone);
                }
                Ok(_) => {}
                Err(why) => self.refuse(p, reader, why),
            }
        }
        cones
    }

    /// True when computing `p` in the kernel of `reader` cannot take longer than storing it.
    fn has_no_choice(&self, p: NodeId, reader: NodeId) -> bool {
        if self.reads_bytes(p, reader) {
            return true;
        }
        let n = |id: NodeId| legal::n_elements(self.g, self.g.node(id).outputs[0]);
        let is_as_large = n(p).is_some() && n(p) == n(reader);
        let founds_map = self.cones_of(p).all(|c| c.kind == ClusterKind::Map);
        let op = &self.g.node(reader).op;
        let is_free = match op.class() {
            OpClass::Contract | OpClass::Attention => self.is_view(p),
            OpClass::View if self.is_concat(reader) && !self.pricing.only_gpus => {
                self.is_copied_view(p)
            }
            OpClass::Map | OpClass::View => is_as_large,
            _ => false,
        };
        founds_map && is_free && self.is_only_reader(p, reader)
    }

    /// True when `reader` is a product or a lookup that has a kernel for the bytes below `p`, whatever
    /// else reads them, but none for its 32-bit integers.
    fn reads_bytes(&self, p: NodeId, reader: NodeId) -> bool {
        let node = self.g.node(reader);
        let is_of = |operand: usize| self.producer(node.inputs[operand]) == Some(p);
        let multiplies = || bytes::product(self.g, node).is_some() && is_of(0);
        let looks_up = || bytes::lookup(self.g, node).is_some() && is_of(1);
        !self.pricing.only_gpus && (multiplies() || looks_up())
    }

    /// Keeps the cones of the smallest flow; ties go to the smallest arithmetic, then to the most
    /// members.
    fn keep_best(&self, cones: &mut Vec<Cone>, limit: usize) {
        if cones.len() <= limit {
            return;
        }
        cones.sort_by_cached_key(|c| {
            (
                self.flow_of(c),
                c.arithmetic(),
                usize::MAX - c.members.len(),
            )
        });
        // One of each kind stays, so that readers of all kinds find a cone that they can extend.
        let kept: Vec<ClusterKind> = cones[..limit].iter().map(|c| c.kind).collect();
        let mut extra: Vec<Cone> = Vec::new();
        for c in cones.drain(limit..) {
            if !kept.contains(&c.kind) && extra.iter().all(|e| e.kind != c.kind) {
                extra.push(c);
            }
        }
        cones.extend(extra);
    }

    /// Checks that `reader` may join a cone of which it is the only reader.
    fn may_join(&self, cone: &Cone, reader: NodeId) -> Result<(), String> {
        legal::may_share(self.g, &self.ordered, cone.anchor, reader)?;
        if !self.is_only_reader(cone.root, reader) {
            return Err("its value is needed elsewhere too".into());
        }
        if cone.members.len() < legal::MAX_MEMBERS {
            return Ok(());
        }
        Err(format!(
            "the cluster has {} nodes already",
            legal::MAX_MEMBERS
        ))
    }

    /// `cone` with nodes computed on the way, at no cost in arithmetic.
    fn with_free(&self, cone: &Cone, nodes: &[NodeId]) -> Result<Cone, String> {
        for &m in nodes {
            legal::may_share(self.g, &self.ordered, cone.anchor, m)?;
        }
        let free = nodes.iter().map(|&m| (m, Picos::ZERO));
        Ok(self.grown(cone, free, cone.root))
    }

    /// True for a view that a concatenation can copy by strides.
    fn is_copied_view(&self, id: NodeId) -> bool {
        self.is_view(id) && !self.is_concat(id)
    }

    fn is_concat(&self, id: NodeId) -> bool {
        matches!(self.g.node(id).op, Op::Concat { .. })
    }

    /// The cone of a contraction with the views that define its operand `i`.
    fn with_views(&self, cone: &Cone, i: usize) -> Result<Cone, String> {
        let views = legal::views_below(self.g, self.g.node(cone.anchor).inputs[i]);
        let grown = self.with_free(cone, &views)?;
        has_room(cone, views.len())?;
        Ok(grown)
    }

    /// `cone` with the members of `q`, the cone of something that its loops read. Errors say why they cannot compute it.
    fn absorbed(&self, cone: &Cone, q: &Cone) -> Result<Cone, String> {
        legal::may_share(self.g, &self.ordered, cone.anchor, q.root)?;
        has_room(cone, q.members.len())?;
        let times = self.repetitions(cone, q)?;
        let is_member = |m: NodeId| cone.contains(m) || q.contains(m);
        let computes_operands = self.computes_operands(cone, q);
        for m in q.nodes().filter(|m| !cone.contains(*m)) {
            if computes_operands && self.is_concat(m) {
                continue;
            }
            legal::is_pulled(self.g, &self.users, m, &is_member)?;
        }
        let repeated = q.members.iter().map(|&(m, time)| (m, time.times(times)));
        Ok(self.grown(cone, repeated, cone.root))
    }

    /// True where element-wise loops of a CPU over a concatenation go over its operands one after the other: nothing but element-wise ops
    /// of `f32` comes between.
    fn computes_operands(&self, cone: &Cone, q: &Cone) -> bool {
        let is_map = matches!(self.g.node(cone.root).op, Op::Map(_));
        let is_own = !self.pricing.only_gpus && self.is_only_reader(q.root, cone.root);
        let [from, to] = [q, cone].map(|c| self.g.ty(self.g.node(c.root).outputs[0]));
        let keeps_f32 = to.dtype == DType::F32 && from == to;
        is_map && is_own && keeps_f32 && !cone.nodes().any(|m| self.is_concat(m))
    }

    /// True where a GPU reads `q` only for ops on results in registers, such as a mask of the gradient of
    /// an activation: it computes one element for each result, and nothing of the anchor's operands.
    fn is_beside_results(&self, cone: &Cone, q: &Cone) -> bool {
        let holds = self.pricing.only_gpus && gpu::holds_result(self.g.node(cone.anchor));
        let n = |id: NodeId| legal::n_elements(self.g, self.g.node(id).outputs[0]);
        let is_behind = |m: NodeId| {
            let results = self.g.node(m).outputs.iter();
            let users = results.flat_map(|v| &self.users[v.0 as usize]);
            let mut readers = users.map(|u| u.0).filter(|&id| cone.contains(id));
            readers.all(|id| id > cone.anchor)
        };
        let mut more = q.nodes().filter(|m| !cone.contains(*m));
        holds && n(q.root) == n(cone.anchor) && more.all(is_behind)
    }

    /// Times that the loops of `cone` compute each element of `q`.
    fn repetitions(&self, cone: &Cone, q: &Cone) -> Result<u64, String> {
        let (g, anchor) = (self.g, self.g.node(cone.anchor));
        let n_results = |id: NodeId| legal::known_elements(g, g.node(id).outputs[0]);
        if self.is_beside_results(cone, q) {
            return Ok(1);
        }
        let pulled = if self.pricing.only_gpus {
            gpu::loops_over(g, anchor)?
        } else {
            legal::loops_over(g, anchor)?
        };
        let pulled = if cone.root == cone.anchor {
            pulled
        } else {
            n_results(cone.root)?
        };
        let computed = n_results(q.root)?;
        Ok((pulled / computed.max(1)).max(1) as u64)
    }
}

fn has_room(cone: &Cone, n_more: usize) -> Result<(), String> {
    if cone.members.len() + n_more <= legal::MAX_MEMBERS {
        return Ok(());
    }
    Err(format!(
        "the cluster would have more than {} nodes",
        legal::MAX_MEMBERS
    ))
}

fn epilogue_onto_contraction(f: &Fuser, cone: &Cone, v: ValueId, reader: NodeId) -> RuleResult {
    let is_map = matches!(f.g.node(reader).op, Op::Map(_));
    (is_map && has_tail(f, cone)).then(|| onto_contraction(f, cone, v, reader))
}

fn view_after_contraction(f: &Fuser, cone: &Cone, v: ValueId, reader: NodeId) -> RuleResult {
    let is_view = matches!(
        f.g.node(reader).op,
        Op::Reshape { .. } | Op::Transpose { .. }
    );
    (is_view && has_tail(f, cone)).then(|| onto_contraction(f, cone, v, reader))
}

/// True when the ops behind the anchor of a cone are its tail.
fn has_tail(f: &Fuser, cone: &Cone) -> bool {
    cone.kind == ClusterKind::Contract
        || f.pricing.only_gpus && gpu::holds_result(f.g.node(cone.anchor))
}

fn onto_contraction(f: &Fuser, cone: &Cone, v: ValueId, reader: NodeId) -> Result<Cone, String> {
    let (anchor, node) = (f.g.node(cone.anchor), f.g.node(reader));
    let tail = if f.pricing.only_gpus {
        gpu::with(cone.tail, f.g, anchor, node, v)?
    } else if legal::takes_epilogue(f.g, anchor) {
        cone.tail.with(f.g, anchor, node, v)?
    } else {
        return Err(format!(
            "{} of {} has no tile to follow on",
            anchor.op.name(),
            f.g.ty(anchor.outputs[0])
        ));
    };
    f.may_join(cone, reader)?;
    let grown = f.extended(cone, reader);
    Ok(Cone { tail, ..grown })
}

fn epilogue_onto_reduction(f: &Fuser, cone: &Cone, v: ValueId, reader: NodeId) -> RuleResult {
    let is_reduction = matches!(f.g.node(cone.anchor).op, Op::Reduce { .. });
    let is_map = matches!(f.g.node(reader).op, Op::Map(_));
    (is_reduction && is_map && !has_tail(f, cone)).then(|| {
        legal::follows_reduction(f.g, f.g.node(reader), v)?;
        f.may_join(cone, reader)?;
        Ok(f.extended(cone, reader))
    })
}

fn views_into_contraction(f: &Fuser, cone: &Cone, q: &Cone) -> RuleResult {
    let anchor = f.g.node(cone.anchor);
    let reads = matches!(anchor.op, Op::MatMul | Op::Attention { .. }) && cone.root == cone.anchor;
    // Only the chain of views is absorbed, whatever the producer's cone holds.
    if !reads || !f.is_view(q.root) {
        return None;
    }
    let mut operands = anchor.inputs.iter().map(|&v| f.producer(v));
    let i = operands.position(|p| p == Some(q.root))?;
    if i == 0 && !f.pricing.only_gpus && bytes::product(f.g, anchor).is_some() {
        return None;
    }
    if f.pricing.only_gpus || legal::reads_by_strides(f.g, anchor, i) {
        return Some(f.with_views(cone, i));
    }
    let (op, operand) = (anchor.op.name(), f.g.ty(anchor.inputs[i]));
    Some(Err(format!("{op} cannot read {operand} by strides")))
}

fn views_into_concat(f: &Fuser, cone: &Cone, q: &Cone) -> RuleResult {
    let is_copied = f.is_concat(cone.anchor) && cone.root == cone.anchor;
    let is_read = is_copied && !f.pricing.only_gpus;
    (is_read && q.nodes().all(|m| f.is_copied_view(m))).then(|| {
        has_room(cone, q.members.len())?;
        let v = f.results(q.root)[0];
        match legal::is_strided(f.g, v, &|p| q.contains(p)) {
            true => f.with_free(cone, &q.nodes().collect::<Vec<_>>()),
            false => Err(format!("{} is not read by strides", f.g.ty(v))),
        }
    })
}

fn reshape_after_concat(f: &Fuser, cone: &Cone, _: ValueId, reader: NodeId) -> RuleResult {
    let is_reshape = matches!(f.g.node(reader).op, Op::Reshape { .. });
    (f.is_concat(cone.anchor) && is_reshape && cone.root == cone.anchor).then(|| {
        f.may_join(cone, reader)?;
        Ok(f.extended(cone, reader))
    })
}

fn bytes_into_contraction(f: &Fuser, cone: &Cone, q: &Cone) -> RuleResult {
    let anchor = f.g.node(cone.anchor);
    if cone.root != cone.anchor || f.pricing.only_gpus {
        return None;
    }
    let (operand, nodes) = match bytes::lookup(f.g, anchor) {
        Some(lookup) => (1, vec![lookup.widening]),
        None => (0, bytes::product(f.g, anchor)?.nodes),
    };
    let is_read = f.producer(anchor.inputs[operand]) == Some(q.root);
    is_read.then(|| f.with_free(cone, &nodes))
}

fn producer_into_map(f: &Fuser, cone: &Cone, q: &Cone) -> RuleResult {
    let fits = cone.kind == ClusterKind::Map && is_own_map(f, cone, q);
    fits.then(|| f.absorbed(cone, q))
}

fn prologue_into_reduction(f: &Fuser, cone: &Cone, q: &Cone) -> RuleResult {
    let fits = cone.kind != ClusterKind::Map && is_own_map(f, cone, q);
    (fits && !reads_views(f, cone, q)).then(|| f.absorbed(cone, q))
}

/// True when `q` is an element-wise loop that nothing but the root of `cone` reads.
fn is_own_map(f: &Fuser, cone: &Cone, q: &Cone) -> bool {
    q.kind == ClusterKind::Map && f.is_only_reader(q.root, cone.root)
}

fn recompute_in_each_reader(f: &Fuser, cone: &Cone, q: &Cone) -> RuleResult {
    let fits = q.kind == ClusterKind::Map && !f.is_only_reader(q.root, cone.root);
    (fits && !reads_views(f, cone, q)).then(|| f.absorbed(cone, q))
}

/// True for views read by a product or attention, which another rule decides about.
fn reads_views(f: &Fuser, cone: &Cone, q: &Cone) -> bool {
    let anchor = &f.g.node(cone.anchor).op;
    f.is_view(q.root) && matches!(anchor, Op::MatMul | Op::Attention { .. })
}
