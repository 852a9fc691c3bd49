//! Values as bytes, each described once for both directions: fields in order, alternatives by number, whole numbers of seven bits a byte.

use crate::error::{Error, ErrorKind};
use crate::program::{MAX_NESTING, Program};
use crate::tensor::{ALIGN_BYTES, Tensor};
use crate::text::{Code, FUNCTION_ALIGN, Function, Text};
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes under construction, with the tensors and functions that they refer to by place.
#[derive(Default)]
pub(super) struct Writer {
    pub(super) bytes: Vec<u8>,
    pub(super) constants: Constants,
    pub(super) texts: Texts,
}

/// Texts that are joined to one, each once.
#[derive(Default)]
pub(super) struct Texts {
    /// With the offsets at which they begin.
    texts: Vec<(Arc<Text>, usize)>,
}

impl Texts {
    /// The offset at which a text begins.
    fn start(&mut self, text: &Arc<Text>) -> usize {
        if let Some(start) = self.known(text) {
            return start;
        }
        let last = self.texts.last();
        let end = last.map_or(0, |(t, start)| start + t.bytes().len());
        let start = end.next_multiple_of(FUNCTION_ALIGN);
        self.texts.push((text.clone(), start));
        start
    }

    /// The same of a text that is there.
    pub(super) fn known(&self, text: &Arc<Text>) -> Option<usize> {
        let known = self.texts.iter().find(|(t, _)| Arc::ptr_eq(t, text));
        known.map(|(_, start)| *start)
    }

    /// The one text, and the names of the functions that it calls.
    ///
    /// Errors with `Unsupported` for programs of several images: their calls are not known any more.
    pub(super) fn joined(&self) -> Result<(Vec<u8>, Vec<String>), Error> {
        if let [(only, _)] = &self.texts[..] {
            return Ok((only.bytes().to_vec(), only.imports().to_vec()));
        }
        let mut joined = Code::default();
        for (text, start) in &self.texts {
            let code = text.code().ok_or_else(|| {
                let message = "programs of several images cannot be written to one";
                Error::new(ErrorKind::Unsupported, message)
            })?;
            if joined.append(&code) != *start {
                return Err(Error::internal("texts are joined at other places"));
            }
        }
        joined.place_calls()?;
        Ok((joined.bytes, joined.imports))
    }
}

/// Constants in the order of the file; those of the same bytes are there once.
#[derive(Default)]
pub(super) struct Constants {
    pub(super) tensors: Vec<(usize, Tensor)>,
    pub(super) n_bytes: usize,
    /// Indices of tensors by the size and the checksum of their bytes.
    by_content: HashMap<(usize, u32), Vec<usize>>,
    /// Offsets by address and size: variants have most tensors in common, whose bytes are then looked at once.
    by_address: HashMap<(usize, usize), usize>,
}

impl Constants {
    /// The offset of a tensor's bytes.
    fn place(&mut self, tensor: &Tensor) -> usize {
        let bytes = tensor.as_bytes();
        let address = (bytes.as_ptr() as usize, bytes.len());
        if let Some(&offset) = self.by_address.get(&address) {
            return offset;
        }
        let key = (bytes.len(), crc32fast::hash(bytes));
        let alike = self.by_content.entry(key).or_default();
        let tensors = &self.tensors;
        let known = alike.iter().find(|&&i| tensors[i].1.as_bytes() == bytes);
        if let Some(&i) = known {
            return self.tensors[i].0;
        }
        alike.push(self.tensors.len());
        let offset = self.n_bytes;
        self.tensors.push((offset, tensor.clone()));
        self.by_address.insert(address, offset);
        self.n_bytes = (offset + bytes.len()).next_multiple_of(ALIGN_BYTES);
        offset
    }
}

/// Bytes being read, and the memory that they refer to.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    /// Constants by their offset.
    constants: &'a dyn Memory,
    text: &'a Arc<Text>,
    /// Depth of sub-programs.
    depth: usize,
}

/// The constants of an image.
pub(super) trait Memory {
    /// A tensor in place, at an offset.
    fn tensor(&self, dtype: crate::DType, shape: &[usize], offset: usize) -> Result<Tensor, Error>;
}

/// Most elements of a list for which room is made before they are read.
const MOST_RESERVED: usize = 1024;

/// An error about bytes that no writer has written.
pub(super) fn damaged(what: &str) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!("the image is damaged: {what}"),
    )
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        bytes: &'a [u8],
        constants: &'a dyn Memory,
        text: &'a Arc<Text>,
    ) -> Reader<'a> {
        Reader {
            bytes,
            constants,
            text,
            depth: 0,
        }
    }

    /// Errors when bytes are left.
    pub(super) fn finish(self) -> Result<(), Error> {
        match self.bytes.is_empty() {
            true => Ok(()),
            false => Err(damaged("there are bytes behind the last program")),
        }
    }

    /// The bytes that are left.
    pub(super) fn rest(self) -> &'a [u8] {
        self.bytes
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let (taken, rest) = self
            .bytes
            .split_at_checked(n)
            .ok_or_else(|| damaged("a program ends early"))?;
        self.bytes = rest;
        Ok(taken)
    }
}

/// A value that an image holds.
pub(super) trait Item: Sized {
    fn write(&self, w: &mut Writer) -> Result<(), Error>;
    fn read(r: &mut Reader) -> Result<Self, Error>;
}

impl Item for u64 {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        let mut rest = *self;
        while rest >= 0x80 {
            w.bytes.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        w.bytes.push(rest as u8);
        Ok(())
    }

    fn read(r: &mut Reader) -> Result<u64, Error> {
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = r.take(1)?[0];
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                break;
            }
            value |= part << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(damaged("a number is out of range"))
    }
}

macro_rules! numbers {
    ($($ty:ty),*) => {$(
        impl Item for $ty {
            fn write(&self, w: &mut Writer) -> Result<(), Error> {
                (*self as u64).write(w)
            }

            fn read(r: &mut Reader) -> Result<$ty, Error> {
                let value = u64::read(r)?;
                <$ty>::try_from(value).map_err(|_| damaged("a number is out of range"))
            }
        }
    )*};
}

numbers!(u32, usize);

impl Item for bool {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        u64::from(*self).write(w)
    }

    fn read(r: &mut Reader) -> Result<bool, Error> {
        match u64::read(r)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(damaged("a truth value is neither 0 nor 1")),
        }
    }
}

impl Item for String {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        self.len().write(w)?;
        w.bytes.extend_from_slice(self.as_bytes());
        Ok(())
    }

    fn read(r: &mut Reader) -> Result<String, Error> {
        let n = usize::read(r)?;
        let text = std::str::from_utf8(r.take(n)?);
        text.map(str::to_owned)
            .map_err(|_| damaged("a name is not UTF-8"))
    }
}

impl<T: Item> Item for Vec<T> {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        self.len().write(w)?;
        self.iter().try_for_each(|item| item.write(w))
    }

    fn read(r: &mut Reader) -> Result<Vec<T>, Error> {
        let n = usize::read(r)?;
        let mut items = Vec::with_capacity(n.min(MOST_RESERVED));
        for _ in 0..n {
            items.push(T::read(r)?);
        }
        Ok(items)
    }
}

impl<A: Item, B: Item> Item for (A, B) {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        self.0.write(w)?;
        self.1.write(w)
    }

    fn read(r: &mut Reader) -> Result<(A, B), Error> {
        Ok((A::read(r)?, B::read(r)?))
    }
}

impl<T: Item> Item for Option<T> {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        self.is_some().write(w)?;
        self.iter().try_for_each(|item| item.write(w))
    }

    fn read(r: &mut Reader) -> Result<Option<T>, Error> {
        bool::read(r)?.then(|| T::read(r)).transpose()
    }
}

impl<T: Item> Item for Box<T> {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        T::write(self, w)
    }

    fn read(r: &mut Reader) -> Result<Box<T>, Error> {
        T::read(r).map(Box::new)
    }
}

impl Item for Arc<Program> {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        Program::write(self, w)
    }

    fn read(r: &mut Reader) -> Result<Arc<Program>, Error> {
        if r.depth == MAX_NESTING {
            return Err(damaged("sub-programs are nested too deep"));
        }
        r.depth += 1;
        let program = Program::read(r)?;
        r.depth -= 1;
        Ok(Arc::new(program))
    }
}

impl Item for Tensor {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        self.dtype().write(w)?;
        self.shape().to_vec().write(w)?;
        w.constants.place(self).write(w)
    }

    fn read(r: &mut Reader) -> Result<Tensor, Error> {
        let (dtype, shape) = (Item::read(r)?, Vec::read(r)?);
        let offset = usize::read(r)?;
        r.constants.tensor(dtype, &shape, offset)
    }
}

impl Item for Function {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        let place = self.place();
        let (text, offset) = place.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "a kernel that is a function of this process cannot be written to an image",
            )
        })?;
        (w.texts.start(text) + offset).write(w)
    }

    fn read(r: &mut Reader) -> Result<Function, Error> {
        let (text, offset) = (r.text, usize::read(r)?);
        if offset >= text.bytes().len() {
            return Err(damaged("a function lies beyond its text"));
        }
        // SAFETY: whoever opened the image has vouched for it, and its checksum says that it is as it was written.
        Ok(unsafe { text.function(offset) })
    }
}

/// Implements [`Item`] for a struct, whose fields are all listed.
macro_rules! record {
    ($($ty:ident { $($field:ident),* $(,)? })*) => {$(
        impl Item for $ty {
            fn write(&self, w: &mut Writer) -> Result<(), Error> {
                let $ty { $($field),* } = self;
                $($field.write(w)?;)*
                Ok(())
            }

            fn read(r: &mut Reader) -> Result<$ty, Error> {
                Ok($ty { $($field: Item::read(r)?),* })
            }
        }
    )*};
}

/// Implements [`Item`] for an enum, whose variants have numbers in the file.
macro_rules! choice {
    ($($ty:ident { $($number:literal $variant:ident
        $({ $($field:ident),* $(,)? })? $(($inner:ident))?),* $(,)? })*) => {$(
        impl Item for $ty {
            fn write(&self, w: &mut Writer) -> Result<(), Error> {
                match self {
                    $($ty::$variant $({ $($field),* })? $(($inner))? => {
                        u64::write(&$number, w)?;
                        $($($field.write(w)?;)*)?
                        $($inner.write(w)?;)?
                    })*
                    #[allow(unreachable_patterns)]
                    other => return Err(not_written(other)),
                }
                Ok(())
            }

            fn read(r: &mut Reader) -> Result<$ty, Error> {
                match u64::read(r)? {
                    $($number => Ok($ty::$variant
                        $({ $($field: Item::read(r)?),* })?
                        $(({ let $inner = Item::read(r)?; $inner }))?),)*
                    _ => Err(damaged(concat!("an unknown ", stringify!($ty)))),
                }
            }
        }
    )*};
}

/// The error about a part of a program that images do not hold.
pub(super) fn not_written(part: &dyn std::fmt::Debug) -> Error {
    let text = format!("{part:?}");
    let name: String = text.chars().take_while(|c| c.is_alphanumeric()).collect();
    Error::new(
        ErrorKind::Unsupported,
        format!("an image holds programs for CPUs only, found {name}"),
    )
}

pub(super) use {choice, record};
