//! Models at several sizes, beside onnxruntime, with the number of times that they are compiled: `tests/data/sizes`.

use crate::extents::{Case, cases_in};
use crate::multi_device::setup;
use crate::process::gristmill;
use gristmill::{DType, ErrorKind, Tensor, onnx};
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/sizes")
}

/// Compilations, apart from that of kernels for all sizes, of three sizes there and back.
fn compilations(case: &Case) -> usize {
    let model = setup("cpu:1", 2).compile(&case.model).unwrap();
    case.check(&model, "at several sizes");
    model.compiled_alone()
}

#[test]
fn kernels_are_chosen_once_for_all_sizes() {
    let mut found: Vec<(String, usize)> = Vec::new();
    for case in cases_in(&folder()) {
        let n = compilations(&case);
        found.push((case.name, n));
    }
    // Segments of the decoder for sound have extents that do not fit each other at some sizes.
    let expected = [
        ("bert", 0),
        ("encodec", 0),
        ("gcn", 0),
        ("hubert", 0),
        ("mobilebert", 0),
        ("unet", 0),
        ("wav2vec2", 0),
    ];
    let expected = expected.map(|(name, n)| (name.to_owned(), n));
    assert_eq!(found, expected);
}

#[test]
fn check_says_that_kernels_are_chosen_once() {
    for name in ["bert", "gcn", "hubert", "mobilebert", "unet", "wav2vec2"] {
        let ended = gristmill(&folder().join(name), &["check", "model.onnx"]);
        let says = ended
            .stdout
            .contains("kernels are chosen once for all sizes");
        assert!(says, "{name}: {}{}", ended.stdout, ended.stderr);
    }
}

/// Sizes that do not fit are errors as of a model for those sizes alone.
#[test]
fn odd_sizes_of_a_u_net_are_errors() {
    let model = onnx::load(folder().join("unet/model.onnx")).unwrap();
    let compiled = setup("cpu:1", 2).compile(&model).unwrap();
    let run = |h: usize, w: usize| {
        let x = Tensor::zeros(DType::F32, &[1, 3, h, w]).unwrap();
        compiled.run([("x", x)]).map(drop)
    };
    run(16, 24).unwrap();
    let error = run(17, 24).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let text = error.to_string();
    assert!(
        text.contains("/Concat") && text.contains("cannot join"),
        "{text}"
    );
    run(32, 8).unwrap();
    assert_eq!(compiled.compiled_alone(), 0);
}
