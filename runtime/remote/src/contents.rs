//! Texts and constants by their contents: they cross the network under their SHA-256, and each task has them once.

use crate::engine::{Job, in_thread};
use crate::messages::{Chunk, Content, Contents, Fault, Missing, Nothing, Reply};
use crate::pieces::{self, Incoming, WithBody};
use crate::rpc::{self, Failure};
use crate::server::Task;
use crate::worker::{given, locked};
use crate::{Limits, rpc::OFFER};
use bytes::Bytes;
use gristmill_runtime::{DType, ErrorKind, Tensor};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Request;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

/// SHA-256 of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    pub(crate) fn to_bytes(self) -> Bytes {
        Bytes::copy_from_slice(&self.0)
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Digest, Fault> {
        let digest = bytes.try_into().map(Digest);
        digest.map_err(|_| Fault::invalid(format!("{} bytes are not a SHA-256", bytes.len())))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Digest {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Digest, Fault> {
        let fail = || Fault::invalid(format!("{text:?} is not a SHA-256"));
        let byte = |i: usize| u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok();
        let mut digest = [0; 32];
        for (i, out) in digest.iter_mut().enumerate() {
            *out = byte(i).ok_or_else(fail)?;
        }
        match text.len() {
            64 => Ok(Digest(digest)),
            _ => Err(fail()),
        }
    }
}

/// Makes the bytes of a constant, `u8[n]`, when they are needed.
pub type Source = Arc<dyn Fn() -> Result<Tensor, Fault> + Send + Sync>;

/// A constant beside a text.
#[derive(Clone)]
pub struct Constant {
    /// Of its bytes.
    pub digest: Digest,
    /// Number of its bytes.
    pub size_bytes: usize,
    /// Its bytes.
    pub source: Source,
}

/// A text with the constants beside it.
#[derive(Clone)]
pub struct Document {
    text: Arc<str>,
    digest: Digest,
    constants: Arc<BTreeMap<Digest, Constant>>,
}

impl fmt::Debug for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, n_constants) = (self.text.len(), self.constants.len());
        write!(f, "{n} bytes and {n_constants} constants, {}", self.digest)
    }
}

impl Document {
    /// A text with constants. It should name them by their digests: other constants, another text.
    pub fn new(text: impl Into<Arc<str>>, constants: BTreeMap<Digest, Constant>) -> Document {
        let text = text.into();
        Document {
            digest: Digest::of(text.as_bytes()),
            text,
            constants: Arc::new(constants),
        }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Digest of the text.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The constants beside the text.
    pub fn constants(&self) -> &BTreeMap<Digest, Constant> {
        &self.constants
    }

    /// The bytes of a constant, `u8[n]`.
    pub fn constant(&self, digest: &Digest) -> Result<Tensor, Fault> {
        let found = self.constants.get(digest);
        let found = found
            .ok_or_else(|| Fault::invalid(format!("constant {digest} is not beside its text")))?;
        (found.source)()
    }

    pub(crate) fn contents(&self) -> Contents {
        let content = |digest: Digest, size: usize| Content {
            sha256: digest.to_bytes(),
            size_bytes: size as u64,
        };
        let constants = self.constants.values();
        Contents {
            text: Some(content(self.digest, self.text.len())),
            constants: constants.map(|c| content(c.digest, c.size_bytes)).collect(),
        }
    }

    /// The bytes under a digest, text or constant.
    fn bytes_of(&self, digest: &Digest) -> Result<Tensor, Fault> {
        if *digest != self.digest {
            return self.constant(digest);
        }
        let text = self.text.as_bytes();
        Ok(Tensor::from_bytes(DType::U8, &[text.len()], text)?)
    }
}

impl From<String> for Document {
    fn from(text: String) -> Document {
        Document::new(text, BTreeMap::new())
    }
}

impl Content {
    pub(crate) fn digest(&self) -> Result<Digest, Fault> {
        Digest::from_bytes(&self.sha256)
    }
}

/// Texts and constants of a task.
#[derive(Default)]
pub(crate) struct Store(Mutex<HashMap<Digest, Entry>>);

struct Entry {
    /// Documents hold it as well.
    bytes: Arc<Tensor>,
    touched: Instant,
}

impl Store {
    /// Digests of the absent ones of these contents. The others stay for a while.
    fn missing(&self, contents: &Contents) -> Result<Vec<Digest>, Fault> {
        let mut entries = locked(&self.0);
        let mut missing = Vec::new();
        for content in contents.text.iter().chain(&contents.constants) {
            let digest = content.digest()?;
            match entries.get_mut(&digest) {
                Some(entry) => entry.touched = Instant::now(),
                None => missing.push(digest),
            }
        }
        Ok(missing)
    }

    /// Takes contents, once those are gone which nobody has used for a while. Errors when there are too many.
    fn insert(&self, digest: Digest, bytes: Tensor, limits: &Limits) -> Result<Arc<Tensor>, Fault> {
        let mut entries = locked(&self.0);
        sweep(&mut entries, limits);
        let held: usize = entries.values().map(|entry| entry.bytes.len()).sum();
        if held.saturating_add(bytes.len()) > limits.store_bytes {
            let (n, most) = (bytes.len(), limits.store_bytes);
            let message = format!("{n} bytes beside the {held} held are more than {most}");
            return Err(Fault::new(ErrorKind::OutOfMemory, message));
        }
        let entry = Entry {
            bytes: Arc::new(bytes),
            touched: Instant::now(),
        };
        Ok(entries.entry(digest).or_insert(entry).bytes.clone())
    }

    /// Lets go of what nobody has used for a while.
    pub(crate) fn tidy(&self, limits: &Limits) {
        sweep(&mut locked(&self.0), limits);
    }

    /// A document whose contents are here; they stay as long as it does.
    pub(crate) fn document(&self, contents: &Contents, limits: &Limits) -> Result<Document, Fault> {
        let held = |content: &Content| {
            let digest = content.digest()?;
            let mut entries = locked(&self.0);
            let entry = entries.get_mut(&digest).ok_or_else(|| {
                let message = format!("contents {digest} did not come");
                Fault::new(ErrorKind::DeviceFailed, message).with_hint("try again")
            })?;
            entry.touched = Instant::now();
            Ok::<_, Fault>((digest, entry.bytes.clone()))
        };
        let (digest, text) = held(given(contents.text.as_ref())?)?;
        if text.len() > limits.text_bytes {
            let (n, most) = (text.len(), limits.text_bytes);
            let message = format!("a text of {n} bytes, more than {most}");
            return Err(Fault::invalid(message));
        }
        let text = std::str::from_utf8(text.as_bytes());
        let text = text.map_err(|e| Fault::invalid(format!("a text is not UTF-8: {e}")))?;
        let mut constants = BTreeMap::new();
        for content in &contents.constants {
            let (digest, bytes) = held(content)?;
            let constant = Constant {
                digest,
                size_bytes: bytes.len(),
                source: Arc::new(move || Ok(Tensor::clone(&bytes))),
            };
            constants.insert(digest, constant);
        }
        Ok(Document {
            text: text.into(),
            digest,
            constants: Arc::new(constants),
        })
    }

    fn held_bytes(&self) -> usize {
        locked(&self.0)
            .values()
            .map(|entry| entry.bytes.len())
            .sum()
    }
}

/// Drops what no document holds and nobody has touched for a while.
fn sweep(entries: &mut HashMap<Digest, Entry>, limits: &Limits) {
    entries.retain(|_, entry| {
        Arc::strong_count(&entry.bytes) > 1 || entry.touched.elapsed() < limits.unclaimed
    });
}

/// Contents on their way in.
struct Arriving {
    digest: Digest,
    bytes: Tensor,
    n_bytes: usize,
}

impl Arriving {
    fn new(content: &Content, limits: &Limits) -> Result<Arriving, Fault> {
        let size = usize::try_from(content.size_bytes).unwrap_or(usize::MAX);
        if size > limits.store_bytes {
            let message = format!("{size} bytes are more than {}", limits.store_bytes);
            return Err(Fault::new(ErrorKind::OutOfMemory, message));
        }
        Ok(Arriving {
            digest: content.digest()?,
            bytes: Tensor::zeros(DType::U8, &[size])?,
            n_bytes: 0,
        })
    }

    /// Takes the next bytes; true if they are the last.
    fn take(&mut self, data: &[u8]) -> Result<bool, Fault> {
        let stop = self.n_bytes + data.len();
        let room = self.bytes.as_bytes_mut().get_mut(self.n_bytes..stop);
        let room = room.ok_or_else(|| {
            let message = format!("contents {}: more bytes than promised", self.digest);
            Fault::invalid(message)
        })?;
        room.copy_from_slice(data);
        self.n_bytes = stop;
        Ok(self.n_bytes == self.bytes.len())
    }

    /// Errors unless the bytes are those of the digest.
    fn checked(self) -> Result<(Digest, Tensor), Fault> {
        let found = Digest::of(self.bytes.as_bytes());
        match found == self.digest {
            true => Ok((self.digest, self.bytes)),
            false => {
                let message = format!("contents {} arrived as {found}", self.digest);
                Err(Fault::new(ErrorKind::DeviceFailed, message).with_hint("try again"))
            }
        }
    }
}

impl Task {
    /// Digests of offered contents, where the task lacks them.
    pub(crate) fn offered(&self, offer: Contents) -> Result<Missing, Fault> {
        let missing = self.store.missing(&offer)?;
        Ok(Missing {
            sha256: missing.into_iter().map(Digest::to_bytes).collect(),
        })
    }

    /// Takes contents until their stream ends.
    pub(crate) async fn put(
        self: &Arc<Self>,
        mut stream: Incoming<Chunk>,
    ) -> Result<Nothing, Fault> {
        self.takes_more()?;
        let mut arriving: Option<Arriving> = None;
        // Held as long as others are on their way. The last one's digest is computed meanwhile.
        let (mut arrived, mut last, mut n_last) = (Vec::new(), None, 0);
        while let Some(chunk) = self.next_chunk(&mut stream).await? {
            if let Some(content) = &chunk.content {
                if arriving.is_some() {
                    return Err(Fault::invalid("contents came before the last ones ended"));
                }
                let size = usize::try_from(content.size_bytes).unwrap_or(usize::MAX);
                let held = self.store.held_bytes().saturating_add(n_last);
                if held.saturating_add(size) > self.limits.store_bytes {
                    self.clone().evict_idle(0).await;
                }
                arriving = Some(Arriving::new(content, &self.limits)?);
            }
            let mut one = given(arriving.take())?;
            match one.take(&chunk.data)? {
                false => arriving = Some(one),
                true => {
                    n_last = one.bytes.len();
                    let before = last.replace(in_thread(move || one.checked()));
                    arrived.extend(self.stored(before).await?);
                }
            }
        }
        arrived.extend(self.stored(last).await?);
        match arriving {
            None => Ok(Nothing {}),
            Some(_) => Err(Fault::invalid("a stream ended within contents")),
        }
    }
}

impl Task {
    /// Contents in the store, once their digest is computed.
    async fn stored(
        &self,
        checked: Option<Job<(Digest, Tensor)>>,
    ) -> Result<Option<Arc<Tensor>>, Fault> {
        let Some(checked) = checked else {
            return Ok(None);
        };
        let (digest, bytes) = checked.await?;
        self.store.insert(digest, bytes, &self.limits).map(Some)
    }

    async fn next_chunk(&self, stream: &mut Incoming<Chunk>) -> Result<Option<Chunk>, Fault> {
        let silent = |_| Fault::new(ErrorKind::DeviceFailed, "the sender of contents is silent");
        let next = tokio::time::timeout(self.limits.prepare, stream.next()).await;
        let chunk = next.map_err(silent)??;
        let is_empty = |c: &Chunk| c.data.is_empty() && c.content.is_none();
        match chunk.as_ref().is_some_and(is_empty) {
            true => Err(Fault::invalid("a chunk of contents is empty")),
            false => Ok(chunk),
        }
    }
}

/// Memory of a tensor, as the network reads it.
pub(crate) struct TensorBytes(pub(crate) Tensor);

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Most offers of the same contents: what a task had may be gone when the rest is there.
const MOST_OFFERS: usize = 4;

/// Gives a task the contents of a document, where it lacks them.
pub(crate) async fn bring(
    channel: &Channel,
    document: &Document,
    limits: &Limits,
) -> Result<(), Failure> {
    for _ in 0..MOST_OFFERS {
        let offer = document.contents();
        let missing: Missing = rpc::call(channel, OFFER, offer, limits.hello, limits).await?;
        if missing.sha256.is_empty() {
            break;
        }
        send(channel, document, missing, limits).await?;
    }
    Ok(())
}

async fn send(
    channel: &Channel,
    document: &Document,
    missing: Missing,
    limits: &Limits,
) -> Result<(), Failure> {
    let (chunks, queue) = mpsc::channel(2);
    let feeding = tokio::spawn(feed(document.clone(), missing, chunks, limits.clone()));
    let mut client =
        tonic::client::Grpc::new(WithBody::new(channel.clone(), pieces::sending(queue)));
    client.ready().await.map_err(|e| rpc::lost(&e))?;
    let codec = ProstCodec::<Chunk, Reply>::default();
    let path = http::uri::PathAndQuery::from_static(rpc::PUT);
    let request = Request::new(tokio_stream::empty());
    // As long as chunks go: their giver has a deadline for each.
    let put = async {
        let answers = client.streaming(request, path, codec).await;
        let answers = answers.map_err(|status| rpc::of_status(&status))?;
        rpc::after_beats(&mut answers.into_inner()).await
    };
    let put = put.await;
    let fed = feeding.await;
    match fed {
        Ok(Err(failure)) => return Err(failure),
        Ok(Ok(())) => {}
        Err(e) => return Err(Failure::Lost(format!("a task panicked: {e}"))),
    }
    put?.fault
        .map_or(Ok(()), |fault| Err(Failure::Fault(fault)))
}

/// Gives chunks of the missing contents to a stream. Errors when they cannot be made, or none is taken for too long.
async fn feed(
    document: Document,
    missing: Missing,
    chunks: mpsc::Sender<Chunk>,
    limits: Limits,
) -> Result<(), Failure> {
    for sha256 in missing.sha256 {
        let digest = Digest::from_bytes(&sha256).map_err(Failure::Fault)?;
        let own = document.clone();
        let made = in_thread(move || own.bytes_of(&digest)).await;
        let bytes = Bytes::from_owner(TensorBytes(made.map_err(Failure::Fault)?));
        let mut content = Some(Content {
            sha256,
            size_bytes: bytes.len() as u64,
        });
        let mut at = 0;
        loop {
            let stop = (at + limits.piece_bytes).min(bytes.len());
            let chunk = Chunk {
                content: content.take(),
                data: bytes.slice(at..stop),
            };
            let sent = tokio::time::timeout(limits.prepare, chunks.send(chunk)).await;
            match sent {
                Ok(Ok(())) => {}
                // The other side has ended the stream, and says why.
                Ok(Err(_)) => return Ok(()),
                Err(_) => return Err(Failure::Silent(limits.prepare)),
            }
            if stop == bytes.len() {
                break;
            }
            at = stop;
        }
    }
    Ok(())
}
