//! Steps of a loop's body which run in its first iteration alone.

use super::*;
use std::sync::atomic::{AtomicU32, Ordering};

/// Calls of [`add_counted`].
static N_ADDED: AtomicU32 = AtomicU32::new(0);

/// [`add`] for one test.
unsafe extern "C" fn add_counted(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    N_ADDED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: as for `add`.
    unsafe { add(args, begin, end) }
}

#[test]
fn steps_of_the_first_iteration_run_once_in_each_run() {
    let buffers = vec![
        buffer("s", DType::F32, &[2], Loc::Input(0)),
        buffer("w", DType::F32, &[2], Loc::Input(1)),
        buffer("twice", DType::F32, &[2], at(0)),
        buffer("next", DType::F32, &[2], Loc::Output(0)),
    ];
    let steps = vec![
        step(call(0, &[1, 1, 2], 2), "/body/twice", &[]),
        step(call(1, &[0, 2, 3], 2), "/body/add", &[0]),
    ];
    let kernels = vec![kernel("twice", add_counted, 0), kernel("add", add, 0)];
    let body = program(
        vec![f32_io("s", &[2]), f32_io("w", &[2])],
        vec![f32_io("next", &[2])],
        vec![partition(0, 64, buffers, kernels, steps)],
    );
    let repeated = Loop {
        trips: TripCount::Fixed(5),
        body: Arc::new(body),
        carried: vec![Carried {
            init: BufferId(0),
            result: BufferId(2),
        }],
        scan_inputs: vec![],
        scan_outputs: vec![],
        args: ids(&[1]),
        once: vec![StepId(0)],
    };
    let buffers = vec![
        buffer("s", DType::F32, &[2], Loc::Input(0)),
        buffer("w", DType::F32, &[2], Loc::Input(1)),
        buffer("sum", DType::F32, &[2], Loc::Output(0)),
    ];
    let steps = vec![step(StepKind::Loop(Box::new(repeated)), "/loop", &[])];
    let whole = program(
        vec![f32_io("s", &[2]), f32_io("w", &[2])],
        vec![f32_io("sum", &[2])],
        vec![partition(0, 0, buffers, vec![], steps)],
    );
    assert_eq!(whole.validate(), Vec::<String>::new());
    let executor = executor(whole, 1);
    for (run, w) in [1f32, 3.0].into_iter().enumerate() {
        let inputs = [[100f32, 200.0], [w, -w]].map(|x| Tensor::from_slice(&x, &[2]).unwrap());
        let outputs = executor.run(&inputs).unwrap();
        assert_eq!(
            outputs[0].as_slice::<f32>(),
            [100.0 + 10.0 * w, 200.0 - 10.0 * w]
        );
        assert_eq!(N_ADDED.load(Ordering::Relaxed) as usize, run + 1);
    }
}
