//! An engine without threads, for simulations: a part waits on the simulated clock only.

use super::{cpu, task};
use crate::TaskName;
use crate::contents::Document;
use crate::engine::{Engine, Job, Made, Part, Plan, Share};
use crate::messages::{DeviceInfo, Fault};
use crate::outbox::PartWire;
use crate::turn::{StateUse, Turn, Wish};
use crate::worker::locked;
use bytes::Bytes;
use gristmill_runtime::device::DeviceName;
use gristmill_runtime::exec::{Progress, Received, RemoteEnd, VariableState};
use gristmill_runtime::program::{IoSpec, Key};
use gristmill_runtime::{DType, Error, ErrorKind, Tensor};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// Bytes of the tensor: the number of the call, a count, and more. Some pieces.
pub const SIZE: usize = 1200;

/// Programs are lists of tasks, as those of `Relay`; the one with a `+` adds one to the count of its task, and writes it into the tensor.
pub struct Chain {
    /// Variable of the task.
    pub count: Arc<tokio::sync::Mutex<u64>>,
    /// Number of parts on it.
    pub n_parts: Arc<AtomicUsize>,
    /// State of a generator of random numbers.
    pub random: Arc<AtomicU64>,
}

/// A number from 0 to below `n` (Steele et al., "Fast splittable pseudorandom number generators", 2014, section 4).
pub fn below(random: &AtomicU64, n: u64) -> u64 {
    let mut z = random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % n
}

fn stages(text: &str) -> Vec<&str> {
    text.split(' ').collect()
}

fn named(stage: &str) -> TaskName {
    task(stage.trim_end_matches('+'))
}

fn spec_of(name: &str) -> IoSpec {
    IoSpec::new(name, DType::U8, &[SIZE])
}

impl Engine for Chain {
    fn version(&self) -> String {
        "1.0".into()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        vec![DeviceInfo {
            name: cpu().to_string(),
            ..DeviceInfo::default()
        }]
    }

    fn tasks(&self, program: &Document) -> Result<Vec<TaskName>, Fault> {
        Ok(stages(program.text()).into_iter().map(named).collect())
    }

    fn plan(&self, program: Document, _: Vec<(TaskName, Vec<DeviceInfo>)>) -> Job<Plan> {
        let text = program.text().to_owned();
        let stages = stages(&text);
        let share = |(i, stage): (usize, &&str)| Share {
            task: named(stage),
            part: Document::from(format!("{i} {text}")),
            inputs: if i == 0 { vec![0] } else { vec![] },
            outputs: if i + 1 == stages.len() {
                vec![0]
            } else {
                vec![]
            },
        };
        let plan = Plan {
            inputs: vec![spec_of("x")],
            outputs: vec![spec_of("y")],
            shares: stages.iter().enumerate().map(share).map(Arc::new).collect(),
            warnings: vec![],
            placement: String::new(),
        };
        Box::pin(async move { Ok(plan) })
    }

    fn variables(&self) -> Result<Vec<VariableState>, Fault> {
        Ok(Vec::new())
    }

    fn reset(&self, _: Vec<String>, _: Duration) -> Job<()> {
        Box::pin(async { Ok(()) })
    }

    fn register(&self, part: Document, wire: Arc<PartWire>) -> Job<Made> {
        let words = stages(part.text());
        let (i, stages) = (words[0].parse::<usize>().unwrap(), &words[1..]);
        let name = |i: usize| stages.get(i).map(|s| named(s));
        let before = i.checked_sub(1).and_then(name);
        let link = Link {
            before: before.map(|name| device(&name)),
            after: name(i + 1).map(|name| device(&name)),
            counts: stages[i].ends_with('+').then(|| self.count.clone()),
            wire,
            random: self.random.clone(),
            n_parts: self.n_parts.clone(),
            state: Mutex::default(),
            changed: Notify::new(),
        };
        self.n_parts.fetch_add(1, Ordering::SeqCst);
        let time = Duration::from_millis(below(&self.random, 200));
        Box::pin(async move {
            tokio::time::sleep(time).await;
            Ok(Made {
                part: Arc::new(link),
                warnings: vec![],
            })
        })
    }
}

fn device(task: &TaskName) -> DeviceName {
    DeviceName::parse(&format!("{task}/cpu:0")).unwrap()
}

/// A part of a chain.
struct Link {
    before: Option<DeviceName>,
    after: Option<DeviceName>,
    counts: Option<Arc<tokio::sync::Mutex<u64>>>,
    wire: Arc<PartWire>,
    random: Arc<AtomicU64>,
    n_parts: Arc<AtomicUsize>,
    state: Mutex<State>,
    changed: Notify,
}

/// The tensor of a run that arrives, and the ends of runs.
#[derive(Default)]
struct State {
    run: u64,
    bytes: Vec<u8>,
    ended: u64,
    given_up: Option<(u64, Error)>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.n_parts.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Link {
    fn end(&self, source: DeviceName, destination: DeviceName) -> RemoteEnd {
        RemoteEnd {
            key: Key {
                source,
                destination,
                tensor: "x".into(),
            },
            size_bytes: SIZE,
        }
    }

    /// The tensor from the task before. Errors when the run is given up.
    async fn received(&self, run: u64) -> Result<Vec<u8>, Fault> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            self.is_wanted(run)?;
            {
                let state = &mut *locked(&self.state);
                if state.run == run && state.bytes.len() == SIZE {
                    return Ok(std::mem::take(&mut state.bytes));
                }
            }
            changed.await;
        }
    }

    fn is_wanted(&self, run: u64) -> Result<(), Fault> {
        match &locked(&self.state).given_up {
            Some((given_up, e)) if *given_up >= run => Err(e.clone().into()),
            _ => Ok(()),
        }
    }

    /// Runs once; a part that counts gets the new count.
    async fn relay(
        &self,
        run: u64,
        feeds: Vec<Tensor>,
        count: Option<u64>,
    ) -> Result<Vec<Tensor>, Fault> {
        let mut bytes = match feeds.first() {
            Some(x) => x.as_bytes().to_vec(),
            None => self.received(run).await?,
        };
        tokio::time::sleep(Duration::from_millis(below(&self.random, 20))).await;
        self.is_wanted(run)?;
        if let Some(count) = count {
            bytes[8..16].copy_from_slice(&count.to_le_bytes());
        }
        {
            let state = &mut *locked(&self.state);
            state.ended = state.ended.max(run);
        }
        if self.after.is_some() {
            self.wire.carry(0, run, Bytes::from(bytes));
            return Ok(vec![]);
        }
        Ok(vec![Tensor::from_slice(&bytes, &[SIZE])?])
    }
}

impl Part for Link {
    fn inputs(&self) -> Vec<IoSpec> {
        match self.before {
            None => vec![spec_of("x")],
            Some(_) => vec![],
        }
    }

    fn outgoing(&self) -> Vec<RemoteEnd> {
        let after = self.after.clone();
        after
            .into_iter()
            .map(|after| self.end(cpu(), after))
            .collect()
    }

    fn incoming(&self) -> Vec<RemoteEnd> {
        let before = self.before.clone();
        before
            .into_iter()
            .map(|before| self.end(before, cpu()))
            .collect()
    }

    fn state_use(&self) -> StateUse {
        match self.counts {
            Some(_) => StateUse::Assigns,
            None => StateUse::None,
        }
    }

    fn holds_devices(&self) -> bool {
        false
    }

    fn variables(&self) -> Vec<VariableState> {
        let count = || VariableState {
            container: String::new(),
            name: "count".into(),
            dtype: DType::U64,
            shape: None,
        };
        self.counts.iter().map(|_| count()).collect()
    }

    fn hold(self: Arc<Self>) -> Job<Turn> {
        Box::pin(async move {
            let count = self.counts.clone().unwrap();
            let mut held = count.lock_owned().await;
            let (turn, mut wishes) = Turn::new();
            tokio::spawn(async move {
                let mut next = None;
                while let Some(wish) = wishes.recv().await {
                    match wish {
                        Wish::Run(run, feeds, done) => {
                            let ran = self.relay(run, feeds, Some(*held + 1)).await;
                            next = ran.is_ok().then_some(*held + 1);
                            let _ = done.send(ran);
                        }
                        Wish::Commit(done) => {
                            *held = next.unwrap_or(*held);
                            let _ = done.send(());
                            return;
                        }
                    }
                }
            });
            Ok(turn)
        })
    }

    fn run(self: Arc<Self>, run: u64, feeds: Vec<Tensor>) -> Job<Vec<Tensor>> {
        Box::pin(async move {
            let Some(count) = self.counts.clone() else {
                return self.relay(run, feeds, None).await;
            };
            let mut held = count.lock_owned().await;
            let ran = self.relay(run, feeds, Some(*held + 1)).await?;
            *held += 1;
            Ok(ran)
        })
    }

    fn skip(&self, run: u64) {
        let state = &mut *locked(&self.state);
        state.ended = state.ended.max(run);
    }

    fn initialise(self: Arc<Self>, _: Duration) -> Job<()> {
        // The count goes on: then each is there once.
        Box::pin(async { Ok(()) })
    }

    fn receive(&self, _: usize, run: u64, at: usize, bytes: &[u8]) -> Result<Received, Error> {
        let state = &mut *locked(&self.state);
        let is_given_up = state.given_up.as_ref().is_some_and(|(n, _)| *n >= run);
        if run <= state.ended || run < state.run || is_given_up {
            return Ok(Received::Late);
        }
        if run > state.run {
            (state.run, state.bytes) = (run, Vec::new());
        }
        if at != state.bytes.len() || at + bytes.len() > SIZE {
            let message = format!("byte {at} after {}", state.bytes.len());
            return Err(Error::new(ErrorKind::Internal, message));
        }
        state.bytes.extend_from_slice(bytes);
        match state.bytes.len() == SIZE {
            true => {
                self.changed.notify_waiters();
                Ok(Received::Whole)
            }
            false => Ok(Received::Part),
        }
    }

    fn abort(&self, run: u64, error: Error) {
        let state = &mut *locked(&self.state);
        if state.given_up.as_ref().is_none_or(|(n, _)| *n < run) {
            state.given_up = Some((run, error));
        }
        self.changed.notify_waiters();
    }

    fn progress(&self) -> Progress {
        let state = locked(&self.state);
        Progress {
            count: state.run + state.bytes.len() as u64,
            steps: Vec::new(),
            awaited: Vec::new(),
            is_sending: false,
        }
    }
}
