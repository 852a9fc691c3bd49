//! Constants that are made late are as they would have been at once, alone and through the whole pipeline.

use super::*;
use crate::ir::{Graph, GraphBuilder, Layout, ScalarOp, ValueId, Window};
use crate::testing::Setup;
use crate::{interp, passes};
use std::io::Write;

/// Tensors one after another in a file, and the same held in memory.
struct Store {
    file: tempfile::NamedTempFile,
    next: u64,
    tensors: Vec<(u64, Tensor)>,
}

impl Store {
    fn new() -> Store {
        Store {
            file: tempfile::NamedTempFile::new().unwrap(),
            next: 0,
            tensors: Vec::new(),
        }
    }

    fn put(&mut self, shape: &[usize]) -> usize {
        let n: usize = shape.iter().product();
        let phase = self.tensors.len() as f32;
        let t = Tensor::from_slice(
            &(0..n)
                .map(|i| (i as f32 * 0.37 + phase).sin())
                .collect::<Vec<_>>(),
            shape,
        )
        .unwrap();
        self.file.write_all(t.as_bytes()).unwrap();
        self.tensors.push((self.next, t));
        self.next += 4 * n as u64;
        self.tensors.len() - 1
    }

    /// All of them, read late or held.
    fn constants(&self, late: bool) -> Vec<ConstData> {
        self.constants_of(&self.opened(), late)
    }

    fn opened(&self) -> Arc<DataFile> {
        let file = Arc::new(DataFile::open(self.file.path()).unwrap());
        assert_eq!(file.len_bytes(), self.next);
        file
    }

    fn constants_of(&self, file: &Arc<DataFile>, late: bool) -> Vec<ConstData> {
        let one = |(offset, t): &(u64, Tensor)| match late {
            true => ConstData::stored(file, *offset, t.dtype(), t.shape()).unwrap(),
            false => ConstData::held(t.clone()),
        };
        self.tensors.iter().map(one).collect()
    }
}

#[test]
fn small_constants_are_read_at_once_and_large_ones_when_needed() {
    let mut store = Store::new();
    let (small, large) = (store.put(&[3]), store.put(&[128, 200]));
    let file = store.opened();
    let late = store.constants_of(&file, true);
    assert_eq!(late[small].in_memory(), Some(&store.tensors[small].1));
    assert_eq!(late[large].in_memory(), None);
    assert_eq!(late[large].tensor().unwrap(), store.tensors[large].1);
    assert_eq!(
        (late[large].len(), late[large].size_bytes()),
        (25_600, 102_400)
    );
    let again = store.constants_of(&file, true);
    assert!(late[large] == again[large] && late[large].recipe() == again[large].recipe());
    // Another opening may find other bytes under the same path.
    let anew = store.constants(true);
    assert!(late[large] != anew[large] && late[large].recipe() != anew[large].recipe());
    assert!(late[large] != store.constants(false)[large]);
}

#[test]
fn a_file_cut_short_is_an_error() {
    let mut store = Store::new();
    let large = store.put(&[128, 200]);
    let late = store.constants(true);
    store.file.as_file().set_len(1000).unwrap();
    let error = late[large].tensor().unwrap_err().to_string();
    assert!(
        error.starts_with("cannot read ") && error.ends_with("failed to fill whole buffer"),
        "{error}"
    );
}

#[test]
fn ops_are_noted_down_up_to_a_limit() {
    let mut store = Store::new();
    let w = store.put(&[128, 200]);
    let (late, held) = (store.constants(true), store.constants(false));
    let transpose = Op::Transpose { perm: vec![1, 0] };
    let made = ConstData::made(&transpose, &[&late[w]], DType::F32, &[200, 128]).unwrap();
    let expected = ConstData::made(&transpose, &[&held[w]], DType::F32, &[200, 128]).unwrap();
    assert!(matches!(made.viewed(), Viewed::Transposed(c, [1, 0]) if *c == late[w]));
    assert_eq!(made.tensor().unwrap(), expected.tensor().unwrap());
    assert!(
        ConstData::made(
            &Op::CumSum {
                axis: 0,
                exclusive: false,
                reverse: false
            },
            &[&made],
            DType::F32,
            &[200, 128]
        )
        .is_none()
    );
    // Doubling shares operands: each step is made once for either use.
    let mut sum = late[w].clone();
    let steps = (0..20).take_while(|_| {
        let more = ConstData::made(
            &Op::Map(ScalarOp::Add),
            &[&sum, &sum],
            DType::F32,
            &[128, 200],
        );
        more.map(|m| sum = m).is_some()
    });
    assert_eq!(steps.count(), 3);
}

fn window() -> Window {
    Window {
        strides: vec![1; 2],
        dilations: vec![1; 2],
        pads_low: vec![1; 2],
        pads_high: vec![1; 2],
    }
}

/// Everything that folding does to weights: batch normalisation, other layouts, transposes, joint products, a table that is also a weight.
fn model(w: &[ConstData]) -> Graph {
    let mut b = GraphBuilder::new("weights");
    let x = b.input("x", DType::F32, [1usize, 32, 5, 5]);
    let ids = b.input("ids", DType::I64, [4usize]);
    let c: Vec<ValueId> = w.iter().map(|c| b.constant(c.clone())).collect();
    let conv = Op::Conv {
        window: window(),
        groups: 1,
        layout: Layout::ChannelsFirst,
    };
    let y = b.add1(conv, &[x, c[0]]).unwrap();
    let y = b.mul(y, c[1]).unwrap();
    let y = b.add_(y, c[1]).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.output("image", y);
    let rows = b.add1(Op::Gather { axis: 0 }, &[c[2], ids]).unwrap();
    let parts: Vec<ValueId> = [c[3], c[4], c[3]]
        .map(|w| {
            let wt = b.transpose(w, &[1, 0]).unwrap();
            b.matmul(rows, wt).unwrap()
        })
        .into();
    let q = b.mul(parts[0], parts[1]).unwrap();
    let q = b.add_(q, parts[2]).unwrap();
    let head = b.transpose(c[2], &[1, 0]).unwrap();
    let logits = b.matmul(q, head).unwrap();
    b.output("logits", logits);
    b.finish().unwrap()
}

#[test]
fn models_compute_the_same_from_weights_read_late() {
    let mut store = Store::new();
    for shape in [
        &[64, 32, 3, 3][..],
        &[64, 1, 1],
        &[300, 160],
        &[160, 160],
        &[160, 160],
    ] {
        store.put(shape);
    }
    let x = Tensor::from_slice(
        &(0..800).map(|i| (i as f32 * 0.1).cos()).collect::<Vec<_>>(),
        &[1, 32, 5, 5],
    )
    .unwrap();
    let ids = Tensor::from_slice(&[7i64, 0, 299, 7], &[4]).unwrap();
    let inputs = [("x", x.clone()), ("ids", ids.clone())];
    let run = |g: &Graph| {
        Setup::with_threads(2)
            .compile(g)
            .unwrap()
            .run(inputs.clone())
            .unwrap()
            .into_tensors()
    };
    let (late, held) = (
        model(&store.constants(true)),
        model(&store.constants(false)),
    );
    assert_eq!(
        late.to_string(),
        held.to_string(),
        "texts show the elements"
    );
    let found = run(&late);
    assert_eq!(found, run(&held), "both are packed alike");
    let expected = interp::run(&held, &[x, ids]).unwrap();
    for (want, have) in expected.iter().zip(&found) {
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-3 * (1.0 + a.abs());
        assert!(
            want.as_slice::<f32>()
                .iter()
                .zip(have.as_slice::<f32>())
                .all(close)
        );
    }
}

#[test]
fn folding_reads_no_large_constant() {
    let mut store = Store::new();
    let w = store.put(&[160, 160]);
    let mut b = GraphBuilder::new("fold");
    let c = b.constant(store.constants(true)[w].clone());
    let c = b.transpose(c, &[1, 0]).unwrap();
    let c = b.reshape(c, [25_600usize]).unwrap();
    b.output("y", c);
    let folded = passes::fold_constants(&b.finish().unwrap()).unwrap();
    let y = folded.constant(folded.outputs[0].value).unwrap();
    assert!(y.in_memory().is_none() && matches!(y.viewed(), Viewed::Reshaped(_)));
}

/// Constants of bytes, each alone in a file.
fn stored_bytes(shape: &[usize], seed: usize) -> (tempfile::NamedTempFile, ConstData, Tensor) {
    let n: usize = shape.iter().product();
    let bytes: Vec<i8> = (0..n).map(|i| (i * i * 31 + i * 7 + seed) as i8).collect();
    let t = Tensor::from_slice(&bytes, shape).unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(t.as_bytes()).unwrap();
    let opened = Arc::new(DataFile::open(file.path()).unwrap());
    let late = ConstData::stored(&opened, 0, DType::I8, shape).unwrap();
    (file, late, t)
}

#[test]
fn views_of_widened_bytes_are_widened_views() {
    let (_file, late, held) = stored_bytes(&[256, 320], 0);
    let transposed = |c: &ConstData| {
        let wide = ConstData::made(WIDEN, &[c], DType::I32, &[256, 320]).unwrap();
        let perm = Op::Transpose { perm: vec![1, 0] };
        let turned = ConstData::made(&perm, &[&wide], DType::I32, &[320, 256]).unwrap();
        let twice = Op::Concat { axis: 0 };
        ConstData::made(&twice, &[&turned, &turned], DType::I32, &[640, 256]).unwrap()
    };
    let made = transposed(&late);
    let bytes = match made.viewed() {
        Viewed::Widened(bytes) => bytes,
        _ => panic!("the widening is not outside: {made:?}"),
    };
    assert_eq!((bytes.dtype(), bytes.in_memory()), (DType::I8, None));
    let made = made.tensor().unwrap();
    assert_eq!(made.dtype(), DType::I32);
    assert_eq!(made, transposed(&held.into()).tensor().unwrap());
    // Integers of other conversions are there: some rules look at their elements.
    let to_bool = &Op::Map(ScalarOp::Cast(DType::Bool));
    assert!(ConstData::made(to_bool, &[&late], DType::Bool, &[256, 320]).is_none());
    // No other conversion moves: `f32` views of integers keep their order.
    let wide = ConstData::made(WIDEN, &[&late], DType::I32, &[256, 320]).unwrap();
    let floats = &Op::Map(ScalarOp::Cast(DType::F32));
    let floats = ConstData::made(floats, &[&wide], DType::F32, &[256, 320]).unwrap();
    assert!(matches!(floats.viewed(), Viewed::Plain));
}

/// Products of bytes minus a zero point: two that merge, one by a transposed matrix, one of a depth that
/// is no multiple of 4, and a convolution.
fn model_of_bytes(w: &[ConstData]) -> Graph {
    let mut b = GraphBuilder::new("bytes");
    let x = b.input("x", DType::U8, [5usize, 256]);
    let x = b.cast(x, DType::I32).unwrap();
    let zero = b.constant(Tensor::from_slice(&[117i32], &[]).unwrap());
    let x = b.sub(x, zero).unwrap();
    let none = b.constant(Tensor::from_slice(&[0i32], &[]).unwrap());
    for (i, c) in w[..2].iter().enumerate() {
        let w = b.constant(c.clone());
        let w = b.cast(w, DType::I32).unwrap();
        let w = b.sub(w, none).unwrap();
        let y = b.matmul(x, w).unwrap();
        b.output(&format!("merged{i}"), y);
    }
    let filters = &w[4];
    let turned = b.constant(w[2].clone());
    let turned = b.cast(turned, DType::I32).unwrap();
    let turned = b.transpose(turned, &[1, 0]).unwrap();
    let y = b.matmul(x, turned).unwrap();
    b.output("turned", y);
    let odd = b.slice_axis(x, 1, 0, 254).unwrap();
    let w = b.constant(w[3].clone());
    let w = b.cast(w, DType::I32).unwrap();
    let y = b.matmul(odd, w).unwrap();
    b.output("padded", y);
    let image = b.reshape(x, [1usize, 64, 4, 5]).unwrap();
    let conv = Op::Conv {
        window: window(),
        groups: 1,
        layout: Layout::ChannelsFirst,
    };
    let w = b.constant(filters.clone());
    let w = b.cast(w, DType::I32).unwrap();
    let y = b.add1(conv, &[image, w]).unwrap();
    b.output("image", y);
    b.finish().unwrap()
}

/// Weights of bytes stay in their file until code generation packs them, and compute the same as weights
/// in memory.
#[test]
fn weights_of_bytes_stay_bytes() {
    let shapes = [
        &[256, 320][..],
        &[256, 272],
        &[384, 256],
        &[254, 320],
        &[128, 64, 3, 3],
    ];
    let stored: Vec<_> = (0..5).map(|i| stored_bytes(shapes[i], i)).collect();
    let late: Vec<ConstData> = stored.iter().map(|s| s.1.clone()).collect();
    let held: Vec<ConstData> = stored.iter().map(|s| s.2.clone().into()).collect();
    let x: Vec<u8> = (0..5 * 256).map(|i| (i * 73 % 256) as u8).collect();
    let x = Tensor::from_slice(&x, &[5, 256]).unwrap();
    let g = model_of_bytes(&late);
    let passed = passes::integer_products(&g).unwrap();
    let passed = passes::fold_constants(&passed).unwrap();
    let is_product = |op: &Op| matches!(op, Op::MatMul | Op::Conv { .. });
    let weights = passed.nodes().filter(|(_, n)| is_product(&n.op));
    let is_late =
        |c: &ConstData| matches!(c.viewed(), Viewed::Widened(b) if b.in_memory().is_none());
    let n_late = weights.filter(|(_, n)| passed.constant(n.inputs[1]).is_some_and(is_late));
    assert_eq!(n_late.count(), 4, "but for the padded ones, which are read");
    let run = |g: &Graph| {
        let compiled = Setup::with_threads(2).compile(g).unwrap();
        compiled.run([("x", x.clone())]).unwrap().into_tensors()
    };
    let expected = interp::run(&model_of_bytes(&held), std::slice::from_ref(&x)).unwrap();
    assert_eq!(run(&g), expected);
    assert_eq!(run(&model_of_bytes(&held)), expected);
}
