//! The command line as users and scripts meet it: output forms, exit codes, errors.

mod files;
mod help;
mod inputs;
mod limits;
mod stages;
mod streams;
mod train;
mod tuned;

use crate::process::{gristmill, gristmill_with, gristmill_with_cache};
use std::path::{Path, PathBuf};

fn data(path: &str) -> String {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/data"))
        .join(path)
        .to_str()
        .unwrap()
        .to_owned()
}

fn run(args: &[&str]) -> (i32, String, String) {
    let ended = gristmill(Path::new("."), args);
    (ended.code.unwrap_or(-1), ended.stdout, ended.stderr)
}

#[test]
fn digits_are_classified() {
    let (code, out, err) = run(&[
        "run",
        &data("digits/model.onnx"),
        "--inputs",
        &data("digits/batch.npz"),
        "--labels",
        &data("digits/labels.npy"),
    ]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("accuracy 98.89 % (356 of 360)"), "{out}");
}

#[test]
fn json_names_its_format() {
    for (verb, extra) in [
        ("inspect", vec![]),
        ("check", vec![]),
        ("bench", vec!["--iters", "2", "--set", "batch=1"]),
        ("run", vec!["--set", "batch=2"]),
        ("place", vec!["--set", "batch=2", "--devices", "cpu:2"]),
    ] {
        let model = data("digits/model.onnx");
        let (code, out, err) = run(&[&[verb, &model, "--json"], extra.as_slice()].concat());
        assert_eq!(code, 0, "{verb}: {err}");
        let value: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(value["format"], format!("gristmill/{verb}/1"));
    }
}

#[test]
fn every_stage_prints_and_the_ir_stages_parse_back() {
    let dir = tempfile::tempdir().unwrap();
    let model = data("digits/model.onnx");
    for stage in [
        "graph",
        "rewritten",
        "clusters",
        "placed",
        "partitions",
        "schedule",
        "clif",
        "asm",
        "cuda",
    ] {
        let (code, out, err) = run(&[
            "dump", &model, "--stage", stage, "--set", "batch=2", "--full",
        ]);
        assert_eq!(code, 0, "{stage}: {err}");
        assert!(!out.trim().is_empty(), "{stage}");
        let (_, again, _) = run(&[
            "dump", &model, "--stage", stage, "--set", "batch=2", "--full",
        ]);
        assert!(out == again, "{stage} differs from run to run");
        if stage == "rewritten" {
            let path = dir.path().join("digits.ir");
            std::fs::write(&path, out).unwrap();
            let (code, _, err) = run(&["run", path.to_str().unwrap()]);
            assert_eq!(code, 0, "{err}");
        }
    }
}

#[test]
fn user_errors_have_codes_and_remedies() {
    let (digits, batch) = (data("digits/model.onnx"), data("digits/batch.npz"));
    let missing = run(&["run", "no-such.onnx"]);
    assert_eq!(missing.0, 2);
    assert!(missing.2.contains("no-such.onnx"), "{}", missing.2);
    for (args, code, text) in [
        (vec!["run", &digits], 2, "--set"),
        (vec!["run", &digits, "--set", "bach=2"], 2, "bach"),
        (
            vec!["run", &digits, "--set", "bach=2", "--set", "bach=3"],
            2,
            "twice",
        ),
        (vec!["run", &digits, "--shape", "bach=1..4"], 2, "bach"),
        (vec!["run", &digits, "--shape", "batch=4..1"], 2, "empty"),
        (
            vec!["run", &digits, "--shape", "batch=1..many"],
            2,
            "\"many\" is not a size",
        ),
        (
            vec!["run", &digits, "--shape", "batch=1..4", "--set", "batch=9"],
            2,
            "outside of its declared range 1..4",
        ),
        (
            vec!["run", &digits, "--shape", "batch=1..64", "--inputs", &batch],
            2,
            "\"batch\" is 360, outside",
        ),
        (
            vec![
                "run",
                &digits,
                "--set",
                "batch=1",
                "--target-cpu",
                "x86-64-v9",
            ],
            2,
            "x86-64-v4",
        ),
        (
            vec!["run", &digits, "--set", "batch=2", "--input", "imag=x.npy"],
            2,
            "imag",
        ),
        (
            vec!["run", &digits, "--set", "batch=2", "--devices", "tpu:1"],
            2,
            "tpu",
        ),
        (
            vec!["run", &digits, "--set", "batch=2", "--devices", "/gpu:900"],
            3,
            "GPU:900",
        ),
        (
            vec!["run", &digits, "--set", "batch=2", "--pin", "nothing=cpu:0"],
            2,
            "nothing",
        ),
        (
            vec!["run", &digits, "--set", "batch=64", "--mem", "cpu:0=1KiB"],
            5,
            "1.0 KiB",
        ),
        (vec!["dump", &digits, "--stage", "clusterz"], 2, "clusters"),
        (
            vec![
                "dump",
                &digits,
                "--stage",
                "cuda",
                "--set",
                "batch=1",
                "--gpu-arch",
                "sm_91",
            ],
            2,
            "sm_90",
        ),
        (vec!["run"], 2, "MODEL"),
        (vec!["frobnicate"], 2, "frobnicate"),
    ] {
        let (got, _, err) = run(&args);
        assert_eq!(got, code, "{args:?}: {err}");
        assert!(err.contains(text), "{args:?}: {err}");
    }
}

/// A declared range is a contract for inputs; where nothing says a size, it is the greatest.
#[test]
fn ranges_of_dims_bound_the_inputs() {
    let (digits, batch) = (data("digits/model.onnx"), data("digits/batch.npz"));
    let (code, out, err) = run(&["run", &digits, "--shape", "batch=1..3"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("f32[3, 10]"), "{out}");
    let (code, out, err) = run(&[
        "run",
        &digits,
        "--shape",
        "batch=360..360",
        "--inputs",
        &batch,
    ]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("f32[360, 10]"), "{out}");
    let (code, out, err) = run(&["dump", &digits, "--stage", "graph", "--shape", "batch=7"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("f32[7, 10]"), "{out}");
}

/// Code for lesser CPUs computes the same, and uses no register that they lack.
#[cfg(target_arch = "x86_64")]
#[test]
fn lesser_target_cpus_compute_the_same() {
    let runs_here = [
        ("x86-64-v2", is_x86_feature_detected!("sse4.2")),
        ("x86-64-v3", is_x86_feature_detected!("avx2")),
        ("x86-64-v4", is_x86_feature_detected!("avx512dq")),
    ];
    for (target, runs_here) in runs_here {
        for model in ["resnet_dynamo", "bert_dynamo", "unet_script", "rnn_script"] {
            let dir = data(&format!("models/{model}"));
            let (path, inputs) = (
                format!("{dir}/model.onnx"),
                format!("{dir}/test_data_set_0"),
            );
            let (code, out, err) =
                run(&["run", &path, "--test-data", &inputs, "--target-cpu", target]);
            match runs_here {
                true => assert_eq!(code, 0, "{target} {model}: {out}{err}"),
                false => assert!(code == 3 && err.contains(target), "{target} {model}: {err}"),
            }
        }
    }
    let asm = |target| {
        run(&[
            "dump",
            &data("models/rnn_script/model.onnx"),
            "--stage",
            "asm",
            "--target-cpu",
            target,
        ])
        .1
    };
    let old = asm("x86-64-v2");
    assert!(old.contains(" mulps") && !old.contains(" vmulps"), "{old}");
    assert_eq!(
        asm("native").contains(" vmulps"),
        is_x86_feature_detected!("avx")
    );
}

#[test]
fn two_logical_devices_give_the_same_answer() {
    let dir = Path::new(&data("models/bert_dynamo")).join("test_data_set_0");
    let model = data("models/bert_dynamo/model.onnx");
    let args = [
        "run",
        &model,
        "--test-data",
        dir.to_str().unwrap(),
        "--devices",
        "cpu:2",
        "--threads",
        "2",
        "--verify",
    ];
    let (code, out, err) = run(&args);
    assert_eq!(code, 0, "{out}{err}");
    let (code, out, err) = run(&[&args[..], &["--pin", ".*=cpu:1"]].concat());
    assert_eq!(code, 0, "{out}{err}");
}

#[test]
fn a_difference_from_expected_outputs_is_exit_code_4() {
    let from = Path::new(&data("models/mlp_dynamo")).join("test_data_set_0");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("input_0.pb"), dir.path().join("input_0.pb")).unwrap();
    let mut bytes = std::fs::read(from.join("output_0.pb")).unwrap();
    let last = bytes.len() - 20;
    bytes[last..].iter_mut().for_each(|b| *b ^= 0x11);
    std::fs::write(dir.path().join("output_0.pb"), bytes).unwrap();
    let (code, _, err) = run(&[
        "run",
        &data("models/mlp_dynamo/model.onnx"),
        "--test-data",
        dir.path().to_str().unwrap(),
    ]);
    assert_eq!(code, 4, "{err}");
}

#[test]
fn the_placement_log_has_a_line_per_op() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("two.ir");
    let text = "graph \"two\" {\n%0 = input \"x\": f32[2]\n%1: f32[2] = neg(%0) on \"/gpu:1\" @ \"/a\"\n\
                %2: f32[2] = exp(%1) on \"/cpu:1\" with \"/a\" @ \"/b\"\noutput \"y\" %2\n}\n";
    std::fs::write(&path, text).unwrap();
    let model = path.to_str().unwrap();
    for verb in ["run", "place"] {
        let flags = [
            "--devices",
            "cpu:2",
            "--fallback",
            "allow",
            "--log-device-placement",
        ];
        let (code, _, err) = run(&[&[verb, model], flags.as_slice()].concat());
        assert_eq!(code, 0, "{err}");
        for op in ["/a: (neg)", "/b: (exp)"] {
            assert_eq!(
                err.lines().filter(|l| l.starts_with(op)).count(),
                1,
                "{verb}: {err}"
            );
        }
        let full = |l: &&str| {
            l.contains(": (") && l.contains("): /job:localhost/replica:0/task:0/device:CPU:")
        };
        assert_eq!(err.lines().filter(full).count(), 2, "{verb}: {err}");
        assert!(
            err.contains("'/a' is placed on [/device:CPU:0, /device:CPU:1] instead: "),
            "{verb}: {err}"
        );
    }
    let (code, _, err) = run(&["run", model, "--devices", "cpu:2"]);
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains(
            "Cannot colocate nodes '/a' and '/b': Cannot merge devices with incompatible types"
        ),
        "{err}"
    );
    assert!(
        err.contains(
            "chain: '/a' (asked for /device:GPU:1) -- loc:@/a -- '/b' (asked for /device:CPU:1)"
        ),
        "{err}"
    );
}

/// Two GPUs that this machine need not have.
const TARGET: &str = r#"
format = "gristmill/profile/1"
name = "two GPUs"
[[device]]
kind = "gpu"
count = 2
memory_bytes_per_second = 3e12
cache_bytes = 50_000_000
cache_bytes_per_second = 5e12
launch_ns = 3_000
flops_per_second = { f32 = 6e13 }
[[link]]
from = "any"
to = "any"
latency_ns = 8_000
bytes_per_second = 5e10
"#;

#[test]
fn absent_machines_are_planned_for_but_do_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("gpus.toml");
    std::fs::write(&target, TARGET).unwrap();
    let target = target.to_str().unwrap();
    let model = data("digits/model.onnx");
    let (code, out, err) = run(&["place", &model, "--set", "batch=2", "--target", target]);
    assert!(code == 0 && out.contains("/device:GPU:0"), "{out}{err}");
    let absent = [
        "run",
        &model,
        "--set",
        "batch=2",
        "--target",
        target,
        "--visible-gpus",
        "1000,1001",
    ];
    let (code, _, err) = run(&absent);
    assert!(
        code == 3 && err.contains("nodes on a GPU: /device:GPU:0 is not there"),
        "{code}: {err}"
    );
    std::fs::write(target, TARGET.replace("launch_ns", "launch_us")).unwrap();
    let (code, _, err) = run(&["place", &model, "--set", "batch=2", "--target", target]);
    assert!(
        code == 2 && err.contains("gpus.toml: line 10: unknown field `launch_us`"),
        "{code}: {err}"
    );
}

#[test]
fn times_are_kept_and_broken_files_ignored() {
    let cache = tempfile::tempdir().unwrap();
    let model = data("digits/model.onnx");
    let bench = [
        "bench",
        &model,
        "--set",
        "batch=2",
        "--iters",
        "1",
        "--devices",
        "cpu:2",
        "--profile",
    ];
    let times = cache.path().join("times.json");
    for _ in 0..2 {
        let ended = gristmill_with_cache(Path::new("."), cache.path(), &bench);
        assert!(
            ended.code == Some(0) && ended.stderr.contains("16 runs each"),
            "{}",
            ended.stderr
        );
        assert!(!ended.stderr.contains("warning"), "{}", ended.stderr);
    }
    let text = std::fs::read_to_string(&times).unwrap();
    assert!(
        text.contains("\"count\":32"),
        "the second bench adds to the first"
    );
    let rates = cache.path().join("cpu.toml");
    std::fs::write(&times, &text[..text.len() / 2]).unwrap();
    std::fs::write(&rates, TARGET).unwrap();
    let ended = gristmill_with_cache(
        Path::new("."),
        cache.path(),
        &["run", &model, "--set", "batch=2"],
    );
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for file in [times, rates] {
        assert!(
            ended
                .stderr
                .contains(&format!("warning: {}: ", file.display())),
            "{}",
            ended.stderr
        );
    }
    let ended = gristmill_with_cache(Path::new("."), cache.path(), &["devices"]);
    assert!(
        ended.code == Some(0)
            && ended
                .stdout
                .contains("assumed; `gristmill calibrate` measures"),
        "{}",
        ended.stdout
    );
}

/// Two CPUs that are thought to be far too fast for a second one to pay, joined by a link that is as fast.
const FAST_CPUS: &str = r#"
format = "gristmill/profile/1"
name = "two fast CPUs"
[[device]]
kind = "cpu"
count = 2
memory_bytes_per_second = 1e18
cache_bytes = 50_000_000
cache_bytes_per_second = 1e18
launch_ns = 0
flops_per_second = { f32 = 1e18 }
[[link]]
from = "any"
to = "any"
latency_ns = 1_000
bytes_per_second = 1e12
"#;

/// Two chains of products that meet in the end: one for each of two devices.
fn chains() -> String {
    let product = |id: usize, a: usize, b: usize, path: &str| {
        format!("%{id}: f32[512, 512] = matmul(%{a}, %{b}) @ \"{path}\"\n")
    };
    let inputs = (0..3).map(|i| format!("%{i} = input \"i{i}\": f32[512, 512]\n"));
    let chain = |side: usize| {
        let at = move |k: usize| 3 + 4 * side + k;
        (0..4).map(move |k| {
            product(
                at(k),
                if k == 0 { 0 } else { at(k - 1) },
                1 + side,
                &format!("/{side}/{k}"),
            )
        })
    };
    let lines: String = inputs.chain(chain(0)).chain(chain(1)).collect();
    format!(
        "graph \"chains\" {{\n{lines}{}output \"y\" %11\n}}\n",
        product(11, 6, 10, "/end")
    )
}

#[test]
fn place_says_what_one_device_with_all_threads_takes() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chains.ir"), chains()).unwrap();
    let place = |flags: &[&str]| {
        let ended = gristmill(dir.path(), &[&["place", "chains.ir"], flags].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout
    };
    let text = place(&["--devices", "cpu:2", "--threads", "2"]);
    assert!(
        text.contains("  one CPU device with all threads: "),
        "{text}"
    );
    let json = |flags: &[&str]| -> serde_json::Value {
        serde_json::from_str(&place(&[&["--json", "--threads", "2"], flags].concat())).unwrap()
    };
    let one = json(&["--devices", "cpu:1"]);
    assert_eq!(one["one_device_ns"], serde_json::Value::Null);
    let two = json(&["--devices", "cpu:2"]);
    assert_eq!(two["one_device_ns"], one["makespan_ns"]);
}

#[test]
fn placements_that_pay_by_measured_times_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    std::fs::write(dir.path().join("chains.ir"), chains()).unwrap();
    std::fs::write(dir.path().join("cpus.toml"), FAST_CPUS).unwrap();
    let go = |verb: &str, more: &[&str]| {
        let args = [
            &[verb, "chains.ir", "--target", "cpus.toml", "--threads", "2"],
            more,
        ]
        .concat();
        let ended = gristmill_with_cache(dir.path(), &cache, &args);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended
    };
    let placed = |flags: &[&str]| {
        let answer = go("place", &[&["--json"], flags].concat()).stdout;
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        let nodes = answer["nodes"].as_array().unwrap();
        let devices: Vec<String> = nodes.iter().map(|n| n["device"].to_string()).collect();
        (answer["algorithm"].as_str().unwrap().to_owned(), devices)
    };
    let n_used = |devices: &[String]| {
        devices
            .iter()
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    };
    let bench =
        |flags: &[&str]| go("bench", &[&["--iters", "1", "--profile"], flags].concat()).stderr;
    let kept = || -> Vec<std::path::PathBuf> {
        std::fs::read_dir(cache.join("placements"))
            .unwrap()
            .map(|f| f.unwrap().path())
            .collect()
    };
    assert_eq!(n_used(&placed(&[]).1), 1);
    let said = bench(&[]);
    assert!(
        said.contains("adopted from the next process on")
            && said.contains("the placement is kept in "),
        "{said}"
    );
    let adopted = placed(&[]);
    assert_eq!(
        (adopted.0.as_str(), n_used(&adopted.1)),
        ("kept placement", 2)
    );
    let [file] = &kept()[..] else {
        panic!("{:?}", kept())
    };
    let text = std::fs::read_to_string(file).unwrap();
    // From then on nothing changes: not when it is used, and not when it is measured again.
    go("run", &[]);
    assert_eq!(std::fs::read_to_string(file).unwrap(), text);
    let said = bench(&[]);
    assert!(
        !said.contains("adopted from") && said.contains("the placement is kept in "),
        "{said}"
    );
    assert_eq!(placed(&[]), adopted);
    // Other options are another problem, decided by itself; the same times go with both.
    let pin = ["--pin", "^/=cpu:0"];
    assert!(placed(&pin).0 != "kept placement" && bench(&pin).contains(": nothing changes"));
    assert_eq!(
        (placed(&pin).0.as_str(), kept().len()),
        ("kept placement", 2)
    );
    // Those runs changed the times of this problem: what was decided by others does not count, until it is decided anew.
    assert_ne!(placed(&[]).0, "kept placement");
    bench(&[]);
    let decided = placed(&[]);
    assert_eq!(
        (decided.0.as_str(), n_used(&decided.1)),
        ("kept placement", 2)
    );
    // A plan goes before it.
    go("place", &["--plan-out", "my.plan"]);
    assert_eq!(
        placed(&["--plan", "my.plan"]),
        ("plan".to_owned(), decided.1)
    );
    // What is broken or of something else is named and ignored.
    let text = std::fs::read_to_string(file).unwrap();
    for broken in [
        &text[..text.len() / 2],
        "",
        &text.replace("/end", "/other"),
        &text.replace("# decided", "#"),
    ] {
        std::fs::write(file, broken).unwrap();
        let ended = go("place", &[]);
        assert!(
            ended
                .stderr
                .contains(&format!("warning: {}: ", file.display())),
            "{broken}: {}",
            ended.stderr
        );
        assert!(!ended.stdout.contains("kept placement"), "{}", ended.stdout);
    }
}

/// What `dump` gives with a CUDA compiler, without one, and without a disassembler.
#[test]
fn gpu_stages_are_compiled_or_say_what_is_missing() {
    let model = data("digits/model.onnx");
    let dump = |stage: &str, variables: &[(&str, &Path)]| {
        let args = [
            "dump",
            &model,
            "--stage",
            stage,
            "--set",
            "batch=2",
            "--gpu-arch",
            "sm_90a",
        ];
        let ended = gristmill_with(Path::new("."), variables, &args);
        (ended.code, ended.stdout, ended.stderr)
    };
    let none = Path::new("");
    let (code, out, err) = dump("cuda", &[("GRISTMILL_NVRTC", none)]);
    assert_eq!(code, Some(0), "CUDA text needs no compiler: {err}");
    assert!(
        out.starts_with("// for sm_90a\n") && out.contains("extern \"C\" __global__"),
        "{out}"
    );
    let (code, _, err) = dump("ptx", &[("GRISTMILL_NVRTC", none)]);
    assert_eq!(code, Some(3), "{err}");
    assert!(
        err.contains("NVRTC") && err.contains("$GRISTMILL_NVRTC is empty"),
        "{err}"
    );
    if gristmill::testing::nvrtc_or_left_out("PTX and machine code through the command line")
        .is_none()
    {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let cached = ("GRISTMILL_CACHE_DIR", cache.path());
    let (code, out, err) = dump("ptx", &[cached]);
    assert_eq!(code, Some(0), "{err}");
    assert!(
        out.contains(".target sm_90a") && out.contains(".entry gm_map("),
        "{out}"
    );
    let again = dump("ptx", &[cached]).1;
    assert!(
        again == out
            && std::fs::read_dir(cache.path().join("cuda"))
                .unwrap()
                .count()
                > 0,
        "kept, and the same"
    );
    let (code, _, err) = dump(
        "sass",
        &[
            cached,
            ("GRISTMILL_NVDISASM", Path::new("no/such/nvdisasm")),
        ],
    );
    assert!(
        code == Some(3) && err.contains("no/such/nvdisasm: no such file"),
        "{err}"
    );
    let (code, out, err) = dump("sass", &[cached]);
    match code {
        Some(0) => assert!(out.contains("STG") && out.contains("EXIT"), "{out}"),
        _ if std::env::var_os("GRISTMILL_NVDISASM").is_some() => panic!("{err}"),
        _ => eprintln!("left out: disassembly through the command line: {err}"),
    }
}

#[test]
fn devices_say_which_cuda_compiler_there_is() {
    let none = [("GRISTMILL_NVRTC", Path::new(""))];
    let ended = gristmill_with(Path::new("."), &none, &["devices"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stdout.contains("CUDA compiler  none: NVRTC"),
        "{}",
        ended.stdout
    );
    if gristmill::testing::nvrtc_or_left_out("`devices` with a CUDA compiler").is_some() {
        let (code, out, err) = run(&["devices"]);
        assert_eq!(code, 0, "{err}");
        assert!(
            out.contains("CUDA compiler  NVRTC 1") && out.contains("sm_90"),
            "{out}"
        );
    }
}

#[test]
fn flags_of_bare_problems_are_refused_beside_a_model() {
    for flags in [
        ["--topology", "t.json"],
        ["--algorithm", "heft"],
        ["--effort", "300"],
    ] {
        let model = data("digits/model.onnx");
        let args = ["place", &model, "--set", "batch=1"];
        let (code, _, err) = run(&[&args[..], &flags].concat());
        assert_eq!(code, 2, "{flags:?}");
        assert!(
            err.contains(&format!("{} is for bare problems", flags[0])),
            "{err}"
        );
    }
}
