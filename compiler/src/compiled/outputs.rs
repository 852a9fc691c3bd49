//! Named results of a run.

use crate::nearest::unknown;
use crate::onnx;
use gristmill_runtime::Tensor;

/// Named results of a run, in the model's order.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs(Vec<(String, Tensor)>);

impl Outputs {
    /// The results but for those of these names.
    pub(crate) fn without(self, names: &[&str]) -> Outputs {
        let kept = self
            .0
            .into_iter()
            .filter(|(name, _)| !names.contains(&&name[..]));
        Outputs(kept.collect())
    }

    /// Results with their names.
    #[doc(hidden)]
    pub fn of(results: Vec<(String, Tensor)>) -> Outputs {
        Outputs(results)
    }

    /// A result by name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, t)| t)
    }

    /// The elements of a result that is a sequence; those of an empty one are none. Element `i` of `y` is the result `y[i]`.
    pub fn elements(&self, sequence: &str) -> Vec<&Tensor> {
        let element = |i| self.get(&onnx::element_name(sequence, i));
        (0..).map_while(element).collect()
    }

    /// Names and tensors in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// The tensors in order.
    pub fn into_tensors(self) -> Vec<Tensor> {
        self.0.into_iter().map(|(_, t)| t).collect()
    }
}

impl std::ops::Index<&str> for Outputs {
    type Output = Tensor;

    /// Panics when there is no such output; [`Outputs::get`] does not.
    fn index(&self, name: &str) -> &Tensor {
        self.get(name).unwrap_or_else(|| {
            panic!(
                "{}",
                unknown("output", name, self.0.iter().map(|(n, _)| n.as_str()))
            )
        })
    }
}
