//! Inputs whose tensors a run decides: sequences, optional values, and tensors of no declared rank.
//!
//! Lists exist at the boundary of a model only. For a [`Structure`], which says how many tensors
//! there are and of which ranks, [`Model::closed`] is the model with an input for each of them.
//! Element `i` of a sequence `x` is the tensor `x[i]`, among inputs and outputs alike; the element of
//! an optional value has the name of that.

use super::load::Model;
use super::proto::{
    DimensionProto, NodeProto, OptionalProto, SequenceProto, TensorProto, TensorShapeProto,
    TensorTypeProto, TypeProto, TypeValue, ValueInfoProto,
};
use super::tensor::{External, tensor_of};
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

/// Ranks of the tensors that open inputs consist of, by the names of the inputs.
pub type Structure = BTreeMap<String, Vec<usize>>;

/// Tensors of the longest sequence.
pub(super) const MAX_ELEMENTS: usize = 4096;

/// A declared input or output.
#[derive(Clone, Debug, PartialEq)]
pub struct Declared {
    /// Its name.
    pub name: String,
    is_sequence: bool,
    is_optional: bool,
    element: TensorTypeProto,
}

impl Declared {
    /// Errors when the value is no tensor, nor a sequence of tensors or an optional one of these.
    pub(super) fn of(info: &ValueInfoProto) -> Result<Declared> {
        let name = &info.name;
        let none = || Error::invalid(format!("{name:?} has no type"));
        let (mut is_sequence, mut is_optional) = (false, false);
        let mut ty = info.r#type.as_ref().ok_or_else(none)?;
        loop {
            let inner = match ty.value.as_ref().ok_or_else(none)? {
                TypeValue::Tensor(element) => {
                    return Ok(Declared {
                        name: name.clone(),
                        is_sequence,
                        is_optional,
                        element: element.clone(),
                    });
                }
                TypeValue::Optional(inner) if !is_optional && !is_sequence => {
                    is_optional = true;
                    inner
                }
                TypeValue::Sequence(inner) if !is_sequence => {
                    is_sequence = true;
                    inner
                }
                other => return Err(no_tensors(name, other)),
            };
            ty = inner.elem_type.as_deref().ok_or_else(none)?;
        }
    }

    /// True when the tensors that it consists of, or their ranks, are not declared.
    pub fn is_open(&self) -> bool {
        self.is_list() || self.rank().is_none()
    }

    /// True for sequences and optional values.
    pub fn is_list(&self) -> bool {
        self.is_sequence || self.is_optional
    }

    /// True for a sequence that must be given, and may be empty.
    pub fn is_sequence(&self) -> bool {
        self.is_sequence && !self.is_optional
    }

    /// Its kind, for people.
    pub fn kind(&self) -> &'static str {
        match (self.is_optional, self.is_sequence) {
            (true, true) => "an optional sequence",
            (true, false) => "an optional tensor",
            (false, true) => "a sequence",
            (false, false) => "a tensor of any rank",
        }
    }

    fn rank(&self) -> Option<usize> {
        self.element.shape.as_ref().map(|shape| shape.dim.len())
    }

    /// Names of `n` tensors that it consists of.
    fn names(&self, n: usize) -> impl Iterator<Item = String> {
        (0..n).map(|i| match self.is_sequence {
            true => element_name(&self.name, i),
            false => self.name.clone(),
        })
    }

    /// Ranks of `n` tensors, as declared. Errors when there cannot be so many; `None` where no rank is
    /// declared.
    fn ranks(&self, n: usize) -> Result<Option<Vec<usize>>> {
        let (name, kind) = (&self.name, self.kind());
        let most = if self.is_sequence { MAX_ELEMENTS } else { 1 };
        let least = usize::from(!self.is_list());
        if !(least..=most).contains(&n) {
            let message = format!("input {name:?} is {kind}, and cannot have {n} tensors");
            return Err(Error::invalid(message));
        }
        let rank = self.rank().or((n == 0).then_some(0));
        Ok(rank.map(|rank| vec![rank; n]))
    }

    /// Ranks of its tensors among those of given names.
    fn ranks_of(&self, given: &BTreeMap<&str, usize>) -> Result<Vec<usize>> {
        let rank = |name: &String| given.get(name.as_str()).copied();
        let ranks: Vec<usize> = self.names(MAX_ELEMENTS).map_while(|n| rank(&n)).collect();
        let ranks = match self.is_sequence {
            true => ranks,
            false => ranks.into_iter().take(1).collect(),
        };
        if ranks.is_empty() && !self.is_optional {
            return Err(self.not_given());
        }
        Ok(ranks)
    }

    /// The error when nothing says which tensors it consists of.
    pub(super) fn not_given(&self) -> Error {
        let (name, kind) = (&self.name, self.kind());
        if !self.is_list() {
            let e = Error::invalid(format!("input {name:?} is {kind}, and is not given"));
            return e.hint("give the tensor to the run, or declare a shape in the model");
        }
        let first = self.names(1).next().unwrap_or_default();
        let message = format!("input {name:?} is {kind}, and nothing says how many tensors it has");
        Error::invalid(message).hint(format!(
            "give {first:?} and so on, or their number: --set {name}=1"
        ))
    }

    /// Type of one of its tensors. Named dims of sequences are no names: elements may differ.
    fn element_of_rank(&self, rank: usize) -> TensorTypeProto {
        let declared = self.element.shape.clone();
        let mut shape = declared.unwrap_or_else(|| TensorShapeProto {
            dim: vec![DimensionProto { value: None }; rank],
        });
        if self.is_sequence {
            use super::proto::DimensionValue::Value;
            let is_constant = |d: &DimensionProto| matches!(d.value, Some(Value(_)));
            let open = shape.dim.iter_mut().filter(|d| !is_constant(d));
            open.for_each(|d| d.value = None);
        }
        TensorTypeProto {
            shape: Some(shape),
            ..self.element.clone()
        }
    }

    /// The tensors of a serialised value, with their names; a name in the file is preferred.
    pub fn read(&self, bytes: &[u8]) -> Result<Vec<(String, Tensor)>> {
        let (name, protos) = self.decode(bytes).map_err(|e| {
            let kind = self.kind();
            Error::invalid(format!("not {kind} in protobuf form: {e}"))
        })?;
        let mut declared = self.clone();
        if !name.is_empty() {
            declared.name = name;
        }
        let names = declared.names(protos.len());
        let read = |(name, proto): (String, &TensorProto)| {
            Ok((name, tensor_of(proto, &External::none())?))
        };
        names.zip(&protos).map(read).collect()
    }

    fn decode(&self, bytes: &[u8]) -> Result<(String, Vec<TensorProto>), prost::DecodeError> {
        if self.is_optional {
            let optional = OptionalProto::decode(bytes)?;
            let list = optional.sequence_value.map(|s| s.tensor_values);
            let one = optional.tensor_value.map(|tensor| vec![tensor]);
            return Ok((optional.name, one.or(list).unwrap_or_default()));
        }
        if self.is_sequence {
            let sequence = SequenceProto::decode(bytes)?;
            return Ok((sequence.name, sequence.tensor_values));
        }
        let tensor = TensorProto::decode(bytes)?;
        Ok((tensor.name.clone(), vec![tensor]))
    }
}

/// Name of the tensor that is an element of a sequence.
pub fn element_name(sequence: &str, i: usize) -> String {
    format!("{sequence}[{i}]")
}

/// The error for a value that has other parts than tensors.
fn no_tensors(name: &str, found: &TypeValue) -> Error {
    let kind = match found {
        TypeValue::Map(_) => "a map",
        TypeValue::SparseTensor(_) => "a sparse tensor",
        _ => "a nested sequence",
    };
    let message = format!("{name:?} has {kind}; tensors, sequences of them and optional ones");
    Error::unsupported(message + " are supported")
}

impl Model {
    /// The declared inputs that a run takes.
    ///
    /// Errors with one that is neither a tensor nor a sequence of tensors or an optional one.
    pub fn declared_inputs(&self) -> Result<Vec<Declared>> {
        let initialisers = self.graph_proto().initializer.iter();
        let initialised: BTreeSet<&str> = initialisers.map(|t| t.name.as_str()).collect();
        let inputs = self.graph_proto().input.iter();
        let free = inputs.filter(|info| !initialised.contains(info.name.as_str()));
        free.map(Declared::of).collect()
    }

    /// The declared outputs; one without a type is a tensor.
    pub fn declared_outputs(&self) -> Result<Vec<Declared>> {
        let untyped = |info: &ValueInfoProto| Declared {
            name: info.name.clone(),
            is_sequence: false,
            is_optional: false,
            element: TensorTypeProto::default(),
        };
        let outputs = self.graph_proto().output.iter();
        let declared = outputs.map(|info| match info.r#type {
            None => Ok(untyped(info)),
            Some(_) => Declared::of(info),
        });
        declared.collect()
    }

    /// The inputs whose tensors a run decides.
    pub fn open_inputs(&self) -> Result<Vec<Declared>> {
        let declared = self.declared_inputs()?.into_iter();
        Ok(declared.filter(Declared::is_open).collect())
    }

    /// The structure of the inputs that tensors of given names and ranks make up, and of those that
    /// `known` has.
    ///
    /// Errors when a sequence, or a tensor of no declared rank, is not there.
    pub fn structure_of<'a>(
        &self,
        known: &Structure,
        given: impl IntoIterator<Item = (&'a str, usize)>,
    ) -> Result<Structure> {
        let given: BTreeMap<&str, usize> = given.into_iter().collect();
        let mut structure = known.clone();
        for input in self.open_inputs()? {
            if !structure.contains_key(&input.name) {
                structure.insert(input.name.clone(), input.ranks_of(&given)?);
            }
        }
        Ok(structure)
    }

    /// The structure of the open inputs whose numbers of tensors `sizes` has under their names; these
    /// are taken out.
    pub fn structure_by(&self, sizes: &mut BTreeMap<String, usize>) -> Result<Structure> {
        let mut structure = Structure::new();
        for input in self.open_inputs()? {
            let Some(&n) = sizes.get(&input.name) else {
                continue;
            };
            if let Some(ranks) = input.ranks(n)? {
                sizes.remove(&input.name);
                structure.insert(input.name, ranks);
            }
        }
        Ok(structure)
    }

    /// A structure to try where none is given: sequences of `n` tensors, optional values that are
    /// there, and `rank` where no rank is declared.
    pub(super) fn structure_like(
        &self,
        known: &Structure,
        n: usize,
        rank: usize,
    ) -> Result<Structure> {
        let mut structure = known.clone();
        for input in self.open_inputs()? {
            let n = if input.is_sequence { n } else { 1 };
            let ranks = vec![input.rank().unwrap_or(rank); n];
            structure.entry(input.name).or_insert(ranks);
        }
        Ok(structure)
    }

    /// The model with an input for each tensor of a structure.
    ///
    /// Errors when the structure does not have all open inputs, or not of their declared ranks.
    pub fn closed(&self, structure: &Structure) -> Result<Model> {
        let mut closed = self.clone();
        let mut nodes = Vec::new();
        for input in self.open_inputs()? {
            let ranks = structure.get(&input.name);
            let ranks = ranks.ok_or_else(|| input.not_given())?;
            check_ranks(&input, ranks)?;
            let infos = &mut closed.graph.input;
            let at = infos.iter().position(|info| info.name == input.name);
            let at = at.ok_or_else(|| Error::internal("an open input is not an input"))?;
            let tensors = input.names(ranks.len()).zip(ranks);
            let tensors = tensors.map(|(name, &rank)| info_of(name, input.element_of_rank(rank)));
            infos.splice(at..=at, tensors);
            nodes.extend(joining(&input, ranks.len()));
        }
        closed.graph.node.splice(0..0, nodes);
        Ok(closed)
    }
}

fn check_ranks(input: &Declared, ranks: &[usize]) -> Result<()> {
    let names = input.names(ranks.len()).zip(ranks);
    let wrong = |rank: &usize| input.rank().is_some_and(|declared| declared != *rank);
    match names.into_iter().find(|(_, rank)| wrong(rank)) {
        Some((name, rank)) => {
            let declared = input.rank().unwrap_or_default();
            Err(Error::invalid(format!(
                "input {name:?}: expected a tensor of rank {declared}, got one of rank {rank}"
            )))
        }
        None => input.ranks(ranks.len()).map(|_| ()),
    }
}

fn info_of(name: String, element: TensorTypeProto) -> ValueInfoProto {
    let value = Some(TypeValue::Tensor(element));
    ValueInfoProto {
        name,
        r#type: Some(TypeProto { value }),
    }
}

/// The node that makes an input of its tensors, where it is not the tensor itself.
fn joining(input: &Declared, n: usize) -> Option<NodeProto> {
    let op_type = match (input.is_sequence, input.is_optional, n) {
        (_, true, 0) => "Optional",
        (true, _, 0) => "SequenceEmpty",
        (true, _, _) => "SequenceConstruct",
        (false, ..) => return None,
    };
    Some(NodeProto {
        op_type: op_type.to_owned(),
        name: input.name.clone(),
        input: input.names(n).collect(),
        output: vec![input.name.clone()],
        ..NodeProto::default()
    })
}
