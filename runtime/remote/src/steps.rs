//! Orders of a master to a task: one standing stream for each pair, with runs and their ends.
//!
//! Order: orders are read in turn; runs of different programs go on at once. Blocking: neither side waits for the other. Bound: one run of a
//! program at a time. Peer gone: the master's runs on the task fail, and the task gives up the master's runs.

use crate::TaskName;
use crate::contents::TensorBytes;
use crate::inbox::Inbox;
use crate::messages::{
    Abort, CallableId, Fault, Hello, Opening, Order, Report, Results, Step, TurnOrder, Value,
};
use crate::outbox::{Outbox, Parcel};
use crate::rpc::{self, Failure};
use crate::server::Task;
use crate::worker::{given, locked};
use bytes::Bytes;
use gristmill_runtime::{ErrorKind, Tensor};
use http::uri::PathAndQuery;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// A run of a callable.
pub(crate) type RunOf = (CallableId, u64);

/// A master's stream to a task.
#[derive(Clone)]
pub(crate) struct Link {
    orders: mpsc::UnboundedSender<Order>,
    waiting: Arc<Waiting>,
    /// Number of the last order with an answer.
    last: Arc<AtomicU64>,
}

/// Orders without an answer so far, by number; once the stream has ended, the reason.
struct Waiting(Mutex<Result<HashMap<u64, oneshot::Sender<Ended>>, Fault>>);

/// The end of a run on a task.
type Ended = Result<Results, Fault>;

impl Link {
    /// Opens a stream, in the name of a task, to `who`.
    fn open(task: &Arc<Task>, who: &TaskName, channel: Channel) -> Link {
        let (orders, queue) = mpsc::unbounded_channel();
        let waiting = Arc::new(Waiting(Mutex::new(Ok(HashMap::new()))));
        let hello = Order {
            hello: Some(task.hello(who)),
            ..Order::default()
        };
        let link = Link {
            orders,
            waiting: waiting.clone(),
            last: Arc::default(),
        };
        link.send(hello);
        let (master, who) = (Arc::downgrade(task), who.clone());
        let most = task.limits.message_bytes;
        tokio::spawn(async move {
            let failure = read(channel, most, queue, &master, &waiting).await;
            if let Some(task) = master.upgrade() {
                waiting.end(task.fault_of(&who, failure));
            }
        });
        link
    }

    fn send(&self, order: Order) {
        // After the end of the stream nobody waits for an answer.
        let _ = self.orders.send(order);
    }

    pub(crate) fn has_ended(&self) -> bool {
        locked(&self.waiting.0).is_err()
    }

    /// Gives an order about a run, and waits for the answer.
    async fn ask(&self, mut order: Order) -> Ended {
        order.number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, receiver) = oneshot::channel();
        match &mut *locked(&self.waiting.0) {
            Ok(waiting) => {
                // Of those whose askers have gone, no more than one per order stays.
                waiting.retain(|_, sender| !sender.is_closed());
                waiting.insert(order.number, sender);
            }
            Err(fault) => return Err(fault.clone()),
        };
        self.send(order);
        let lost = |_| Err(Fault::new(ErrorKind::DeviceFailed, "the server ends"));
        receiver.await.unwrap_or_else(lost)
    }
}

impl Waiting {
    /// Takes the answer to an order.
    fn take(&self, number: u64, ended: Ended) {
        let found = match &mut *locked(&self.0) {
            Ok(waiting) => waiting.remove(&number),
            Err(_) => None,
        };
        if let Some(sender) = found {
            // Whoever waited may have gone.
            let _ = sender.send(ended);
        }
    }

    fn end(&self, fault: Fault) {
        let ended = std::mem::replace(&mut *locked(&self.0), Err(fault.clone()));
        for (_, sender) in ended.into_iter().flatten() {
            let _ = sender.send(Err(fault.clone()));
        }
    }
}

/// Reads reports until the stream ends, with a reason.
async fn read(
    channel: Channel,
    most: usize,
    queue: mpsc::UnboundedReceiver<Order>,
    master: &Weak<Task>,
    waiting: &Waiting,
) -> Failure {
    let mut client = tonic::client::Grpc::new(channel)
        .max_decoding_message_size(most)
        .max_encoding_message_size(most);
    if let Err(e) = client.ready().await {
        return rpc::lost(&e);
    }
    let codec = ProstCodec::<Order, Report>::default();
    let path = PathAndQuery::from_static(rpc::STEPS);
    let request = Request::new(UnboundedReceiverStream::new(queue));
    let mut reports = match client.streaming(request, path, codec).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return rpc::lost(&status),
    };
    loop {
        let report = match reports.message().await {
            Ok(Some(report)) => report,
            Ok(None) => return Failure::Lost("it has ended the stream of orders".to_owned()),
            Err(status) => return rpc::lost(&status),
        };
        if let Some(refusal) = dispatch(report, master, waiting) {
            return Failure::Fault(refusal);
        }
    }
}

/// Gives a report to whoever waits for it. An error if it refuses the stream.
fn dispatch(report: Report, master: &Weak<Task>, waiting: &Waiting) -> Option<Fault> {
    let ended = match report.fault {
        Some(fault) => Err(fault),
        None => Ok(report.results.unwrap_or_default()),
    };
    let Some(id) = report.callable else {
        return Some(ended.err().unwrap_or_default());
    };
    match (report.number, ended) {
        (0, Err(fault)) => {
            let inbox = master.upgrade().and_then(|task| task.master.inbox(id));
            inbox
                .iter()
                .for_each(|inbox| inbox.fail(report.run, fault.clone()));
        }
        (number, ended) => waiting.take(number, ended),
    }
    None
}

impl Task {
    /// The stream to a task.
    pub(crate) fn link(self: &Arc<Self>, name: &TaskName) -> Result<Link, Fault> {
        let channel = self.channel(name)?;
        let mut links = locked(&self.master.links);
        match links.get(name).filter(|link| !link.has_ended()) {
            Some(link) => Ok(link.clone()),
            None => {
                let link = Link::open(self, name, channel);
                links.insert(name.clone(), link.clone());
                Ok(link)
            }
        }
    }

    /// Runs a part on another task, with inputs of its own. Outputs with their bytes come back; others go to the inbox of the program.
    pub(crate) async fn step_on(
        self: &Arc<Self>,
        name: &TaskName,
        (id, run): RunOf,
        feeds: Vec<Tensor>,
        inbox: &Arc<Inbox>,
    ) -> Result<Vec<Value>, Fault> {
        let link = self.link(name)?;
        let values = Value::of_all(&feeds, &self.limits);
        let outbox = self.outbox(name)?;
        let failing = Arc::downgrade(inbox);
        let lost = move |run: u64, fault: &Fault| {
            let inbox = failing.upgrade();
            inbox
                .iter()
                .for_each(|inbox| inbox.fail(run, fault.clone()));
        };
        let opening = |i| Opening::of_feed(id, i);
        send_apart(feeds, &values, run, opening, &outbox, Arc::new(lost));
        let step = Step {
            callable: Some(id),
            run,
            feeds: values,
        };
        let order = Order {
            step: Some(step),
            ..Order::default()
        };
        Ok(link.ask(order).await?.fetches)
    }

    /// Has another task take the turn of a run, or commit it.
    pub(crate) async fn turn_on(
        self: &Arc<Self>,
        name: &TaskName,
        (id, run): RunOf,
        is_commit: bool,
    ) -> Result<(), Fault> {
        let turn = TurnOrder {
            callable: Some(id),
            run,
            is_commit,
        };
        let order = Order {
            turn: Some(turn),
            ..Order::default()
        };
        self.link(name)?.ask(order).await.map(|_| ())
    }

    /// Tells another task to give up a run, if there is a stream to it: without one, it has done so.
    pub(crate) fn abort_on(&self, name: &TaskName, order: Abort) {
        if let Some(link) = locked(&self.master.links).get(name) {
            link.send(Order {
                abort: Some(order),
                ..Order::default()
            });
        }
    }

    /// Serves a master until its stream ends.
    pub(crate) fn steps(
        self: Arc<Self>,
        orders: Streaming<Order>,
    ) -> ReceiverStream<Result<Report, Status>> {
        let (reports, out) = mpsc::channel(16);
        tokio::spawn(self.obey(orders, reports));
        ReceiverStream::new(out)
    }

    async fn obey(self: Arc<Self>, orders: Streaming<Order>, reports: mpsc::Sender<Said>) {
        let mut runs = LastRuns::default();
        let ended = tokio::select! {
            ended = self.obey_all(orders, &reports, &mut runs) => ended,
            () = self.stopped() => Err(self.is_stopping()),
        };
        let lost = ended.clone().err().unwrap_or_else(|| {
            Fault::new(ErrorKind::DeviceFailed, "the master has ended its stream")
        });
        for (id, run) in runs.of {
            if let Ok(hosted) = self.hosted(id) {
                hosted.give_up(run, lost.clone());
            }
        }
        if let Some(master) = runs.master {
            self.worker.masters.leave(master);
        }
        if let Err(fault) = ended {
            let report = Report {
                fault: Some(fault),
                ..Report::default()
            };
            // The master may be gone.
            let _ = reports.send(Ok(report)).await;
        }
    }

    /// Errors when the stream breaks, or its master is not of this cluster.
    async fn obey_all(
        self: &Arc<Self>,
        mut orders: Streaming<Order>,
        reports: &mpsc::Sender<Said>,
        runs: &mut LastRuns,
    ) -> Result<(), Fault> {
        let first = orders.message().await.map_err(rpc::broken)?;
        let hello = given(first.and_then(|order| order.hello))?;
        let master = self.master_of(&hello)?;
        let replaced = self.worker.masters.enter(&master, hello.incarnation)?;
        runs.master = Some(hello.incarnation);
        self.release_all(replaced, "its master was restarted");
        while let Some(mut order) = orders.message().await.map_err(rpc::broken)? {
            if let Some(abort) = order.abort.take() {
                // An absent part has no runs.
                let _ = self.abort(abort);
            }
            let of = match (&order.step, &order.turn) {
                (Some(step), _) => (given(step.callable)?, step.run),
                (None, Some(turn)) => (given(turn.callable)?, turn.run),
                (None, None) => continue,
            };
            runs.note(of, self);
            let (master, reports) = (master.clone(), reports.downgrade());
            tokio::spawn(self.clone().obey_one(order, of, master, reports));
        }
        Ok(())
    }

    /// Does what an order about a run says, and reports, unless the stream of reports has ended.
    async fn obey_one(
        self: Arc<Self>,
        order: Order,
        (id, run): RunOf,
        master: TaskName,
        reports: mpsc::WeakSender<Said>,
    ) {
        let (number, said) = (order.number, reports.clone());
        let doing = tokio::spawn(async move {
            match (order.step, order.turn) {
                (Some(step), _) => self.step(step, &master, said).await,
                (None, turn) => self.take_turn(turn.unwrap_or_default()).await,
            }
        });
        let panicked = |e| {
            Err(Fault::new(
                ErrorKind::Internal,
                format!("a run panicked: {e}"),
            ))
        };
        let done = doing.await.unwrap_or_else(panicked);
        let (results, fault) = match done {
            Ok(results) => (Some(results), None),
            Err(fault) => (None, Some(fault)),
        };
        let report = Report {
            callable: Some(id),
            run,
            fault,
            results,
            number,
        };
        // An absent master needs no report.
        if let Some(reports) = reports.upgrade() {
            let _ = reports.send(Ok(report)).await;
        }
    }

    async fn take_turn(&self, order: TurnOrder) -> Result<Results, Fault> {
        let hosted = self.hosted(given(order.callable)?)?;
        match order.is_commit {
            true => hosted.commit(order.run).await?,
            false => hosted.take_turn(order.run, self.begin_run()?).await?,
        }
        Ok(Results::default())
    }

    /// The greeting task. Errors when it is not of this cluster, or has another program.
    fn master_of(&self, hello: &Hello) -> Result<TaskName, Fault> {
        self.greeted(hello)?;
        let from = given(hello.from.clone())?;
        let mut tasks = self.spec.tasks().map(|(name, _)| name);
        let found = tasks.find(|name| name.to_string() == from);
        let found = found.cloned();
        found.ok_or_else(|| Fault::invalid(format!("{from} is not a task of the cluster")))
    }

    /// Runs a part for a master.
    async fn step(
        &self,
        step: Step,
        master: &TaskName,
        reports: mpsc::WeakSender<Said>,
    ) -> Result<Results, Fault> {
        let (id, run) = (given(step.callable)?, step.run);
        let hosted = self.hosted(id)?;
        let _underway = match hosted.has_turn(run) {
            true => None,
            false => Some(self.begin_run()?),
        };
        let outbox = self.outbox(master)?;
        let fetches = hosted.run(run, hosted.gathered(run, &step.feeds)).await?;
        if fetches.len() != hosted.outputs.len() {
            let (n, expected) = (fetches.len(), hosted.outputs.len());
            return Err(Fault::invalid(format!(
                "{n} outputs, where the master has {expected}"
            )));
        }
        let values = Value::of_all(&fetches, &self.limits);
        let lost = move |run: u64, fault: &Fault| {
            let Some(reports) = reports.upgrade() else {
                return;
            };
            let report = Report {
                callable: Some(id),
                run,
                fault: Some(fault.clone()),
                ..Report::default()
            };
            // An absent master needs no report.
            tokio::spawn(async move { reports.send(Ok(report)).await });
        };
        let opening = |i: usize| Opening::of_fetch(id, hosted.outputs[i]);
        send_apart(fetches, &values, run, opening, &outbox, Arc::new(lost));
        Ok(Results { fetches: values })
    }
}

/// The last run of each program of a stream.
#[derive(Default)]
struct LastRuns {
    of: HashMap<CallableId, u64>,
    /// Once it has greeted.
    master: Option<u64>,
    /// Number of programs at which released ones are looked for.
    most: usize,
}

impl LastRuns {
    fn note(&mut self, (id, run): RunOf, task: &Task) {
        if self.of.len() > self.most {
            self.of.retain(|id, _| task.hosted(*id).is_ok());
            self.most = 2 * self.of.len() + 16;
        }
        self.of.insert(id, run);
    }
}

/// A message of a stream of reports.
type Said = Result<Report, Status>;

/// Puts the tensors whose bytes are not among the values on the way.
fn send_apart(
    tensors: Vec<Tensor>,
    values: &[Value],
    run: u64,
    opening: impl Fn(usize) -> Opening,
    outbox: &Outbox,
    lost: crate::outbox::Lost,
) {
    let apart = tensors.into_iter().zip(values).enumerate();
    for (i, (tensor, _)) in apart.filter(|(_, (_, value))| value.data.is_none()) {
        outbox.send(Parcel {
            bytes: Bytes::from_owner(TensorBytes(tensor)),
            run,
            opening: Arc::new(opening(i)),
            lost: lost.clone(),
        });
    }
}
