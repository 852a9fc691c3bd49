//! Pieces of tensors as gRPC messages whose bytes are copied nowhere: from the memory of a tensor to the network, and from the network to where they belong.
//!
//! Each message is a [`Piece`] with its bytes last. A sender writes them to the network from where they are. A receiver gets them as they
//! come, in smaller pieces than the message has, and never holds a whole one.

use crate::Limits;
use crate::messages::{Fault, Piece};
use crate::rpc;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http_body::{Body as _, Frame};
use prost::Message as _;
use prost::encoding::{self, DecodeContext, WireType};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::transport::Channel;
use tower_service::Service;

/// Bytes before a message: a flag that it is compressed, and its length.
const PREFIX: usize = 5;

/// The tag of a piece's bytes.
const DATA: u32 = 5;

/// Smaller tensors go in one piece with their heads.
const SMALL: usize = 4 << 10;

/// Most bytes of a message before those of the tensor.
const MOST_HEAD: usize = 64 << 10;

/// The body of a request that sends pieces until their queue ends.
pub(crate) struct Sending {
    queue: mpsc::Receiver<Piece>,
    /// Bytes of a tensor whose head has gone.
    data: Option<Bytes>,
}

/// Pieces as the body of a request.
pub(crate) fn sending(queue: mpsc::Receiver<Piece>) -> Body {
    Body::new(Sending { queue, data: None })
}

impl http_body::Body for Sending {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(data) = self.data.take() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let next = ready!(self.queue.poll_recv(context));
        Poll::Ready(next.map(|piece| {
            let (head, data) = split(piece);
            self.data = Some(data).filter(|data| !data.is_empty());
            Ok(Frame::data(head))
        }))
    }
}

/// A message up to the bytes of its tensor, and these.
fn split(mut piece: Piece) -> (Bytes, Bytes) {
    let data = std::mem::take(&mut piece.data);
    let n_head = piece.encoded_len();
    let n_key = encoding::key_len(DATA) + encoding::encoded_len_varint(data.len() as u64);
    let n_message = n_head + n_key + data.len();
    let mut head = BytesMut::with_capacity(PREFIX + n_head + n_key + SMALL.min(data.len()));
    head.put_u8(0);
    head.put_u32(u32::try_from(n_message).expect("a piece is far smaller"));
    piece.encode(&mut head).expect("the memory grows");
    encoding::encode_key(DATA, WireType::LengthDelimited, &mut head);
    encoding::encode_varint(data.len() as u64, &mut head);
    if data.len() <= SMALL {
        head.put(data);
        return (head.freeze(), Bytes::new());
    }
    (head.freeze(), data)
}

/// Pieces as they arrive.
pub(crate) struct Arriving {
    body: Body,
    /// Bytes that were not looked at so far.
    rest: Bytes,
    /// The tensor whose bytes come, and their number.
    current: Option<(Piece, usize)>,
    most: usize,
}

impl Arriving {
    /// The pieces of a request's body.
    pub(crate) fn new(body: Body, limits: &Limits) -> Arriving {
        Arriving {
            body,
            rest: Bytes::new(),
            current: None,
            most: limits.message_bytes,
        }
    }

    /// The next bytes of a tensor; `None` after the last message. Errors on what is not a piece, and when the stream breaks.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>, Fault> {
        let (mut piece, left) = match self.current.take() {
            Some(current) => current,
            None => match self.head().await? {
                Some(head) => head,
                None => return Ok(None),
            },
        };
        while left > 0 && self.rest.is_empty() {
            if !self.more().await? {
                return Err(cut());
            }
        }
        let n = left.min(self.rest.len());
        piece.data = self.rest.split_to(n);
        if n < left {
            let rest = Piece {
                number: piece.number,
                run: piece.run,
                offset: piece.offset.saturating_add(n as u64),
                ..Piece::default()
            };
            self.current = Some((rest, left - n));
        }
        Ok(Some(piece))
    }

    /// The next message up to the bytes of its tensor, and their number.
    async fn head(&mut self) -> Result<Option<(Piece, usize)>, Fault> {
        loop {
            if let Some((n, piece, n_data)) = read_head(&self.rest, self.most)? {
                self.rest.advance(n);
                return Ok(Some((piece, n_data)));
            }
            if self.rest.len() > MOST_HEAD {
                return Err(malformed("its bytes do not come"));
            }
            if !self.more().await? {
                return match self.rest.is_empty() {
                    true => Ok(None),
                    false => Err(cut()),
                };
            }
        }
    }

    /// Waits for more bytes; false at the end of the stream.
    async fn more(&mut self) -> Result<bool, Fault> {
        loop {
            let next = std::future::poll_fn(|c| Pin::new(&mut self.body).poll_frame(c)).await;
            let frame = match next {
                None => return Ok(false),
                Some(frame) => frame.map_err(rpc::broken)?,
            };
            // Trailers say nothing.
            let Ok(data) = frame.into_data() else {
                continue;
            };
            self.rest = match self.rest.is_empty() {
                true => data,
                false => [&self.rest[..], &data[..]].concat().into(),
            };
            return Ok(true);
        }
    }
}

/// A message's beginning at the front of `bytes`: its length, its fields, and the number of bytes of its tensor, which follow. None if more
/// bytes are needed.
fn read_head(bytes: &[u8], most: usize) -> Result<Option<(usize, Piece, usize)>, Fault> {
    let Some((prefix, rest)) = bytes.split_at_checked(PREFIX) else {
        return Ok(None);
    };
    let n_message = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if prefix[0] != 0 {
        return Err(malformed("it is compressed"));
    }
    if n_message > most {
        let message = format!("a message of {n_message} bytes, more than {most}");
        return Err(Fault::invalid(message));
    }
    let is_whole = rest.len() >= n_message;
    let rest = &rest[..rest.len().min(n_message)];
    let Some((n_fields, n_key, n_data)) = find_data(rest) else {
        return match is_whole {
            // An empty tensor, without its empty bytes.
            true => {
                let piece = Piece::decode(rest).map_err(|e| malformed(&e.to_string()))?;
                match piece.data.is_empty() {
                    true => Ok(Some((PREFIX + n_message, piece, 0))),
                    false => Err(malformed("its bytes are not its last field")),
                }
            }
            false => Ok(None),
        };
    };
    if n_fields + n_key + n_data != n_message {
        return Err(malformed("its bytes are not its last field"));
    }
    let piece = Piece::decode(&rest[..n_fields]).map_err(|e| malformed(&e.to_string()))?;
    Ok(Some((PREFIX + n_fields + n_key, piece, n_data)))
}

/// The length of the fields before a piece's bytes, that of the key of these, and their number. None if the key is not there.
fn find_data(fields: &[u8]) -> Option<(usize, usize, usize)> {
    let mut left = fields;
    loop {
        let before = left.len();
        let (tag, wire) = encoding::decode_key(&mut left).ok()?;
        if tag == DATA && wire == WireType::LengthDelimited {
            let n_data = encoding::decode_varint(&mut left).ok()?;
            let n_data = usize::try_from(n_data).ok()?;
            return Some((fields.len() - before, before - left.len(), n_data));
        }
        encoding::skip_field(wire, tag, &mut left, DecodeContext::default()).ok()?;
    }
}

fn malformed(why: &str) -> Fault {
    Fault::invalid(format!("a piece of a tensor is malformed: {why}"))
}

fn cut() -> Fault {
    Fault::invalid("a stream of tensors ended within a message")
}

/// A channel for one call, whose body is another one than the call's.
pub(crate) struct WithBody {
    channel: Channel,
    body: Option<Body>,
}

impl WithBody {
    pub(crate) fn new(channel: Channel, body: Body) -> WithBody {
        WithBody {
            channel,
            body: Some(body),
        }
    }
}

impl Service<http::Request<Body>> for WithBody {
    type Response = http::Response<Body>;
    type Error = tonic::transport::Error;
    type Future = <Channel as Service<http::Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let body = self.body.take().unwrap_or_default();
        self.channel.call(request.map(|_| body))
    }
}
