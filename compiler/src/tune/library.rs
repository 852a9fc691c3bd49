//! A library as one more variant of a product, after all of ours: timed and checked as they are,
//! and taken only where the library that was timed is present again.

use super::{Bench, agree};
use crate::codegen::kernel_forms::{LibraryForm, Preferred, Why};
use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::session::Tuning;
use crate::{DType, ErrorKind, Tensor};
use gristmill_runtime::cuda;
use gristmill_runtime::product::{MOST_WORKSPACE_BYTES, Product};
use serde::{Deserialize, Serialize};

/// Timing of a library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Timed {
    /// Name and version.
    pub(super) name: String,
    /// None when it could not compute the product, or did so wrongly.
    pub(super) ns: Option<u64>,
    pub(super) workspace_bytes: usize,
}

/// The library of this machine.
pub(super) struct Library {
    /// Name and version, or why none is taken.
    there: Result<String, String>,
    /// True if the user allows libraries.
    is_wanted: bool,
}

impl Library {
    pub(super) fn of(tuning: &Tuning) -> Library {
        let is_wanted = tuning.libraries;
        let there = if is_wanted {
            cuda::product_library()
        } else {
            Err("libraries are not to be used".to_owned())
        };
        Library { there, is_wanted }
    }

    /// The library that can be timed.
    pub(super) fn name(&self) -> Option<&str> {
        self.there.as_deref().ok()
    }

    /// True if the library on this machine has not been timed.
    pub(super) fn is_news(&self, timed: Option<&Timed>) -> bool {
        self.name()
            .is_some_and(|name| timed.is_none_or(|t| t.name != name))
    }

    /// The library in place of our best variant, if it took less time. The error explains why a
    /// faster library cannot be used; `None` where libraries are not wanted.
    pub(super) fn instead(
        &self,
        timed: Option<&Timed>,
        ours: Option<u64>,
    ) -> Option<Result<LibraryForm, String>> {
        let timed = timed.filter(|_| self.is_wanted)?;
        let ns = timed.ns.filter(|ns| ours.is_none_or(|ours| *ns < ours))?;
        Some(match &self.there {
            Ok(name) if *name == timed.name => Ok(LibraryForm {
                name: name.clone(),
                workspace_bytes: timed.workspace_bytes,
                ns,
            }),
            Ok(name) => Err(format!(
                "{} was faster, but it is {name} that is there now: --tune times it",
                timed.name
            )),
            Err(why) => Err(format!(
                "{} was faster, but is not there: {why}",
                timed.name
            )),
        })
    }
}

impl Bench<'_> {
    /// Times the library `name`, as variant `form` of the cluster that `g` is. The error says why it
    /// cannot be used.
    pub(super) fn time_library(
        &mut self,
        g: &Graph,
        (name, form): (&str, u8),
        product: &Product,
        (inputs, expected): (&[Tensor], &[Tensor]),
    ) -> (Timed, Result<()>) {
        let mut library = LibraryForm {
            name: name.to_owned(),
            workspace_bytes: 0,
            ns: 0,
        };
        let result = self.library_ns(g, (&mut library, form), product, (inputs, expected));
        let timed = Timed {
            name: library.name,
            ns: result.as_ref().ok().copied(),
            workspace_bytes: library.workspace_bytes,
        };
        (timed, result.map(drop).map_err(|e| e.context(name)))
    }

    /// Time of a library, whose workspace it notes. Errors when its results are wrong.
    fn library_ns(
        &mut self,
        g: &Graph,
        (library, form): (&mut LibraryForm, u8),
        product: &Product,
        (inputs, expected): (&[Tensor], &[Tensor]),
    ) -> Result<u64> {
        let asked = Product {
            workspace_bytes: MOST_WORKSPACE_BYTES,
            ..product.clone()
        };
        library.workspace_bytes = self.driver()?.product(&asked)?.workspace_bytes();
        let preferred = Preferred {
            form,
            why: Why::Predicted,
            library: Some(library.clone()),
        };
        let (results, ns) = self.run(g, preferred.clone(), inputs)?;
        agree(expected, &results, self.settings.gpu.tf32)?;
        if product.relu {
            self.check_nan(g, preferred, inputs)?;
        }
        Ok(ns)
    }

    /// Checks that a library's relu propagates NaN, as ours does: its documentation does not say.
    fn check_nan(&mut self, g: &Graph, library: Preferred, inputs: &[Tensor]) -> Result<()> {
        let mut inputs = inputs.to_vec();
        if let Some(input) = inputs.iter_mut().find(|t| t.dtype().is_float()) {
            let bits = match input.dtype() {
                DType::F64 => &f64::NAN.to_le_bytes()[..],
                DType::F32 => &f32::NAN.to_le_bytes(),
                // As f16 and as bf16.
                _ => &0x7fffu16.to_le_bytes(),
            };
            let bytes = [bits, &input.as_bytes()[bits.len()..]].concat();
            *input = Tensor::from_bytes(input.dtype(), input.shape(), &bytes)?;
        }
        let ours = self.run(g, Preferred::default(), &inputs)?.0;
        let theirs = self.run(g, library, &inputs)?.0;
        agree(&ours, &theirs, self.settings.gpu.tf32)
            .map_err(|e| Error::internal(format!("an operand is not a number: {e}")))
    }
}

/// True if the library does not support something, which is no fault.
pub(super) fn is_lack(e: &Error) -> bool {
    e.kind() == ErrorKind::Unsupported
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_taken_where_it_is_the_one_that_was_faster() {
        let timed = |ns| Timed {
            name: "L 1.0".into(),
            ns,
            workspace_bytes: 7,
        };
        let there = |there: Result<&str, &str>| Library {
            there: there.map(str::to_owned).map_err(str::to_owned),
            is_wanted: true,
        };
        let same = there(Ok("L 1.0"));
        let taken = LibraryForm {
            name: "L 1.0".into(),
            workspace_bytes: 7,
            ns: 3,
        };
        assert_eq!(
            same.instead(Some(&timed(Some(3))), Some(4)),
            Some(Ok(taken))
        );
        assert_eq!(
            same.instead(Some(&timed(Some(4))), Some(4)),
            None,
            "ours is as fast"
        );
        assert_eq!(
            same.instead(Some(&timed(None)), Some(4)),
            None,
            "it was wrong"
        );
        assert_eq!(same.instead(None, Some(4)), None);
        assert!(!same.is_news(Some(&timed(None))) && same.is_news(None));
        let newer = there(Ok("L 2.0"));
        let said = newer
            .instead(Some(&timed(Some(3))), Some(4))
            .unwrap()
            .unwrap_err();
        assert!(
            said.starts_with("L 1.0 was faster, but it is L 2.0")
                && newer.is_news(Some(&timed(Some(3)))),
            "{said}"
        );
        let gone = there(Err("not found"));
        let said = gone
            .instead(Some(&timed(Some(3))), Some(4))
            .unwrap()
            .unwrap_err();
        assert_eq!(said, "L 1.0 was faster, but is not there: not found");
        assert!(!gone.is_news(None));
        let unwanted = Library {
            is_wanted: false,
            ..gone
        };
        assert_eq!(unwanted.instead(Some(&timed(Some(3))), Some(4)), None);
    }
}
