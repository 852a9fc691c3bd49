//! Runs that change variables at the same time.

use super::state::{accumulator, floats};
use super::*;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

/// Runs inside of the kernel at one time, and whether two have met there.
static N_INSIDE: AtomicUsize = AtomicUsize::new(0);
static HAVE_MET: AtomicUsize = AtomicUsize::new(0);

/// Waits until another run is here; errors where none comes in ten seconds.
unsafe extern "C" fn meet(_: *const *mut u8, _: u64, _: u64) -> u32 {
    if N_INSIDE.fetch_add(1, Ordering::SeqCst) == 1 {
        HAVE_MET.store(1, Ordering::SeqCst);
    }
    let began = Instant::now();
    while HAVE_MET.load(Ordering::SeqCst) == 0 {
        if began.elapsed() > Duration::from_secs(10) {
            return status::INDEX_OUT_OF_RANGE;
        }
        std::thread::yield_now();
    }
    status::OK
}

fn overlapping(p: Program, resources: &Arc<Resources>) -> Result<Executor, Error> {
    assert_eq!(p.validate(), [""; 0]);
    let options = ExecOptions {
        pool: Arc::new(Pool::new(1)),
        resources: resources.clone(),
        overlaps: true,
        ..ExecOptions::default()
    };
    Executor::new(Arc::new(p), &options)
}

#[test]
fn runs_that_assign_overlap() {
    for in_place in [true, false] {
        assert_overlap(in_place);
    }
}

fn assert_overlap(in_place: bool) {
    HAVE_MET.store(0, Ordering::SeqCst);
    N_INSIDE.store(0, Ordering::SeqCst);
    let mut p = accumulator(in_place, true);
    p.partitions[0].kernels[1] = kernel("meet", meet, 0);
    let initial = p.variables[0].initial.clone().unwrap();
    let resources = Arc::new(Resources::default());
    let both = [(); 2].map(|()| overlapping(p.clone(), &resources).unwrap());
    // Holders of a value keep it: the initial one, which the program shares, and one that was taken.
    let taken = resources.get("c", "v").unwrap().unwrap();
    std::thread::scope(|scope| {
        for executor in &both {
            let inputs = [floats(&[10.0, 20.0]), floats(&[0.0, 0.0])];
            scope.spawn(move || executor.run(&inputs).unwrap());
        }
    });
    assert_eq!(taken.as_slice::<f32>(), [1.0, 2.0]);
    assert_eq!(initial.as_slice::<f32>(), [1.0, 2.0]);
    // Of two updates at the same time one may be lost.
    let value = resources.get("c", "v").unwrap().unwrap();
    for (found, x) in value.as_slice::<f32>().iter().zip([10.0, 20.0]) {
        let n = (found - x / 10.0) / x;
        assert!([1.0, 2.0].contains(&n), "{value:?}");
    }
}

#[test]
fn counts_are_exact() {
    let resources = Resources::default();
    let zero = Tensor::from_slice(&[0i64], &[]).unwrap();
    resources.set("c", "n", &zero).unwrap();
    let taken = resources.get("c", "n").unwrap().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope
                .spawn(|| (0..1_000).for_each(|_| assert!(resources.count("c", "n").unwrap() > 0)));
        }
    });
    let n = resources.get("c", "n").unwrap().unwrap();
    assert_eq!(n.as_slice::<i64>(), [4_000]);
    assert_eq!(taken.as_slice::<i64>(), [0]);
    resources.set("c", "x", &floats(&[1.0])).unwrap();
    for name in ["x", "other"] {
        let e = resources.count("c", name).unwrap_err().to_string();
        assert_eq!(e, format!("variable {name:?} is not a count"));
    }
}
