//! Sizes and contents to try on a model that cannot be imported without them: an operand that may
//! or may not be broadcast, for instance, is a problem until sizes are known.

use super::import::{Importer, TrainingNode, Weights};
use super::load::{Model, Specialisation};
use super::open_inputs::Structure;
use crate::error::{Error, ErrorKind, Result};
use crate::ir::{Type, symbols_of};
use gristmill_runtime::Tensor;
use std::collections::BTreeSet;

/// Sizes that are tried for all symbols together.
const SIZES: [usize; 6] = [1, 2, 12, 16, 3, 60];
/// Contents that are tried for the inputs that decide shapes: element `i` is `first + i * step`.
const CONTENTS: [[f64; 2]; 4] = [[1.0, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 1.0]];
/// Elements of the largest input that is tried.
const MAX_ELEMENTS: usize = 4096;

/// Numbers of tensors that are tried for sequences, and ranks where none is declared.
const LENGTHS: [usize; 4] = [2, 1, 3, 0];
const RANKS: [usize; 5] = [2, 1, 3, 4, 0];

/// A way to import a model.
pub struct Trial {
    /// Sizes and contents with which it imports, if there are such.
    pub spec: Specialisation,
    /// Names of the inputs whose contents decide shapes.
    pub values: BTreeSet<String>,
    /// False when no trial helped.
    pub(crate) imports: bool,
    /// True when contents are asked for, and all that were tried were refused as wrong: others may
    /// be right.
    pub is_undecided: bool,
    /// Warnings of the import.
    pub(crate) warnings: Vec<String>,
}

impl Trial {
    /// The sizes and contents, for people.
    pub(crate) fn text(&self) -> String {
        let sizes = self
            .spec
            .dims
            .iter()
            .map(|(dim, n)| format!("{dim} is {n}"));
        let values = self.spec.values.iter().map(|(name, t)| content(name, t));
        sizes.chain(values).collect::<Vec<_>>().join(", ")
    }
}

fn content(name: &str, t: &Tensor) -> String {
    let first = t.to_f64s().first().copied();
    format!("{name:?} begins with {}", first.unwrap_or_default())
}

impl Model {
    /// The model for some structure of its open inputs, one with which it imports if there is such.
    /// Sizes of `spec` that are numbers of tensors are taken out and hold.
    ///
    /// Errors when `spec` does not fit the model.
    #[doc(hidden)]
    pub fn trial_form(&self, spec: &mut Specialisation) -> Result<(Model, Structure)> {
        let known = self.structure_by(&mut spec.dims)?;
        let form = |n: usize, rank: usize| -> Result<(Model, Structure)> {
            let structure = self.structure_like(&known, n, rank)?;
            Ok((self.closed(&structure)?, structure))
        };
        let first = form(LENGTHS[0], RANKS[0])?;
        if first.1.len() == known.len() {
            return Ok(first);
        }
        let forms = LENGTHS.iter().flat_map(|&n| RANKS.map(|rank| (n, rank)));
        let mut tried = BTreeSet::new();
        for (n, rank) in forms {
            let (model, structure) = form(n, rank)?;
            if tried.insert(structure.clone()) && model.trial(spec)?.imports {
                return Ok((model, structure));
            }
        }
        Ok(first)
    }

    /// The least that must be known to import the model: nothing beside `spec`, sizes, or sizes and
    /// contents. Where no trial helps, the first.
    ///
    /// Errors when `spec` does not fit the model.
    #[doc(hidden)]
    pub fn trial(&self, spec: &Specialisation) -> Result<Trial> {
        let first = self.with_values(spec.clone())?;
        if first.imports {
            return Ok(first);
        }
        Ok(self.sized_trial(spec)?.unwrap_or(first))
    }

    fn sized_trial(&self, spec: &Specialisation) -> Result<Option<Trial>> {
        let inputs = self.interface(spec)?.0;
        let symbols = symbols_of(inputs.iter().map(|(_, ty)| ty));
        for n in SIZES.into_iter().filter(|_| !symbols.is_empty()) {
            let mut sized = spec.clone();
            sized.dims.extend(symbols.iter().map(|s| (s.clone(), n)));
            let attempt = self.with_values(sized)?;
            if attempt.imports {
                return Ok(Some(attempt));
            }
        }
        Ok(None)
    }

    /// An import, with contents where these are asked for.
    fn with_values(&self, spec: Specialisation) -> Result<Trial> {
        let imported = Importer::run(self, &spec, Weights::Skip)?;
        let values = imported.needs;
        let warnings = TrainingNode::warnings(&imported.visits);
        if values.is_empty() || imported.errors.is_empty() {
            let imports = imported.errors.is_empty();
            return Ok(Trial {
                spec,
                values,
                imports,
                is_undecided: false,
                warnings,
            });
        }
        let mut is_undecided = imported.errors.iter().all(Error::is_of_values);
        let inputs = self.interface(&spec)?.0;
        for contents in CONTENTS {
            let Some(given) = given(&spec, &inputs, &values, contents)? else {
                break;
            };
            let imported = Importer::run(self, &given, Weights::Skip)?;
            if imported.errors.is_empty() {
                return Ok(Trial {
                    spec: given,
                    values,
                    imports: true,
                    is_undecided: false,
                    warnings: TrainingNode::warnings(&imported.visits),
                });
            }
            let is_wrong = |e: &Error| e.kind() == ErrorKind::InvalidInput || e.is_of_values();
            is_undecided &= imported.errors.iter().all(is_wrong);
        }
        Ok(Trial {
            spec,
            values,
            imports: false,
            is_undecided,
            warnings,
        })
    }
}

/// `spec` with such contents of some inputs; `None` where one has no known shape, or is
/// large.
fn given(
    spec: &Specialisation,
    inputs: &[(String, Type)],
    values: &BTreeSet<String>,
    [first, step]: [f64; 2],
) -> Result<Option<Specialisation>> {
    let mut given = spec.clone();
    for (name, ty) in inputs.iter().filter(|(name, _)| values.contains(name)) {
        let n = ty.shape.n_elements().as_usize();
        let (Some(shape), Some(n)) = (ty.static_shape(), n.filter(|n| *n <= MAX_ELEMENTS)) else {
            return Ok(None);
        };
        let elements: Vec<f64> = (0..n).map(|i| first + i as f64 * step).collect();
        let tensor = Tensor::from_f64s(ty.dtype, &shape, &elements)?;
        given.values.insert(name.clone(), tensor);
    }
    Ok(Some(given))
}
