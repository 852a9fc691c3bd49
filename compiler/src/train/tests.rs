//! Steps of optimisers beside loops over single elements.

mod layers;
mod losses;
mod strategies;
mod updates;

use super::{
    Adam, Curve, Decay, Exponential, Group, Model, Optimizer, Parameter, Piecewise, Schedule, Sgd,
    Update, WeightDecay,
};
use crate::ir::{Graph, GraphBuilder};
use crate::passes::clean;
use crate::{DType, ErrorKind, Options, Tensor, compile, interp};

const NAMES: [&str; 2] = ["layer/weights", "layer/bias"];
const SHAPES: [&[usize]; 2] = [&[2, 3], &[3]];

fn start(i: usize) -> Vec<f64> {
    let n: usize = SHAPES[i].iter().product();
    (0..n)
        .map(|k| 0.3 * (k as f64 + 1.0) - 0.5 * i as f64)
        .collect()
}

/// Gradients of step `t`, from 0.
fn gradients(t: usize) -> [Vec<f64>; 2] {
    [0, 1].map(|i| {
        let n: usize = SHAPES[i].iter().product();
        let one = |k: usize| ((t * 7 + k * 3 + i * 5) % 11) as f64 / 4.0 - 1.2;
        (0..n).map(one).collect()
    })
}

/// A step over both parameters, whose gradients are inputs.
fn graph(update: &Update, dtype: DType) -> Graph {
    let mut b = GraphBuilder::new("step");
    let mut parameters = Vec::new();
    for (i, name) in NAMES.into_iter().enumerate() {
        let initial = Tensor::from_f64s(dtype, SHAPES[i], &start(i)).unwrap();
        parameters.push(Parameter {
            name: name.into(),
            value: b.variable(name, initial).unwrap(),
            gradient: b.input(&format!("g{i}"), dtype, SHAPES[i].iter().copied()),
        });
    }
    let step = update.apply(&mut b, &parameters).unwrap();
    b.output("number", step.number);
    b.output("rate", step.learning_rate);
    b.finish().unwrap()
}

/// Parameters after each of `n` steps.
fn compiled(update: &Update, dtype: DType, n: usize) -> Vec<[Vec<f64>; 2]> {
    let model = compile(&graph(update, dtype), &Options::default()).unwrap();
    let mut path = Vec::new();
    for t in 0..n {
        let given = gradients(t);
        let tensors = [0, 1].map(|i| Tensor::from_f64s(dtype, SHAPES[i], &given[i]).unwrap());
        let outputs = model.run_ordered(&tensors).unwrap();
        assert_eq!(outputs["number"].as_slice::<i64>(), [t as i64 + 1]);
        let rate = outputs["rate"].as_slice::<f64>()[0];
        let expected = update.optimizer.learning_rate().at(t as u64).unwrap();
        assert!(
            (rate - expected).abs() <= 1e-12 * expected.abs(),
            "{rate} {expected}"
        );
        path.push(NAMES.map(|name| variable(&model, name)));
    }
    path
}

fn variable(model: &crate::Compiled, name: &str) -> Vec<f64> {
    let value = model.resources().get("", name).unwrap();
    value.unwrap().to_f64s()
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!(
            (got - want).abs() <= tolerance * want.abs().max(1.0),
            "{got} {want}"
        );
    }
}

/// Compares `n` steps with a loop that changes one element: from its number in the list of both parameters, the step,
/// the value and the gradient, by what it keeps.
fn check<S: Clone + Default>(update: &Update, step: &dyn Fn(usize, usize, &mut f64, f64, &mut S)) {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 2e-6)] {
        let path = compiled(update, dtype, 25);
        let mut values = [start(0), start(1)];
        let mut kept = values.clone().map(|v| vec![S::default(); v.len()]);
        for (t, found) in path.iter().enumerate() {
            let given = gradients(t);
            for i in [0, 1] {
                for k in 0..values[i].len() {
                    step(i, t, &mut values[i][k], given[i][k], &mut kept[i][k]);
                }
                assert_close(&found[i], &values[i], tolerance);
            }
        }
    }
}

#[test]
fn gradient_descent_with_and_without_momentum() {
    let rate = Schedule::staircase(0.1, 0.5, 5);
    let plain = Sgd {
        learning_rate: rate.clone(),
        ..Sgd::default()
    };
    check(&plain.clone().into(), &|_, t, w, g, _: &mut ()| {
        *w -= rate.at(t as u64).unwrap() * g
    });
    let heavy = Sgd {
        momentum: 0.9,
        dampening: 0.3,
        ..plain.clone()
    };
    check(&heavy.into(), &|_, t, w, g, v: &mut f64| {
        *v = if t == 0 { g } else { 0.9 * *v + 0.7 * g };
        *w -= rate.at(t as u64).unwrap() * *v;
    });
    let ahead = Sgd {
        momentum: 0.9,
        nesterov: true,
        ..plain
    };
    check(&ahead.into(), &|_, t, w, g, v: &mut f64| {
        *v = 0.9 * *v + g;
        *w -= rate.at(t as u64).unwrap() * (g + 0.9 * *v);
    });
}

fn adam(w: &mut f64, g: f64, t: usize, rate: f64, (m, v): &mut (f64, f64)) {
    let t = t as i32 + 1;
    *m = 0.9 * *m + 0.1 * g;
    *v = 0.999 * *v + (1.0 - 0.999) * g * g;
    let root = v.sqrt() / (1.0 - 0.999f64.powi(t)).sqrt() + 1e-8;
    *w -= rate / (1.0 - 0.9f64.powi(t)) * *m / root;
}

#[test]
fn adam_with_decay_of_both_kinds() {
    let rate = Schedule::Decay(Decay {
        initial: 0.05,
        last: 0.001,
        steps: 20,
        curve: Curve::Cosine,
    });
    let rate = rate.warmed_up(4);
    let optimizer = Adam {
        learning_rate: rate.clone(),
        ..Adam::default()
    };
    let update = Update {
        weight_decay: WeightDecay::Decoupled(0.1),
        groups: vec![
            Group {
                pattern: "bias$".into(),
                rate_factor: 2.0,
                weight_decay: WeightDecay::L2(0.01),
            },
            Group {
                pattern: "bias".into(),
                rate_factor: 0.0,
                weight_decay: WeightDecay::None,
            },
        ],
        ..optimizer.into()
    };
    check(&update, &|i, t, w, mut g, kept: &mut (f64, f64)| {
        let mut rate = rate.at(t as u64).unwrap();
        match i {
            0 => *w *= 1.0 - 0.1 * rate,
            _ => {
                rate *= 2.0;
                g += 0.01 * *w;
            }
        }
        adam(w, g, t, rate, kept);
    });
}

#[test]
fn gradients_are_clipped_together() {
    let update = Update {
        clip_norm: Some(1.5),
        ..Sgd::default().into()
    };
    let norms: Vec<f64> = (0..25)
        .map(|t| {
            gradients(t)
                .iter()
                .flatten()
                .map(|g| g * g)
                .sum::<f64>()
                .sqrt()
        })
        .collect();
    assert!(norms.iter().any(|&n| n > 1.5));
    check(&update, &|_, t, w, g, _: &mut ()| {
        *w -= 0.01 * g * (1.5 / norms[t]).min(1.0)
    });
}

#[test]
fn an_average_follows_its_parameter() {
    for warms_up in [false, true] {
        follows(warms_up);
    }
}

fn follows(warms_up: bool) {
    let update = Update {
        average: Some(0.4),
        average_warms_up: warms_up,
        ..Sgd::default().into()
    };
    let model = compile(&graph(&update, DType::F64), &Options::default()).unwrap();
    let [mut w, mut average] = [start(1), start(1)];
    for t in 0..8 {
        let given = gradients(t);
        let tensors = [0, 1].map(|i| Tensor::from_f64s(DType::F64, SHAPES[i], &given[i]).unwrap());
        model.run_ordered(&tensors).unwrap();
        for (k, g) in given[1].iter().enumerate() {
            w[k] -= 0.01 * g;
            // (1 + t) / (10 + t) in step t is 2/11, 3/12, 4/13, 5/14, and from the sixth on above 0.4.
            let warming = (2.0 + t as f64) / (11.0 + t as f64);
            let decay = if warms_up { warming.min(0.4) } else { 0.4 };
            average[k] -= (1.0 - decay) * (average[k] - w[k]);
        }
        assert_close(&variable(&model, "average/layer/bias"), &average, 1e-14);
    }
}

#[test]
fn gradients_that_are_not_finite_change_nothing() {
    let clipped = Update {
        clip_norm: Some(1.0),
        ..Sgd::default().into()
    };
    // The square of the last one is beyond f32.
    let bad = [(f64::NAN, false), (f64::INFINITY, false), (1e30, true)];
    for (update, of_norm) in [(Sgd::default().into(), false), (clipped, true)] {
        let graph = graph(&update, DType::F32);
        let graph = clean(&graph).unwrap();
        for (bad, is_overflow) in bad {
            let mut store = interp::Store::new();
            let first = [bad, 1.0, 2.0, 3.0, 4.0, 5.0];
            let given = [&first[..], &[10.0, 20.0, 30.0]];
            let tensors =
                [0, 1].map(|i| Tensor::from_f64s(DType::F32, SHAPES[i], given[i]).unwrap());
            let ended = interp::run_with_state(&graph, &tensors, &mut store);
            if is_overflow && !of_norm {
                ended.unwrap();
                continue;
            }
            let error = ended.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFinite, "{error}");
        }
    }
}

#[test]
fn schedules_have_the_values_that_their_documentation_says() {
    let at = |schedule: &Schedule, steps: &[u64]| -> Vec<f64> {
        steps.iter().map(|&n| schedule.at(n).unwrap()).collect()
    };
    let line = Schedule::linear(1.0, 0.0, 4);
    assert_eq!(at(&line, &[0, 1, 4, 9]), [1.0, 0.75, 0.0, 0.0]);
    let steps = Schedule::Piecewise(Piecewise {
        initial: 1.0,
        changes: vec![(2, 0.5), (4, 0.1)],
    });
    let reached = [1.0, 1.0, 0.5, 0.5, 0.1, 0.1];
    assert_eq!(at(&steps, &[0, 1, 2, 3, 4, 99]), reached);
    let smooth = Schedule::Exponential(Exponential {
        initial: 2.0,
        rate: 0.25,
        per: 2,
        staircase: false,
    });
    assert_eq!(at(&smooth, &[0, 1, 2]), [2.0, 1.0, 0.5]);
    let stairs = Schedule::staircase(2.0, 0.25, 2);
    assert_eq!(at(&stairs, &[0, 1, 2, 5]), [2.0, 2.0, 0.5, 0.125]);
    let cosine = Schedule::cosine(4.0, 6);
    assert_close(
        &at(&cosine, &[0, 2, 3, 6, 7]),
        &[4.0, 3.0, 2.0, 0.0, 0.0],
        1e-15,
    );
    let warm = Schedule::from(3.0).warmed_up(3);
    assert_eq!(at(&warm, &[0, 1, 2, 3]), [1.0, 2.0, 3.0, 3.0]);
    for schedule in [line, steps, smooth, stairs, cosine, warm] {
        let update = Sgd {
            learning_rate: schedule,
            ..Sgd::default()
        };
        compiled(&update.into(), DType::F64, 6);
    }
}

#[test]
fn settings_and_parameters_out_of_range_are_refused() {
    let refused = |update: &Update| {
        let mut b = GraphBuilder::new("refused");
        let error = update.apply(&mut b, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        error.to_string()
    };
    let sgd = || Update::from(Sgd::default());
    assert!(
        refused(&Update {
            clip_norm: Some(0.0),
            ..sgd()
        })
        .contains("norm of gradients: 0")
    );
    assert!(
        refused(&Update {
            average: Some(1.0),
            ..sgd()
        })
        .contains("decay of averages: 1")
    );
    let decay = WeightDecay::L2(-1.0);
    assert!(
        refused(&Update {
            weight_decay: decay,
            ..sgd()
        })
        .contains("weight decay: -1")
    );
    let group = Group {
        pattern: "(".into(),
        rate_factor: 1.0,
        weight_decay: WeightDecay::None,
    };
    assert!(
        refused(&Update {
            groups: vec![group],
            ..sgd()
        })
        .contains("pattern \"(\"")
    );
    let adam = Optimizer::Adam(Adam {
        beta1: 1.0,
        ..Adam::default()
    });
    assert!(refused(&adam.into()).contains("beta1: 1, expected a decay from 0 to below 1"));
    let stuck = Schedule::cosine(1.0, 0);
    let stuck = Sgd {
        learning_rate: stuck,
        ..Sgd::default()
    };
    assert!(refused(&stuck.into()).contains("a length of 0 steps: expected at least 1"));
    for rate in [f64::NAN, f64::INFINITY, -1.0] {
        let sgd = Sgd {
            learning_rate: rate.into(),
            ..Sgd::default()
        };
        let expected = format!("learning rate: {rate}: expected a finite number, 0 or more");
        assert_eq!(refused(&sgd.into()), expected);
    }
    let heavy = Sgd {
        momentum: f64::NAN,
        ..Sgd::default()
    };
    let message = refused(&heavy.into());
    assert_eq!(
        message,
        "momentum: NaN, expected a finite number, 0 or more"
    );

    let mut b = GraphBuilder::new("parameters");
    let value = b
        .variable("v", Tensor::zeros(DType::F32, &[2]).unwrap())
        .unwrap();
    let wide = b.input("wide", DType::F32, [3usize]);
    let parameter = |name: &str, gradient| Parameter {
        name: name.into(),
        value,
        gradient,
    };
    let error =
        |b: &mut GraphBuilder, all: &[Parameter]| sgd().apply(b, all).unwrap_err().to_string();
    let message = error(&mut b, &[parameter("v", wide)]);
    assert!(
        message.contains("it is f32[2], its gradient f32[3]"),
        "{message}"
    );
    let twice = error(&mut b, &[parameter("v", value), parameter("v", value)]);
    assert!(twice.contains("\"v\": its name is used twice"), "{twice}");
}

#[test]
fn layers_are_built_on_a_device() {
    let mut m = Model::new("g", 1, true);
    let x = m.input("x", DType::F32, [2usize, 3]);
    let first = |m: &mut Model| m.scope("first", |m| m.dense(x, 4));
    let y = m.with_device("/cpu:1", first).unwrap();
    let e = m.with_device("/cpu:", |m| m.dense(x, 4)).unwrap_err();
    assert!(e.to_string().contains("device scope at "), "{e}");
    let after = m.scope("second", |m| m.dense(y, 2)).unwrap();
    let (mut b, _) = m.into_parts();
    b.output("y", after);
    let text = b.finish().unwrap().to_string();
    let products = text.lines().filter(|l| l.contains("= matmul("));
    let on: Vec<bool> = products.map(|l| l.contains("CPU:1")).collect();
    assert_eq!(on, [true, false], "{text}");
}
