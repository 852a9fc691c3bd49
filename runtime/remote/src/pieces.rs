//! Pieces of tensors as gRPC messages whose bytes are copied nowhere: from the memory of a tensor to the network, and from the network to
//! where they belong.
//!
//! Each message [carries](Carrying) bytes, as its last field. A sender writes them to the network from where they are. A receiver gets them
//! as they come, in smaller pieces than the message has, and never holds a whole one.

use crate::Limits;
use crate::messages::{Chunk, Fault, Piece};
use crate::rpc;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http_body::{Body as _, Frame};
use prost::Message;
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

/// Smaller tensors go in one piece with their heads.
const SMALL: usize = 4 << 10;

/// Most bytes of a message before those of the tensor.
const MOST_HEAD: usize = 64 << 10;

/// A message with bytes of a tensor.
pub(crate) trait Carrying: Message + Default + Unpin + 'static {
    /// The tag of the bytes, which no other field follows.
    const DATA: u32;

    fn data(&mut self) -> &mut Bytes;

    /// The message of further bytes, after so many.
    fn after(&self, n_bytes: usize) -> Self;
}

impl Carrying for Piece {
    const DATA: u32 = 5;

    fn data(&mut self) -> &mut Bytes {
        &mut self.data
    }

    fn after(&self, n_bytes: usize) -> Piece {
        Piece {
            number: self.number,
            run: self.run,
            offset: self.offset.saturating_add(n_bytes as u64),
            ..Piece::default()
        }
    }
}

impl Carrying for Chunk {
    const DATA: u32 = 2;

    fn data(&mut self) -> &mut Bytes {
        &mut self.data
    }

    fn after(&self, _: usize) -> Chunk {
        Chunk::default()
    }
}

/// The body of a request that sends messages until their queue ends.
pub(crate) struct Sending<M> {
    queue: mpsc::Receiver<M>,
    /// Bytes of a tensor whose head has gone.
    data: Option<Bytes>,
}

/// Messages as the body of a request.
pub(crate) fn sending<M: Carrying>(queue: mpsc::Receiver<M>) -> Body {
    Body::new(Sending { queue, data: None })
}

impl<M: Carrying> http_body::Body for Sending<M> {
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
        Poll::Ready(next.map(|message| {
            let (head, data) = split(message);
            self.data = Some(data).filter(|data| !data.is_empty());
            Ok(Frame::data(head))
        }))
    }
}

/// A message up to the bytes of its tensor, and these.
fn split<M: Carrying>(mut message: M) -> (Bytes, Bytes) {
    let data = std::mem::take(message.data());
    let n_head = message.encoded_len();
    let n_key = encoding::key_len(M::DATA) + encoding::encoded_len_varint(data.len() as u64);
    let n_message = n_head + n_key + data.len();
    let mut head = BytesMut::with_capacity(PREFIX + n_head + n_key + SMALL.min(data.len()));
    head.put_u8(0);
    head.put_u32(u32::try_from(n_message).expect("a piece is far smaller"));
    message.encode(&mut head).expect("the memory grows");
    encoding::encode_key(M::DATA, WireType::LengthDelimited, &mut head);
    encoding::encode_varint(data.len() as u64, &mut head);
    if data.len() <= SMALL {
        head.put(data);
        return (head.freeze(), Bytes::new());
    }
    (head.freeze(), data)
}

/// Messages as they arrive.
pub(crate) struct Incoming<M> {
    body: Body,
    /// Bytes that were not looked at so far.
    rest: Bytes,
    /// The tensor whose bytes come, and their number.
    current: Option<(M, usize)>,
    most: usize,
}

impl<M: Carrying> Incoming<M> {
    /// The messages of a request's body.
    pub(crate) fn new(body: Body, limits: &Limits) -> Incoming<M> {
        Incoming {
            body,
            rest: Bytes::new(),
            current: None,
            most: limits.message_bytes,
        }
    }

    /// The next bytes of a tensor; `None` after the last message. Errors on what is not a piece, and when the stream breaks.
    pub(crate) async fn next(&mut self) -> Result<Option<M>, Fault> {
        let (mut message, left) = match self.current.take() {
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
        *message.data() = self.rest.split_to(n);
        if n < left {
            self.current = Some((message.after(n), left - n));
        }
        Ok(Some(message))
    }

    /// The next message up to the bytes of its tensor, and their number.
    async fn head(&mut self) -> Result<Option<(M, usize)>, Fault> {
        loop {
            if let Some((n, message, n_data)) = read_head(&self.rest, self.most)? {
                self.rest.advance(n);
                return Ok(Some((message, n_data)));
            }
            if self.rest.is_empty() {
                if !self.more().await? {
                    return Ok(None);
                }
            } else if !self.double().await? {
                return Err(cut());
            }
        }
    }

    /// Waits for as many bytes again as there are, or for the end of the message: so a head that comes byte
    /// by byte is copied and read a few times only. False at the end of the stream.
    async fn double(&mut self) -> Result<bool, Fault> {
        let mut all = BytesMut::from(&self.rest[..]);
        let length = all.get(1..PREFIX).and_then(|length| length.try_into().ok());
        let end = length.map_or(PREFIX, |l| PREFIX + u32::from_be_bytes(l) as usize);
        let wanted = end.min(2 * all.len());
        while all.len() < wanted {
            if !self.more().await? {
                return Ok(false);
            }
            all.extend_from_slice(&self.rest);
        }
        self.rest = all.freeze();
        Ok(true)
    }

    /// Waits for more bytes, once the last ones are used; false at the end of the stream.
    async fn more(&mut self) -> Result<bool, Fault> {
        loop {
            // Where much has come, others get their turn.
            tokio::task::consume_budget().await;
            let next = std::future::poll_fn(|c| Pin::new(&mut self.body).poll_frame(c)).await;
            let frame = match next {
                None => return Ok(false),
                Some(frame) => frame.map_err(rpc::broken)?,
            };
            // Trailers say nothing.
            if let Ok(data) = frame.into_data() {
                self.rest = data;
                return Ok(true);
            }
        }
    }
}

/// The length of the message at the front of `bytes`. None if more bytes are needed.
fn message_length(bytes: &[u8], most: usize) -> Result<Option<usize>, Fault> {
    let Some(&[flag, ref length @ ..]) = bytes.first_chunk::<PREFIX>() else {
        return Ok(None);
    };
    let n_message = u32::from_be_bytes(*length) as usize;
    if flag != 0 {
        return Err(malformed("it is compressed"));
    }
    if n_message > most {
        let message = format!("a message of {n_message} bytes, more than {most}");
        return Err(Fault::invalid(message));
    }
    Ok(Some(n_message))
}

/// A message's beginning at the front of `bytes`: its length, its fields, and the number of bytes of its
/// tensor, which follow. None if more bytes are needed.
fn read_head<M: Carrying>(bytes: &[u8], most: usize) -> Result<Option<(usize, M, usize)>, Fault> {
    let Some(n_message) = message_length(bytes, most)? else {
        return Ok(None);
    };
    let rest = &bytes[PREFIX..bytes.len().min(PREFIX + n_message)];
    let found = find_data(M::DATA, rest);
    if found.map_or(rest.len(), |(n_fields, ..)| n_fields) > MOST_HEAD {
        return Err(malformed("its bytes do not come"));
    }
    let (n_fields, n_key, n_data) = match found {
        Some(found) => found,
        // An empty tensor, without its empty bytes.
        None if rest.len() == n_message => (n_message, 0, 0),
        None => return Ok(None),
    };
    if n_data > n_message || n_fields + n_key + n_data != n_message {
        return Err(malformed("its bytes are not its last field"));
    }
    let message = M::decode(&rest[..n_fields]).map_err(|e| malformed(&e.to_string()))?;
    Ok(Some((PREFIX + n_fields + n_key, message, n_data)))
}

/// The length of the fields before a message's bytes, that of the key of these, and their number. None if the key is not there.
fn find_data(data: u32, fields: &[u8]) -> Option<(usize, usize, usize)> {
    let mut left = fields;
    loop {
        let before = left.len();
        let (tag, wire) = encoding::decode_key(&mut left).ok()?;
        if tag == data && wire == WireType::LengthDelimited {
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
