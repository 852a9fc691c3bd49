//! Sessions of clients on a task: each holds programs, and has a lease.
//!
//! A session is a standing stream of its client. When the stream breaks, the client opens it again; a session without a stream for the time of
//! the lease ends, as a closed one does. A session knows the values of variables by the start of their task: once the task was
//! restarted, they are lost to the session until somebody sets them (Abadi et al., "TensorFlow: large-scale machine learning on heterogeneous
//! distributed systems", 2015, section 3.3).
//!
//! Order: none between sessions. Blocking: never. Bound: [`Limits::sessions`]. Peer gone: see above.

use crate::TaskName;
use crate::contents::Digest;
use crate::limits::Limits;
use crate::master::Installed;
use crate::messages::{Attend, CallableId, Close, Fault, Nothing, Reply, Welcome};
use crate::rpc;
use crate::server::Task;
use crate::worker::{given, locked};
use gristmill_runtime::ErrorKind;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// A variable of a task, by its container and name.
type VariableOf = (TaskName, String, String);

/// The sessions of a task.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<u64, Session>>);

struct Session {
    /// Open streams; more than one when the end of a broken one is noticed late.
    n_streams: usize,
    /// The end of the last stream.
    left: Instant,
    /// Programs, and how often the client holds each.
    held: HashMap<Digest, usize>,
    /// Variables its runs may have used, with the start of their task then.
    known: HashMap<VariableOf, u64>,
    /// Programs whose variables are all known.
    checked: HashSet<CallableId>,
}

impl Sessions {
    /// Begins a session. Errors when there are too many.
    fn begin(&self, id: u64, limits: &Limits) -> Result<(), Fault> {
        let mut sessions = locked(&self.0);
        if sessions.len() >= limits.sessions {
            let n = sessions.len();
            let message = format!("the task has {n} sessions, and takes no more");
            return Err(Fault::new(ErrorKind::OutOfMemory, message).with_hint(
                "close some, or try again: those of clients that are gone end by themselves",
            ));
        }
        let session = Session {
            n_streams: 1,
            left: Instant::now(),
            held: HashMap::new(),
            known: HashMap::new(),
            checked: HashSet::new(),
        };
        sessions.insert(id, session);
        Ok(())
    }

    /// Does something with a session. Errors once it has ended.
    fn with<T>(&self, id: u64, act: impl FnOnce(&mut Session) -> T) -> Result<T, Fault> {
        let found = locked(&self.0).get_mut(&id).map(act);
        found.ok_or_else(|| {
            let message = "the session has ended: its task was restarted, or did not hear of its client for too long";
            Fault::new(ErrorKind::DeviceFailed, message).with_hint("open another session")
        })
    }

    pub(crate) fn check(&self, id: u64) -> Result<(), Fault> {
        self.with(id, |_| ())
    }

    /// Notes a program of a session.
    pub(crate) fn hold(&self, id: u64, digest: Digest) -> Result<(), Fault> {
        self.with(id, |session| *session.held.entry(digest).or_default() += 1)
    }

    /// Lets a session go of a program. False if it did not hold it.
    pub(crate) fn let_go(&self, id: u64, digest: &Digest) -> bool {
        let let_go = self.with(id, |session| match session.held.get_mut(digest) {
            None => false,
            Some(n) => {
                *n -= 1;
                if *n == 0 {
                    session.held.remove(digest);
                }
                true
            }
        });
        let_go.unwrap_or(false)
    }

    fn leave(&self, id: u64) {
        // It may have been closed.
        let _ = self.with(id, |session| {
            session.n_streams = session.n_streams.saturating_sub(1);
            session.left = Instant::now();
        });
    }

    /// Ends a session; gives the programs it held.
    fn end(&self, id: u64) -> Vec<Digest> {
        let ended = locked(&self.0).remove(&id);
        let held = ended.into_iter().flat_map(|session| session.held);
        held.flat_map(|(digest, n)| std::iter::repeat_n(digest, n))
            .collect()
    }

    /// Sessions without a stream for the time of the lease.
    fn expired(&self, limits: &Limits) -> Vec<u64> {
        let sessions = locked(&self.0);
        let is_over = |s: &Session| s.n_streams == 0 && s.left.elapsed() >= limits.lease;
        let over = sessions.iter().filter(|(_, session)| is_over(session));
        over.map(|(id, _)| *id).collect()
    }

    /// Errors when a task was restarted since the session has used variables of the program there; else notes these.
    pub(crate) fn check_variables(&self, id: u64, program: &Installed) -> Result<(), Fault> {
        self.with(id, |session| {
            if session.checked.contains(&program.id) {
                return Ok(());
            }
            for task in &program.tasks {
                let lost = task.variables.iter().filter(|(container, name)| {
                    let variable = (task.name.clone(), container.clone(), name.clone());
                    *session.known.entry(variable).or_insert(task.incarnation) != task.incarnation
                });
                let lost: Vec<&str> = lost.map(|(_, name)| name.as_str()).collect();
                if !lost.is_empty() {
                    return Err(without_values(&task.name, &lost));
                }
            }
            if session.checked.len() >= MOST_CHECKED {
                session.checked.clear();
            }
            session.checked.insert(program.id);
            Ok(())
        })?
    }

    /// Notes the values of a program's variables as known to a session.
    pub(crate) fn note_values(&self, id: u64, program: &Installed) -> Result<(), Fault> {
        self.with(id, |session| {
            for task in &program.tasks {
                for (container, name) in &task.variables {
                    let variable = (task.name.clone(), container.clone(), name.clone());
                    session.known.insert(variable, task.incarnation);
                }
            }
        })
    }

    /// Notes the values of all variables of containers of a task as set by a session.
    pub(crate) fn note_reset(&self, id: u64, task: &TaskName, containers: &[String]) {
        // An ended session knows nothing.
        let _ = self.with(id, |session| {
            session.checked.clear();
            session
                .known
                .retain(|(of, container, _), _| of != task || !containers.contains(container));
        });
    }
}

/// Most programs noted as checked; after that all are checked again.
const MOST_CHECKED: usize = 4096;

/// Names in an error; the number of the others follows.
const NAMED: usize = 3;

fn without_values(task: &TaskName, names: &[&str]) -> Fault {
    let shown: Vec<String> = names
        .iter()
        .take(NAMED)
        .map(|name| format!("{name:?}"))
        .collect();
    let more = match names.len().saturating_sub(NAMED) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    let message = format!(
        "{task} was restarted, and the values of {}{more} that this session has used are lost",
        shown.join(", ")
    );
    let hint = "set the model's variables to their initial values, or open another session";
    Fault::new(ErrorKind::DeviceFailed, message).with_hint(hint)
}

impl Task {
    /// Serves a session as long as its client's stream is open.
    pub(crate) fn attend(
        self: Arc<Self>,
        words: Streaming<Attend>,
    ) -> ReceiverStream<Result<Reply, Status>> {
        let (answers, out) = mpsc::channel(2);
        tokio::spawn(async move {
            let ended = self.attended(words, &answers).await;
            if let Err(fault) = ended {
                // An absent client needs no reason.
                let _ = answers.send(Ok(rpc::reply::<Nothing>(Err(fault)))).await;
            }
        });
        ReceiverStream::new(out)
    }

    /// Begins a session, or takes one up again, as the first word says.
    async fn welcomed(&self, words: &mut Streaming<Attend>) -> Result<Welcome, Fault> {
        let first = tokio::time::timeout(self.limits.hello, words.message()).await;
        let silent = |_| Fault::invalid("a client opened a stream and said nothing");
        let first = first.map_err(silent)?.map_err(rpc::broken)?;
        self.takes_more()?;
        let attend = given(first)?;
        let mut welcome = self.greeted(&given(attend.hello)?)?;
        let sessions = &self.master.sessions;
        welcome.session = match attend.session {
            0 => {
                let id = self.network.random().max(1);
                sessions.begin(id, &self.limits).map(|()| id)?
            }
            id => sessions.with(id, |session| {
                session.n_streams += 1;
                id
            })?,
        };
        Ok(welcome)
    }

    async fn attended(
        &self,
        mut words: Streaming<Attend>,
        answers: &mpsc::Sender<Result<Reply, Status>>,
    ) -> Result<(), Fault> {
        let welcome = self.welcomed(&mut words).await?;
        let sessions = &self.master.sessions;
        let id = welcome.session;
        let mut stays = answers.send(Ok(rpc::reply(Ok(welcome)))).await.is_ok();
        let mut stops = false;
        let beats = rpc::beat(answers, self.limits.keep_alive, || Ok(Reply::beat()));
        tokio::pin!(beats);
        while stays {
            tokio::select! {
                never = &mut beats => match never {},
                word = words.message() => stays = matches!(word, Ok(Some(_))),
                () = self.stopped() => (stays, stops) = (false, true),
            }
        }
        sessions.leave(id);
        match stops {
            true => Err(self.is_stopping()),
            false => Ok(()),
        }
    }

    /// Ends a session for its client.
    pub(crate) async fn close(self: &Arc<Self>, order: Close) -> Result<Nothing, Fault> {
        self.end_session(order.session).await;
        Ok(Nothing {})
    }

    async fn end_session(self: &Arc<Self>, id: u64) {
        for digest in self.master.sessions.end(id) {
            self.let_go(&digest).await;
        }
    }

    /// Ends the sessions whose lease is over.
    pub(crate) async fn end_expired(self: &Arc<Self>) {
        for id in self.master.sessions.expired(&self.limits) {
            self.end_session(id).await;
        }
    }
}
