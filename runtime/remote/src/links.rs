//! Orders of a master to a task: one standing stream for each pair, with parts, their runs, and the ends of both.
//!
//! Order: orders are read in turn; parts compile and runs of different programs go on at once. Blocking: neither side waits for the other.
//! Bound: one run of a program at a time. Peer gone: parts live as long as the stream. With its end, the task forgets them, and the master's
//! runs on the task fail; the next run registers its parts again.

use crate::TaskName;
use crate::inbox::Inbox;
use crate::messages::{
    Abort, CallableId, Fault, Initialise, Locate, Opening, Order, Place, Register, Registered,
    Release, Report, Step, TurnOrder, Value,
};
use crate::rpc::{self, Failure};
use crate::server::Task;
use crate::steps::{RunOf, send_apart};
use crate::worker::{given, locked};
use gristmill_runtime::{ErrorKind, Tensor};
use http::uri::PathAndQuery;
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Request;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

/// A master's stream to a task.
#[derive(Clone)]
pub(crate) struct Link {
    who: TaskName,
    orders: mpsc::UnboundedSender<Order>,
    waiting: Arc<Waiting>,
    /// Number of the last order with an answer.
    last: Arc<AtomicU64>,
}

/// Awaited answers of a stream, and the task's word of leave.
struct Waiting {
    /// Orders without an answer so far, by number; once the stream has ended, the reason.
    answers: Mutex<Result<HashMap<u64, oneshot::Sender<Ended>>, Fault>>,
    /// True once the task takes nothing new.
    is_leaving: AtomicBool,
}

/// The answer to an order.
type Ended = Result<Report, Fault>;

impl Link {
    /// Opens a stream, in the name of a task, to `who`.
    fn open(task: &Arc<Task>, who: &TaskName, channel: Channel) -> Link {
        let (orders, queue) = mpsc::unbounded_channel();
        let waiting = Arc::new(Waiting {
            answers: Mutex::new(Ok(HashMap::new())),
            is_leaving: AtomicBool::new(false),
        });
        let hello = Order {
            hello: Some(task.hello(who)),
            ..Order::default()
        };
        let link = Link {
            who: who.clone(),
            orders,
            waiting: waiting.clone(),
            last: Arc::default(),
        };
        link.send(hello);
        let (master, who) = (Arc::downgrade(task), who.clone());
        let (most, every) = (task.limits.message_bytes, task.limits.keep_alive);
        let signs = link.orders.downgrade();
        tokio::spawn(async move {
            let failure = tokio::select! {
                failure = read(channel, most, queue, (&master, &who), &waiting) => failure,
                never = beat(signs, every) => match never {},
            };
            if let Some(task) = master.upgrade() {
                let fault = task.fault_of(&who, failure);
                waiting.end(fault.clone());
                task.master.fail_runs(&who, &fault);
            }
        });
        link
    }

    fn send(&self, order: Order) {
        // After the end of the stream nobody waits for an answer.
        let _ = self.orders.send(order);
    }

    pub(crate) fn has_ended(&self) -> bool {
        locked(&self.waiting.answers).is_err()
    }

    /// True once the task takes nothing new.
    pub(crate) fn is_leaving(&self) -> bool {
        self.waiting.is_leaving.load(Ordering::Acquire)
    }

    /// Gives an order, and waits for the answer.
    async fn ask(&self, mut order: Order) -> Ended {
        order.number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, receiver) = oneshot::channel();
        match &mut *locked(&self.waiting.answers) {
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

    /// Gives an order to compile, or one about variables, and waits for the answer for some time.
    async fn ask_in_time(&self, task: &Task, order: Order) -> Ended {
        let at_most = task.limits.prepare;
        let answered = tokio::time::timeout(at_most, self.ask(order)).await;
        answered.unwrap_or_else(|_| Err(task.fault_of(&self.who, Failure::Silent(at_most))))
    }

    /// Has a part compiled.
    pub(crate) async fn register(&self, task: &Task, order: Register) -> Result<Registered, Fault> {
        let order = Order {
            register: Some(order),
            ..Order::default()
        };
        given(self.ask_in_time(task, order).await?.registered)
    }

    /// Has the variables of a part set to their initial values.
    pub(crate) async fn initialise(&self, task: &Task, id: CallableId) -> Result<(), Fault> {
        let order = Order {
            initialise: Some(Initialise { callable: Some(id) }),
            ..Order::default()
        };
        self.ask_in_time(task, order).await.map(|_| ())
    }

    /// Asks where the run of a part is.
    pub(crate) async fn locate(&self, id: CallableId) -> Result<Place, Fault> {
        let locate = Locate { callable: Some(id) };
        let order = Order {
            locate: Some(locate),
            ..Order::default()
        };
        given(self.ask(order).await?.place)
    }

    /// Has a part forgotten. After the end of the stream it is.
    pub(crate) fn release(&self, id: CallableId) {
        self.send(Order {
            release: Some(Release { callable: Some(id) }),
            ..Order::default()
        });
    }

    /// Has a run given up. After the end of the stream it is.
    pub(crate) fn abort(&self, order: Abort) {
        self.send(Order {
            abort: Some(order),
            ..Order::default()
        });
    }

    /// Has the turn of a run taken, or the run committed.
    pub(crate) async fn turn(&self, (id, run): RunOf, is_commit: bool) -> Result<(), Fault> {
        let turn = TurnOrder {
            callable: Some(id),
            run,
            is_commit,
        };
        let order = Order {
            turn: Some(turn),
            ..Order::default()
        };
        self.ask(order).await.map(|_| ())
    }

    /// Runs a part, with inputs of its own. Outputs with their bytes come back; others go to the inbox of the program.
    pub(crate) async fn step(
        &self,
        task: &Task,
        (id, run, takes_turn): (CallableId, u64, bool),
        feeds: Vec<Tensor>,
        inbox: &Arc<Inbox>,
    ) -> Result<Vec<Value>, Fault> {
        let values = Value::of_all(&feeds, &task.limits);
        let outbox = task.outbox(&self.who)?;
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
            takes_turn,
        };
        let order = Order {
            step: Some(step),
            ..Order::default()
        };
        let report = self.ask(order).await?;
        Ok(report.results.unwrap_or_default().fetches)
    }
}

impl Waiting {
    /// Takes the answer to an order.
    fn take(&self, number: u64, ended: Ended) {
        let found = match &mut *locked(&self.answers) {
            Ok(waiting) => waiting.remove(&number),
            Err(_) => None,
        };
        if let Some(sender) = found {
            // Whoever waited may have gone.
            let _ = sender.send(ended);
        }
    }

    fn end(&self, fault: Fault) {
        let ended = std::mem::replace(&mut *locked(&self.answers), Err(fault.clone()));
        for (_, sender) in ended.into_iter().flatten() {
            let _ = sender.send(Err(fault.clone()));
        }
    }
}

/// Gives signs of life, as long as there are orders.
async fn beat(orders: mpsc::WeakUnboundedSender<Order>, every: Duration) -> Infallible {
    let mut ticks = rpc::ticks(every);
    loop {
        ticks.tick().await;
        if let Some(orders) = orders.upgrade() {
            // The stream may end at this moment.
            let _ = orders.send(Order::default());
        }
    }
}

/// Reads reports until the stream ends, with a reason.
async fn read(
    channel: Channel,
    most: usize,
    queue: mpsc::UnboundedReceiver<Order>,
    between: (&Weak<Task>, &TaskName),
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
        Err(status) => return rpc::of_status(&status),
    };
    loop {
        let report = match reports.message().await {
            Ok(Some(report)) => report,
            Ok(None) => return Failure::Lost("it has ended the stream of orders".to_owned()),
            Err(status) => return rpc::of_status(&status),
        };
        if let Some(refusal) = dispatch(report, between, waiting) {
            return Failure::Fault(refusal);
        }
    }
}

/// Gives a report to whoever waits for it. An error if it refuses the stream.
fn dispatch(
    mut report: Report,
    (master, who): (&Weak<Task>, &TaskName),
    waiting: &Waiting,
) -> Option<Fault> {
    let (number, run, fault) = (report.number, report.run, report.fault.take());
    if report.is_leaving {
        waiting.is_leaving.store(true, Ordering::Release);
        let master = master.upgrade();
        master.into_iter().for_each(|task| task.let_leave(who));
        return None;
    }
    let Some(id) = report.callable else {
        return fault;
    };
    match (number, fault) {
        (0, Some(fault)) => {
            let program = master.upgrade().and_then(|task| task.master.program(id));
            // Only tasks with a part of it can lose its tensors.
            if let Some(program) = program.filter(|program| program.link(who).is_ok()) {
                program.outputs.fail(run, fault);
            }
        }
        (number, Some(fault)) => waiting.take(number, Err(fault)),
        (number, None) => waiting.take(number, Ok(report)),
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
}
