//! Class labels against the scores of a classifier.

use crate::dtype::Element;
use crate::error::Error;
use crate::tensor::Tensor;
use crate::with_dtype;
use std::path::Path;

/// `accuracy 98.89 % (356 of 360)`.
pub fn text((right, total): (usize, usize)) -> String {
    let percent = 100.0 * right as f64 / total.max(1) as f64;
    format!("accuracy {percent:.2} % ({right} of {total})")
}

/// Right answers and total: arg-max over the last axis of an output, with its name, against the labels of a NumPy file.
pub fn accuracy(scores: Option<(&str, &Tensor)>, path: &Path) -> Result<(usize, usize), Error> {
    let labels = Tensor::from_npy(path)?.to_f64s();
    let (name, scores) =
        scores.ok_or_else(|| Error::invalid("the model has no output to compare with labels"))?;
    let n_classes = scores.shape().last().copied().unwrap_or(0);
    if n_classes == 0 || scores.len() / n_classes != labels.len() {
        let (path, n, shape) = (path.display(), labels.len(), scores.shape());
        let message = format!("{path}: {n} labels do not fit output {name:?} of shape {shape:?}");
        return Err(Error::invalid(message));
    }
    let n_right =
        with_dtype!(scores.dtype(), T => n_right(scores.as_slice::<T>(), n_classes, &labels));
    Ok((n_right, labels.len()))
}

fn n_right<T: Element>(scores: &[T], n_classes: usize, labels: &[f64]) -> usize {
    let rows = scores.chunks(n_classes).zip(labels);
    let right = rows.filter(|(row, label)| arg_max(row) as f64 == **label);
    right.count()
}

/// Position of the first largest element; NaN is never the largest.
fn arg_max<T: Element>(row: &[T]) -> usize {
    let (mut best, mut largest) = (0, f64::NEG_INFINITY);
    for (i, element) in row.iter().enumerate() {
        if element.to_f64() > largest {
            (best, largest) = (i, element.to_f64());
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_largest_number_is_the_answer() {
        assert_eq!(arg_max(&[f32::NAN, 1.0, 3.0, 3.0]), 2);
        assert_eq!(n_right(&[0f32, 1.0, 1.0, 0.0], 2, &[1.0, 1.0]), 1);
        assert_eq!(text((356, 360)), "accuracy 98.89 % (356 of 360)");
    }
}
