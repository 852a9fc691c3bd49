//! Values of variables in a [safetensors] file, the format of PyTorch, JAX and others.
//!
//! A variable of the session's own container has its name as key, one of another container `CONTAINER/NAME`; the metadata say which part
//! is the container's, so that files from elsewhere, whose keys have slashes of their own, hold variables of the session's own container.
//! The entry `gristmill` of the metadata is JSON: `containers` by key, `notes` of the writer, and `crc32`, the checksum of all data in file order
//! and of the notes as JSON, which readers check if present.
//!
//! [safetensors]: https://huggingface.co/docs/safetensors

use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::files;
use crate::tensor::Tensor;
use crc32fast::Hasher;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

/// The value of a variable.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The container, empty for the session's own.
    pub container: String,
    /// The name within the container.
    pub name: String,
    /// The value.
    pub value: Tensor,
}

/// Notes of a file, by name.
pub type Notes = BTreeMap<String, String>;

/// The contents of a file.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// The variables.
    pub variables: Vec<Saved>,
    /// The notes.
    pub notes: Notes,
}

/// Longest header, as in the crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Our entry of the metadata. One entry, since the crate writes several in any order.
const ENTRY: &str = "gristmill";

/// `NAME`, or `CONTAINER/NAME`.
pub fn label(container: &str, name: &str) -> String {
    match container {
        "" => name.to_owned(),
        container => format!("{container}/{name}"),
    }
}

/// Writes variables to a file atomically: readers see the old or the new contents. The file is synced before this returns.
///
/// Errors when two variables have the same label.
pub fn write(path: &Path, variables: &[Saved], notes: &Notes) -> Result<(), Error> {
    let named = labelled(variables).map_err(|e| e.context(path.display()))?;
    files::replace(path, |file| write_to(file, &named, notes))
        .map_err(|e| Error::invalid(format!("{}: cannot write it: {e}", path.display())))
}

/// Variables by label.
fn labelled(variables: &[Saved]) -> Result<BTreeMap<String, &Saved>, Error> {
    let mut named = BTreeMap::new();
    for saved in variables {
        let label = label(&saved.container, &saved.name);
        if label == "__metadata__" {
            return Err(Error::invalid("no variable can be saved as __metadata__"));
        }
        if let Some(other) = named.insert(label.clone(), saved) {
            let message = format!(
                "variable {:?} of container {:?} and variable {:?} of container {:?} are both saved as {label:?}",
                other.name, other.container, saved.name, saved.container
            );
            return Err(Error::invalid(message));
        }
    }
    Ok(named)
}

fn write_to(
    file: &mut BufWriter<File>,
    named: &BTreeMap<String, &Saved>,
    notes: &Notes,
) -> io::Result<()> {
    let mut order: Vec<(&String, &Saved)> = named.iter().map(|(k, v)| (k, *v)).collect();
    // Largest elements first: each begins where its elements may.
    order.sort_by_key(|(_, saved)| Reverse(saved.value.dtype().size_bytes()));
    let mut header = header(&order, notes)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for (_, saved) in &order {
        file.write_all(saved.value.as_bytes())?;
    }
    file.flush()?;
    file.get_ref().sync_all()
}

/// The notes as they enter the checksum: not at all where there are none.
fn text_of(notes: &Notes) -> io::Result<Vec<u8>> {
    match notes.is_empty() {
        true => Ok(Vec::new()),
        false => Ok(serde_json::to_vec(notes)?),
    }
}

/// The header of a file of these variables, in JSON.
fn header(order: &[(&String, &Saved)], notes: &Notes) -> io::Result<Vec<u8>> {
    let (mut end, mut checksum) = (0, Hasher::new());
    let info = |(label, saved): &(&String, &Saved)| {
        let begin = end;
        end += saved.value.size_bytes();
        checksum.update(saved.value.as_bytes());
        let info = TensorInfo {
            dtype: to_format(saved.value.dtype()),
            shape: saved.value.shape().to_vec(),
            data_offsets: (begin, end),
        };
        ((*label).clone(), info)
    };
    let infos = order.iter().map(info).collect();
    let contained = order.iter().filter(|(_, s)| !s.container.is_empty());
    let containers: BTreeMap<&str, &str> = contained
        .map(|(label, saved)| (label.as_str(), saved.container.as_str()))
        .collect();
    checksum.update(&text_of(notes)?);
    let mut entry = json!({"containers": containers, "crc32": checksum.finalize()});
    if !notes.is_empty() {
        entry["notes"] = json!(notes);
    }
    let entries = [(ENTRY.to_owned(), entry.to_string())];
    let metadata = Metadata::new(Some(entries.into_iter().collect()), infos);
    Ok(serde_json::to_vec(&metadata.map_err(io::Error::other)?)?)
}

/// Reads a file of any writer. A file shorter than its header promises is refused before any allocation.
pub fn read(path: &Path) -> Result<Contents, Error> {
    read_file(path).map_err(|e| e.context(path.display()))
}

fn read_file(path: &Path) -> Result<Contents, Error> {
    let file = files::open(path).map_err(|e| Error::invalid(format!("cannot open it: {e}")))?;
    let has = file.metadata().map_err(unreadable)?.len();
    let mut file = BufReader::new(file);
    let metadata = read_header(&mut file, has)?;
    let entry = metadata.metadata().as_ref().and_then(|m| m.get(ENTRY));
    let entry = entry.map_or(Ok(Value::Null), |text| serde_json::from_str(text));
    let entry = entry.map_err(|e| Error::invalid(format!("its entry {ENTRY:?}: {e}")))?;
    let mut checksum = Hasher::new();
    let mut variables = Vec::new();
    for key in metadata.offset_keys() {
        let Some(info) = metadata.info(&key) else {
            continue;
        };
        let value =
            read_tensor(&mut file, info).map_err(|e| e.context(format!("tensor {key:?}")))?;
        checksum.update(value.as_bytes());
        variables.push(named(&key, &entry["containers"][&key], value));
    }
    let notes = notes_of(&entry)?;
    checksum.update(&text_of(&notes).map_err(unreadable)?);
    let (want, found) = (&entry["crc32"], checksum.finalize());
    if !want.is_null() && *want != found {
        let message = format!("its checksum is {want}, its data have {found}: it is damaged");
        return Err(Error::invalid(message));
    }
    Ok(Contents { variables, notes })
}

fn notes_of(entry: &Value) -> Result<Notes, Error> {
    match &entry["notes"] {
        Value::Null => Ok(Notes::new()),
        notes => serde_json::from_value(notes.clone())
            .map_err(|e| Error::invalid(format!("its notes: {e}"))),
    }
}

fn read_header(file: &mut impl Read, has: u64) -> Result<Metadata, Error> {
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES.min(has.saturating_sub(8)) {
        let message = format!("not a safetensors file: a header of {length} bytes in {has}");
        return Err(Error::invalid(message));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(unreadable)?;
    let metadata = serde_json::from_slice::<Metadata>(&header);
    let metadata = metadata.map_err(|e| Error::invalid(format!("not a safetensors file: {e}")))?;
    let (want, found) = (metadata.data_len() as u64, has - 8 - length);
    if want != found {
        let message = format!("its header says {want} bytes of data, it has {found}");
        return Err(Error::invalid(message));
    }
    Ok(metadata)
}

fn read_tensor(file: &mut impl Read, info: &TensorInfo) -> Result<Tensor, Error> {
    let dtype = from_format(info.dtype)?;
    let mut value = Tensor::zeros(dtype, &info.shape)?;
    let bytes = value.as_bytes_mut();
    file.read_exact(bytes).map_err(unreadable)?;
    if dtype == DType::Bool && bytes.iter().any(|&b| b > 1) {
        return Err(Error::invalid("a truth value is neither 0 nor 1"));
    }
    Ok(value)
}

/// A tensor as the variable of its key, within a container if the metadata name one.
fn named(key: &str, container: &Value, value: Tensor) -> Saved {
    let parts = container.as_str().and_then(|container| {
        let name = key.strip_prefix(container)?.strip_prefix('/')?;
        Some((container, name))
    });
    let (container, name) = parts.unwrap_or(("", key));
    Saved {
        container: container.to_owned(),
        name: name.to_owned(),
        value,
    }
}

fn unreadable(e: io::Error) -> Error {
    Error::invalid(format!("cannot read it: {e}"))
}

/// Declares the dtypes of the format, both ways.
macro_rules! dtypes {
    ($($own:ident $theirs:ident),* $(,)?) => {
        fn to_format(dtype: DType) -> Dtype {
            match dtype { $(DType::$own => Dtype::$theirs),* }
        }

        fn from_format(dtype: Dtype) -> Result<DType, Error> {
            match dtype {
                $(Dtype::$theirs => Ok(DType::$own),)*
                other => Err(unsupported(other)),
            }
        }
    };
}

dtypes! {
    F32 F32, F64 F64, F16 F16, BF16 BF16,
    F8E4M3FN F8_E4M3, F8E4M3FNUZ F8_E4M3FNUZ, F8E5M2 F8_E5M2, F8E5M2FNUZ F8_E5M2FNUZ,
    I8 I8, I16 I16, I32 I32, I64 I64, U8 U8, U16 U16, U32 U32, U64 U64, Bool BOOL,
}

fn unsupported(dtype: Dtype) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("it has elements of {dtype}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn saved(container: &str, name: &str, value: Tensor) -> Saved {
        Saved {
            container: container.to_owned(),
            name: name.to_owned(),
            value,
        }
    }

    /// A file of this test's own, removed at the end.
    struct Own(std::path::PathBuf);

    impl Own {
        fn new(name: &str) -> Own {
            let name = format!("gristmill-state-{name}-{}.safetensors", std::process::id());
            Own(std::env::temp_dir().join(name))
        }
    }

    impl Drop for Own {
        fn drop(&mut self) {
            drop(fs::remove_file(&self.0));
        }
    }

    fn notes() -> Notes {
        Notes::from([("epoch".to_owned(), "3".to_owned())])
    }

    fn error(path: &Path) -> String {
        read(path).unwrap_err().to_string()
    }

    #[test]
    fn every_dtype_comes_back_as_it_was() {
        let file = Own::new("dtypes");
        let values = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0];
        let all = DType::ALL.iter().map(|&dtype| {
            let value = Tensor::from_f64s(dtype, &[2, 3], &values).unwrap();
            saved("", dtype.name(), value)
        });
        let mut all: Vec<Saved> = all.collect();
        all.push(saved(
            "a",
            "empty",
            Tensor::zeros(DType::F32, &[0, 4]).unwrap(),
        ));
        all.push(saved("", "b/scalar", Tensor::scalar(7i64)));
        all.push(saved("c/d", "e/f", Tensor::scalar(8u8)));
        write(&file.0, &all, &notes()).unwrap();
        let contents = read(&file.0).unwrap();
        assert_eq!(contents.notes, notes());
        let back = contents.variables;
        assert_eq!(back.len(), all.len());
        for own in &all {
            let found = back
                .iter()
                .find(|b| (&b.container, &b.name) == (&own.container, &own.name));
            assert_eq!(found.unwrap().value, own.value, "{own:?}");
        }
    }

    #[test]
    fn two_variables_of_one_label_are_refused() {
        let file = Own::new("labels");
        let both = [
            saved("a", "b/c", Tensor::scalar(1f32)),
            saved("a/b", "c", Tensor::scalar(2f32)),
        ];
        let e = write(&file.0, &both, &Notes::new())
            .unwrap_err()
            .to_string();
        assert!(e.contains("both saved as \"a/b/c\""), "{e}");
        assert!(!file.0.exists());
    }

    #[test]
    fn damage_is_named_wherever_it_is() {
        let file = Own::new("damage");
        let values = [saved(
            "",
            "w",
            Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap(),
        )];
        write(&file.0, &values, &notes()).unwrap();
        let good = fs::read(&file.0).unwrap();
        for n in 0..good.len() {
            fs::write(&file.0, &good[..n]).unwrap();
            read(&file.0).unwrap_err();
        }
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            fs::write(&file.0, &bad).unwrap();
            // Letters of names are not in the checksum; nothing else may pass.
            if let Ok(found) = read(&file.0) {
                assert_eq!(found.variables[0].value, values[0].value, "bit {at}");
                // All notes may be missing, when their key has another name.
                assert!(found.notes.is_empty() || found.notes == notes(), "bit {at}");
            }
        }
        let mut bad = good.clone();
        *bad.last_mut().unwrap() ^= 1;
        fs::write(&file.0, &bad).unwrap();
        assert!(error(&file.0).ends_with("it is damaged"));
        fs::write(&file.0, [&good[..], &[0]].concat()).unwrap();
        assert!(error(&file.0).ends_with("its header says 8 bytes of data, it has 9"));
        fs::write(&file.0, u64::MAX.to_le_bytes()).unwrap();
        assert!(error(&file.0).contains("not a safetensors file"));
    }
}
