//! Bounds of what comes over a network, and of waits.

use std::time::Duration;

/// Bounds of messages and waits of a task or client.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest message to a task in bytes. Tensors and texts go in pieces.
    pub message_bytes: usize,
    /// Largest input or output of a run within a message; others go in pieces.
    pub inline_bytes: usize,
    /// Bytes of a tensor in one piece.
    pub piece_bytes: usize,
    /// Largest text of a program or part, and largest answer, in bytes.
    pub text_bytes: usize,
    /// Most bytes of texts and constants on a task.
    pub store_bytes: usize,
    /// Time for which a task keeps contents no program uses.
    pub unclaimed: Duration,
    /// Most programs of a task's clients.
    pub callables: usize,
    /// Most idle programs: a task keeps them though no client uses them.
    pub idle_callables: usize,
    /// Most transfers, inputs and outputs of programs on a stream of tensors: what it has opened stays with it. Then another stream follows.
    pub openings: usize,
    /// Time to connect.
    pub connect: Duration,
    /// Time for a task's first answer.
    pub hello: Duration,
    /// Time to divide and compile a program on all tasks.
    pub prepare: Duration,
    /// Longest time of a run of a client, from the call on.
    pub run: Duration,
    /// Interval of questions where a run is that takes longer.
    pub beat: Duration,
    /// Time without progress of a run until its client is told; then twice the time, and so on.
    pub stall: Duration,
    /// Time for which an order to set variables waits for the runs that have them. Less than
    /// [`Limits::prepare`], so that whoever gave the order hears of it.
    pub variables: Duration,
    /// Time for the tasks to end a run after it was given up.
    pub abort: Duration,
    /// Most connections to a task. Others wait until one ends.
    pub connections: usize,
    /// Most sessions of clients.
    pub sessions: usize,
    /// Time for which a task keeps the session of a silent client.
    pub lease: Duration,
    /// Most tries to open a broken stream of a session again.
    pub tries: u32,
    /// Longest wait between two of them; the first is 0.1 s, and each is twice the one before.
    pub longest_wait: Duration,
    /// Interval of signs of life of both ends of a connection.
    pub keep_alive: Duration,
    /// Time for such a sign on its way: a connection without a byte from the other end for both times is
    /// lost.
    pub keep_alive_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            message_bytes: 4 << 20,
            inline_bytes: 64 << 10,
            piece_bytes: 256 << 10,
            text_bytes: 64 << 20,
            store_bytes: 64 << 30,
            unclaimed: Duration::from_secs(60),
            callables: 1024,
            idle_callables: 16,
            openings: 1024,
            connect: Duration::from_secs(3),
            hello: Duration::from_secs(10),
            prepare: Duration::from_secs(60),
            run: Duration::from_secs(600),
            beat: Duration::from_secs(1),
            stall: Duration::from_secs(10),
            variables: Duration::from_secs(30),
            abort: Duration::from_secs(3),
            connections: 512,
            sessions: 64,
            lease: Duration::from_secs(30),
            tries: 10,
            longest_wait: Duration::from_secs(30),
            keep_alive: Duration::from_secs(1),
            keep_alive_timeout: Duration::from_secs(2),
        }
    }
}
