//! Variables that programs use where they are.

use super::*;

/// v = v + x, beside a step that fails when y has a NaN: before it, or after it. z is the new v, which begins with 1 and 2.
pub(super) fn accumulator(in_place: bool, checks_first: bool) -> Program {
    let f32s = |name: &str, loc| buffer(name, DType::F32, &[2], loc);
    let buffers = vec![
        f32s("x", Loc::Input(0)),
        f32s("y", Loc::Input(1)),
        f32s("old", Loc::Variable(0)),
        f32s("new", Loc::Assigned(0)),
        f32s("checked", at(0)),
        f32s("z", Loc::Output(0)),
    ];
    let check = step(
        call(1, &[1, 1, 4], 2),
        "/check",
        if checks_first { &[] } else { &[0] },
    );
    let update = step(
        call(0, &[2, 0, 3], 2),
        "/update",
        if checks_first { &[0] } else { &[] },
    );
    let (src, dst) = (BufferId(3), BufferId(5));
    let show = step(StepKind::Copy { src, dst }, "/show", &[0, 1]);
    let steps = match checks_first {
        true => vec![check, update, show],
        false => vec![update, check, show],
    };
    let kernels = vec![kernel("add", add, 0), kernel("add_finite", add_finite, 0)];
    let p = partition(0, 64, buffers, kernels, steps);
    let inputs = vec![f32_io("x", &[2]), f32_io("y", &[2])];
    let mut p = program(inputs, vec![f32_io("z", &[2])], vec![p]);
    p.variables = vec![VariableSpec {
        initial: Some(floats(&[1.0, 2.0])),
        in_place,
        ..VariableSpec::new("c", "v", DType::F32)
    }];
    p
}

pub(super) fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, &[values.len()]).unwrap()
}

struct Session {
    resources: Arc<Resources>,
    executor: Executor,
}

impl Session {
    fn new(p: Program) -> Session {
        assert_eq!(p.validate(), [""; 0]);
        let options = ExecOptions {
            pool: Arc::new(Pool::new(1)),
            ..ExecOptions::default()
        };
        Session {
            resources: options.resources.clone(),
            executor: Executor::new(Arc::new(p), &options).unwrap(),
        }
    }

    fn value(&self) -> Tensor {
        self.resources.get("c", "v").unwrap().unwrap()
    }

    fn run(&self, y: f32) -> Result<Vec<f32>, String> {
        let inputs = [floats(&[10.0, 20.0]), floats(&[0.0, y])];
        let ran = self.executor.run(&inputs).map_err(|e| e.to_string());
        ran.map(|z| z[0].as_slice::<f32>().to_vec())
    }
}

#[test]
fn variables_are_read_and_assigned_where_they_are() {
    for in_place in [false, true] {
        let session = Session::new(accumulator(in_place, true));
        assert_eq!(session.run(0.0).unwrap(), [11.0, 22.0]);
        // A value that was taken stays as it was.
        let first = session.value();
        assert_eq!(session.run(0.0).unwrap(), [21.0, 42.0]);
        assert_eq!(session.run(0.0).unwrap(), [31.0, 62.0]);
        assert_eq!(first.as_slice::<f32>(), [11.0, 22.0]);
        let before = session.value().as_ptr();
        session.run(0.0).unwrap();
        assert_eq!(session.value().as_ptr() == before, in_place);
        session.resources.reset("c");
        assert_eq!(session.run(0.0).unwrap(), [11.0, 22.0]);
        session
            .resources
            .set("c", "v", &floats(&[5.0, 5.0]))
            .unwrap();
        assert_eq!(session.run(0.0).unwrap(), [15.0, 25.0]);
    }
}

#[test]
fn a_failure_before_the_assignment_changes_nothing() {
    for in_place in [false, true] {
        let session = Session::new(accumulator(in_place, true));
        session.run(0.0).unwrap();
        session.run(f32::NAN).unwrap_err();
        assert_eq!(session.value().as_slice::<f32>(), [11.0, 22.0]);
        assert_eq!(session.run(0.0).unwrap(), [21.0, 42.0]);
    }
    // Behind the assignment the other buffer still has the old value.
    let session = Session::new(accumulator(false, false));
    session.run(f32::NAN).unwrap_err();
    assert_eq!(session.value().as_slice::<f32>(), [1.0, 2.0]);
    assert_eq!(session.run(0.0).unwrap(), [11.0, 22.0]);
}

/// No compiler makes such a program; a panic of a thread could have the same effect.
#[test]
fn a_value_that_is_half_changed_is_not_used() {
    let session = Session::new(accumulator(true, false));
    session.run(f32::NAN).unwrap_err();
    let error = session.run(0.0).unwrap_err();
    let expected = "variable \"v\" of container \"c\" is half changed by a run that failed; set it, or reset its container";
    assert_eq!(error, expected);
    session
        .resources
        .set("c", "v", &floats(&[0.0, 0.0]))
        .unwrap();
    assert_eq!(session.run(0.0).unwrap(), [10.0, 20.0]);
    session.run(f32::NAN).unwrap_err();
    session.resources.reset("c");
    assert_eq!(session.run(0.0).unwrap(), [11.0, 22.0]);
}

#[test]
fn values_of_other_shapes_and_missing_ones_are_errors() {
    let mut p = accumulator(true, true);
    p.variables[0].initial = None;
    let session = Session::new(p);
    let error = session.run(0.0).unwrap_err();
    assert!(error.ends_with("is read before it was assigned"), "{error}");
    session.resources.set("c", "v", &floats(&[1.0])).unwrap();
    let error = session.run(0.0).unwrap_err();
    assert!(
        error.ends_with("has the shape [1], and is read as [2]"),
        "{error}"
    );
}

#[test]
fn parts_of_a_run_see_what_earlier_ones_assigned() {
    let session = Session::new(accumulator(false, true));
    let inputs = [floats(&[10.0, 20.0]), floats(&[0.0, 0.0])];
    for commits in [false, true] {
        let transaction = session.resources.begin();
        for expected in [[11.0, 22.0], [21.0, 42.0], [31.0, 62.0]] {
            let z = session.executor.run_in(&transaction, &inputs).unwrap();
            assert_eq!(z[0].as_slice::<f32>(), expected);
        }
        match commits {
            true => transaction.commit(),
            false => drop(transaction),
        }
        let expected = if commits { [31.0, 62.0] } else { [1.0, 2.0] };
        assert_eq!(session.value().as_slice::<f32>(), expected);
    }
    let session = Session::new(accumulator(true, true));
    let transaction = session.resources.begin();
    let error = session.executor.run_in(&transaction, &inputs).unwrap_err();
    assert!(
        error.to_string().contains("assigns variables in place"),
        "{error}"
    );
}

#[test]
fn places_of_variables_are_checked() {
    let refused = |change: &dyn Fn(&mut Program)| {
        let mut p = accumulator(true, true);
        change(&mut p);
        p.validate().join("; ")
    };
    let own = |p: &mut Program, i: usize| p.partitions[0].buffers[i].clone();
    let writes_old = refused(&|p| p.partitions[0].buffers[3].loc = Loc::Variable(0));
    assert!(
        writes_old.contains("writes \"new\", which is at Variable(0)"),
        "{writes_old}"
    );
    let missing = refused(&|p| p.partitions[0].buffers[2].loc = Loc::Variable(1));
    assert!(missing.contains("Variable(1) does not exist"), "{missing}");
    let unread = refused(&|p| p.partitions[0].buffers[2].loc = Loc::Input(0));
    assert!(unread.contains("not read with the same size"), "{unread}");
    let unwritten = refused(&|p| {
        let new = own(p, 3);
        p.partitions[0].buffers[3].loc = at(0);
        p.partitions[0].buffers.push(new);
    });
    assert!(
        unwritten.contains("variable 0 never gets its new value"),
        "{unwritten}"
    );
    let other_dtype = refused(&|p| p.variables[0].dtype = DType::I32);
    assert!(
        other_dtype.contains("a buffer of it has another dtype"),
        "{other_dtype}"
    );
    // A reader of the old value that the update does not wait for.
    let unordered = refused(&|p| {
        let late = step(call(0, &[2, 0, 4], 2), "/late", &[0]);
        p.partitions[0].steps.push(late);
    });
    assert!(
        unordered.contains("touch the same bytes, but nothing orders them"),
        "{unordered}"
    );
    let copied = refused(&|p| {
        let kind = StepKind::ReadVariable {
            variable: 0,
            dst: BufferId(4),
        };
        p.partitions[0].steps.push(step(kind, "/read", &[1]));
    });
    assert!(copied.contains("used in place and copied"), "{copied}");
}
