//! Reading a model file without its weights.
//!
//! The large `raw_data` of initialisers stays in the file: each is replaced by a reference to its
//! place there, in the form of external data, and read when it is needed.

use crate::error::{Error, Result};
use std::io::{BufReader, Read, Seek};

/// `location` of external data that lies in the model file itself; no path can be this.
pub(super) const IN_MODEL: &str = "\0model";
/// Payloads shorter than this are kept.
const MIN_BYTES: u64 = 4096;

/// Wire types of protobuf.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

/// The messages on the way to `raw_data`.
#[derive(Clone, Copy, PartialEq)]
enum Level {
    Model,
    Graph,
    Tensor,
}

/// A file, and the position in it.
struct Source<R> {
    reader: BufReader<R>,
    at: u64,
}

/// The model's bytes, large `raw_data` of the main graph's initialisers replaced by references.
pub(super) fn skim(file: impl Read + Seek, len: u64) -> Result<Vec<u8>> {
    let mut source = Source {
        reader: BufReader::with_capacity(1 << 16, file),
        at: 0,
    };
    let mut out = Vec::new();
    source.copy(len, Level::Model, &mut out)?;
    Ok(out)
}

fn io(e: std::io::Error) -> Error {
    Error::invalid(format!("cannot read: {e}"))
}

fn malformed(at: u64) -> Error {
    Error::invalid(format!("not an ONNX model: malformed at byte {at}"))
}

impl<R: Read + Seek> Source<R> {
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

    fn bytes(&mut self, n: u64, end: u64, out: &mut Vec<u8>) -> Result<()> {
        if n > end - self.at {
            return Err(malformed(self.at));
        }
        let copied = (&mut self.reader).take(n).read_to_end(out).map_err(io)?;
        self.at += n;
        if copied as u64 == n {
            Ok(())
        } else {
            Err(malformed(self.at))
        }
    }

    fn skip(&mut self, n: u64) -> Result<()> {
        self.reader
            .seek_relative(i64::try_from(n).map_err(|_| malformed(self.at))?)
            .map_err(io)?;
        self.at += n;
        Ok(())
    }

    /// Copies the fields of a message that ends at `end`.
    fn copy(&mut self, end: u64, level: Level, out: &mut Vec<u8>) -> Result<()> {
        let mut left_in_file = None;
        while self.at < end {
            let tag = self.varint(end)?;
            match tag & 7 {
                VARINT => {
                    put(tag, out);
                    put(self.varint(end)?, out);
                }
                FIXED64 => {
                    put(tag, out);
                    self.bytes(8, end, out)?;
                }
                FIXED32 => {
                    put(tag, out);
                    self.bytes(4, end, out)?;
                }
                LENGTH => {
                    let skipped = self.copy_field(tag, end, level, out)?;
                    left_in_file = skipped.or(left_in_file);
                }
                _ => return Err(malformed(self.at)),
            }
        }
        if let Some((offset, length)) = left_in_file {
            put_reference(offset, length, out);
        }
        Ok(())
    }

    /// Copies a field of some length, or skips a large payload and gives its offset and length.
    fn copy_field(
        &mut self,
        tag: u64,
        end: u64,
        level: Level,
        out: &mut Vec<u8>,
    ) -> Result<Option<(u64, u64)>> {
        let n = self.varint(end)?;
        if n > end - self.at {
            return Err(malformed(self.at));
        }
        let inner = match (level, tag >> 3) {
            (Level::Model, 7) => Level::Graph,
            (Level::Graph, 5) => Level::Tensor,
            (Level::Tensor, 9) if n >= MIN_BYTES => {
                let offset = self.at;
                self.skip(n)?;
                return Ok(Some((offset, n)));
            }
            _ => {
                put(tag, out);
                put(n, out);
                self.bytes(n, end, out)?;
                return Ok(None);
            }
        };
        let mut message = Vec::new();
        self.copy(self.at + n, inner, &mut message)?;
        put(tag, out);
        put(message.len() as u64, out);
        out.append(&mut message);
        Ok(None)
    }
}

fn put(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_text(field: u64, text: &[u8], out: &mut Vec<u8>) {
    put(field << 3 | LENGTH, out);
    put(text.len() as u64, out);
    out.extend_from_slice(text);
}

/// `external_data` entries (field 13) and `data_location` (field 14) of a payload in the model
/// file.
fn put_reference(offset: u64, length: u64, out: &mut Vec<u8>) {
    for (key, value) in [
        ("location", IN_MODEL.to_owned()),
        ("offset", offset.to_string()),
        ("length", length.to_string()),
    ] {
        let mut entry = Vec::new();
        put_text(1, key.as_bytes(), &mut entry);
        put_text(2, value.as_bytes(), &mut entry);
        put_text(13, &entry, out);
    }
    put(14 << 3 | VARINT, out);
    put(1, out);
}

#[cfg(test)]
mod tests {
    use super::super::proto::{GraphProto, ModelProto, TensorProto};
    use super::*;
    use prost::Message;
    use std::io::Cursor;

    #[test]
    fn only_large_payloads_stay_in_the_file() {
        let tensor = |name: &str, n: usize| TensorProto {
            name: name.to_owned(),
            data_type: 2,
            dims: vec![n as i64],
            raw_data: vec![7; n].into(),
            ..Default::default()
        };
        let initializer = vec![tensor("small", 5), tensor("large", 5000)];
        let graph = GraphProto {
            initializer,
            ..Default::default()
        };
        let model = ModelProto {
            ir_version: 9,
            graph: Some(graph),
            ..Default::default()
        };
        let bytes = model.encode_to_vec();
        let skimmed = skim(Cursor::new(&bytes), bytes.len() as u64).unwrap();
        assert!(skimmed.len() < 300);
        let back = ModelProto::decode(skimmed.as_slice())
            .unwrap()
            .graph
            .unwrap()
            .initializer;
        assert_eq!(back[0], tensor("small", 5));
        assert_eq!((back[1].data_location, back[1].raw_data.len()), (1, 0));
        let offset: usize = back[1].external_data[1].value.parse().unwrap();
        assert_eq!(bytes[offset..offset + 5000], [7; 5000]);
        for cut in 0..bytes.len() {
            // A file cut short never panics; only one cut between fields is still a message.
            let _ = skim(Cursor::new(&bytes[..cut]), cut as u64);
        }
    }
}
