//! The other end of a master's stream of orders: see [`crate::links`].

use crate::TaskName;
use crate::contents::TensorBytes;
use crate::keys::Peer;
use crate::messages::{
    CallableId, Fault, Hello, Opening, Order, Register, Registered, Report, Results, Step,
    TurnOrder, Value,
};
use crate::outbox::{Lost, Outbox, Parcel};
use crate::rpc;
use crate::server::Task;
use crate::shutdown::{Busy, Phase, Underway};
use crate::worker::{given, locked};
use bytes::Bytes;
use gristmill_runtime::{ErrorKind, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// A run of a callable.
pub(crate) type RunOf = (CallableId, u64);

/// A message of a stream of reports.
type Said = Result<Report, Status>;

/// A master's stream.
struct Stream {
    master: TaskName,
    incarnation: u64,
    /// Its parts, also those under compilation; none once the stream has ended.
    parts: Mutex<Option<HashMap<CallableId, Underway>>>,
}

impl Stream {
    /// Adds a part, and counts it. Errors on one of another master, and on one it has.
    fn add(&self, id: CallableId, held: &Busy) -> Result<(), Fault> {
        let is_new = match &mut *locked(&self.parts) {
            Some(parts) => parts.insert(id, held.begin()).is_none(),
            None => true,
        };
        match is_new && id.master == self.incarnation {
            true => Ok(()),
            false => Err(Fault::invalid("a part is of another master, or is there")),
        }
    }

    /// Removes a part. False if the stream does not have it.
    fn remove(&self, id: CallableId) -> bool {
        let mut parts = locked(&self.parts);
        parts
            .as_mut()
            .is_some_and(|parts| parts.remove(&id).is_some())
    }

    fn has(&self, id: CallableId) -> bool {
        let parts = locked(&self.parts);
        parts.as_ref().is_some_and(|parts| parts.contains_key(&id))
    }
}

impl Task {
    /// Serves a master until its stream ends.
    pub(crate) fn steps(
        self: Arc<Self>,
        orders: Streaming<Order>,
        peer: Peer,
    ) -> ReceiverStream<Result<Report, Status>> {
        let (reports, out) = mpsc::channel(16);
        tokio::spawn(self.obey(orders, peer, reports));
        ReceiverStream::new(out)
    }

    async fn obey(
        self: Arc<Self>,
        mut orders: Streaming<Order>,
        peer: Peer,
        reports: mpsc::Sender<Said>,
    ) {
        let ended = match self.begin_stream(&mut orders, &peer).await {
            Err(fault) => Err(fault),
            Ok(stream) => {
                let stream = Arc::new(stream);
                let sign = || Ok(Report::default());
                let ended = tokio::select! {
                    ended = self.obey_all(&mut orders, &reports, &stream) => ended,
                    () = self.say_goodbye(&reports) => Err(self.is_stopping()),
                    never = rpc::beat(&reports, self.limits.keep_alive, sign) => match never {},
                };
                self.end_stream(&stream, &ended);
                ended
            }
        };
        if let Err(fault) = ended {
            let report = Report {
                fault: Some(fault),
                ..Report::default()
            };
            // The master may be gone.
            let _ = reports.send(Ok(report)).await;
        }
    }

    /// Tells a master when this task is about to leave, so that it lets go of its parts once their runs have
    /// ended. Waits for the end of the server.
    async fn say_goodbye(&self, reports: &mpsc::Sender<Said>) {
        if self.draining().await == Phase::Draining {
            let report = Report {
                is_leaving: true,
                ..Report::default()
            };
            tokio::select! {
                // An absent master needs no report.
                _ = reports.send(Ok(report)) => {}
                () = self.stopped() => {}
            }
        }
        self.stopped().await;
    }

    /// Reads the greeting of a master. Errors when it is not of this cluster, has another program, or has another start with a stream.
    async fn begin_stream(
        &self,
        orders: &mut Streaming<Order>,
        peer: &Peer,
    ) -> Result<Stream, Fault> {
        let first = tokio::time::timeout(self.limits.hello, orders.message()).await;
        let silent = |_| Fault::invalid("a master opened a stream and said nothing");
        let first = first.map_err(silent)?.map_err(rpc::broken)?;
        let hello = given(first.and_then(|order| order.hello))?;
        let master = self.master_of(&hello, peer)?;
        let incarnation = hello.incarnation;
        if incarnation == self.incarnation {
            return Err(Fault::invalid(format!(
                "{master} has the incarnation of {}",
                self.name
            )));
        }
        self.worker
            .masters
            .enter(&master, incarnation, &self.limits)
            .await?;
        Ok(Stream {
            master,
            incarnation,
            parts: Mutex::new(Some(HashMap::new())),
        })
    }

    /// Forgets the parts of a stream, and gives up their runs.
    fn end_stream(&self, stream: &Stream, ended: &Result<(), Fault>) {
        let lost = ended.clone().err().unwrap_or_else(|| {
            Fault::new(ErrorKind::DeviceFailed, "the master has ended its stream")
        });
        let parts = locked(&stream.parts).take();
        for (id, _underway) in parts.into_iter().flatten() {
            self.release(id, &lost);
        }
        self.worker
            .masters
            .leave(&stream.master, stream.incarnation);
    }

    /// Errors when the stream breaks.
    async fn obey_all(
        self: &Arc<Self>,
        orders: &mut Streaming<Order>,
        reports: &mpsc::Sender<Said>,
        stream: &Arc<Stream>,
    ) -> Result<(), Fault> {
        while let Some(mut order) = orders.message().await.map_err(rpc::broken)? {
            if let Some(abort) = order.abort.take()
                && stream.has(given(abort.callable)?)
            {
                // An absent part has no runs.
                let _ = self.abort(abort);
            }
            if let Some(release) = order.release.take()
                && stream.remove(given(release.callable)?)
            {
                let message = "the master has released the program";
                let cause = Fault::new(ErrorKind::DeviceFailed, message);
                self.release(given(release.callable)?, &cause);
            }
            let (id, run) = match about(&order)? {
                Some(of) => of,
                None => continue,
            };
            if order.register.is_some() {
                stream.add(id, &self.held)?;
            } else if stream.has(id)
                && let Ok(hosted) = self.hosted(id)
            {
                // From here on the run is given up with the stream.
                hosted.note(run);
            }
            let reports = reports.downgrade();
            let obeying = self
                .clone()
                .obey_one(order, (id, run), stream.clone(), reports);
            tokio::spawn(obeying);
        }
        Ok(())
    }

    /// Does what an order says, and reports, unless the stream of reports has ended.
    async fn obey_one(
        self: Arc<Self>,
        order: Order,
        (id, run): RunOf,
        stream: Arc<Stream>,
        reports: mpsc::WeakSender<Said>,
    ) {
        let (number, said) = (order.number, reports.clone());
        let doing = tokio::spawn(async move { self.done((id, order), &stream, said).await });
        let panicked = |e| {
            let message = format!("an order panicked: {e}");
            Err(Fault::new(ErrorKind::Internal, message))
        };
        let done = doing.await.unwrap_or_else(panicked);
        let report = Report {
            callable: Some(id),
            run,
            number,
            ..done.unwrap_or_else(|fault| Report {
                fault: Some(fault),
                ..Report::default()
            })
        };
        // An absent master needs no report.
        if let Some(reports) = reports.upgrade() {
            let _ = reports.send(Ok(report)).await;
        }
    }

    /// The report on an order.
    async fn done(
        &self,
        (id, order): (CallableId, Order),
        stream: &Stream,
        reports: mpsc::WeakSender<Said>,
    ) -> Result<Report, Fault> {
        let mut report = Report::default();
        if !stream.has(id) {
            return Err(self.has_no_part());
        }
        match order {
            Order {
                register: Some(part),
                ..
            } => report.registered = Some(self.register(part, stream, reports).await?),
            Order {
                step: Some(step), ..
            } => report.results = Some(self.step(step, &stream.master, reports).await?),
            Order {
                turn: Some(turn), ..
            } => self.take_turn(turn).await?,
            Order {
                locate: Some(of), ..
            } => report.place = Some(self.hosted(given(of.callable)?)?.place()),
            Order {
                initialise: Some(of),
                ..
            } => {
                let hosted = self.hosted(given(of.callable)?)?;
                hosted.initialise(&self.limits).await?;
            }
            _ => return Err(Fault::invalid("an order without contents")),
        }
        Ok(report)
    }

    /// Compiles a part for a master. It lives as long as its stream.
    async fn register(
        &self,
        order: Register,
        stream: &Stream,
        reports: mpsc::WeakSender<Said>,
    ) -> Result<Registered, Fault> {
        self.takes_more()?;
        let document = self.store.document(&given(order.part)?, &self.limits)?;
        let id = given(order.callable)?;
        let tell = report_of_loss(reports, id);
        let master = stream.master.clone();
        let registered = self.compile((id, master), document, order.outputs, tell);
        let registered = registered.await?;
        if !stream.has(id) {
            let message = "the master wants the program no more";
            let fault = Fault::new(ErrorKind::DeviceFailed, message);
            self.release(id, &fault);
            return Err(fault);
        }
        Ok(registered)
    }

    async fn take_turn(&self, order: TurnOrder) -> Result<(), Fault> {
        let hosted = self.hosted(given(order.callable)?)?;
        match order.is_commit {
            true => hosted.commit(order.run).await,
            false => hosted.take_turn(order.run).await,
        }
    }

    /// The greeting task. Errors when it is not of this cluster, not at the other end, or has another program.
    fn master_of(&self, hello: &Hello, peer: &Peer) -> Result<TaskName, Fault> {
        self.greeted(hello)?;
        self.sender(hello, peer)
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
        let outbox = self.outbox(master)?;
        let feeds = hosted.gathered(run, &step.feeds);
        let fetches = hosted.run(run, step.takes_turn, feeds).await?;
        if fetches.len() != hosted.outputs.len() {
            let (n, expected) = (fetches.len(), hosted.outputs.len());
            return Err(Fault::invalid(format!(
                "{n} outputs, where the master has {expected}"
            )));
        }
        let values = Value::of_all(&fetches, &self.limits);
        let lost = report_of_loss(reports, id);
        let opening = |i: usize| Opening::of_fetch(id, hosted.outputs[i]);
        send_apart(fetches, &values, run, opening, &outbox, lost);
        Ok(Results { fetches: values })
    }
}

/// Tells a master of a tensor that was lost on the way.
fn report_of_loss(reports: mpsc::WeakSender<Said>, id: CallableId) -> Lost {
    Arc::new(move |run, fault| {
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
    })
}

/// The program of an order with an answer, and the run, if it is about one. Errors on an order to do more than one thing.
fn about(order: &Order) -> Result<Option<RunOf>, Fault> {
    let things = [
        order.register.is_some(),
        order.initialise.is_some(),
        order.step.is_some(),
        order.turn.is_some(),
        order.locate.is_some(),
    ];
    if things.into_iter().filter(|is_there| *is_there).count() > 1 {
        return Err(Fault::invalid("an order to do more than one thing"));
    }
    let (callable, run) = match order {
        Order {
            register: Some(of), ..
        } => (of.callable, 0),
        Order {
            initialise: Some(of),
            ..
        } => (of.callable, 0),
        Order {
            locate: Some(of), ..
        } => (of.callable, 0),
        Order { step: Some(of), .. } => (of.callable, of.run),
        Order { turn: Some(of), .. } => (of.callable, of.run),
        _ => return Ok(None),
    };
    Ok(Some((given(callable)?, run)))
}

/// Puts the tensors whose bytes are not among the values on the way.
pub(crate) fn send_apart(
    tensors: Vec<Tensor>,
    values: &[Value],
    run: u64,
    opening: impl Fn(usize) -> Opening,
    outbox: &Outbox,
    lost: Lost,
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
