//! All-reduces of several devices: a rank's part, and waiting for it without hanging when another rank never comes.

use super::ExecOptions;
use super::frame::{Addresses, Frame, Groups, PreparedAllReduce, PreparedStep};
use super::step::{Context, Stop};
use crate::driver::Reduce;
use crate::error::{Error, ErrorKind};
use crate::program::{Program, StepKind};
use crate::sync::{lock, wait_on};
use std::sync::{Arc, Condvar, Mutex};

/// Runs on devices that may reduce together, over all executors of the process.
///
/// A device that has come to an all-reduce does nothing else in that queue, and its kernel keeps its place. So if two devices came to the all-reduces of
/// two programs in different orders, or one of them to other work that waits for a step of the other behind an all-reduce, they could wait for each other.
/// Therefore a program with all-reduces shares neither its GPUs with another one that has them, nor its queues with any other. Those that came
/// first go first; runs of one program, which take turns on each device ([`super::Lanes`]), go together.
#[derive(Default)]
pub(crate) struct Runs {
    under_way: Mutex<Vec<Run>>,
    left: Condvar,
}

struct Run {
    ticket: u64,
    program: usize,
    devices: Arc<Devices>,
}

/// Devices that the runs of a program use.
#[derive(Default)]
pub(crate) struct Devices {
    /// Ordinals of the GPUs that reduce together.
    reducing: Vec<u32>,
    /// Queues that compute.
    queues: Vec<u64>,
}

impl Devices {
    /// Of a program with these groups.
    pub(crate) fn of(program: &Program, groups: &Groups, options: &ExecOptions) -> Devices {
        let peer = |device| options.drivers.get(device).and_then(|driver| driver.peer());
        Devices {
            reducing: groups
                .keys()
                .flatten()
                .filter_map(peer)
                .map(|peer| peer.ordinal)
                .collect(),
            queues: program
                .partitions
                .iter()
                .filter_map(|p| peer(&p.device))
                .map(|peer| peer.compute)
                .collect(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    fn excludes(&self, other: &Devices) -> bool {
        let reduces = !self.reducing.is_empty() || !other.reducing.is_empty();
        self.reducing.iter().any(|gpu| other.reducing.contains(gpu))
            || reduces && self.queues.iter().any(|queue| other.queues.contains(queue))
    }
}

/// All runs of the process.
pub(crate) static RUNS: Runs = Runs {
    under_way: Mutex::new(Vec::new()),
    left: Condvar::new(),
};

impl Runs {
    /// Waits for the runs of other programs that came before and exclude this one; the result lets later ones go when it is dropped. `program` tells
    /// programs apart.
    pub(crate) fn enter(&self, program: usize, devices: &Arc<Devices>) -> RunGuard<'_> {
        let mut runs = lock(&self.under_way);
        let ticket = runs.iter().map(|run| run.ticket + 1).max().unwrap_or(0);
        runs.push(Run {
            ticket,
            program,
            devices: devices.clone(),
        });
        let is_in_the_way = |run: &Run| {
            run.ticket < ticket && run.program != program && run.devices.excludes(devices)
        };
        while runs.iter().any(is_in_the_way) {
            runs = wait_on(&self.left, runs);
        }
        RunGuard { runs: self, ticket }
    }
}

/// A run that may go on.
pub(crate) struct RunGuard<'a> {
    runs: &'a Runs,
    ticket: u64,
}

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        lock(&self.runs.under_way).retain(|run| run.ticket != self.ticket);
        self.runs.left.notify_all();
    }
}

/// The groups of a program's all-reduces, each made by the driver of its first device.
pub(crate) fn groups(program: &Program, options: &ExecOptions) -> Result<Groups, Error> {
    let mut groups = Groups::new();
    for step in program.partitions.iter().flat_map(|p| &p.steps) {
        let StepKind::AllReduce(s) = &step.kind else {
            continue;
        };
        if groups.contains_key(&s.devices) {
            continue;
        }
        let driver = |device| {
            options
                .drivers
                .get(device)
                .ok_or_else(|| format!("{device} has no driver"))
        };
        let drivers = s.devices.iter().map(driver).collect::<Result<Vec<_>, _>>();
        let peers = drivers.and_then(|all| {
            let peers = all
                .iter()
                .zip(&s.devices)
                .map(|(d, name)| d.peer().ok_or_else(|| format!("{name} has no peers")));
            Ok((all[0], peers.collect::<Result<Vec<_>, _>>()?))
        });
        let (first, peers) =
            peers.map_err(|why| Error::new(ErrorKind::Unsupported, why).at(&step.origin))?;
        groups.insert(
            s.devices.clone(),
            first.group(&peers).map_err(|e| e.at(&step.origin))?,
        );
    }
    Ok(groups)
}

impl PreparedAllReduce {
    /// Asks the device for its part.
    pub(crate) fn start(&self, addresses: &Addresses, context: &Context<'_>) -> Result<(), Stop> {
        let address = |buffer: usize| addresses.buffers[buffer].addr() as u64;
        let reduce = Reduce {
            reduction: self.reduction,
            dtype: self.dtype,
            from: address(self.src.buffer),
            to: address(self.dst.buffer),
            n_elements: self.dst.size_bytes / self.dtype.size_bytes(),
        };
        let asked = self
            .group
            .all_reduce(self.rank, &reduce, &|| context.rendezvous.is_aborted());
        match asked.map_err(|e| e.context(format!("on {}", context.device)))? {
            true => Ok(()),
            false => Err(Stop::Aborted),
        }
    }
}

impl Frame {
    /// Waits until the device has done its part in all all-reduces that it was asked for; from then on waiting for it depends on no other device.
    /// False when the run was over before.
    pub(crate) fn settle(&self, is_over: &dyn Fn() -> bool) -> Result<bool, Error> {
        let mut all = true;
        for &i in &self.collectives {
            if let PreparedStep::AllReduce(s) = &self.steps[i] {
                all &= s.group.settle(s.rank, is_over)?;
            }
        }
        Ok(all)
    }
}

/// True for a step in which the host waits for the device.
pub(crate) fn waits_for_device(step: &PreparedStep) -> bool {
    matches!(
        step,
        PreparedStep::If(_)
            | PreparedStep::Loop(_)
            | PreparedStep::ReadVariable { .. }
            | PreparedStep::AssignVariable { .. }
            | PreparedStep::Send { .. }
            | PreparedStep::Recv { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Never two programs on one GPU, and none waits for one on another.
    #[test]
    fn programs_that_share_a_gpu_run_one_at_a_time() {
        let runs = Runs::default();
        // By GPU: its program, and how many runs of it are there.
        let users = Mutex::new([(0, 0); 3]);
        let lists = [[0, 1], [1, 2], [0, 2]];
        let n_runs = if cfg!(miri) { 3 } else { 200 };
        std::thread::scope(|scope| {
            for (program, gpus) in lists.iter().enumerate().flat_map(|run| [run; 2]) {
                let (runs, users) = (&runs, &users);
                let devices = Arc::new(Devices {
                    reducing: gpus.to_vec(),
                    queues: Vec::new(),
                });
                scope.spawn(move || {
                    for _ in 0..n_runs {
                        let _entered = runs.enter(program, &devices);
                        for &gpu in gpus.iter() {
                            let user = &mut users.lock().unwrap()[gpu as usize];
                            assert!(
                                user.1 == 0 || user.0 == program,
                                "program {program} found {user:?}"
                            );
                            *user = (program, user.1 + 1);
                        }
                        gpus.iter()
                            .for_each(|&gpu| users.lock().unwrap()[gpu as usize].1 -= 1);
                    }
                });
            }
        });
        let on = |reducing: &[u32], queues: &[u64]| {
            Arc::new(Devices {
                reducing: reducing.to_vec(),
                queues: queues.to_vec(),
            })
        };
        let first = runs.enter(1, &on(&[0, 1], &[10, 11]));
        let _same = runs.enter(1, &on(&[0, 1], &[10, 11]));
        // Another GPU; a GPU of these in queues of its own; other work in one queue.
        let _others = [
            runs.enter(2, &on(&[7], &[17])),
            runs.enter(3, &on(&[], &[20])),
            runs.enter(4, &on(&[], &[20])),
        ];
        assert!(on(&[], &[11]).excludes(&on(&[0, 1], &[10, 11])));
        drop(first);
    }
}
