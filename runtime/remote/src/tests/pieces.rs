//! Tensors on a stream: bytes come as they were sent, cut anywhere, and are copied nowhere.

use super::hostile::Rng;
use crate::Limits;
use crate::messages::{CallableId, Fault, Opening, Piece};
use crate::pieces::{Carrying, Incoming, sending};
use bytes::Bytes;
use http_body::{Body as _, Frame};
use prost::Message as _;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::body::Body;

/// A body of these chunks.
struct Chunks(VecDeque<Bytes>);

impl http_body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|chunk| Ok(Frame::data(chunk))))
    }
}

fn here<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(work)
}

/// The frames in which pieces go.
fn sent(pieces: Vec<Piece>) -> Vec<Bytes> {
    here(async {
        let (queue, pieces_out) = tokio::sync::mpsc::channel(pieces.len().max(1));
        for piece in pieces {
            queue.send(piece).await.unwrap();
        }
        drop(queue);
        let (mut body, mut frames) = (sending(pieces_out), Vec::new());
        let mut next = async || std::future::poll_fn(|c| Pin::new(&mut body).poll_frame(c)).await;
        while let Some(frame) = next().await {
            frames.push(frame.unwrap().into_data().unwrap());
        }
        frames
    })
}

/// The pieces that arrive in these chunks.
fn arrived<M: Carrying>(chunks: impl IntoIterator<Item = Bytes>) -> Result<Vec<M>, Fault> {
    let body = Body::new(Chunks(chunks.into_iter().collect()));
    let mut arriving = Incoming::new(body, &Limits::default());
    here(async {
        let mut pieces = Vec::new();
        while let Some(piece) = arriving.next().await? {
            pieces.push(piece);
        }
        Ok(pieces)
    })
}

/// A message as gRPC frames it.
fn framed(message: &[u8]) -> Bytes {
    let length = (message.len() as u32).to_be_bytes();
    [&[0], &length[..], message].concat().into()
}

fn piece(number: u32, n_bytes: usize, rng: &mut Rng) -> Piece {
    let id = CallableId {
        master: 7,
        number: 8,
    };
    let opening = match rng.below(2) {
        0 => None,
        _ => Some(Opening::of_feed(id, rng.below(1000))),
    };
    Piece {
        number,
        opening,
        run: rng.below(3) as u64,
        offset: rng.below(1 << 20) as u64,
        data: (0..n_bytes).map(|_| rng.below(256) as u8).collect(),
    }
}

/// Pieces with those of the same message put together again.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut whole: Vec<Piece> = Vec::new();
    for piece in pieces {
        match whole.last_mut() {
            Some(last)
                if piece.opening.is_none()
                    && (last.number, last.run) == (piece.number, piece.run)
                    && last.offset + last.data.len() as u64 == piece.offset =>
            {
                last.data = [&last.data[..], &piece.data[..]].concat().into();
            }
            _ => whole.push(piece),
        }
    }
    whole
}

/// The same bytes, cut at random places.
fn cut(bytes: &Bytes, rng: &mut Rng) -> Vec<Bytes> {
    let (mut rest, mut chunks) = (bytes.clone(), Vec::new());
    while !rest.is_empty() {
        let most = [3, 200, 20_000][rng.below(3)].min(rest.len());
        chunks.push(rest.split_to(1 + rng.below(most)));
    }
    chunks
}

#[test]
fn pieces_arrive_however_the_stream_is_cut() {
    let rng = &mut Rng(1);
    for _ in 0..200 {
        let sizes = [0, 1, 100, 4096, 4097, 70_000];
        let pieces: Vec<Piece> = (0..4)
            .map(|number| piece(number, sizes[rng.below(sizes.len())], rng))
            .collect();
        let all: Bytes = sent(pieces.clone()).concat().into();
        // Another gRPC library writes the same, but for empty bytes.
        let written: Vec<Bytes> = pieces.iter().map(|p| framed(&p.encode_to_vec())).collect();
        for stream in [all, written.concat().into()] {
            assert_eq!(joined(arrived(cut(&stream, rng)).unwrap()), pieces);
        }
    }
}

#[test]
fn bytes_of_tensors_are_not_copied() {
    let within = |inner: &Bytes, outer: Range<*const u8>| {
        let own = inner.as_ptr_range();
        outer.start <= own.start && own.end <= outer.end
    };
    let data = Bytes::from(vec![5; 256 << 10]);
    let frames = sent(vec![Piece {
        data: data.clone(),
        ..Piece::default()
    }]);
    assert_eq!(frames.len(), 2, "a head, and the bytes");
    assert_eq!(frames[1].as_ptr_range(), data.as_ptr_range());
    let pieces: Vec<Piece> = arrived(frames).unwrap();
    assert_eq!(pieces.len(), 1);
    assert!(within(&pieces[0].data, data.as_ptr_range()));
    // The head and the first bytes may come together.
    let whole: Bytes = framed(
        &Piece {
            data,
            ..Piece::default()
        }
        .encode_to_vec(),
    );
    let mut rest = whole.clone();
    let chunks = [rest.split_to(1000), rest];
    let pieces: Vec<Piece> = arrived(chunks).unwrap();
    assert_eq!(pieces.len(), 2);
    for piece in &pieces {
        assert!(within(&piece.data, whole.as_ptr_range()));
    }
}

#[test]
fn malformed_pieces_are_refused() {
    let rng = &mut Rng(2);
    let good = piece(1, 9000, rng).encode_to_vec();
    let refusal = |bytes: Bytes| arrived::<Piece>([bytes]).unwrap_err().message;
    let short = framed(&good);
    for n in [2, 8, short.len() - 1] {
        let cut = short.slice(..n);
        assert_eq!(
            refusal(cut),
            "a stream of tensors ended within a message",
            "{n}"
        );
    }
    let mut compressed = framed(&good).to_vec();
    compressed[0] = 1;
    assert!(refusal(compressed.into()).ends_with("it is compressed"));
    let huge = [&[0], &u32::MAX.to_be_bytes()[..]].concat();
    assert!(refusal(huge.into()).contains("more than 4194304"));
    // A run after the bytes.
    let later = [&good[..], &[3 << 3, 1]].concat();
    assert!(refusal(framed(&later)).ends_with("its bytes are not its last field"));
    // Unknown fields are skipped, but not without end.
    let unknown = [&[8 << 3 | 2, 0xff, 0x7f][..], &[0; 0x3fff]].concat();
    let read: Vec<Piece> = arrived([framed(&[&unknown[..], &good].concat())]).unwrap();
    assert_eq!(read[0].data.len(), 9000);
    let endless = [unknown.repeat(5), good.clone()].concat();
    let chunks = cut(&framed(&endless), rng);
    assert!(
        arrived::<Piece>(chunks)
            .unwrap_err()
            .message
            .ends_with("its bytes do not come")
    );
    assert!(refusal(framed(&[0xff; 20])).contains("malformed"));
    // More bytes than can be counted.
    let mut countless = vec![5 << 3 | 2];
    countless.extend([0xff; 9]);
    countless.push(1);
    assert!(refusal(framed(&countless)).ends_with("its bytes are not its last field"));
}

#[test]
fn a_stream_may_come_byte_by_byte() {
    let sent = piece(3, 5000, &mut Rng(3));
    let stream = framed(&sent.encode_to_vec());
    let bytes = (0..stream.len()).map(|i| stream.slice(i..i + 1));
    assert_eq!(joined(arrived(bytes).unwrap()), [sent]);
}
