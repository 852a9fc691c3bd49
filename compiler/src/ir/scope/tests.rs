//! Scopes: which device, groups and order a node gets.

use super::*;
use crate::ir::{Dim, Graph, ScalarOp};
use gristmill_runtime::{DType, Tensor};

struct Sample {
    b: GraphBuilder,
    x: ValueId,
}

fn sample() -> Sample {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [Dim::from(2)]);
    Sample { b, x }
}

impl Sample {
    fn exp(&mut self) -> Result<ValueId> {
        self.b.map(ScalarOp::Exp, &[self.x])
    }
}

fn exp(b: &mut GraphBuilder) -> Result<ValueId> {
    b.map(ScalarOp::Exp, &[ValueId::new(0)])
}

/// The request of the last node.
fn last(b: &GraphBuilder) -> DeviceRequest {
    let (_, node) = b.graph().nodes().next_back().unwrap();
    node.device.as_deref().cloned().unwrap_or_default()
}

fn spec(b: &GraphBuilder) -> String {
    last(b).spec.to_string()
}

#[test]
fn inner_scopes_win_field_by_field() {
    for (outer, inner, expected) in [
        ("/job:foo", "/device:gpu:1", "/job:foo/device:GPU:1"),
        (
            "/job:worker/gpu:0",
            "/task:1",
            "/job:worker/task:1/device:GPU:0",
        ),
        ("/gpu:0", "/cpu:*", "/device:CPU:0"),
        ("", "/cpu:1", "/device:CPU:1"),
    ] {
        let mut s = sample();
        s.b.with_device(outer, |b| b.with_device(inner, exp))
            .unwrap();
        assert_eq!(spec(&s.b), expected, "{outer:?} around {inner:?}");
        s.exp().unwrap();
        assert_eq!(spec(&s.b), "", "scopes end");
    }
}

#[test]
fn functions_replace_and_clear_stops() {
    let mut s = sample();
    let function = |seen: &'static str, gives: &'static str| {
        DeviceScope::function(move |node| {
            assert_eq!(
                (node.device.to_string().as_str(), node.op.name()),
                (seen, "exp")
            );
            assert_eq!(node.results.len(), 1);
            Ok(DeviceSpec::parse(gives)?)
        })
    };
    // The function sees the requests inside it, and its result replaces them; outer scopes fill the open fields.
    s.b.with_device("/job:a/task:3", |b| {
        b.with_device(function("/task:1/device:GPU:0", "/device:CPU:*"), |b| {
            b.with_device("/task:1/gpu:0", exp)
        })
    })
    .unwrap();
    assert_eq!(spec(&s.b), "/job:a/task:3/device:CPU:*");
    s.b.with_device("/gpu:0", |b| {
        b.with_device(DeviceScope::Clear, |b| b.with_device("/task:1", exp))
    })
    .unwrap();
    assert_eq!(spec(&s.b), "/task:1");
    s.b.with_device("/gpu:0", |b| b.with_device(DeviceScope::Clear, exp))
        .unwrap();
    assert!(last(&s.b).is_open());
}

#[test]
fn requests_know_the_line_of_their_scopes() {
    let mut s = sample();
    let inner = |b: &mut GraphBuilder| b.with_device("/gpu:1", |b| b.with_device("/gpu:*", exp));
    let inner_line = line!() - 1;
    s.b.with_device("/job:a", inner).unwrap();
    let line = line!() - 1;
    let file = file!();
    let scope = |name: &str, line| format!("scope \"{name}\" at {file}:{line}");
    let wanted = [
        scope("/device:GPU:*", inner_line),
        scope("/device:GPU:1", inner_line),
        scope("/job:a", line),
    ]
    .join(", ");
    assert_eq!(last(&s.b).asked_by.as_str(), wanted);
    let text = s.b.finish().unwrap().to_string();
    assert!(
        text.contains(&format!("on \"/job:a/device:GPU:1\" by {wanted:?}")),
        "{text}"
    );
    assert_eq!(Graph::parse(&text).unwrap().to_string(), text);
}

#[test]
fn errors_name_the_scope() {
    let mut s = sample();
    let line = line!() + 1;
    let e = s.b.with_device("/tpu:0", exp).unwrap_err().to_string();
    assert_eq!(
        e,
        format!(
            "device scope at {}:{line}: Unknown attribute: 'tpu' in '/tpu:0'",
            file!()
        )
    );
    let full = DeviceScope::function(|_| Err(Error::invalid("no more room")));
    let line = line!() + 1;
    let e = s.b.with_device(full, exp).unwrap_err();
    assert!(
        e.to_string().contains(&format!(
            "device function at {}:{line}: no more room",
            file!()
        )),
        "{e}"
    );
    s.exp().unwrap();
    assert!(last(&s.b).is_open(), "a scope ends with an error too");
}

#[test]
fn scopes_close_in_order() {
    let mut s = sample();
    let outer = s.b.enter_device("/cpu:0").unwrap();
    let inner = s.b.enter_device("/cpu:1").unwrap();
    let e = s.b.exit_scope(outer).unwrap_err();
    assert_eq!(
        e.to_string(),
        "Exiting device scope without proper scope nesting"
    );
    s.b.exit_scope(inner).unwrap();
    assert!(s.b.exit_scope(inner).is_err());
    s.exp().unwrap();
    assert_eq!(spec(&s.b), "/device:CPU:0");
    s.b.exit_scope(outer).unwrap();
    let left_open = s.b.with_device("/cpu:0", |b| b.enter_device("/cpu:1"));
    assert_eq!(
        left_open.unwrap_err().to_string(),
        "Exiting device scope without proper scope nesting"
    );
}

#[test]
fn colocation_joins_two_nodes_and_resets_devices() {
    let mut s = sample();
    let a = s.b.with_device("/cpu:1", exp).unwrap();
    let x = s.x;
    s.b.with_device("/gpu:0", |b| {
        b.colocate_with(a, |b| b.with_device("/task:2", exp))
    })
    .unwrap();
    let own = last(&s.b);
    assert_eq!(
        own.spec.to_string(),
        "/task:2",
        "device scopes outside are ignored"
    );
    let of_a =
        s.b.graph()
            .nodes()
            .next()
            .unwrap()
            .1
            .device
            .clone()
            .unwrap();
    assert_eq!(
        (of_a.spec.to_string().as_str(), &of_a.groups),
        ("/device:CPU:1", &own.groups)
    );
    assert_eq!(own.groups.len(), 1);
    let by = own.groups.values().next().unwrap().as_str();
    assert!(
        by.starts_with("colocate_with at ") && by.contains("scope/tests.rs:"),
        "{by}"
    );
    // Nested: both groups; with ignore_existing only the inner one, or none.
    let b2 = s.exp().unwrap();
    s.b.colocate_with(a, |b| b.colocate_with(b2, exp)).unwrap();
    assert_eq!(last(&s.b).groups.len(), 2);
    for (value, n) in [(Some(b2), 1), (None, 0)] {
        s.b.colocate_with(a, |b| {
            let token = b.enter_colocation(value, true)?;
            exp(b)?;
            b.exit_scope(token)
        })
        .unwrap();
        assert_eq!(last(&s.b).groups.len(), n);
    }
    let c = s.b.constant(Tensor::scalar(1f32));
    let text = |e: Error| e.to_string().split(": ").last().unwrap().to_owned();
    assert_eq!(
        text(s.b.colocate_with(x, exp).unwrap_err()),
        "a graph input has no node to be with"
    );
    assert_eq!(
        text(s.b.colocate_with(c, exp).unwrap_err()),
        "a constant is on every device that uses it"
    );
    assert_eq!(
        text(s.b.colocate_with(ValueId::new(99), exp).unwrap_err()),
        "value 99 is not of graph \"g\", but of another builder's"
    );
    let e = s.b.enter_colocation(None, false).unwrap_err();
    assert_eq!(
        text(e),
        "trying to reset colocation (no value) but ignore_existing is not set"
    );
}

#[test]
fn control_dependencies_order_nodes() {
    let mut s = sample();
    let (a, b2) = (s.exp().unwrap(), s.exp().unwrap());
    let c = s.b.scalar(DType::F32, 1.0);
    let x = s.x;
    s.b.with_control_dependencies(&[b2, a, c, x], exp).unwrap();
    let after = |b: &GraphBuilder| b.graph().nodes().next_back().unwrap().1.control.clone();
    assert_eq!(after(&s.b), [NodeId(0), NodeId(1)]);
    s.b.with_control_dependencies(&[a], |b| {
        b.without_control_dependencies(|b| b.with_control_dependencies(&[b2], exp))
    })
    .unwrap();
    assert_eq!(after(&s.b), [NodeId(1)]);
    assert!(
        s.b.with_control_dependencies(&[ValueId::new(99)], exp)
            .is_err()
    );
}
