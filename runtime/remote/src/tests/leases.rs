//! Clients and masters that go without a word, and sessions that end.

use super::*;

/// Limits of a task that waits a second for silent clients.
fn impatient() -> Limits {
    Limits {
        lease: Duration::from_secs(1),
        idle_callables: 0,
        ..limits()
    }
}

/// Servers of three tasks; number of parts on each.
fn counting(spec: &ClusterSpec, limits: &Limits) -> (Vec<Server>, Vec<Arc<AtomicUsize>>) {
    let one = |name: &&str| {
        let engine = Relay::new(&Arc::default());
        let n_parts = engine.n_parts.clone();
        let server = Server::start(
            spec.clone(),
            task(name),
            Arc::new(engine),
            limits.clone().into(),
        );
        (server.unwrap(), n_parts)
    };
    THREE.iter().map(one).unzip()
}

fn counts(n_parts: &[Arc<AtomicUsize>]) -> Vec<usize> {
    n_parts.iter().map(|n| n.load(Ordering::SeqCst)).collect()
}

/// Waits for these numbers of parts, at most ten seconds.
fn wait_for(n_parts: &[Arc<AtomicUsize>], expected: [usize; 3]) {
    let began = Instant::now();
    while counts(n_parts) != expected {
        let shown = counts(n_parts);
        assert!(began.elapsed() < Duration::from_secs(10), "{shown:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends a client as a signal does: no message says so.
fn kill(client: Client) {
    client.lease.abandon();
    std::mem::forget(client);
}

#[test]
fn programs_of_clients_that_are_gone_are_forgotten() {
    let spec = cluster(&THREE);
    let (_servers, n_parts) = counting(&spec, &impatient());
    let [stays, goes, closes] = [0, 0, 1].map(|i| connect(&spec, THREE[i]).unwrap());
    let all = Document::from(THREE.join(" "));
    let of_two = Document::from(THREE[..2].join(" "));
    let held = stays.prepare(&of_two).unwrap();
    goes.prepare(&of_two).unwrap();
    goes.prepare(&all).unwrap();
    goes.prepare(&all).unwrap();
    closes.prepare(&all).unwrap();
    assert_eq!(counts(&n_parts), [3, 3, 2]);
    // A client that closes its session is done with at once.
    drop(closes);
    wait_for(&n_parts, [2, 2, 1]);
    kill(goes);
    wait_for(&n_parts, [1, 1, 0]);
    stays.call(&held, &[values(1.0)]).unwrap();
    drop(stays);
    wait_for(&n_parts, [0, 0, 0]);
}

#[test]
fn parts_of_masters_that_are_gone_are_forgotten() {
    let spec = cluster(&THREE);
    let (mut servers, n_parts) = counting(&spec, &impatient());
    let clients = [0, 1].map(|i| connect(&spec, THREE[i]).unwrap());
    for client in &clients {
        let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
        client.call(&callable, &[values(1.0)]).unwrap();
    }
    assert_eq!(counts(&n_parts), [2, 2, 2]);
    drop(servers.remove(0));
    wait_for(&n_parts, [0, 1, 1]);
    let callable = clients[1]
        .prepare(&Document::from(THREE[1].to_owned()))
        .unwrap();
    clients[1].call(&callable, &[values(1.0)]).unwrap();
    wait_for(&n_parts, [0, 2, 1]);
    drop(servers.remove(0));
    let _again = start(&spec, THREE[1], &Arc::default()).unwrap();
    let other = connect(&spec, THREE[1]).unwrap();
    let callable = other
        .prepare(&Document::from(THREE[1..].join(" ")))
        .unwrap();
    other.call(&callable, &[values(1.0)]).unwrap();
    assert_eq!(counts(&n_parts), [0, 0, 1]);
}

#[test]
fn a_session_ends_with_its_lease() {
    let spec = cluster(&THREE[..1]);
    let engine = Arc::new(Relay::new(&Arc::default()));
    let _server = Server::start(spec.clone(), task(THREE[0]), engine, impatient().into()).unwrap();
    let client = connect(&spec, THREE[0]).unwrap();
    let program = Document::from(THREE[0].to_owned());
    let callable = client.prepare(&program).unwrap();
    client.call(&callable, &[values(1.0)]).unwrap();
    // As if nothing came from the client any more.
    client.lease.abandon();
    std::thread::sleep(Duration::from_secs(2));
    for error in [
        client.call(&callable, &[values(1.0)]).unwrap_err(),
        client.prepare(&program).unwrap_err(),
        client.initialise(&callable).unwrap_err(),
    ] {
        let ended = "the session has ended: its task was restarted, or did not hear of its client for too long";
        assert_eq!(error.to_string(), ended);
        assert_eq!(error.category(), ErrorKind::DeviceFailed);
        assert_eq!(error.hint.as_deref(), Some("open another session"));
    }
    connect(&spec, THREE[0]).unwrap().prepare(&program).unwrap();
}

#[test]
fn sessions_are_counted() {
    let spec = cluster(&THREE[..1]);
    let limits = Limits {
        sessions: 2,
        ..impatient()
    };
    let engine = Arc::new(Relay::new(&Arc::default()));
    let _server = Server::start(spec.clone(), task(THREE[0]), engine, limits.into()).unwrap();
    let [first, second] = [0, 1].map(|_| connect(&spec, THREE[0]).unwrap());
    let refused = connect(&spec, THREE[0]).err().unwrap();
    assert_eq!(
        refused.to_string(),
        "the task has 2 sessions, and takes no more"
    );
    assert_eq!(refused.category(), ErrorKind::OutOfMemory);
    drop(first);
    let third = connect(&spec, THREE[0]).unwrap();
    assert!(connect(&spec, THREE[0]).is_err());
    kill(second);
    let began = Instant::now();
    while connect(&spec, THREE[0]).is_err() {
        assert!(began.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(50));
    }
    third.prepare(&Document::from(THREE[0].to_owned())).unwrap();
}

#[test]
fn streams_of_tensors_follow_each_other() {
    let spec = cluster(&THREE);
    let limits = Limits {
        openings: 1,
        ..impatient()
    };
    let (_servers, _) = counting(&spec, &limits);
    let client = connect(&spec, THREE[0]).unwrap();
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    let programs = orders.map(|order| {
        let program = Document::from(order.map(|i| THREE[i]).join(" "));
        client.prepare(&program).unwrap()
    });
    for run in 0..60 {
        let x = values(run as f32);
        let y = client.call(&programs[run * 5 % 6], std::slice::from_ref(&x));
        assert_eq!(y.unwrap()[0].as_bytes(), x.as_bytes());
    }
}
