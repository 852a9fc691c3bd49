//! Types of values: dtype and shape.

use super::dim::{Bindings, Dim};
use gristmill_runtime::DType;
use std::collections::BTreeSet;
use std::fmt;

/// Extents of the axes, outermost first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Shape(pub Vec<Dim>);

impl Shape {
    /// A shape of constants.
    pub fn of(dims: &[usize]) -> Shape {
        Shape(dims.iter().map(|&d| d.into()).collect())
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The extents, when all are constant and not negative.
    pub fn as_static(&self) -> Option<Vec<usize>> {
        self.0.iter().map(Dim::as_usize).collect()
    }

    /// Product of the extents.
    pub fn n_elements(&self) -> Dim {
        self.0.iter().fold(Dim::constant(1), |n, d| n.product(d))
    }

    /// Replaces bound symbols by their values.
    pub fn bind(&self, bindings: &Bindings) -> Shape {
        Shape(self.0.iter().map(|d| d.bind(bindings)).collect())
    }
}

impl std::ops::Deref for Shape {
    type Target = [Dim];
    fn deref(&self) -> &[Dim] {
        &self.0
    }
}

impl FromIterator<Dim> for Shape {
    fn from_iter<I: IntoIterator<Item = Dim>>(iter: I) -> Shape {
        Shape(iter.into_iter().collect())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            write!(f, "{}{d}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

/// Type of a value, e.g. `f32[batch, 3, 224, 224]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Shape,
}

impl Type {
    /// A type from a dtype and anything that makes dims.
    pub fn new<D: Into<Dim>>(dtype: DType, shape: impl IntoIterator<Item = D>) -> Type {
        Type {
            dtype,
            shape: shape.into_iter().map(Into::into).collect(),
        }
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.shape.rank()
    }

    /// Static extents; `None` when a symbol is left.
    pub fn static_shape(&self) -> Option<Vec<usize>> {
        self.shape.as_static()
    }

    /// Bytes of a tensor of this type, when static; saturates.
    pub fn size_bytes(&self) -> Option<usize> {
        let n = self
            .static_shape()?
            .into_iter()
            .fold(1usize, usize::saturating_mul);
        Some(n.saturating_mul(self.dtype.size_bytes()))
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

/// The symbols of some types.
pub fn symbols_of<'t>(types: impl IntoIterator<Item = &'t Type>) -> BTreeSet<String> {
    let mut symbols = BTreeSet::new();
    for dim in types.into_iter().flat_map(|ty| ty.shape.iter()) {
        dim.visit_symbols(&mut |s| {
            symbols.insert(s.to_owned());
        });
    }
    symbols
}
