//! NVRTC itself, where it is there, and the cache, which needs none.

use super::*;
use crate::testing::nvrtc_or_left_out;
use std::process::Command;

const COPY: &str = r#"extern "C" __global__ void __launch_bounds__(256) gm_copy(float* out, const float* in, int n) {
    __shared__ float tile[256];
    int i = blockIdx.x * 256 + threadIdx.x;
    tile[threadIdx.x] = i < n ? in[i] : 0.0f;
    __syncthreads();
    if (i < n) out[i] = tile[255 - threadIdx.x];
}
"#;

fn unit(source: &str, arch: &str) -> Unit {
    Unit {
        source: source.to_owned(),
        name: "copy.cu".to_owned(),
        arch: Arch::parse(arch).unwrap(),
    }
}

fn compiled(n: u8) -> Compiled {
    let log = "ptxas info    : Compiling entry function 'k' for 'sm_80'\nptxas info    : Used 9 registers\n".to_owned();
    let resources = resources::parse(&log);
    Compiled {
        ptx: format!("// {n}\n"),
        cubin: vec![n; 3000 + usize::from(n)],
        log,
        resources,
        compile_ns: 7,
    }
}

#[test]
fn absence_names_every_place() {
    let nowhere = |name: &str| (name == "GRISTMILL_NVRTC").then(|| "absent/libnvrtc.so".into());
    let e = Nvrtc::open(&nowhere, None).err().expect("it is absent");
    assert_eq!(e.kind(), crate::ErrorKind::Unsupported);
    insta::assert_snapshot!(e.to_string(), @r"
    NVRTC, the run-time compiler of CUDA, was not found; looked in:
      $GRISTMILL_NVRTC: absent/libnvrtc.so: no such file (try: pip install nvidia-cuda-nvrtc, or GRISTMILL_NVRTC with the path of libnvrtc.so)
    ");
}

#[test]
fn ptx_cubin_and_resources_for_every_architecture() {
    let Some(nvrtc) = nvrtc_or_left_out("compiling for every architecture") else {
        return;
    };
    assert!(
        nvrtc.version().0 >= 12 && nvrtc.archs().contains(&90),
        "{:?}",
        nvrtc.archs()
    );
    for arch in [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a",
    ] {
        let made = nvrtc.compile(&unit(COPY, arch)).unwrap();
        assert!(
            made.ptx.contains(&format!(".target {arch}")) && made.ptx.contains(".entry gm_copy("),
            "{}",
            made.ptx
        );
        assert_eq!(made.cubin[..4], *b"\x7fELF");
        let r = made.resources["gm_copy"];
        assert!(
            r.registers > 0
                && r.shared_bytes >= 1024
                && r.stack_bytes == 0
                && r.spill_store_bytes == 0,
            "{r:?}"
        );
    }
}

#[test]
fn errors_show_the_line() {
    let Some(nvrtc) = nvrtc_or_left_out("errors of sources that do not compile") else {
        return;
    };
    let source = COPY.replace("in[i] : 0.0f", "inn[i] : 0.0f");
    let e = nvrtc
        .compile(&unit(&source, "sm_80"))
        .unwrap_err()
        .to_string();
    assert!(
        e.starts_with("copy.cu does not compile for sm_80: NVRTC_ERROR_COMPILATION"),
        "{e}"
    );
    assert!(
        e.contains("copy.cu(4): error: identifier \"inn\" is undefined"),
        "{e}"
    );
    assert!(
        e.contains("tile[threadIdx.x] = i < n ? inn[i] : 0.0f;"),
        "{e}"
    );
    let old = Unit {
        arch: Arch::new(30, None),
        ..unit(COPY, "sm_80")
    };
    let e = nvrtc.compile(&old).unwrap_err();
    assert_eq!(e.kind(), crate::ErrorKind::Unsupported);
    assert!(
        e.to_string()
            .contains("does not compile for sm_30, only for 75, 80"),
        "{e}"
    );
}

#[test]
fn builds_come_in_order_and_again_from_the_cache() {
    let Some(nvrtc) = nvrtc_or_left_out("parallel builds through the cache") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut units: Vec<Unit> = (0..5)
        .map(|i| unit(&COPY.replace("gm_copy", &format!("gm_copy_{i}")), "sm_80"))
        .collect();
    units.push(units[1].clone());
    let build = |units: &[Unit]| -> Vec<Compiled> {
        let cache = Cache::new(folder.path().to_path_buf());
        let made = super::build(nvrtc, Some(&cache), units)
            .into_iter()
            .collect::<Result<_>>()
            .unwrap();
        assert_eq!(cache.take_warnings(), Vec::<String>::new());
        made
    };
    let first = build(&units);
    for (i, made) in first[..5].iter().enumerate() {
        assert!(
            made.resources.contains_key(&format!("gm_copy_{i}")),
            "{:?}",
            made.resources
        );
    }
    assert_eq!(first[5], first[1]);
    // The time of the first compilation is kept, so equality shows that nothing was compiled again.
    assert_eq!(build(&units), first);
}

#[test]
fn what_decides_the_code_decides_the_key() {
    let base = unit(COPY, "sm_80");
    let key = |u: &Unit, options: &[&str], build: &str| {
        cache::key(
            u,
            &options.iter().map(|o| o.to_string()).collect::<Vec<_>>(),
            build,
        )
    };
    let k = key(&base, &["-a", "-b"], "13.0");
    assert_eq!(k.len(), 64);
    assert_eq!(k, key(&base, &["-b", "-a"], "13.0"));
    let others = [
        key(&base, &["-a"], "13.0"),
        key(&base, &["-a", "-b"], "13.1"),
        key(&unit(COPY, "sm_90a"), &["-a", "-b"], "13.0"),
        key(
            &unit(&COPY.replace("255", "254"), "sm_80"),
            &["-a", "-b"],
            "13.0",
        ),
        key(
            &Unit {
                name: "other.cu".into(),
                ..base.clone()
            },
            &["-a", "-b"],
            "13.0",
        ),
    ];
    assert!(others.iter().all(|o| *o != k));
}

/// Entries that are on disk stay valid: examples of FIPS 180-4.
#[test]
fn digests_on_disk_do_not_change() {
    for (message, digest) in [
        (
            "",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        ),
        (
            "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
        ),
    ] {
        assert_eq!(cache::sha256(message.as_bytes()), digest, "{message}");
    }
}

#[test]
fn damaged_entries_are_warned_of_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path().to_path_buf());
    let key = "ab".repeat(32);
    assert_eq!(cache.get(&key), None);
    cache.put(&key, &compiled(1));
    assert_eq!(cache.get(&key), Some(compiled(1)));
    assert_eq!(cache.take_warnings(), Vec::<String>::new());
    let whole = std::fs::read(cache.path(&key)).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let other = String::from_utf8_lossy(&whole)
        .replacen("abab", "acab", 1)
        .into_bytes();
    for (damaged, why) in [
        (
            whole[..whole.len() - 1].to_vec(),
            "do not match its checksum",
        ),
        (flipped, "do not match its checksum"),
        (b"text".to_vec(), "it has no head"),
        (b"{}\n".to_vec(), "its head"),
        (Vec::new(), "it has no head"),
        (other, "are another entry's"),
    ] {
        std::fs::write(cache.path(&key), damaged).unwrap();
        assert_eq!(cache.get(&key), None);
        let warnings = cache.take_warnings();
        assert!(
            warnings.len() == 1 && warnings[0].contains(why),
            "{why}: {warnings:?}"
        );
        cache.put(&key, &compiled(2));
        assert_eq!(cache.get(&key), Some(compiled(2)));
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let cache = Cache::new(file);
    cache.put(&"cd".repeat(32), &compiled(1));
    let warnings = cache.take_warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("compiled kernels are not kept"),
        "{warnings:?}"
    );
}

#[test]
fn the_oldest_entries_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path().to_path_buf());
    let key = |i: u8| format!("{i:02x}").repeat(32);
    for i in 0..6 {
        cache.put(&key(i), &compiled(i));
        let at = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000 + u64::from(i));
        std::fs::File::open(cache.path(&key(i)))
            .unwrap()
            .set_modified(at)
            .unwrap();
    }
    // Used again, so no longer among the oldest.
    assert!(cache.get(&key(0)).is_some());
    let size = std::fs::metadata(cache.path(&key(0))).unwrap().len();
    cache.shrink(7 * size, 0);
    assert!(
        (0..6).all(|i| cache.path(&key(i)).exists()),
        "below the limit nothing goes"
    );
    cache.shrink(3 * size, 3 * size + 20);
    let left: Vec<u8> = (0..6).filter(|&i| cache.path(&key(i)).exists()).collect();
    assert_eq!(left, [0, 4, 5]);
}

/// The part that other processes of `concurrent_processes_share_a_cache` play; on its own it does nothing.
#[test]
fn writer_and_reader() {
    let Some(folder) = std::env::var_os("GRISTMILL_TEST_SHARED_CACHE") else {
        return;
    };
    let cache = Cache::new(folder.into());
    for round in 0..60u8 {
        let n = round % 4;
        let key = format!("{n:02x}").repeat(32);
        if let Some(found) = cache.get(&key) {
            assert_eq!(found, compiled(n));
        }
        cache.put(&key, &compiled(n));
        assert_eq!(cache.get(&key), Some(compiled(n)));
    }
    assert_eq!(
        cache.take_warnings(),
        Vec::<String>::new(),
        "no process sees half an entry"
    );
}

#[test]
fn concurrent_processes_share_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "codegen::cuda::nvrtc::tests::writer_and_reader"])
            .env("GRISTMILL_TEST_SHARED_CACHE", folder.path())
            .output()
            .unwrap()
    };
    std::thread::scope(|s| {
        let running: Vec<_> = (0..4).map(|_| s.spawn(start)).collect();
        for process in running {
            let output = process.join().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{text}"
            );
        }
    });
    let cache = Cache::new(folder.path().to_path_buf());
    assert!((0..4u8).all(|n| cache.get(&format!("{n:02x}").repeat(32)) == Some(compiled(n))));
    let left_over: Vec<_> = (std::fs::read_dir(folder.path()).unwrap().flatten())
        .flat_map(|d| std::fs::read_dir(d.path()).unwrap().flatten())
        .filter(|e| e.file_name().to_string_lossy().ends_with(".new"))
        .collect();
    assert!(left_over.is_empty(), "{left_over:?}");
}
