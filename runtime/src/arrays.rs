//! Tensors as arrays of the crate `ndarray`, and from them.

use crate::dtype::Element;
use crate::error::Error;
use crate::tensor::Tensor;
use ndarray::{Array, ArrayBase, ArrayD, ArrayViewD, ArrayViewMutD, Data, Dimension, ShapeError};

impl Tensor {
    /// The elements as an array, without a copy.
    ///
    /// ```
    /// # fn main() -> Result<(), gristmill_runtime::Error> {
    /// # use gristmill_runtime as gristmill;
    /// use gristmill::Tensor;
    /// use gristmill::ndarray::{Axis, arr2, arr1};
    ///
    /// let t = Tensor::from(arr2(&[[1f32, 2.0], [3.0, 4.0]]));
    /// assert_eq!(t.view::<f32>()?.sum_axis(Axis(0)), arr1(&[4.0, 6.0]).into_dyn());
    /// assert!(t.view::<i64>().is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Errors with `InvalidInput`, naming both dtypes, when `T` is not the tensor's; with `Unsupported` for empty tensors of a shape that `ndarray`
    /// does not have, since the product of its other extents is too large.
    pub fn view<T: Element>(&self) -> Result<ArrayViewD<'_, T>, Error> {
        let elements = self.try_as_slice()?;
        ArrayViewD::from_shape(self.shape(), elements).map_err(|e| no_array(self.shape(), e))
    }

    /// The same, writable; shared elements are copied first. Errors as [`Tensor::view`].
    pub fn view_mut<T: Element>(&mut self) -> Result<ArrayViewMutD<'_, T>, Error> {
        let shape = self.shape().to_vec();
        let elements = self.try_as_mut_slice()?;
        ArrayViewMutD::from_shape(shape.as_slice(), elements).map_err(|e| no_array(&shape, e))
    }

    /// A tensor with the elements of an array, or of a view of one, of any memory layout. They are copied, as [`Tensor::from_vec`] explains.
    pub fn from_array<S, D>(array: &ArrayBase<S, D>) -> Result<Tensor, Error>
    where
        S: Data<Elem: Element>,
        D: Dimension,
    {
        let mut tensor = Tensor::zeros(S::Elem::DTYPE, array.shape())?;
        tensor.view_mut()?.assign(&array.view().into_dyn());
        Ok(tensor)
    }
}

fn no_array(shape: &[usize], e: ShapeError) -> Error {
    Error::new(
        crate::ErrorKind::Unsupported,
        format!("ndarray has no array of shape {shape:?}: {e}"),
    )
}

impl<T: Element, D: Dimension> From<Array<T, D>> for Tensor {
    /// Copies, as [`Tensor::from_array`].
    fn from(array: Array<T, D>) -> Tensor {
        Tensor::from_array(&array).expect("the elements fitted in memory once")
    }
}

impl<T: Element> TryFrom<&Tensor> for ArrayD<T> {
    type Error = Error;

    /// A copy of the elements. Errors as [`Tensor::view`].
    fn try_from(tensor: &Tensor) -> Result<ArrayD<T>, Error> {
        Ok(tensor.view()?.into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, ErrorKind, with_dtype};
    use ndarray::{Axis, arr0, arr2, s};

    #[test]
    fn all_dtypes_go_there_and_back() {
        for &dtype in DType::ALL {
            let tensor =
                Tensor::from_f64s(dtype, &[2, 3], &[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]).unwrap();
            with_dtype!(dtype, T => {
                let array = ArrayD::<T>::try_from(&tensor).unwrap();
                assert_eq!(array.shape(), [2, 3]);
                assert_eq!(array[[0, 1]], <T as Element>::from_f64(1.0));
                assert_eq!(Tensor::from(array), tensor, "{dtype}");
            });
        }
    }

    #[test]
    fn views_of_any_layout_are_read_in_order() {
        let array = arr2(&[[1i32, 2, 3], [4, 5, 6]]);
        let transposed = Tensor::from_array(&array.t()).unwrap();
        assert_eq!(transposed, Tensor::from(array.t().to_owned()));
        assert_eq!(transposed.shape(), [3, 2]);
        assert_eq!(transposed.as_slice::<i32>(), [1, 4, 2, 5, 3, 6]);
        let mut reversed = array.slice(s![.., ..;-2]);
        reversed.invert_axis(Axis(0));
        let reversed = Tensor::from_array(&reversed).unwrap();
        assert_eq!(reversed.as_slice::<i32>(), [6, 4, 3, 1]);
        assert_eq!(Tensor::from(arr0(7u8)), Tensor::scalar(7u8));
        assert_eq!(
            Tensor::from(ndarray::Array2::<f32>::zeros((0, 4))).shape(),
            [0, 4]
        );
    }

    #[test]
    fn writing_through_a_view_leaves_other_holders_alone() {
        let tensor = Tensor::from(vec![1f32, 2.0]);
        let mut other = tensor.clone();
        other.view_mut::<f32>().unwrap()[[1]] = 9.0;
        assert_eq!(tensor.as_slice::<f32>(), [1.0, 2.0]);
        assert_eq!(other.as_slice::<f32>(), [1.0, 9.0]);
    }

    #[test]
    fn errors_name_the_dtypes_or_the_shape() {
        let mut tensor = Tensor::from(vec![1f32]);
        let expected =
            "cannot read the elements of a tensor f32[1] as i64; Tensor::dtype gives its dtype";
        assert_eq!(tensor.view::<i64>().unwrap_err().to_string(), expected);
        assert_eq!(tensor.view_mut::<i64>().unwrap_err().to_string(), expected);
        let e = ArrayD::<i64>::try_from(&tensor).unwrap_err();
        assert_eq!(
            (e.kind(), e.to_string()),
            (ErrorKind::InvalidInput, expected.to_owned())
        );
        let huge = Tensor::zeros(DType::F32, &[1 << 40, 1 << 40, 0]).unwrap();
        let e = huge.view::<f32>().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(
            e.to_string().contains("[1099511627776, 1099511627776, 0]"),
            "{e}"
        );
    }
}
