//! Pinned memory through which bytes of any place on the host cross, piece by piece.

use super::context::{Context, Event, PinnedMemory, Stream};
use crate::driver::HostMemory;
use crate::error::Error;
use std::ptr;
use std::sync::Arc;

/// Bytes of a piece: large enough for the full speed of a link, small enough to keep two of them.
const PIECE_BYTES: usize = 4 << 20;

/// Two pieces, used in turn: the host fills or empties one while the device copies the other.
pub(super) struct Ring {
    pieces: [Piece; 2],
    next: usize,
}

struct Piece {
    memory: PinnedMemory,
    /// The last copy that uses it.
    event: Event,
}

impl Piece {
    fn new(context: &Arc<Context>) -> Result<Piece, Error> {
        Ok(Piece {
            memory: PinnedMemory::new(context, PIECE_BYTES)?,
            event: Event::new(context)?,
        })
    }
}

impl Ring {
    pub(super) fn new(context: &Arc<Context>) -> Result<Ring, Error> {
        Ok(Ring {
            pieces: [Piece::new(context)?, Piece::new(context)?],
            next: 0,
        })
    }

    /// The piece whose turn it is, once its last copy is done.
    fn turn(&mut self) -> Result<&Piece, Error> {
        let piece = &self.pieces[self.next];
        self.next = 1 - self.next;
        piece.event.synchronize()?;
        Ok(piece)
    }

    /// Copies to the device in the order of the stream.
    pub(super) fn write(&mut self, stream: &Stream, to: u64, bytes: &[u8]) -> Result<(), Error> {
        for (i, part) in bytes.chunks(PIECE_BYTES).enumerate() {
            let piece = self.turn()?;
            let (context, at) = (&stream.context, to + (i * PIECE_BYTES) as u64);
            context.bind()?;
            // SAFETY: the piece is large enough, and the copy that used it last is done.
            let code = unsafe {
                ptr::copy_nonoverlapping(part.as_ptr(), piece.memory.as_ptr(), part.len());
                (context.api.to_device)(at, piece.memory.as_ptr().cast(), part.len(), stream.handle)
            };
            context.check(code, "copying from the host")?;
            piece.event.record(stream)?;
        }
        Ok(())
    }

    /// Copies from the device in the order of the stream, and waits.
    pub(super) fn read(
        &mut self,
        stream: &Stream,
        from: u64,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let n = bytes.len().div_ceil(PIECE_BYTES);
        if n > 0 {
            self.fetch(stream, from, 0, bytes.len())?;
        }
        for i in 0..n {
            if i + 1 < n {
                self.fetch(stream, from, i + 1, bytes.len())?;
            }
            let piece = &self.pieces[i % 2];
            piece.event.synchronize()?;
            let part = &mut bytes[i * PIECE_BYTES..];
            let part_bytes = part.len().min(PIECE_BYTES);
            // SAFETY: the copy into the piece is done, and it has so many bytes.
            unsafe {
                ptr::copy_nonoverlapping(piece.memory.as_ptr(), part.as_mut_ptr(), part_bytes)
            };
        }
        Ok(())
    }

    /// Begins to copy part `i` of `size_bytes` bytes into the piece of its parity, which no write uses any more.
    fn fetch(
        &mut self,
        stream: &Stream,
        from: u64,
        i: usize,
        size_bytes: usize,
    ) -> Result<(), Error> {
        let (piece, begin, context) = (&self.pieces[i % 2], i * PIECE_BYTES, &stream.context);
        piece.event.synchronize()?;
        let part_bytes = PIECE_BYTES.min(size_bytes - begin);
        context.bind()?;
        // SAFETY: the piece is large enough; the host looks at it after the event.
        let code = unsafe {
            (context.api.to_host)(
                piece.memory.as_ptr().cast(),
                from + begin as u64,
                part_bytes,
                stream.handle,
            )
        };
        context.check(code, "copying to the host")?;
        piece.event.record(stream)
    }
}
