//! Fields of protobuf messages in a file, read and written without decoding what they hold.

use crate::error::{Error, Result};
use std::io::{BufReader, Read, Seek};

/// Wire types.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

/// A file, and the position in it.
pub(super) struct Wire<R> {
    reader: BufReader<R>,
    at: u64,
}

/// A field of a message.
pub(super) enum Field {
    /// A number.
    Number {
        /// Number of the field.
        number: u64,
        /// The bytes of the whole field.
        whole: Vec<u8>,
    },
    /// A payload of some length, which begins at the position.
    Payload {
        /// Number of the field.
        number: u64,
        /// Bytes of the payload.
        len: u64,
    },
}

fn io(e: std::io::Error) -> Error {
    Error::invalid(format!("cannot read: {e}"))
}

fn malformed(at: u64) -> Error {
    Error::invalid(format!("not an ONNX model: malformed at byte {at}"))
}

/// The error for a message that ends before its part at byte `at` does: a download that was cut short, most of the time.
fn truncated(at: u64, n_bytes: u64, n_left: u64) -> Error {
    let message = format!(
        "not an ONNX model, or a truncated one: the part at byte {at} has {n_bytes} bytes, {n_left} are left"
    );
    Error::invalid(message).hint("download or export it again")
}

impl<R: Read + Seek> Wire<R> {
    /// Begins at the start of a file.
    pub fn new(file: R) -> Wire<R> {
        Wire {
            reader: BufReader::with_capacity(1 << 16, file),
            at: 0,
        }
    }

    /// The position in the file.
    pub fn at(&self) -> u64 {
        self.at
    }

    fn byte(&mut self, end: u64) -> Result<u8> {
        if self.at >= end {
            return Err(malformed(self.at));
        }
        let mut b = [0];
        self.reader.read_exact(&mut b).map_err(io)?;
        self.at += 1;
        Ok(b[0])
    }

    fn varint(&mut self, end: u64) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let b = self.byte(end)?;
            if shift < 64 {
                value |= u64::from(b & 0x7f) << shift;
            }
            if b & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(malformed(self.at))
    }

    /// The next field of a message that ends at `end`; `None` at its end. A payload is to be read or skipped next.
    pub fn field(&mut self, end: u64) -> Result<Option<Field>> {
        if self.at >= end {
            return Ok(None);
        }
        let tag = self.varint(end)?;
        let number = tag >> 3;
        let mut whole = Vec::new();
        put(tag, &mut whole);
        match tag & 7 {
            VARINT => put(self.varint(end)?, &mut whole),
            FIXED64 => self.bytes(8, end, &mut whole)?,
            FIXED32 => self.bytes(4, end, &mut whole)?,
            LENGTH => {
                let len = self.varint(end)?;
                if len > end - self.at {
                    return Err(truncated(self.at, len, end - self.at));
                }
                return Ok(Some(Field::Payload { number, len }));
            }
            _ => return Err(malformed(self.at)),
        }
        Ok(Some(Field::Number { number, whole }))
    }

    /// Appends the next `n` bytes of a message that ends at `end`.
    pub fn bytes(&mut self, n: u64, end: u64, out: &mut Vec<u8>) -> Result<()> {
        if n > end - self.at {
            return Err(truncated(self.at, n, end - self.at));
        }
        let copied = (&mut self.reader).take(n).read_to_end(out).map_err(io)?;
        self.at += n;
        if copied as u64 == n {
            Ok(())
        } else {
            Err(malformed(self.at))
        }
    }

    /// Passes over the next `n` bytes.
    pub fn skip(&mut self, n: u64) -> Result<()> {
        let distance = i64::try_from(n).map_err(|_| malformed(self.at))?;
        self.reader.seek_relative(distance).map_err(io)?;
        self.at += n;
        Ok(())
    }
}

fn put(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends the head of a field with a payload of `len` bytes.
pub(super) fn put_head(field: u64, len: u64, out: &mut Vec<u8>) {
    put(field << 3 | LENGTH, out);
    put(len, out);
}

/// Appends a field with a payload.
pub(super) fn put_payload(field: u64, payload: &[u8], out: &mut Vec<u8>) {
    put_head(field, payload.len() as u64, out);
    out.extend_from_slice(payload);
}

/// Appends `external_data` entries (field 13) and `data_location` (field 14) of a tensor whose bytes lie elsewhere.
pub(super) fn put_reference(location: &str, offset: u64, length: u64, out: &mut Vec<u8>) {
    for (key, value) in [
        ("location", location.to_owned()),
        ("offset", offset.to_string()),
        ("length", length.to_string()),
    ] {
        let mut entry = Vec::new();
        put_payload(1, key.as_bytes(), &mut entry);
        put_payload(2, value.as_bytes(), &mut entry);
        put_payload(13, &entry, out);
    }
    put(14 << 3 | VARINT, out);
    put(1, out);
}
