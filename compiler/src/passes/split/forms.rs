//! The form of each value, and the forms in which each node is computed.

use super::rules::{self, Sizes};
use super::{Form, Shares};
use crate::ir::{Def, Graph, Node, NodeId, Op, ValueId};
use std::collections::BTreeSet;

/// One computation of a node.
pub(super) struct Computed {
    /// The form of its results.
    pub(super) form: Form,
    /// The forms of its operands.
    pub(super) operands: Vec<Form>,
}

/// Forms of all values of a graph.
pub(super) struct Plan {
    /// The form in which each value is made, by value.
    made: Vec<Form>,
    /// The computations of each node, by node; none where nobody needs its results.
    computed: Vec<Vec<Computed>>,
}

impl Plan {
    /// Forms with few transfers. The first axis of the inputs named is the batch.
    pub(super) fn of(g: &Graph, inputs: &[String], shares: &Shares) -> Plan {
        let mut plan = Plan {
            made: vec![Form::Whole; g.n_values()],
            computed: Vec::new(),
        };
        if shares.n() > 1 {
            for (v, name) in g.inputs.iter().zip(&g.input_names) {
                if inputs.contains(name) {
                    plan.made[v.0 as usize] = Form::Piece(0);
                }
            }
            plan.choose(g, shares);
        }
        plan.demand(g, shares);
        plan
    }

    pub(super) fn made(&self, v: ValueId) -> Form {
        self.made[v.0 as usize]
    }

    pub(super) fn computed(&self, id: NodeId) -> &[Computed] {
        &self.computed[id.0 as usize]
    }

    /// Gives the results of each node a form.
    fn choose(&mut self, g: &Graph, shares: &Shares) {
        for (_, node) in g.nodes() {
            let form = self.cheapest(g, node, shares);
            for v in &node.outputs {
                self.made[v.0 as usize] = form;
            }
        }
    }

    /// The form of a node's results with the fewest bytes of operands to be summed. Operands in pieces stay so, or the node is computed whole.
    fn cheapest(&self, g: &Graph, node: &Node, shares: &Shares) -> Form {
        let has = |is: fn(&Form) -> bool| node.inputs.iter().any(|&v| is(&self.made(v)));
        let is_piece = |form: &Form| matches!(form, Form::Piece(_));
        let has_piece = has(is_piece);
        if !has_piece && !has(|form| *form == Form::Addend) {
            return Form::Whole;
        }
        let Some(sizes) = Sizes::of(g, node) else {
            return Form::Whole;
        };
        let axes = sizes.cut_axes(shares).filter(|_| has_piece);
        let forms = [Form::Addend].into_iter().chain(axes.map(Form::Piece));
        let mut best = (usize::MAX, Form::Whole);
        for form in forms {
            for operands in rules::operands(g, node, &sizes, form, shares) {
                if let Some(moved) = self.moved_bytes(g, node, &operands)
                    && moved < best.0
                {
                    best = (moved, form);
                }
            }
        }
        // Without pieces, addends stay addends only where no operand has to be summed for it.
        match best {
            (moved, _) if !has_piece && moved > 0 => Form::Whole,
            (_, form) => form,
        }
    }

    /// Bytes of addends to be summed before a node has its operands in some forms; `None` where pieces would have to be joined, or an operand is no
    /// sum of addends.
    fn moved_bytes(&self, g: &Graph, node: &Node, forms: &[Form]) -> Option<usize> {
        let mut moved = 0_usize;
        for (&v, &form) in node.inputs.iter().zip(forms) {
            match (self.made(v), form) {
                (made, form) if made == form => {}
                (Form::Whole, Form::Piece(_)) => {}
                (Form::Addend, Form::Whole | Form::Piece(_)) => {
                    moved = moved.saturating_add(g.ty(v).size_bytes()?);
                }
                _ => return None,
            }
        }
        Some(moved)
    }

    /// Finds the computations behind the outputs and the assignments.
    fn demand(&mut self, g: &Graph, shares: &Shares) {
        let mut needed: Vec<BTreeSet<Form>> = vec![BTreeSet::new(); g.n_values()];
        let mut computed: Vec<Vec<Computed>> = Vec::new();
        for o in &g.outputs {
            needed[o.value.0 as usize].insert(Form::Whole);
        }
        for (_, node) in g.nodes().rev() {
            let forms: BTreeSet<Form> = node
                .outputs
                .iter()
                .flat_map(|v| needed[v.0 as usize].iter().copied())
                .collect();
            let is_effect = matches!(node.op, Op::AssignVariable { .. });
            let own = match forms.is_empty() && !is_effect {
                true => Vec::new(),
                false => self.computations(g, node, &forms, shares),
            };
            for Computed { operands, .. } in &own {
                for (&v, &form) in node.inputs.iter().zip(operands) {
                    needed[v.0 as usize].insert(form);
                }
            }
            computed.push(own);
        }
        computed.reverse();
        self.computed = computed;
    }

    /// Computations of a node for its results in these forms.
    fn computations(
        &self,
        g: &Graph,
        node: &Node,
        needed: &BTreeSet<Form>,
        shares: &Shares,
    ) -> Vec<Computed> {
        let whole = || Computed {
            form: Form::Whole,
            operands: vec![Form::Whole; node.inputs.len()],
        };
        let made = node.outputs.first().map_or(Form::Whole, |&v| self.made(v));
        if made == Form::Whole && (needed.is_empty() || needed.contains(&Form::Whole)) {
            return vec![whole()];
        }
        let Some(sizes) = Sizes::of(g, node) else {
            return vec![whole()];
        };
        let best = |form: Form| {
            let all = rules::operands(g, node, &sizes, form, shares);
            let priced = all.into_iter().filter_map(|operands| {
                let moved = self.moved_bytes(g, node, &operands)?;
                Some((moved, Computed { form, operands }))
            });
            priced.min_by_key(|(moved, _)| *moved).map(|(_, c)| c)
        };
        let forms = match made {
            Form::Whole => needed.iter().copied().collect(),
            made => vec![made],
        };
        let all: Option<Vec<Computed>> = forms.into_iter().map(best).collect();
        // Without a rule, pieces are cut out of the whole.
        all.unwrap_or_else(|| vec![whole()])
    }
}

/// True when all elements of a value are known to be 0.
pub(super) fn is_zero(g: &Graph, v: ValueId) -> bool {
    let Def::Node(id, _) = g.value(v).def else {
        return false;
    };
    let node = g.node(id);
    match &node.op {
        Op::Broadcast { .. } | Op::Reshape { .. } => is_zero(g, node.inputs[0]),
        Op::Constant { value } => value
            .in_memory()
            .is_some_and(|t| t.as_bytes().iter().all(|b| *b == 0)),
        _ => false,
    }
}
