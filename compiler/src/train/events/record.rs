//! Records of an event file: a length, data, and a checksum of each (TensorFlow's `TFRecord`).

use super::proto::Event;
use prost::Message;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

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

/// The records of a file, read one by one.
pub(super) struct Records {
    file: BufReader<File>,
    /// Where the next record begins.
    at: u64,
    n_bytes: u64,
}

/// The next part of a file.
pub(super) enum Next {
    /// A whole record.
    Event(Event),
    /// The file ends within a record.
    Unfinished,
    /// A checksum, or a message, is wrong.
    Damaged,
}

impl Records {
    pub(super) fn open(path: &Path) -> io::Result<Records> {
        let file = File::open(path)?;
        Ok(Records {
            n_bytes: file.metadata()?.len(),
            file: BufReader::new(file),
            at: 0,
        })
    }

    /// Where the next record begins.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// The next record; `None` at the end of the file. Nothing follows a record that is not whole.
    pub(super) fn next(&mut self) -> io::Result<Option<Next>> {
        if self.at >= self.n_bytes {
            return Ok(None);
        }
        match self.read() {
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => Ok(Some(Next::Unfinished)),
            read => read.map(Some),
        }
    }

    fn read(&mut self) -> io::Result<Next> {
        let mut head = [0; HEAD];
        self.file.read_exact(&mut head)?;
        if number(&head[8..]) != checksum(&head[..8]) {
            return Ok(Next::Damaged);
        }
        let length = u64::from(number(&head[4..])) << 32 | u64::from(number(&head));
        let left = self.n_bytes.saturating_sub(self.at);
        if length.saturating_add((HEAD + TAIL) as u64) > left {
            return Ok(Next::Unfinished);
        }
        let mut data = vec![0; length as usize + TAIL];
        self.file.read_exact(&mut data)?;
        let (data, tail) = data.split_at(length as usize);
        if number(tail) != checksum(data) {
            return Ok(Next::Damaged);
        }
        let Ok(event) = Event::decode(data) else {
            return Ok(Next::Damaged);
        };
        self.at += length + (HEAD + TAIL) as u64;
        Ok(Next::Event(event))
    }
}

/// The number in the first four bytes.
fn number(bytes: &[u8]) -> u32 {
    let four = bytes.first_chunk().copied().unwrap_or_default();
    u32::from_le_bytes(four)
}
