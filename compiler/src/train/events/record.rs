//! Records of an event file: a length, data, and a checksum of each (TensorFlow's `TFRecord`).

use prost::Message;

use super::proto::Event;

/// The masked CRC-32C of bytes.
fn checksum(bytes: &[u8]) -> u32 {
    let crc = crc32c::crc32c(bytes);
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Bytes before the data: its length, and the checksum of that.
const HEAD: usize = 12;
/// Bytes behind the data: its checksum.
const TAIL: usize = 4;

/// Appends an event as a record.
pub(super) fn append(event: &Event, to: &mut Vec<u8>) {
    let length = (event.encoded_len() as u64).to_le_bytes();
    to.extend(length);
    to.extend(checksum(&length).to_le_bytes());
    let begin = to.len();
    event.encode(to).expect("a vector has room");
    let crc = checksum(&to[begin..]);
    to.extend(crc.to_le_bytes());
}

/// The records of a file.
pub(super) struct Records<'f> {
    bytes: &'f [u8],
    at: usize,
}

/// The end of whole records in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// The file ends within a record.
    Unfinished,
    /// A checksum, or a message, is wrong.
    Damaged,
}

impl<'f> Records<'f> {
    pub(super) fn new(bytes: &'f [u8]) -> Records<'f> {
        Records { bytes, at: 0 }
    }

    /// Where the next record begins.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    fn read(&self) -> Result<(Event, usize), Flaw> {
        let rest = &self.bytes[self.at..];
        let head = rest.get(..HEAD).ok_or(Flaw::Unfinished)?;
        if number(&head[8..]) != checksum(&head[..8]) {
            return Err(Flaw::Damaged);
        }
        let length = u64::from(number(&head[4..])) << 32 | u64::from(number(head));
        let length = usize::try_from(length).map_err(|_| Flaw::Unfinished)?;
        let end = length.checked_add(HEAD).ok_or(Flaw::Unfinished)?;
        let data = rest.get(HEAD..end).ok_or(Flaw::Unfinished)?;
        let tail = rest.get(end..end + TAIL).ok_or(Flaw::Unfinished)?;
        if number(tail) != checksum(data) {
            return Err(Flaw::Damaged);
        }
        let event = Event::decode(data).map_err(|_| Flaw::Damaged)?;
        Ok((event, end + TAIL))
    }
}

/// The number in the first four bytes.
fn number(bytes: &[u8]) -> u32 {
    let four = bytes.first_chunk().copied().unwrap_or_default();
    u32::from_le_bytes(four)
}

impl Iterator for Records<'_> {
    type Item = Result<Event, Flaw>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.bytes.len() {
            return None;
        }
        Some(self.read().map(|(event, length)| {
            self.at += length;
            event
        }))
    }
}
