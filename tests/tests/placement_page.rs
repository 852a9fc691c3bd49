//! `place --html`: pages are whole, and look right in a browser where there is one.
//!
//! `GRISTMILL_BROWSER` names a Chromium; otherwise one is looked for on the path. Screenshots at
//! three widths are left in the folder that the test prints.

use crate::process::gristmill;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of a page, and the arguments that make it.
const PAGES: [(&str, &[&str]); 4] = [
    (
        "bert",
        &[
            "tests/data/models/bert_dynamo/model.onnx",
            "--devices",
            "cpu:2",
        ],
    ),
    (
        "densenet",
        &[
            "--task-graph",
            "tests/data/placement/pipedream/densenet121.fwd.json",
            "--topology",
            TOPOLOGY,
        ],
    ),
    (
        "pipeline",
        &[
            "--task-graph",
            "tests/data/placement/pipedream/vgg16.fwd.json",
            "--topology",
            TOPOLOGY,
            "--objective",
            "throughput",
        ],
    ),
    (
        "stream",
        &[
            "tests/data/digits/model.onnx",
            "--set",
            "batch=64",
            "--devices",
            "cpu:2",
            "--objective",
            "throughput",
        ],
    ),
];

const TOPOLOGY: &str = "topology.json";
const WIDTHS: [u32; 3] = [1400, 1200, 420];
const HEIGHT: u32 = 1600;

const TWO_GPUS: &str = r#"{ "format": "topology/1",
  "devices": [
    { "name": "/gpu:0", "kind": "gpu", "memory_bytes": 16000000000 },
    { "name": "/gpu:1", "kind": "gpu", "memory_bytes": 16000000000 } ],
  "default_link": { "latency_ns": 10000, "bytes_per_second": 12000000000 } }"#;

/// Writes the pages into `folder`, and gives their texts.
fn pages(folder: &Path) -> Vec<String> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let topology = folder.join(TOPOLOGY);
    fs::write(&topology, TWO_GPUS).unwrap();
    let page = |(name, arguments): &(&str, &[&str])| {
        let path = folder.join(format!("{name}.html"));
        let absolute = |a: &&str| {
            if *a == TOPOLOGY {
                text(&topology)
            } else {
                (*a).to_owned()
            }
        };
        let mut all: Vec<String> = arguments.iter().map(absolute).collect();
        all.extend(["--html".to_owned(), text(&path)]);
        let mut arguments = vec!["place"];
        arguments.extend(all.iter().map(String::as_str));
        let ended = gristmill(root, &arguments);
        assert_eq!(ended.code, Some(0), "{name}: {}", ended.stderr);
        fs::read_to_string(path).unwrap()
    };
    PAGES.iter().map(page).collect()
}

fn text(path: &Path) -> String {
    path.to_str().expect("the path is text").to_owned()
}

#[test]
fn pages_have_their_parts() {
    let folder = tempfile::tempdir().unwrap();
    let pages = pages(folder.path());
    let titles = [
        "model.onnx: main_graph",
        "densenet121.fwd.json",
        "vgg16.fwd.json",
        "model.onnx",
    ];
    for (page, title) in pages.iter().zip(titles) {
        assert!(page.contains(&format!("<title>{title}")), "{title}");
        for part in [
            "<canvas",
            "data-colour=\"0\"",
            "<h2>Devices</h2>",
            "<h2>Nodes</h2>",
            "id=\"n0\"",
        ] {
            assert!(page.contains(part), "{title}: no {part}");
        }
        assert!(page.contains("\"memory\":{"), "{title}");
    }
    let headers = [
        "<dt>model</dt><dd>tests/data/models/bert_dynamo/model.onnx</dd>",
        "<dt>topology</dt><dd>",
        "<dt>devices</dt><dd>/gpu:0, /gpu:1</dd>",
        "<dt>dims</dt><dd>batch=64</dd>",
    ];
    for (page, header) in pages.iter().zip(headers) {
        assert!(page.contains(header), "{header}");
        assert!(page.contains("<dt>command</dt><dd>gristmill place "));
    }
    let digits = &pages[3];
    assert!(digits.contains("<dt>inputs</dt><dd>image: f32[64, 1, 8, 8]</dd>"));
    assert!(digits.contains("<p>Merges 2 nodes of the model: node_div, node_sub_1</p>"));
    for stream in &pages[2..] {
        assert!(stream.contains("<h2>Stages</h2>") && stream.contains("<dt>period</dt>"));
        assert!(
            stream.contains("\"period\":["),
            "a period of the steady state is drawn"
        );
    }
}

/// A browser of the Chromium family, if one is there.
fn browser() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("GRISTMILL_BROWSER") {
        return Some(PathBuf::from(named));
    }
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome"];
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let candidates = names
        .iter()
        .flat_map(|name| folders.iter().map(move |f| f.join(name)));
    candidates.into_iter().find(|file| file.is_file())
}

/// Runs the browser on a page of `folder`; gives its standard output and standard error.
fn browse(browser: &Path, folder: &Path, page: &str, flags: &[&str]) -> (String, String) {
    let ran = Command::new(browser)
        .args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        .args(["--enable-logging=stderr", "--allow-file-access-from-files"])
        .args(["--virtual-time-budget=4000", "--timeout=60000"])
        .arg(format!("--user-data-dir={}", text(&folder.join("profile"))))
        .args(flags)
        .arg(format!("file://{}", text(&folder.join(page))))
        .output()
        .expect("the browser starts");
    let words = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (words(ran.stdout), words(ran.stderr))
}

/// A page of frames, one per width: a window cannot be as narrow as a phone.
fn frames(page: &str) -> String {
    let frame = |width: u32| {
        format!("<iframe src=\"{page}.html#n0\" width=\"{width}\" height=\"{HEIGHT}\"></iframe>")
    };
    let frames: String = WIDTHS.into_iter().map(frame).collect();
    format!(
        "<body style=\"margin:0;white-space:nowrap\">{frames}<pre id=\"report\"></pre>{REPORT}</body>"
    )
}

/// Of each frame: its width, that of its contents, and the explanation that `#n0` opens.
const REPORT: &str = "<script>addEventListener('load', () => setTimeout(() => {
  const lines = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const name = page.querySelector('#n0 b').textContent;
    const isShown = page.querySelector('#detail').textContent.includes(name);
    return ['measured', root.clientWidth, root.scrollWidth, isShown].join(' ');
  });
  document.getElementById('report').textContent = lines.join('\\n');
}, 500))</script>";

#[test]
fn pages_look_right_in_a_browser() {
    let Some(browser) = browser() else {
        println!("left out: no browser; GRISTMILL_BROWSER names one");
        return;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("placement-pages");
    fs::create_dir_all(&folder).unwrap();
    pages(&folder);
    for (name, _) in PAGES {
        fs::write(folder.join(format!("{name}-frames.html")), frames(name)).unwrap();
        check_in_browser(&browser, &folder, name);
    }
    println!("screenshots are in {}", folder.display());
}

fn check_in_browser(browser: &Path, folder: &Path, name: &str) {
    let page = format!("{name}-frames.html");
    let (dom, log) = browse(browser, folder, &page, &["--dump-dom"]);
    assert!(!log.contains("Uncaught"), "{name}: {log}");
    let report: Vec<&str> = dom.lines().filter(|l| l.contains("measured ")).collect();
    assert_eq!(report.len(), WIDTHS.len(), "{name}: {dom}\n{log}");
    for (line, width) in report.iter().zip(WIDTHS) {
        let expected = format!("measured {width} {width} true");
        assert!(
            line.contains(&expected),
            "{name}: {line:?}, expected {expected:?}"
        );
    }
    let picture = folder.join(format!("{name}.png"));
    let total: u32 = WIDTHS.iter().sum::<u32>() + 20;
    let (shot, window) = (
        format!("--screenshot={}", text(&picture)),
        format!("--window-size={total},{HEIGHT}"),
    );
    let (_, log) = browse(browser, folder, &page, &[&shot, &window]);
    let bytes = fs::read(&picture).unwrap_or_else(|e| panic!("{name}: {e}\n{log}"));
    assert!(bytes.starts_with(b"\x89PNG"));
    // Blank paper of this size takes some 20 KB.
    assert!(bytes.len() > 100_000, "{name}: {} bytes", bytes.len());
}
