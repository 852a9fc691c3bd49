//! Writing a model with other weights: new elements of some initialisers, and all else as it is in the file.
//!
//! Messages on the way to tensors are walked on the wire, and all other fields are copied, known or not. Tensors whose bytes lay in other
//! files lie in one file beside the new model.

use super::inference_form::{Change, Conversion, Converted};
use super::load::Model;
use super::proto::{AttributeProto, NodeProto, TensorProto};
use super::tensor::{External, ExternalData, dtype_of, shape_of};
use super::wire::{Field, Wire, put_head, put_reference};
use crate::error::{Error, Result};
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{Tensor, files};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::slice;

/// New elements by the names of initialisers.
pub type Weights = BTreeMap<String, Tensor>;

/// Payloads shorter than this are held in memory.
const HELD_BYTES: u64 = 1 << 12;
/// Multiple of positions in a file of tensors, as ONNX recommends it for mapping.
const ALIGNMENT: u64 = 4096;

impl Model {
    /// Writes the file that the model was loaded from to `path`, with the elements of initialisers of the main graph replaced. Where tensors
    /// of the model lie in other files, those of the new one lie in `NAME.data` beside it.
    ///
    /// Errors with `InvalidInput` when the model was not loaded from a file, when an initialiser is not there or has another type, and when
    /// reading or writing fails; then `path` is as it was.
    pub fn write_with(&self, weights: &Weights, path: impl AsRef<Path>) -> Result<()> {
        self.write(weights, path.as_ref(), None).map(drop)
    }

    /// [`Model::write_with`], with `BatchNormalization` and `Dropout` in inference form where the file has them in training form: any runtime
    /// then computes what evaluations do. Gives the numbers of such nodes.
    pub fn write_for_inference(
        &self,
        weights: &Weights,
        path: impl AsRef<Path>,
    ) -> Result<Converted> {
        self.write(weights, path.as_ref(), Some(Conversion::new(self)))
    }

    fn write(
        &self,
        weights: &Weights,
        path: &Path,
        conversion: Option<Conversion>,
    ) -> Result<Converted> {
        let spliced = Spliced::of(&self.external, weights, path, conversion);
        let written = spliced.and_then(|s| s.write(weights));
        written.map_err(|e| e.context(format!("cannot write {}", path.display())))
    }

    /// Errors when [`Model::write_with`] could not write to `path` without a loss: to files that the model's tensors lie in.
    #[doc(hidden)]
    pub fn check_target(&self, path: &Path) -> Result<()> {
        Spliced::of(&self.external, &Weights::new(), path, None).map(drop)
    }
}

/// A new model, ready to be written.
struct Spliced<'m> {
    model: &'m Path,
    file: File,
    whole: Message,
    path: PathBuf,
    data_path: PathBuf,
    data: Vec<(u64, Data)>,
    n_replaced: usize,
    converted: Converted,
}

impl<'m> Spliced<'m> {
    fn of(
        external: &'m External,
        weights: &Weights,
        path: &Path,
        conversion: Option<Conversion>,
    ) -> Result<Spliced<'m>> {
        let Some(model) = external.model() else {
            return Err(Error::invalid("the model was not loaded from a file"));
        };
        // The target of a link is replaced, and its tensors lie beside it.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let data_path = beside(&path);
        let mut splice = Splice {
            external,
            weights,
            location: file_name(&data_path)?,
            data: Vec::new(),
            sources: BTreeSet::new(),
            end: 0,
            n_replaced: 0,
            conversion,
            copies: Vec::new(),
        };
        let (mut file, len) = open(model)?;
        let whole = splice.message(&mut Wire::new(&mut file), len, Level::Model)?;
        if !splice.sources.is_empty() {
            splice.sources.insert(model.to_owned());
            check_apart(&splice.sources, [&path, &data_path])?;
        }
        let converted = splice.conversion.map(|c| c.converted());
        Ok(Spliced {
            converted: converted.unwrap_or_default(),
            model,
            file,
            whole,
            path,
            data_path,
            data: splice.data,
            n_replaced: splice.n_replaced,
        })
    }

    fn write(mut self, weights: &Weights) -> Result<Converted> {
        if self.n_replaced != weights.len() {
            let n = weights.len() - self.n_replaced;
            return Err(Error::invalid(format!(
                "{}: {n} of {} initialisers are not in the file, which has changed since it was loaded",
                self.model.display(),
                weights.len()
            )));
        }
        if !self.data.is_empty() {
            write(&self.data_path, |out| write_data(&self.data, out))?;
        }
        let (whole, file) = (&self.whole, &mut self.file);
        write(&self.path, |out| whole.write(file, out))?;
        Ok(self.converted)
    }
}

/// Errors when a target is a file of the model itself: an interrupted write would damage both, and other models may share
/// the file.
fn check_apart(sources: &BTreeSet<PathBuf>, targets: [&PathBuf; 2]) -> Result<()> {
    let resolved = |path: &PathBuf| path.canonicalize().ok();
    let read: BTreeSet<PathBuf> = sources.iter().filter_map(resolved).collect();
    let target = targets
        .into_iter()
        .find(|t| resolved(t).is_some_and(|t| read.contains(&t)));
    let Some(target) = target else {
        return Ok(());
    };
    let target = target.display();
    let e = Error::invalid(format!(
        "refusing to overwrite {target}: the model stores tensors in separate files"
    ));
    Err(e.hint("another name"))
}

fn write(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
    let synced = |out: &mut BufWriter<File>| {
        write(out)?;
        out.flush()?;
        out.get_ref().sync_all()
    };
    let io = |e: io::Error| Error::invalid(format!("{}: {e}", path.display()));
    files::replace(path, synced).map_err(io)
}

fn open(path: &Path) -> Result<(File, u64)> {
    let opened = File::open(path).and_then(|f| Ok((f.metadata()?.len(), f)));
    let (len, file) = opened.map_err(|e| Error::invalid(format!("{}: {e}", path.display())))?;
    Ok((file, len))
}

/// `NAME.data` beside `NAME`.
fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".data");
    name.into()
}

fn file_name(path: &Path) -> Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Error::invalid("the name is no file name in UTF-8"))?;
    Ok(name.to_owned())
}

/// The messages on the way to tensors.
#[derive(Clone, Copy, PartialEq)]
enum Level {
    Model,
    /// The main graph, whose initialisers may be replaced.
    Main,
    Graph,
    Function,
    Node,
    Attribute,
    Sparse,
    Initialiser,
    Tensor,
}

impl Level {
    /// The message in a field.
    fn inner(self, number: u64) -> Option<Level> {
        use Level::*;
        Some(match (self, number) {
            (Model, 7) => Main,
            (Model, 25) => Function,
            (Main, 5) => Initialiser,
            (Graph, 5) => Tensor,
            (Main | Graph, 1) | (Function, 7) => Node,
            (Main | Graph, 15) => Sparse,
            (Node, 5) | (Function, 11) => Attribute,
            (Attribute, 5 | 10) => Tensor,
            (Attribute, 6 | 11) => Graph,
            (Attribute, 22 | 23) => Sparse,
            (Sparse, 1 | 2) => Tensor,
            _ => return None,
        })
    }

    fn is_tensor(self) -> bool {
        matches!(self, Level::Initialiser | Level::Tensor)
    }
}

/// A part of the new file.
enum Piece {
    Bytes(Vec<u8>),
    /// Bytes of the original file.
    Original {
        offset: u64,
        len: u64,
    },
    Tensor(Tensor),
}

/// A message of the new file.
#[derive(Default)]
struct Message {
    pieces: Vec<Piece>,
    len: u64,
}

impl Message {
    fn of(proto: &impl prost::Message) -> Message {
        let mut message = Message::default();
        message.push(Piece::Bytes(proto.encode_to_vec()));
        message
    }

    fn push(&mut self, piece: Piece) {
        self.len += match &piece {
            Piece::Bytes(bytes) => bytes.len() as u64,
            Piece::Original { len, .. } => *len,
            Piece::Tensor(t) => t.size_bytes() as u64,
        };
        match (self.pieces.last_mut(), piece) {
            (Some(Piece::Bytes(last)), Piece::Bytes(next)) => last.extend(next),
            (_, piece) => self.pieces.push(piece),
        }
    }

    fn push_field(&mut self, number: u64, inner: Message) {
        let mut head = Vec::new();
        put_head(number, inner.len, &mut head);
        self.push(Piece::Bytes(head));
        self.append(inner);
    }

    fn append(&mut self, other: Message) {
        other.pieces.into_iter().for_each(|piece| self.push(piece));
    }

    fn write(&self, original: &mut File, out: &mut impl Write) -> io::Result<()> {
        for piece in &self.pieces {
            match piece {
                Piece::Bytes(bytes) => out.write_all(bytes)?,
                Piece::Tensor(t) => out.write_all(t.as_bytes())?,
                Piece::Original { offset, len } => copy_range(original, *offset, *len, out)?,
            }
        }
        Ok(())
    }
}

fn copy_range(from: &mut File, offset: u64, len: u64, out: &mut impl Write) -> io::Result<()> {
    from.seek(SeekFrom::Start(offset))?;
    match io::copy(&mut from.take(len), out)? == len {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Bytes of the file of tensors.
enum Data {
    Tensor(Tensor),
    Copied {
        path: PathBuf,
        offset: u64,
        len: u64,
    },
}

fn write_data(data: &[(u64, Data)], out: &mut BufWriter<File>) -> io::Result<()> {
    let mut end = 0;
    for (at, data) in data {
        io::copy(&mut io::repeat(0).take(at - end), out)?;
        end = match data {
            Data::Tensor(t) => {
                out.write_all(t.as_bytes())?;
                at + t.size_bytes() as u64
            }
            Data::Copied { path, offset, len } => {
                copy_range(&mut File::open(path)?, *offset, *len, out)?;
                at + len
            }
        };
    }
    Ok(())
}

/// A model in the making.
struct Splice<'s> {
    external: &'s External,
    weights: &'s Weights,
    /// Name of the file of tensors.
    location: String,
    /// Its contents by position.
    data: Vec<(u64, Data)>,
    /// Files that tensors lie in now.
    sources: BTreeSet<PathBuf>,
    end: u64,
    n_replaced: usize,
    /// The conversion to inference form, if it is wanted.
    conversion: Option<Conversion<'s>>,
    /// Nodes to follow the one being read.
    copies: Vec<NodeProto>,
}

/// `TensorProto.raw_data`.
const RAW_DATA: u64 = 9;
/// Fields of a `NodeProto`.
const INPUT: u64 = 1;
const OUTPUT: u64 = 2;
const ATTRIBUTE: u64 = 5;

/// Fields of a `TensorProto` that hold elements, or say where they are.
fn is_data(number: u64) -> bool {
    matches!(number, 4..=7 | 9..=11 | 13 | 14)
}

impl Splice<'_> {
    /// The new form of a message that ends at `end`.
    fn message<R: Read + Seek>(
        &mut self,
        from: &mut Wire<R>,
        end: u64,
        level: Level,
    ) -> Result<Message> {
        if level.is_tensor() {
            return self.tensor(from, end, level);
        }
        self.enter(level)?;
        let mut parts = self.parts(from, end, level)?;
        if level == Level::Node {
            self.convert(&mut parts)?;
        }
        Ok(joined(parts))
    }

    /// The fields of a message by number, in their order, with new forms of the messages in them.
    fn parts<R: Read + Seek>(
        &mut self,
        from: &mut Wire<R>,
        end: u64,
        level: Level,
    ) -> Result<Vec<(u64, Message)>> {
        let mut parts = Vec::new();
        while let Some(field) = from.field(end)? {
            let mut part = Message::default();
            let number = match field {
                Field::Number { number, whole } => {
                    part.push(Piece::Bytes(whole));
                    number
                }
                Field::Payload { number, len } => {
                    let end = from.at() + len;
                    let inner = match level.inner(number) {
                        Some(inner) => self.message(from, end, inner)?,
                        None => copied(from, len)?,
                    };
                    part.push_field(number, inner);
                    for copy in self.copies.drain(..) {
                        part.push_field(number, Message::of(&copy));
                    }
                    number
                }
            };
            parts.push((number, part));
        }
        Ok(parts)
    }

    fn enter(&mut self, level: Level) -> Result<()> {
        match (&mut self.conversion, level) {
            (Some(conversion), Level::Main) => conversion.enter_main(),
            (Some(conversion), Level::Function) => conversion.enter_function()?,
            _ => {}
        }
        Ok(())
    }

    /// Brings the fields of a node to inference form. Nodes that are to follow it are left in `copies`.
    fn convert(&mut self, parts: &mut Vec<(u64, Message)>) -> Result<()> {
        let Some(conversion) = &mut self.conversion else {
            return Ok(());
        };
        let head: NodeProto = decoded(parts, |number| number != ATTRIBUTE)?;
        if !Conversion::concerns(&head) {
            return Ok(());
        }
        let node: NodeProto = decoded(parts, |_| true)?;
        if let Some(change) = conversion.change(&node) {
            apply(&change, parts)?;
            self.copies = change.copies;
        }
        Ok(())
    }

    fn tensor<R: Read + Seek>(
        &mut self,
        from: &mut Wire<R>,
        end: u64,
        level: Level,
    ) -> Result<Message> {
        let parts = self.parts(from, end, level)?;
        let is_small = |number: u64| !matches!(number, 4..=7 | 9..=11);
        let proto: TensorProto = decoded(&parts, is_small)?;
        let new = self.elements(&proto, level);
        let new = new.map_err(|e| e.context(format!("tensor {:?}", proto.name)))?;
        let mut message = Message::default();
        let is_replaced = new.is_some();
        let kept = parts.into_iter();
        let kept = kept.filter(|(number, _)| !(is_replaced && is_data(*number)));
        kept.for_each(|(_, part)| message.append(part));
        message.append(new.unwrap_or_default());
        Ok(message)
    }

    /// New fields of a tensor's elements: new ones, or a reference to the file of tensors. `None` where those of the original stay.
    fn elements(&mut self, proto: &TensorProto, level: Level) -> Result<Option<Message>> {
        let is_external = proto.data_location == 1;
        let weights = self.weights;
        let new = weights
            .get(&proto.name)
            .filter(|_| level == Level::Initialiser);
        if let Some(new) = new {
            check_type(proto, new)?;
            self.n_replaced += 1;
        }
        Ok(match (new, is_external) {
            (None, false) => None,
            (Some(new), false) => {
                let (mut raw, mut bytes) = (Message::default(), Message::default());
                bytes.push(Piece::Tensor(new.clone()));
                raw.push_field(RAW_DATA, bytes);
                Some(raw)
            }
            (Some(new), true) => {
                self.original(proto)?;
                let len = new.size_bytes() as u64;
                Some(self.stored(Data::Tensor(new.clone()), len))
            }
            (None, true) => {
                let (data, len) = self.original(proto)?;
                Some(self.stored(data, len))
            }
        })
    }

    /// Elements that lie in another file now.
    fn original(&mut self, proto: &TensorProto) -> Result<(Data, u64)> {
        let place = ExternalData::read(&proto.external_data)?;
        let path = self.external.resolve(place.location)?;
        self.sources.insert(path.clone());
        let len = match place.length {
            Some(len) => len,
            None => {
                let (dtype, shape) = (dtype_of(proto.data_type)?, shape_of(proto)?);
                checked_size_bytes(dtype, &shape)? as u64
            }
        };
        let offset = place.offset;
        Ok((Data::Copied { path, offset, len }, len))
    }

    /// Puts elements into the file of tensors, and gives the reference.
    fn stored(&mut self, data: Data, len: u64) -> Message {
        let at = self.end.next_multiple_of(ALIGNMENT);
        self.end = at + len;
        self.data.push((at, data));
        let mut reference = Vec::new();
        put_reference(&self.location, at, len, &mut reference);
        let mut message = Message::default();
        message.push(Piece::Bytes(reference));
        message
    }
}

fn check_type(proto: &TensorProto, new: &Tensor) -> Result<()> {
    let (dtype, shape) = (dtype_of(proto.data_type)?, shape_of(proto)?);
    if (new.dtype(), new.shape()) == (dtype, &shape) {
        return Ok(());
    }
    let (got, got_shape) = (new.dtype(), new.shape());
    Err(Error::invalid(format!(
        "it is {dtype}{shape:?}, its new value {got}{got_shape:?}"
    )))
}

/// A message of the fields whose numbers are taken, without those that stay in the file.
fn decoded<M: prost::Message + Default>(
    parts: &[(u64, Message)],
    is_taken: impl Fn(u64) -> bool,
) -> Result<M> {
    let mut bytes = Vec::new();
    for (_, part) in parts.iter().filter(|(number, _)| is_taken(*number)) {
        if let [Piece::Bytes(part)] = &part.pieces[..] {
            bytes.extend(part);
        }
    }
    M::decode(bytes.as_slice()).map_err(|e| Error::invalid(format!("not an ONNX model: {e}")))
}

fn joined(parts: Vec<(u64, Message)>) -> Message {
    let mut message = Message::default();
    parts.into_iter().for_each(|(_, part)| message.append(part));
    message
}

/// Changes the fields of a node.
fn apply(change: &Change, parts: &mut Vec<(u64, Message)>) -> Result<()> {
    let (mut n_inputs, mut n_outputs) = (0, 0);
    let mut stays = Vec::new();
    for part in parts.drain(..) {
        let is_kept = match part.0 {
            INPUT => {
                n_inputs += 1;
                n_inputs <= change.n_inputs
            }
            OUTPUT => {
                n_outputs += 1;
                n_outputs <= change.n_outputs
            }
            ATTRIBUTE => {
                let only: NodeProto = decoded(slice::from_ref(&part), |_| true)?;
                let is_dropped = |a: &AttributeProto| a.name == change.dropped;
                !only.attribute.first().is_some_and(is_dropped)
            }
            _ => true,
        };
        if is_kept {
            stays.push(part);
        }
    }
    *parts = stays;
    if let Some(attribute) = &change.added {
        let mut part = Message::default();
        part.push_field(ATTRIBUTE, Message::of(attribute));
        parts.push((ATTRIBUTE, part));
    }
    Ok(())
}

/// A payload as it is in the original.
fn copied<R: Read + Seek>(from: &mut Wire<R>, len: u64) -> Result<Message> {
    let mut message = Message::default();
    let offset = from.at();
    if len >= HELD_BYTES {
        from.skip(len)?;
        message.push(Piece::Original { offset, len });
        return Ok(message);
    }
    let mut bytes = Vec::new();
    from.bytes(len, offset + len, &mut bytes)?;
    message.push(Piece::Bytes(bytes));
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::super::load::{Specialisation, load};
    use super::super::proto::{
        GraphProto, ModelProto, OperatorSetIdProto, StringStringEntryProto, attribute_type,
    };
    use super::*;
    use crate::interp::run;
    use prost::Message as _;
    use std::fs;

    /// Numbers in an external file, from `offset` on.
    fn tensor(name: &str, offset: usize, length: Option<usize>) -> TensorProto {
        let entry = |key: &str, value: String| StringStringEntryProto {
            key: key.to_owned(),
            value,
        };
        let mut external_data = vec![
            entry("location", "numbers.bin".to_owned()),
            entry("offset", offset.to_string()),
        ];
        external_data.extend(length.map(|n| entry("length", n.to_string())));
        TensorProto {
            name: name.to_owned(),
            data_type: 1,
            dims: vec![2],
            data_location: 1,
            external_data,
            ..TensorProto::default()
        }
    }

    fn node(op_type: &str, input: &[&str], output: &str) -> NodeProto {
        NodeProto {
            op_type: op_type.to_owned(),
            input: input.iter().map(|&name| name.to_owned()).collect(),
            output: vec![output.to_owned()],
            ..NodeProto::default()
        }
    }

    /// `a * b + c`: an initialiser that learns, one that does not, and a constant of a node, all in one external file.
    fn model() -> Vec<u8> {
        let mut constant = node("Constant", &[], "c");
        constant.attribute.push(AttributeProto {
            name: "value".to_owned(),
            r#type: attribute_type::TENSOR,
            t: Some(tensor("", 16, None)),
            ..AttributeProto::default()
        });
        let graph = GraphProto {
            node: vec![
                constant,
                node("Mul", &["a", "b"], "ab"),
                node("Add", &["ab", "c"], "y"),
            ],
            initializer: vec![tensor("a", 0, Some(8)), tensor("b", 8, None)],
            output: vec![super::super::proto::ValueInfoProto {
                name: "y".to_owned(),
                ..Default::default()
            }],
            ..GraphProto::default()
        };
        ModelProto {
            ir_version: 9,
            graph: Some(graph),
            opset_import: vec![OperatorSetIdProto {
                domain: String::new(),
                version: 18,
            }],
            ..ModelProto::default()
        }
        .encode_to_vec()
    }

    fn result(path: &Path) -> Vec<f64> {
        let graph = load(path).unwrap().graph(&Specialisation::default());
        run(&graph.unwrap(), &[]).unwrap()[0].to_f64s()
    }

    #[test]
    fn tensors_of_other_files_lie_beside_the_new_model() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::create_dir(&old).unwrap();
        fs::create_dir(&new).unwrap();
        let numbers = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(f32::to_le_bytes);
        fs::write(old.join("numbers.bin"), numbers.concat()).unwrap();
        let path = old.join("model.onnx");
        fs::write(&path, model()).unwrap();
        assert_eq!(result(&path), [8.0, 14.0]);
        let loaded = load(&path).unwrap();
        let weights = |value: Tensor| Weights::from([("a".to_owned(), value)]);
        let a = weights(Tensor::from_slice(&[10f32, 20.0], &[2]).unwrap());
        let tuned = new.join("tuned.onnx");
        loaded.write_with(&a, &tuned).unwrap();
        fs::remove_dir_all(&old).unwrap();
        assert_eq!(result(&tuned), [35.0, 86.0]);
        let error = |model: &Model, weights: &Weights, path: &Path| {
            model.write_with(weights, path).unwrap_err().to_string()
        };
        let again = load(&tuned).unwrap();
        let message = error(&again, &a, &tuned);
        assert!(message.contains("refusing to overwrite"), "{message}");
        let renamed = new.join("renamed.onnx");
        fs::copy(&tuned, &renamed).unwrap();
        for target in [&tuned, &new.join("tuned.onnx.data")] {
            let message = error(&load(&renamed).unwrap(), &a, target);
            assert!(message.contains("refusing to overwrite"), "{message}");
        }
        let other = new.join("other.onnx");
        let wide = weights(Tensor::from_slice(&[1f32], &[1]).unwrap());
        let message = error(&again, &wide, &other);
        assert!(
            message.contains("it is f32[2], its new value f32[1]"),
            "{message}"
        );
        let unknown = Weights::from([(
            "d".to_owned(),
            Tensor::zeros(crate::DType::F32, &[2]).unwrap(),
        )]);
        let message = error(&again, &unknown, &other);
        assert!(message.contains("are not in the file"), "{message}");
        assert!(!other.exists());
        assert_eq!(result(&tuned), [35.0, 86.0]);
    }
}
