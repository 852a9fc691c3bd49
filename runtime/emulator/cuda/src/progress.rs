//! A GPU gets on without being waited for: requests that are old enough are done.

use crate::streams::Stream;
use crate::world;
use std::thread;
use std::time::Duration;

/// Interval at which it looks for them.
const PERIOD: Duration = Duration::from_millis(1);

/// Starts the thread that lives as long as the process.
pub fn start() {
    let run = || loop {
        thread::sleep(PERIOD);
        while do_one() {}
    };
    // Without the thread requests are done when something waits for them, which is all that most programs need.
    let _ = thread::Builder::new()
        .name("emulated-cuda".to_owned())
        .spawn(run);
}

/// Does one request that is old enough, of the stream made last that waits for no request still to come; false when there is none.
fn do_one() -> bool {
    let done = world::with(|world| {
        let delay = world.settings.delay;
        let old = |s: &Stream| {
            s.queue
                .front()
                .is_some_and(|(asked, _)| asked.elapsed() >= delay)
        };
        let streams: Vec<usize> = world
            .streams
            .iter()
            .rev()
            .filter(|(_, s)| old(s))
            .map(|(handle, _)| *handle)
            .collect();
        Ok(streams.into_iter().any(|s| world.step(s)))
    });
    done.unwrap_or(false)
}
