//! RMSProp and Adagrad: values of PyTorch in `f64`, and loops over single elements.

use super::{NAMES, SHAPES, assert_close, check, compiled, graph, variable};
use crate::train::{Adagrad, Group, Optimizer, RmsProp, Schedule, Update, WeightDecay};
use crate::{DType, Options, Tensor, compile};

fn check_values(optimizer: impl Into<Optimizer>, expected: [&[f64]; 2]) {
    let path = compiled(&optimizer.into().into(), DType::F64, 5);
    for (found, expected) in path[4].iter().zip(expected) {
        assert_close(found, expected, 1e-14);
    }
}

#[test]
fn rms_prop_has_the_values_of_pytorch() {
    // torch.optim.RMSprop(parameters, lr=0.05)
    let weights = [
        0.3314951981501659,
        0.46436992204398764,
        0.7325886777676351,
        0.827180564074454,
        1.9520992307948004,
        2.4059316351189977,
    ];
    let bias = [
        -0.09610839562793821,
        0.0976962437695762,
        0.43149519815016585,
    ];
    let plain = RmsProp {
        learning_rate: 0.05.into(),
        ..RmsProp::default()
    };
    check_values(plain, [&weights, &bias]);
    // torch.optim.RMSprop(parameters, lr=0.05, alpha=0.9, eps=1e-3, momentum=0.8, centered=True)
    let weights = [
        0.5571332875234075,
        0.6531442995780132,
        0.5504670499644093,
        0.7585751530024843,
        1.9800097502669853,
        2.662890686370405,
    ];
    let bias = [-0.3237107265234502, -0.0636564548765881, 0.6571332875234075];
    let all = RmsProp {
        learning_rate: 0.05.into(),
        decay: 0.9,
        epsilon: 1e-3,
        momentum: 0.8,
        centered: true,
    };
    check_values(all, [&weights, &bias]);
}

#[test]
fn adagrad_has_the_values_of_pytorch() {
    // torch.optim.Adagrad(parameters, lr=0.1)
    let weights = [
        0.3068718983301791,
        0.5731791600062756,
        0.8661722336306708,
        1.1253261079414005,
        1.590346207767422,
        1.9215706044044358,
    ];
    let bias = [
        -0.17961847744910842,
        0.0991074127292998,
        0.40687189833017895,
    ];
    let plain = Adagrad {
        learning_rate: 0.1.into(),
        ..Adagrad::default()
    };
    check_values(plain, [&weights, &bias]);
    // torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.5, eps=1e-3)
    let weights = [
        0.32800899649128246,
        0.5665189358297501,
        0.894245089333339,
        1.1347123632301466,
        1.5677524195300134,
        1.8547110612104527,
    ];
    let bias = [
        -0.13610193170490076,
        0.08743186548048584,
        0.4280089964912823,
    ];
    let all = Adagrad {
        learning_rate: 0.1.into(),
        rate_decay: 0.2,
        initial: 0.5,
        epsilon: 1e-3,
    };
    check_values(all, [&weights, &bias]);
}

/// The optimiser with L2 decay 0.02; the bias has a group of its own: twice the rate, and no decay.
fn grouped(optimizer: impl Into<Optimizer>) -> Update {
    let bias = Group {
        pattern: "bias$".into(),
        rate_factor: 2.0,
        weight_decay: WeightDecay::None,
    };
    Update {
        weight_decay: WeightDecay::L2(0.02),
        groups: vec![bias],
        ..optimizer.into().into()
    }
}

#[test]
fn rms_prop_takes_a_schedule_and_groups() {
    let rate = Schedule::staircase(0.05, 0.5, 5);
    let optimizer = RmsProp {
        learning_rate: rate.clone(),
        momentum: 0.9,
        ..RmsProp::default()
    };
    check(&grouped(optimizer), &|i, t, w, g, kept: &mut (f64, f64)| {
        let (factor, decay) = [(1.0, 0.02), (2.0, 0.0)][i];
        let (s, v) = kept;
        let g = g + decay * *w;
        *s = 0.99 * *s + (1.0 - 0.99) * g * g;
        *v = 0.9 * *v + g / (s.sqrt() + 1e-8);
        *w -= rate.at(t as u64).unwrap() * factor * *v;
    });
}

#[test]
fn adagrad_takes_a_schedule_and_groups() {
    let rate = Schedule::staircase(0.05, 0.5, 5);
    let optimizer = Adagrad {
        learning_rate: rate.clone(),
        rate_decay: 0.1,
        ..Adagrad::default()
    };
    check(&grouped(optimizer), &|i, t, w, g, s: &mut f64| {
        let (factor, decay) = [(1.0, 0.02), (2.0, 0.0)][i];
        let g = g + decay * *w;
        *s += g * g;
        let rate = rate.at(t as u64).unwrap() * factor / (1.0 + t as f64 * 0.1);
        *w -= rate * g / (s.sqrt() + 1e-10);
    });
}

/// The variance of equal gradients approaches 0, and is below it by rounding in some step.
#[test]
fn centred_rms_prop_stays_finite_on_equal_gradients() {
    let optimizer = RmsProp {
        decay: 0.5,
        centered: true,
        ..RmsProp::default()
    };
    let model = compile(&graph(&optimizer.into(), DType::F32), &Options::default()).unwrap();
    let tensors = SHAPES.map(|shape| {
        let n: usize = shape.iter().product();
        let g: Vec<f64> = (0..n).map(|k| 0.1 + 0.7 * k as f64).collect();
        Tensor::from_f64s(DType::F32, shape, &g).unwrap()
    });
    for t in 0..60 {
        model.run_ordered(&tensors).unwrap();
        for name in NAMES {
            let w = variable(&model, name);
            assert!(w.iter().all(|w| w.is_finite()), "step {t}: {name} {w:?}");
        }
    }
}

#[test]
fn settings_out_of_range_are_refused() {
    let refused = |optimizer: Optimizer| optimizer.check().unwrap_err().to_string();
    let rms_prop = RmsProp::default();
    let decay = RmsProp {
        decay: 1.0,
        ..rms_prop.clone()
    };
    assert_eq!(
        refused(decay.into()),
        "decay: 1, expected a decay from 0 to below 1"
    );
    let momentum = RmsProp {
        momentum: -0.5,
        ..rms_prop.clone()
    };
    assert_eq!(
        refused(momentum.into()),
        "momentum: -0.5, expected a finite number, 0 or more"
    );
    let epsilon = RmsProp {
        epsilon: f64::NAN,
        ..rms_prop.clone()
    };
    assert_eq!(
        refused(epsilon.into()),
        "epsilon: NaN, expected a finite number, 0 or more"
    );
    let rate = RmsProp {
        learning_rate: (-1.0).into(),
        ..rms_prop
    };
    assert_eq!(
        refused(rate.into()),
        "learning rate: -1: expected a finite number, 0 or more"
    );
    let adagrad = Adagrad::default();
    let rate_decay = Adagrad {
        rate_decay: f64::INFINITY,
        ..adagrad.clone()
    };
    assert_eq!(
        refused(rate_decay.into()),
        "decay of the learning rate: inf, expected a finite number, 0 or more"
    );
    let initial = Adagrad {
        initial: -0.1,
        ..adagrad.clone()
    };
    assert_eq!(
        refused(initial.into()),
        "initial sum of squares: -0.1, expected a finite number, 0 or more"
    );
    let epsilon = Adagrad {
        epsilon: -1e-10,
        ..adagrad
    };
    assert_eq!(
        refused(epsilon.into()),
        "epsilon: -0.0000000001, expected a finite number, 0 or more"
    );
}
