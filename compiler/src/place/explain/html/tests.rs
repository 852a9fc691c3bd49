//! The page is whole, safe, and says of every bar the same as the timeline.

use super::page;
use crate::cost::Nanos;
use crate::place::explain::tests::branches;
use crate::place::explain::{Explanation, Label, Subject, explain};
use crate::place::{Objective, Stream};
use serde_json::Value;

/// A subject with another name of the graph, names of tasks and stream.
fn changed<'a>(s: &Subject<'a>, name: &'a str, stream: Option<Stream>) -> Subject<'a> {
    let label = |t: &Label| Label {
        name: format!("{name}{}", t.name),
        ..t.clone()
    };
    Subject {
        name,
        stream,
        problem: s.problem,
        base: s.base,
        freedom: s.freedom,
        copies: s.copies,
        solution: s.solution,
        objective: match stream {
            Some(stream) => Objective::Throughput {
                samples: stream.samples,
            },
            None => s.objective,
        },
        devices: s.devices.clone(),
        tasks: s.tasks.iter().map(label).collect(),
        sources: s.sources,
        downgrades: s.downgrades.clone(),
        options: s.options.clone(),
    }
}

/// The page, and the data of its drawing.
fn drawn(s: &Subject) -> (String, Value, Explanation) {
    let e = explain(s);
    let page = page(s, &e, "graph.json", &[("dims", "n=<1>".to_owned())]);
    let (_, rest) = page.split_once("id=\"data\">").unwrap();
    let data = serde_json::from_str(rest.split("</script>").next().unwrap()).unwrap();
    (page, data, e)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn pages_need_nothing_else() {
    let (page, ..) = branches(drawn);
    for outside in ["http", "src=", "url(", "@import", "<link"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("<title>graph.json: two &lt;branches&gt;</title>"));
    assert!(page.contains("<dt>dims</dt><dd>n=&lt;1&gt;</dd>"));
}

#[test]
fn names_are_no_markup() {
    let hostile = "</script><img onerror=alert(1)>'\"&\u{202e}";
    let (page, data, _) = branches(|s| drawn(&changed(s, hostile, None)));
    assert_eq!(page.matches("</script").count(), 2);
    assert!(!page.contains("<img"));
    assert!(!page.contains('\u{202e}'), "hidden characters are escaped");
    let name = data["names"][1].as_str().unwrap();
    assert!(
        name.starts_with("</script><img onerror=alert(1)>'\"&"),
        "{name}"
    );
}

#[test]
fn links_lead_to_nodes() {
    let (page, data, e) = branches(drawn);
    let text = page.split("<script").next().unwrap();
    let targets = text.split("href=\"#").skip(1);
    let ids: Vec<&str> = targets.map(|t| t.split('"').next().unwrap()).collect();
    assert!(ids.len() >= e.critical_chain.len(), "{ids:?}");
    let tasks = data["bars"]
        .as_array()
        .unwrap()
        .iter()
        .map(|bar| number(&bar["task"]));
    let ids = ids
        .into_iter()
        .map(str::to_owned)
        .chain(tasks.map(|t| format!("n{t}")));
    for id in ids {
        assert_eq!(
            text.matches(&format!("<details id=\"{id}\">")).count(),
            1,
            "{id}"
        );
    }
}

#[test]
fn bars_are_those_of_the_timeline() {
    branches(|s| {
        let (_, data, e) = drawn(s);
        let (t, bars) = (&s.solution.timeline, data["bars"].as_array().unwrap());
        let times = |bar: &Value| (number(&bar["start"]), number(&bar["end"]));
        let tasks: Vec<_> = t
            .start
            .iter()
            .zip(&t.end)
            .map(|(a, b)| (a.0, b.0))
            .collect();
        let transfers: Vec<_> = t.transfers.iter().map(|x| (x.start.0, x.end.0)).collect();
        let drawn: Vec<_> = bars.iter().map(times).collect();
        assert_eq!(drawn, [tasks, transfers].concat());
        let steps = data["path"].as_array().unwrap().iter();
        let path: Vec<_> = steps.map(|i| times(&bars[number(i) as usize])).collect();
        let chain = e.critical_chain.iter().map(|c| (c.start_ns, c.end_ns));
        assert_eq!(path, chain.collect::<Vec<_>>());
        for (bar, x) in bars[t.start.len()..].iter().zip(&t.transfers) {
            let ends = &data["rows"][number(&bar["row"]) as usize]["ends"];
            assert_eq!(
                (number(&ends[0]), number(&ends[1])),
                (x.from.into(), x.to.into())
            );
        }
    });
}

#[test]
fn memory_has_the_peaks_of_the_explanation() {
    let (_, data, e) = branches(drawn);
    for (row, device) in data["rows"].as_array().unwrap().iter().zip(&e.devices) {
        let memory = &row["memory"];
        assert_eq!(number(&memory["peak"]), device.peak_bytes, "{row}");
        assert_eq!(memory["limit"].as_u64(), device.limit_bytes);
        let levels = memory["levels"].as_array().unwrap();
        let at_peak = levels.iter().find(|l| number(&l[1]) == device.peak_bytes);
        assert_eq!(number(&at_peak.unwrap()[0]), device.peak_at_ns);
        assert!(
            levels
                .windows(2)
                .all(|w| number(&w[0][0]) < number(&w[1][0]))
        );
    }
}

#[test]
fn streams_repeat_a_run_until_one_period_is_full() {
    let period = Nanos(11_000);
    branches(|s| {
        let stream = Stream {
            samples: 16,
            period,
            latency: s.solution.timeline.makespan,
            in_flight: 2,
            lower_bound: period,
        };
        let (page, data, _) = drawn(&changed(s, "", Some(stream)));
        assert!(page.contains("<title>graph.json</title>"));
        let bars = data["bars"].as_array().unwrap();
        let n = s.tasks.len() + s.solution.timeline.transfers.len();
        assert_eq!(bars.len(), 4 * n, "two runs until it is full, and two more");
        for (bar, next) in bars.iter().zip(&bars[n..]) {
            assert_eq!(number(&bar["start"]) + period.0, number(&next["start"]));
        }
        assert_eq!(number(&data["end"]), 4 * period.0);
        assert_eq!(data["period"], serde_json::json!([22_000, 33_000]));
        assert_eq!(
            data["colours"],
            serde_json::json!(["run 1", "run 2", "run 3", "run 4"])
        );
    });
}
