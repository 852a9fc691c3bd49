//! A language model with a cache of keys and values, which is longer at every token.

use gristmill::interp::compare::allclose;
use gristmill::ir::{Bindings, Type};
use gristmill::testing::Setup;
use gristmill::{Compiled, Tensor, onnx};

const MODEL: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../compiler/examples/data/tiny_gpt.onnx"
);
const TEXT: &str = "A placement is a device for each cluster of a graph.";

/// A model and the keys and values of what it has read.
struct Decoder {
    model: Compiled,
    cache: Vec<Tensor>,
}

impl Decoder {
    fn new() -> Decoder {
        let setup = Setup::with_threads(2);
        let model = setup.compile(&onnx::load(MODEL).unwrap()).unwrap();
        let cache = model.inputs()[1..].iter().map(|(_, ty)| empty(ty));
        Decoder {
            cache: cache.collect(),
            model,
        }
    }

    /// Reads tokens; gives their logits and the bytes of code that were generated for them.
    fn read(&mut self, tokens: &[u8]) -> (Tensor, usize) {
        let ids: Vec<i64> = tokens.iter().map(|&t| t.into()).collect();
        let ids = Tensor::from_slice(&ids, &[1, ids.len()]).unwrap();
        let inputs: Vec<Tensor> = [ids].into_iter().chain(self.cache.drain(..)).collect();
        let executable = self.model.for_inputs(&inputs).unwrap();
        let mut outputs = executable.run(&inputs).unwrap().into_tensors();
        let logits = outputs.remove(0);
        self.cache = outputs;
        (logits, executable.lowered.report.code_bytes)
    }
}

fn empty(ty: &Type) -> Tensor {
    let sizes = [("batch", 1), ("past", 0)].map(|(dim, n)| (dim.to_owned(), n));
    let shape = ty.shape.bind(&Bindings::from(sizes)).as_static();
    Tensor::zeros(ty.dtype, &shape.unwrap()).unwrap()
}

#[test]
fn a_cache_gives_the_logits_of_the_whole_text() {
    let text = TEXT.as_bytes();
    let (whole, _) = Decoder::new().read(text);
    let width = whole.shape()[2];
    let mut decoder = Decoder::new();
    let mut code_bytes = Vec::new();
    let mut read = 0;
    while read < text.len() {
        let n = if read == 0 { 9 } else { 1 };
        let (logits, bytes) = decoder.read(&text[read..read + n]);
        code_bytes.push(bytes);
        let expected = &whole.as_slice::<f32>()[read * width..(read + n) * width];
        let expected = Tensor::from_slice(expected, &[1, n, width]).unwrap();
        let c = allclose(&expected, &logits, 1e-4, 1e-4);
        assert!(c.ok, "after {read} tokens: {c}");
        read += n;
    }
    assert_eq!(
        code_bytes[4..],
        vec![0; code_bytes.len() - 4],
        "{code_bytes:?}"
    );
}

#[test]
fn a_long_text_needs_no_more_memory_than_a_short_one() {
    let mut decoder = Decoder::new();
    for _ in 0..100 {
        decoder.read(b"e");
    }
    assert!(decoder.model.specialisations() <= 65);
    assert_eq!(
        decoder.model.session().evictions(),
        0,
        "none for want of memory"
    );
}
