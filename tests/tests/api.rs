//! The public API as another crate uses it: files of tensors, arrays, texts of stages.

use gristmill::dump::Stage;
use gristmill::ir::{Dim, GraphBuilder, ScalarOp};
use gristmill::ndarray::{Array2, ArrayD, Axis, arr2};
use gristmill::place::Fallback;
use gristmill::{
    DType, Element, Options, Session, Settings, TargetCpu, Tensor, compile, onnx, read_npz,
    write_npz,
};

fn data(path: &str) -> String {
    format!("{}/data/{path}", env!("CARGO_MANIFEST_DIR"))
}

/// A generic function needs the trait of elements.
fn sum<T: Element>(tensor: &Tensor) -> gristmill::Result<f64> {
    let elements = tensor.try_as_slice::<T>()?;
    Ok(elements.iter().map(|e| e.to_f64()).sum())
}

#[test]
fn archives_and_elements_need_no_other_crate() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.npz");
    let tensor = Tensor::from(vec![1i64, 2, 3]);
    write_npz(&path, [("x", &tensor)]).unwrap();
    let read = read_npz(&path).unwrap();
    assert_eq!(read, [("x".to_owned(), tensor)]);
    assert_eq!(sum::<i64>(&read[0].1).unwrap(), 6.0);
    let e = sum::<f32>(&read[0].1).unwrap_err().to_string();
    assert!(e.contains("i64[3]") && e.contains("as f32"), "{e}");
}

#[test]
fn arrays_go_in_and_results_come_out() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [Dim::from("rows"), 2.into()]);
    let y = b.map(ScalarOp::Neg, &[x]).unwrap();
    b.output("y", y);
    let compiled = compile(&b.finish().unwrap(), &Options::default()).unwrap();
    let input = arr2(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    let columns = Tensor::from_array(&input.t().slice(gristmill::ndarray::s![.., ..2])).unwrap();
    for tensor in [
        Tensor::from(input.slice(gristmill::ndarray::s![..2, ..]).t().to_owned()),
        columns,
    ] {
        let outputs = compiled.run([("x", tensor)]).unwrap();
        let y = outputs["y"].view::<f32>().unwrap();
        assert_eq!(y, arr2(&[[-1f32, -3.0], [-2.0, -4.0]]).into_dyn());
        assert_eq!(y.sum_axis(Axis(0))[[0]], -3.0);
        let owned = ArrayD::<f32>::try_from(&outputs["y"]).unwrap();
        assert_eq!(owned, y);
    }
    let wrong = compiled.run([("x", Tensor::from(Array2::<f64>::zeros((1, 2))))]);
    let e = wrong.unwrap_err().to_string();
    assert!(e.contains("expected f32[rows, 2], got f64[1, 2]"), "{e}");
}

#[test]
fn warnings_of_placement_reach_the_caller_once() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [Dim::from("rows")]);
    let neg = |b: &mut GraphBuilder| b.map(ScalarOp::Neg, &[x]);
    let on_gpu = |b: &mut GraphBuilder| b.with_device("/gpu:1", neg);
    let y = b.with_origin("tower 1/neg", on_gpu).unwrap();
    b.output("y", y);
    let options = Options {
        fallback: Fallback::Warn,
        ..Options::default()
    };
    let compiled = compile(&b.finish().unwrap(), &options).unwrap();
    for n in [2, 3] {
        let x = Tensor::zeros(DType::F32, &[n]).unwrap();
        compiled.run([("x", x)]).unwrap();
    }
    let [warning] = &compiled.warnings()[..] else {
        panic!("{:?}", compiled.warnings());
    };
    assert!(warning.contains("tower 1/neg"), "{warning}");
}

/// A text is the same with any number of threads, and shows nothing of this machine's files.
#[test]
fn texts_of_stages_are_for_snapshots() {
    let model = onnx::load(data("digits/model.onnx")).unwrap();
    let text = |stage, threads, cpu: &str| {
        let options = Options {
            dims: [("batch".to_owned(), 4)].into(),
            target_cpu: TargetCpu::parse(cpu).unwrap(),
            ..Options::default()
        };
        let settings = Settings {
            threads,
            ..Settings::default()
        };
        let session = Session::new(&settings).unwrap();
        session.text(&model, &options, stage).unwrap()
    };
    for stage in [
        Stage::Graph,
        Stage::Rewritten,
        Stage::Clusters,
        Stage::Placed,
        Stage::Partitions,
    ] {
        let one = text(stage, None, "x86-64-v3");
        assert!(one.contains("node_Conv_52"), "{one}");
        assert!(!one.contains(env!("CARGO_MANIFEST_DIR")), "{one}");
        assert_eq!(one, text(stage, Some(2), "x86-64-v3"), "{}", stage.name());
        assert_eq!(one, text(stage, Some(5), "x86-64-v3"), "{}", stage.name());
    }
    // Predicted times follow the target, not this machine.
    let times = ["x86-64-v2", "x86-64-v3", "x86-64-v4"].map(|cpu| text(Stage::Placed, None, cpu));
    assert!(times[0] != times[1] && times[1] != times[2], "{times:?}");
}
