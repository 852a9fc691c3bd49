//! Dense tensors: row-major, 64-byte aligned, shared by reference count.

use crate::dtype::{DType, Element};
use crate::error::Error;
use crate::sync::lock;
use crate::with_dtype;
use memmap2::MmapMut;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

/// Alignment of every tensor and arena buffer.
pub const ALIGN_BYTES: usize = 64;

/// Buffers of at least this size are mapped, each on its own: freed, they return to the system at once, where the heap would keep
/// them for smaller ones, and pages that nothing writes take no memory.
const MAPPED_FROM_BYTES: usize = 1 << 20;

/// Initialised bytes of its own, aligned to [`ALIGN_BYTES`].
pub struct AlignedBytes {
    ptr: NonNull<u8>,
    len: usize,
    owner: Owner,
}

/// The memory that bytes are in.
enum Owner {
    Heap,
    /// Own pages, held until the drop.
    Map(MmapMut),
    /// Read-only memory of another owner.
    Other(#[expect(dead_code, reason = "held")] Arc<dyn Any + Send + Sync>),
}

// SAFETY: the bytes are owned and plain; access follows the borrow of `AlignedBytes`.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes. Errors with `OutOfMemory` when the size cannot be laid out.
    pub fn zeroed(len: usize) -> Result<AlignedBytes, Error> {
        let layout = Self::layout(len)?;
        if len >= MAPPED_FROM_BYTES {
            return Self::mapped(len);
        }
        // SAFETY: the layout has non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else {
            handle_alloc_error(layout)
        };
        Ok(AlignedBytes {
            ptr,
            len,
            owner: Owner::Heap,
        })
    }

    /// Pages of their own, which are more than aligned. Large ones where there are, for fewer faults and misses of address translation.
    fn mapped(len: usize) -> Result<AlignedBytes, Error> {
        let mut map = MmapMut::map_anon(len).map_err(|_| too_large(len))?;
        #[cfg(target_os = "linux")]
        if len >= 2 << 20 {
            // A hint: without it everything works.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let ptr = NonNull::new(map.as_mut_ptr()).expect("a mapping has an address");
        Ok(AlignedBytes {
            ptr,
            len,
            owner: Owner::Map(map),
        })
    }

    /// Bytes that pages of its own have room for; 0 of other bytes.
    fn room(&self) -> usize {
        match &self.owner {
            Owner::Map(map) => map.len(),
            _ => 0,
        }
    }

    fn layout(len: usize) -> Result<Layout, Error> {
        let padded = len
            .max(1)
            .checked_next_multiple_of(ALIGN_BYTES)
            .ok_or_else(|| too_large(len))?;
        Layout::from_size_align(padded, ALIGN_BYTES).map_err(|_| too_large(len))
    }

    /// Number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "a size, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes, owned by self.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes, writable.
    ///
    /// # Panics
    /// For bytes of another owner. Only tensors hold such bytes, and copy them first.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(self.is_writable(), "bytes of another owner");
        // SAFETY: as in `as_slice`, and `&mut self` makes it unique.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// Address of the first byte, for kernels.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    fn is_writable(&self) -> bool {
        !matches!(self.owner, Owner::Other(_))
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Heap) {
            return;
        }
        let layout = Self::layout(self.len).expect("laid out when allocated");
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), layout) }
    }
}

fn too_large(len: usize) -> Error {
    Error::new(
        crate::ErrorKind::OutOfMemory,
        format!("cannot allocate {len} bytes"),
    )
}

/// A dense row-major tensor. Cloning shares the bytes; writing copies them if they are shared.
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    data: Arc<AlignedBytes>,
}

/// A weak reference to a tensor; see [`Tensor::downgrade`].
#[derive(Clone)]
pub struct WeakTensor {
    dtype: DType,
    shape: Vec<usize>,
    data: Weak<AlignedBytes>,
}

impl WeakTensor {
    /// The tensor, while another reference keeps its bytes.
    pub fn upgrade(&self) -> Option<Tensor> {
        Some(Tensor {
            dtype: self.dtype,
            shape: self.shape.clone(),
            data: self.data.upgrade()?,
        })
    }
}

/// Memory of freed large tensors, for further ones: a system clears every page it gives out, which takes as long as reading it.
#[derive(Default)]
pub struct Spares {
    buffers: Mutex<Vec<AlignedBytes>>,
    most: usize,
}

/// A buffer of more times the size needed is dropped: it would waste memory.
const MOST_ROOM: usize = 4;

impl Spares {
    /// Keeps as many buffers as given, at most. The default keeps none.
    pub fn of(most: usize) -> Spares {
        Spares {
            buffers: Mutex::default(),
            most,
        }
    }

    /// A tensor whose elements are to be written: those of another tensor, or zeros.
    ///
    /// Errors with `OutOfMemory` as [`Tensor::zeros`].
    pub fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        let len = checked_size_bytes(dtype, shape)?;
        // Bytes of other dtypes may be no truth values.
        if len < MAPPED_FROM_BYTES || dtype == DType::Bool {
            return Tensor::zeros(dtype, shape);
        }
        let spare = lock(&self.buffers).pop();
        let fits =
            |bytes: &AlignedBytes| (len..=len.saturating_mul(MOST_ROOM)).contains(&bytes.room());
        let Some(mut bytes) = spare.filter(fits) else {
            return Tensor::zeros(dtype, shape);
        };
        bytes.len = len;
        Ok(Tensor {
            dtype,
            shape: shape.to_vec(),
            data: Arc::new(bytes),
        })
    }

    /// Keeps the memory of a tensor, unless another reference to it exists, or there is enough.
    pub fn give(&self, tensor: Tensor) {
        let Some(bytes) = Arc::into_inner(tensor.data) else {
            return;
        };
        let mut buffers = lock(&self.buffers);
        if bytes.room() > 0 && buffers.len() < self.most {
            buffers.push(bytes);
        }
    }
}

/// Product of `shape`, or an error when it (times `dtype`) does not fit the address space.
pub fn checked_size_bytes(dtype: DType, shape: &[usize]) -> Result<usize, Error> {
    let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    // A zero dimension makes the product zero whatever the others are.
    let n = if shape.contains(&0) { Some(0) } else { n };
    n.and_then(|n| n.checked_mul(dtype.size_bytes()))
        .filter(|&b| b <= isize::MAX as usize / 2)
        .ok_or_else(|| {
            Error::new(
                crate::ErrorKind::OutOfMemory,
                format!("a tensor {dtype}{shape:?} does not fit in memory"),
            )
        })
}

impl Tensor {
    /// A tensor of zeros (false for `bool`).
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        let data = AlignedBytes::zeroed(checked_size_bytes(dtype, shape)?)?;
        Ok(Tensor {
            dtype,
            shape: shape.to_vec(),
            data: Arc::new(data),
        })
    }

    /// A tensor from elements in row-major order. Errors when `values.len()` is not the product of `shape`.
    pub fn from_slice<T: Element>(values: &[T], shape: &[usize]) -> Result<Tensor, Error> {
        let mut t = Tensor::zeros(T::DTYPE, shape)?;
        if t.len() != values.len() {
            return Err(Error::invalid(format!(
                "shape {shape:?} holds {} elements, got {}",
                t.len(),
                values.len()
            )));
        }
        t.as_mut_slice::<T>().copy_from_slice(values);
        Ok(t)
    }

    /// A tensor from elements in row-major order. Errors as [`Tensor::from_slice`].
    ///
    /// Copies, since the elements of a tensor begin at a multiple of [`ALIGN_BYTES`] and those of a vector need not. To fill a
    /// tensor without a copy, write to [`Tensor::as_mut_slice`] of [`Tensor::zeros`].
    pub fn from_vec<T: Element>(values: Vec<T>, shape: &[usize]) -> Result<Tensor, Error> {
        Tensor::from_slice(&values, shape)
    }

    /// A tensor of rank 0.
    pub fn scalar<T: Element>(value: T) -> Tensor {
        Tensor::from_slice(&[value], &[]).expect("one element fits rank 0")
    }

    /// A tensor of numbers, each converted as [`Element::from_f64`] says. Errors as [`Tensor::from_bytes`].
    pub fn from_f64s(dtype: DType, shape: &[usize], values: &[f64]) -> Result<Tensor, Error> {
        with_dtype!(dtype, T => {
            let elements: Vec<T> = values.iter().map(|&v| <T as Element>::from_f64(v)).collect();
            Tensor::from_slice(&elements, shape)
        })
    }

    /// The elements as numbers; 64-bit integers beyond 2^53 round, `bool` is 0 or 1.
    pub fn to_f64s(&self) -> Vec<f64> {
        with_dtype!(self.dtype, T => self.as_slice::<T>().iter().map(|&v| Element::to_f64(v)).collect())
    }

    /// A tensor from little-endian bytes. `bool` bytes other than 0 become 1.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Tensor, Error> {
        let expected = checked_size_bytes(dtype, shape)?;
        if expected != bytes.len() {
            return Err(Error::invalid(format!(
                "{dtype}{shape:?} takes {expected} bytes, got {}",
                bytes.len()
            )));
        }
        let mut t = Tensor::zeros(dtype, shape)?;
        t.as_bytes_mut().copy_from_slice(bytes);
        if dtype == DType::Bool {
            t.as_bytes_mut()
                .iter_mut()
                .for_each(|b| *b = (*b != 0) as u8);
        }
        Ok(t)
    }

    /// A tensor over memory of another owner, which is read in place and copied before a write.
    ///
    /// Errors when the bytes are not aligned to [`ALIGN_BYTES`], or not those of the shape.
    ///
    /// # Safety
    ///
    /// `bytes` are readable and unchanged as long as `owner` lives, and those of `bool` elements are 0 or 1.
    pub unsafe fn borrowed(
        dtype: DType,
        shape: &[usize],
        bytes: *const [u8],
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Tensor, Error> {
        let expected = checked_size_bytes(dtype, shape)?;
        let ptr = bytes.cast::<u8>().cast_mut();
        let found = NonNull::new(ptr).filter(|p| p.addr().get().is_multiple_of(ALIGN_BYTES));
        match found {
            Some(ptr) if bytes.len() == expected => Ok(Tensor {
                dtype,
                shape: shape.to_vec(),
                data: Arc::new(AlignedBytes {
                    ptr,
                    len: expected,
                    owner: Owner::Other(owner),
                }),
            }),
            _ => Err(Error::invalid(format!(
                "{dtype}{shape:?} takes {expected} bytes aligned to {ALIGN_BYTES}, got {} at {ptr:?}",
                bytes.len()
            ))),
        }
    }

    /// A weak reference. While one exists, the next write may copy the bytes.
    pub fn downgrade(&self) -> WeakTensor {
        WeakTensor {
            dtype: self.dtype,
            shape: self.shape.clone(),
            data: Arc::downgrade(&self.data),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extent of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.data.len / self.dtype.size_bytes()
    }

    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the elements in bytes.
    pub fn size_bytes(&self) -> usize {
        self.data.len
    }

    /// The elements as little-endian bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// Address of the first element, for kernels that write; a shared buffer is copied first. `bool` elements must stay 0 or 1.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.make_unique();
        self.data.as_ptr()
    }

    /// The bytes, writable; a shared buffer is copied first. `bool` elements must stay 0 or 1.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.make_unique();
        Arc::get_mut(&mut self.data)
            .expect("unshared just above")
            .as_mut_slice()
    }

    /// True when no other tensor shares the bytes.
    pub(crate) fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.data).is_some_and(|data| data.is_writable())
    }

    fn make_unique(&mut self) {
        if !self.is_unique() {
            let mut copy =
                AlignedBytes::zeroed(self.data.len).expect("same size as an existing buffer");
            copy.as_mut_slice().copy_from_slice(self.data.as_slice());
            self.data = Arc::new(copy);
        }
    }

    /// Address of the first element, for kernels.
    pub fn as_ptr(&self) -> *const u8 {
        self.data.as_ptr()
    }

    /// The elements.
    ///
    /// # Panics
    /// When `T` is not the tensor's dtype; [`Tensor::try_as_slice`] returns an error instead.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        match self.try_as_slice() {
            Ok(elements) => elements,
            Err(e) => panic!("{e}"),
        }
    }

    /// The elements, writable; a shared buffer is copied first.
    ///
    /// # Panics
    /// When `T` is not the tensor's dtype; [`Tensor::try_as_mut_slice`] returns an error instead.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        match self.try_as_mut_slice() {
            Ok(elements) => elements,
            Err(e) => panic!("{e}"),
        }
    }

    /// The elements. Errors with `InvalidInput` when `T` is not the tensor's dtype.
    pub fn try_as_slice<T: Element>(&self) -> Result<&[T], Error> {
        self.check_dtype(T::DTYPE)?;
        // SAFETY: the buffer is aligned to 64 bytes, holds `len` elements of T, and bool bytes are 0 or 1.
        Ok(unsafe { std::slice::from_raw_parts(self.data.as_ptr() as *const T, self.len()) })
    }

    /// The elements, writable; a shared buffer is copied first. Errors as [`Tensor::try_as_slice`].
    pub fn try_as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], Error> {
        self.check_dtype(T::DTYPE)?;
        let n = self.len();
        let ptr = self.as_bytes_mut().as_mut_ptr();
        // SAFETY: as in `try_as_slice`; `as_bytes_mut` made the buffer unique.
        Ok(unsafe { std::slice::from_raw_parts_mut(ptr as *mut T, n) })
    }

    fn check_dtype(&self, asked: DType) -> Result<(), Error> {
        if asked == self.dtype {
            return Ok(());
        }
        let (dtype, shape) = (self.dtype, &self.shape);
        Err(Error::invalid(format!(
            "cannot read the elements of a tensor {dtype}{shape:?} as {asked}; Tensor::dtype gives its dtype"
        )))
    }

    /// The same bits under another dtype of the same size: the `u16` of a `.npy` file may be `bf16`. To `bool`, other values than 0 become 1.
    pub fn with_bits_as(&self, dtype: DType) -> Result<Tensor, Error> {
        if dtype.size_bytes() != self.dtype.size_bytes() {
            return Err(Error::invalid(format!(
                "cannot view the bits of {} as {dtype}: sizes differ",
                self.dtype
            )));
        }
        self.reinterpreted(dtype, &self.shape)
    }

    /// The same bytes as elements of another dtype, `dtype[shape]`, without a copy. To `bool`, other values than 0 become 1, in a copy.
    ///
    /// Errors with `InvalidInput` when the sizes differ.
    pub fn reinterpreted(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        let (size, own) = (checked_size_bytes(dtype, shape)?, self.size_bytes());
        if size != own {
            return Err(Error::invalid(format!(
                "{own} bytes are not a tensor {dtype}{shape:?}, which has {size}"
            )));
        }
        if dtype == DType::Bool && self.as_bytes().iter().any(|b| *b > 1) {
            return Tensor::from_bytes(dtype, shape, self.as_bytes());
        }
        Ok(Tensor {
            dtype,
            shape: shape.to_vec(),
            data: self.data.clone(),
        })
    }

    /// The same elements under another shape of the same length.
    pub fn reshaped(&self, shape: &[usize]) -> Result<Tensor, Error> {
        if checked_size_bytes(self.dtype, shape)? != self.size_bytes() {
            return Err(Error::invalid(format!(
                "cannot view {:?} as {shape:?}: element counts differ",
                self.shape
            )));
        }
        Ok(Tensor {
            dtype: self.dtype,
            shape: shape.to_vec(),
            data: self.data.clone(),
        })
    }
}

impl<T: Element> From<Vec<T>> for Tensor {
    /// A tensor of rank 1; copies as [`Tensor::from_vec`] does.
    fn from(values: Vec<T>) -> Tensor {
        let shape = [values.len()];
        Tensor::from_vec(values, &shape).expect("the elements fitted in memory once")
    }
}

impl PartialEq for Tensor {
    /// Same dtype, shape and bits.
    fn eq(&self, other: &Tensor) -> bool {
        self.dtype == other.dtype
            && self.shape == other.shape
            && self.as_bytes() == other.as_bytes()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} ", self.dtype, self.shape)?;
        let n = self.len().min(8);
        crate::with_dtype!(self.dtype, T => write!(f, "{:?}", &self.as_slice::<T>()[..n]))?;
        if n < self.len() {
            f.write_str("..")
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_a_shared_tensor_copies_it() {
        let a = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
        let mut b = a.clone();
        b.as_mut_slice::<f32>()[0] = 9.0;
        assert_eq!(a.as_slice::<f32>(), [1.0, 2.0]);
        assert_eq!(b.as_slice::<f32>(), [9.0, 2.0]);
    }

    #[test]
    fn another_dtype_is_an_error() {
        let mut t = Tensor::from(vec![1f32, 2.0]);
        assert_eq!(t.shape(), [2]);
        assert_eq!(t.try_as_slice::<f32>().unwrap(), [1.0, 2.0]);
        t.try_as_mut_slice::<f32>().unwrap()[0] = 3.0;
        let e = t.try_as_slice::<i64>().unwrap_err();
        assert_eq!(e.kind(), crate::ErrorKind::InvalidInput);
        assert_eq!(
            e.to_string(),
            "cannot read the elements of a tensor f32[2] as i64; Tensor::dtype gives its dtype"
        );
        assert!(t.try_as_mut_slice::<bool>().is_err());
        let m = Tensor::from_vec(vec![1u8, 2, 3, 4], &[2, 2]).unwrap();
        assert_eq!(m.as_slice::<u8>(), [1, 2, 3, 4]);
        assert!(Tensor::from_vec(vec![1u8], &[2]).is_err());
    }

    #[test]
    #[should_panic(expected = "a tensor f32[1] as i32")]
    fn another_dtype_is_a_panic_that_names_both() {
        Tensor::from(vec![1f32]).as_slice::<i32>();
    }

    #[test]
    fn large_buffers_are_zero_and_writable() {
        for len in [MAPPED_FROM_BYTES - 1, MAPPED_FROM_BYTES, 5 << 20] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            assert!(
                bytes.as_slice().iter().all(|&b| b == 0)
                    && (bytes.as_ptr() as usize).is_multiple_of(ALIGN_BYTES)
            );
            bytes.as_mut_slice()[len - 1] = 7;
            assert_eq!(bytes.as_slice()[len - 1], 7);
        }
    }

    #[test]
    fn weak_tensors_end_with_the_last_strong_one() {
        let a = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
        let (b, weak) = (a.reshaped(&[1, 2]).unwrap(), a.downgrade());
        drop(a);
        assert_eq!(weak.upgrade().unwrap().as_slice::<f32>(), [1.0, 2.0]);
        drop(b);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn sizes_are_checked() {
        assert!(Tensor::zeros(DType::F32, &[1 << 40, 1 << 40]).is_err());
        assert_eq!(
            Tensor::zeros(DType::F32, &[1 << 40, 1 << 40, 0])
                .unwrap()
                .len(),
            0
        );
        assert!(Tensor::from_slice(&[1i64], &[2]).is_err());
        assert_eq!(
            Tensor::from_bytes(DType::Bool, &[2], &[0, 7])
                .unwrap()
                .as_slice::<bool>(),
            [false, true]
        );
    }

    #[test]
    fn spares_are_reused_without_other_references() {
        let spares = Spares::of(1);
        let n = MAPPED_FROM_BYTES / 4;
        let mut large = spares.tensor(DType::F32, &[2 * n]).unwrap();
        large.as_mut_slice::<f32>().fill(1.0);
        let (ptr, shared) = (large.as_ptr(), large.clone());
        spares.give(large);
        let other = spares.tensor(DType::F32, &[n]).unwrap();
        assert_ne!(other.as_ptr(), ptr, "another reference");
        spares.give(shared);
        let small = spares.tensor(DType::U8, &[16]).unwrap();
        assert_ne!(small.as_ptr(), ptr, "small ones are on the heap");
        spares.give(other);
        assert_eq!(lock(&spares.buffers).len(), 1, "no more than asked for");
        let reused = spares.tensor(DType::I32, &[n, 1]).unwrap();
        assert_eq!((reused.as_ptr(), reused.len()), (ptr, n));
        assert_eq!(reused.as_bytes().len(), MAPPED_FROM_BYTES);
        spares.give(reused);
        let truths = spares.tensor(DType::Bool, &[4 * n]).unwrap();
        assert!(truths.as_slice::<bool>().iter().all(|b| !b));
        let whole = spares.tensor(DType::F32, &[2 * n]).unwrap();
        assert_eq!(whole.as_ptr(), ptr, "the room of its first tensor");
        spares.give(whole);
        let larger = spares.tensor(DType::F32, &[3 * n]).unwrap();
        assert_eq!(larger.len(), 3 * n);
        assert!(lock(&spares.buffers).is_empty(), "a small one is dropped");
    }
}
