//! Plain data that is copied into a program byte by byte.

/// Data without padding, whose bytes can be stored and compared.
///
/// # Safety
/// Every byte of a value is initialised, and a copy of the bytes at an aligned address is the same
/// value.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! plain_numbers {
    ($($ty:ty),*) => {$(
        // SAFETY: a number has no padding.
        unsafe impl Plain for $ty {}
    )*};
}

plain_numbers!(u32, i32, f32, usize, isize);

// SAFETY: elements of an array follow each other without padding.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// The descriptor of a task kernel, the `D` of its [`TaskFn`](crate::TaskFn).
///
/// # Safety
/// As [`Plain`]. Implemented by `descriptor!`, which lists the fields and checks at compile time
/// that no padding is between them.
pub unsafe trait Descriptor: Plain {
    /// A hash of names and order of the fields, and of the size.
    const LAYOUT: u64;

    /// The bytes that a program stores.
    fn bytes(&self) -> &[u8] {
        // SAFETY: every byte is initialised, and `u8` has no alignment.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}

/// Size in bytes of the field returned by a function.
pub(crate) const fn field_bytes<S: Copy, F: Plain>(_: fn(S) -> F) -> usize {
    size_of::<F>()
}

/// FNV-1a of the names of a descriptor's fields, and of its size.
pub(crate) const fn layout_of(fields: &str, n_bytes: usize) -> u64 {
    let (bytes, mut hash, mut i) = (fields.as_bytes(), 0xcbf2_9ce4_8422_2325, 0);
    while i < bytes.len() {
        hash = joined(hash, bytes[i] as u64);
        i += 1;
    }
    joined(hash, n_bytes as u64)
}

const fn joined(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0100_0000_01b3)
}

/// A hash of the layouts of several descriptors.
pub(crate) const fn layout_of_all(layouts: &[u64]) -> u64 {
    let (mut hash, mut i) = (0, 0);
    while i < layouts.len() {
        hash = joined(hash, layouts[i]);
        i += 1;
    }
    hash
}

/// Implements [`Plain`] for a struct of plain fields.
///
/// All fields are listed: a missing one, like padding, makes the sum of their sizes less than the
/// size of the struct.
macro_rules! plain {
    ($struct:ty { $($field:ident),* $(,)? }) => {
        const _: () = assert!(
            size_of::<$struct>()
                == 0 $(+ $crate::descriptor::field_bytes(|s: $struct| s.$field))*,
            concat!(stringify!($struct), " has padding, or fields that are not listed"),
        );

        // SAFETY: the fields are plain, and the assertion above proves that nothing else is in the
        // struct.
        unsafe impl $crate::descriptor::Plain for $struct {}
    };
}

/// Implements [`Descriptor`] for a struct of plain fields, which are listed as for `plain!`.
macro_rules! descriptor {
    ($struct:ty { $($field:ident),* $(,)? }) => {
        $crate::descriptor::plain!($struct { $($field),* });

        // SAFETY: as `Plain`.
        unsafe impl $crate::descriptor::Descriptor for $struct {
            const LAYOUT: u64 = $crate::descriptor::layout_of(
                concat!(stringify!($struct), " ", $(stringify!($field), " "),*),
                size_of::<$struct>(),
            );
        }
    };
}

pub(crate) use {descriptor, plain};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::rows::{NormDesc, NormKind};
    use crate::testing::sources;

    #[test]
    fn every_descriptor_is_listed() {
        let listed = include_str!("lib.rs");
        for text in sources() {
            let declared = text.lines().filter_map(|l| l.strip_prefix("descriptor!("));
            for name in declared.filter_map(|l| l.split(' ').next()) {
                assert!(listed.contains(&format!("({name}),")), "{name}");
            }
        }
    }

    #[test]
    fn layouts_are_those_of_names_order_and_size() {
        assert_ne!(layout_of("a b ", 8), layout_of("b a ", 8));
        assert_ne!(layout_of("a b ", 8), layout_of("a b ", 16));
        assert_ne!(layout_of_all(&[1, 2]), layout_of_all(&[2, 1]));
    }

    #[test]
    fn bytes_are_those_of_the_fields() {
        let desc = NormDesc::new(Isa::Portable, NormKind::Layer, 3, 5, 0.5);
        let bytes = desc.bytes();
        assert_eq!(bytes.len(), size_of::<NormDesc>());
        assert_eq!(bytes[..4], (Isa::Portable as u32).to_ne_bytes());
        assert_eq!(bytes[8..12], 0.5f32.to_ne_bytes());
        // SAFETY: the bytes are those of a `NormDesc`.
        let copy = unsafe { bytes.as_ptr().cast::<NormDesc>().read_unaligned() };
        assert_eq!(copy, desc);
    }
}
