//! Reading a model file without its weights.
//!
//! The large `raw_data` of initialisers stays in the file: each is replaced by a reference to its
//! place there, in the form of external data, and read when it is needed.

use super::wire::{Field, Wire, put_payload, put_reference};
use crate::error::Result;
use std::io::{Read, Seek};

/// `location` of external data that lies in the model file itself; no path can be this.
pub(super) const IN_MODEL: &str = "\0model";
/// Payloads shorter than this are kept.
const MIN_BYTES: u64 = 4096;

/// The messages on the way to `raw_data`.
#[derive(Clone, Copy, PartialEq)]
enum Level {
    Model,
    Graph,
    Tensor,
}

/// The model's bytes, large `raw_data` of the main graph's initialisers replaced by references.
pub(super) fn skim(file: impl Read + Seek, len: u64) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    copy(&mut Wire::new(file), len, Level::Model, &mut out)?;
    Ok(out)
}

/// Copies the fields of a message that ends at `end`.
fn copy<R: Read + Seek>(
    from: &mut Wire<R>,
    end: u64,
    level: Level,
    out: &mut Vec<u8>,
) -> Result<()> {
    let mut left_in_file = None;
    while let Some(field) = from.field(end)? {
        match field {
            Field::Number { whole, .. } => out.extend(whole),
            Field::Payload { number, len } => {
                let skipped = copy_payload(from, number, len, level, out)?;
                left_in_file = skipped.or(left_in_file);
            }
        }
    }
    if let Some((offset, length)) = left_in_file {
        put_reference(IN_MODEL, offset, length, out);
    }
    Ok(())
}

/// Copies a field with a payload, or skips a large one and gives its offset and length.
fn copy_payload<R: Read + Seek>(
    from: &mut Wire<R>,
    number: u64,
    len: u64,
    level: Level,
    out: &mut Vec<u8>,
) -> Result<Option<(u64, u64)>> {
    let end = from.at() + len;
    let inner = match (level, number) {
        (Level::Model, 7) => Some(Level::Graph),
        (Level::Graph, 5) => Some(Level::Tensor),
        (Level::Tensor, 9) if len >= MIN_BYTES => {
            let offset = from.at();
            from.skip(len)?;
            return Ok(Some((offset, len)));
        }
        _ => None,
    };
    let mut message = Vec::new();
    match inner {
        Some(inner) => copy(from, end, inner, &mut message)?,
        None => from.bytes(len, end, &mut message)?,
    }
    put_payload(number, &message, out);
    Ok(None)
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
