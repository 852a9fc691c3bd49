//! Messages with errors, endless lengths and crowds: a server refuses them, and goes on.

use super::*;
use crate::client::wait;
use crate::messages::{
    Attend, Call, CallableId, Close, Hello, Initialise, Look, Opening, Order, Piece, Prepare,
    Register, Release, Step, TaskAddress, TurnOrder,
};
use crate::rpc;
use bytes::{Buf, BufMut};
use http::uri::PathAndQuery;
use prost::Message;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::TcpStream;
use tokio_stream::StreamExt;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Request, Status};
use tower_service::Service;

/// Bytes in place of messages.
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, bytes: Vec<u8>, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put_slice(&bytes);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut bytes = vec![0; from.remaining()];
        from.copy_to_slice(&mut bytes);
        Ok(Some(bytes))
    }
}

/// Numbers that differ from run to run of the test in nothing.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n.max(1)
    }
}

/// A message with a few errors.
fn mutant(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..rng.below(4) {
        let at = rng.below(bytes.len());
        match rng.below(4) {
            0 if !bytes.is_empty() => bytes[at] = rng.below(256) as u8,
            1 => bytes.truncate(at),
            2 => bytes.insert(at, rng.below(256) as u8),
            _ => {
                let again = bytes[at..].to_vec();
                bytes.extend(again);
            }
        }
    }
    bytes
}

/// Messages of each method, of which most would be obeyed.
fn messages(spec: &ClusterSpec, id: CallableId, session: u64) -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let program = Document::from(THREE[0].to_owned());
    let hello = Hello {
        from: Some(THREE[1].to_owned()),
        cluster: spec
            .tasks()
            .map(|(name, address)| TaskAddress {
                job: name.job.clone(),
                task: name.task,
                address: address.to_owned(),
            })
            .collect(),
        incarnation: 77,
        ..Hello::new("1.0".into())
    };
    let callable = Some(id);
    let order = |order: Order| Order { number: 1, ..order }.encode_to_vec();
    let orders = [
        Order {
            step: Some(Step {
                callable,
                run: 9,
                feeds: vec![],
                takes_turn: session.is_multiple_of(2),
            }),
            ..Order::default()
        },
        Order {
            turn: Some(TurnOrder {
                callable,
                run: 9,
                is_commit: true,
            }),
            ..Order::default()
        },
        Order {
            initialise: Some(Initialise { callable }),
            ..Order::default()
        },
        Order {
            release: Some(Release { callable }),
            ..Order::default()
        },
        Order {
            register: Some(Register {
                callable,
                part: Some(program.contents()),
                outputs: vec![0, 7],
            }),
            ..Order::default()
        },
    ];
    let greeting = Order {
        hello: Some(hello.clone()),
        ..Order::default()
    }
    .encode_to_vec();
    let steps = [greeting].into_iter().chain(orders.map(order)).collect();
    let piece = Piece {
        number: 0,
        opening: Some(Opening::of_feed(id, 0)),
        run: 1 << 40,
        offset: 0,
        data: vec![1; 64].into(),
    };
    let call = Call {
        program: program.digest().to_bytes(),
        session,
        ..Call::default()
    };
    vec![
        (rpc::HELLO, vec![hello.encode_to_vec()]),
        (
            rpc::ATTEND,
            vec![
                Attend {
                    hello: Some(hello),
                    session: 0,
                }
                .encode_to_vec(),
            ],
        ),
        (
            rpc::PREPARE,
            vec![
                Prepare {
                    program: Some(program.contents()),
                    session,
                }
                .encode_to_vec(),
            ],
        ),
        (rpc::OFFER, vec![program.contents().encode_to_vec()]),
        (rpc::CALL, vec![call.encode_to_vec()]),
        (rpc::FORGET, vec![call.encode_to_vec()]),
        (rpc::INITIALISE, vec![call.encode_to_vec()]),
        (
            rpc::STATUS,
            vec![
                Look {
                    reset: vec!["c".into()],
                    session,
                }
                .encode_to_vec(),
            ],
        ),
        (
            rpc::STATUSES,
            vec![
                Look {
                    reset: vec![],
                    session,
                }
                .encode_to_vec(),
            ],
        ),
        (
            rpc::CLOSE,
            vec![
                Close {
                    session: session + 1,
                }
                .encode_to_vec(),
            ],
        ),
        (rpc::STEPS, steps),
        (
            rpc::TENSORS,
            vec![piece.encode_to_vec(), piece.encode_to_vec()],
        ),
        (rpc::PUT, vec![vec![10, 3, 1, 2, 3]]),
    ]
}

#[test]
fn messages_with_errors_are_refused() {
    let spec = cluster(&THREE[..1]);
    let server = start(&spec, THREE[0], &Arc::default()).unwrap();
    let client = connect(&spec, THREE[0]).unwrap();
    let callable = client
        .prepare(&Document::from(THREE[0].to_owned()))
        .unwrap();
    client.call(&callable, &[values(1.0)]).unwrap();
    let id = CallableId {
        master: server.incarnation(),
        number: 1,
    };
    let all = messages(&spec, id, client.lease.session);
    let address = spec.address(&task(THREE[0])).unwrap().to_owned();
    let n_refused = wait(async move {
        let channel = plain().channel(&address, None, &limits())?;
        let (mut rng, mut n_refused) = (Rng(1), 0);
        for _ in 0..60 {
            for (path, messages) in &all {
                let mut client = tonic::client::Grpc::new(channel.clone());
                client.ready().await.unwrap();
                let sent: Vec<Vec<u8>> = messages.iter().map(|m| mutant(m, &mut rng)).collect();
                let path = PathAndQuery::from_static(path);
                let request = Request::new(tokio_stream::iter(sent));
                let answered = async {
                    let answers = client.streaming(request, path, Raw).await?;
                    let mut answers = answers.into_inner();
                    while let Some(answer) = answers.next().await {
                        answer?;
                    }
                    Ok::<(), Status>(())
                };
                // Some are answered when their work ends only.
                let answered = tokio::time::timeout(Duration::from_millis(200), answered).await;
                n_refused += usize::from(matches!(answered, Ok(Err(_))));
            }
        }
        Ok(n_refused)
    });
    assert!(n_refused.unwrap() > 50);
    let ran = client.call(&callable, &[values(2.0)]).unwrap();
    assert_eq!(ran[0].as_bytes(), values(2.0).as_bytes());
}

#[test]
fn endless_lengths_and_noise_end_a_connection_only() {
    let spec = cluster(&THREE[..1]);
    let _server = start(&spec, THREE[0], &Arc::default()).unwrap();
    let address = spec.address(&task(THREE[0])).unwrap().to_owned();
    let at = address.clone();
    // A message that says it has 2 GiB. Strings are bodies; these bytes are ASCII.
    let told = wait(async move {
        let mut channel = plain().channel(&at, None, &limits())?;
        let mut told = Vec::new();
        for path in [
            rpc::HELLO,
            rpc::PREPARE,
            rpc::STEPS,
            rpc::TENSORS,
            rpc::PUT,
            rpc::CALL,
        ] {
            poll_fn(|context| channel.poll_ready(context))
                .await
                .unwrap();
            let request = http::Request::post(format!("http://{at}{path}"));
            let request = request
                .header("content-type", "application/grpc")
                .header("te", "trailers");
            let body = tonic::body::Body::new("\0\x7f\x7f\x7f\x7fabc".to_owned());
            let answer = channel.call(request.body(body).unwrap()).await.unwrap();
            told.push((path, format!("{:?}", answer.headers().get("grpc-status"))));
        }
        Ok(told)
    });
    for (path, status) in told.unwrap() {
        // OutOfRange, or a stream that ends after its answer has begun.
        assert!(
            status == "Some(\"11\")" || status == "None",
            "{path}: {status}"
        );
    }
    let mut rng = Rng(3);
    for i in 0..200 {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let mut noise: Vec<u8> = (0..rng.below(300)).map(|_| rng.below(256) as u8).collect();
        if i % 2 == 0 {
            noise = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &noise].concat();
        }
        // It may be refused before all of it was sent.
        let _ = stream.write_all(&noise);
        let _ = stream.read(&mut [0; 64]);
    }
    connect(&spec, THREE[0]).unwrap();
}

/// Number of clients in a crowd: see the test.
const CROWD: &str = "GRISTMILL_TEST_CROWD";

/// With the variable GRISTMILL_TEST_CROWD another number of clients.
#[test]
fn a_crowd_of_clients_is_kept_out() {
    let spec = cluster(&THREE[..1]);
    let _server = start(&spec, THREE[0], &Arc::default()).unwrap();
    let address = spec.address(&task(THREE[0])).unwrap().to_owned();
    let n = std::env::var(CROWD).map_or(5000, |n| n.parse().unwrap());
    let (n_in, last) = wait(async move {
        let channel = plain().channel(&address, None, &limits())?;
        let (mut kept, mut last) = (Vec::new(), None);
        for _ in 0..n {
            let hello = Hello::new("1.0".into());
            match crate::lease::Lease::begin(&channel, hello, &address, &limits()).await {
                Ok((lease, _)) => kept.push(lease),
                Err(fault) => last = Some(fault.message),
            }
        }
        Ok((kept.len(), last))
    })
    .unwrap();
    assert_eq!(n_in, limits().sessions);
    assert_eq!(
        last.unwrap(),
        format!("the task has {n_in} sessions, and takes no more")
    );
}
