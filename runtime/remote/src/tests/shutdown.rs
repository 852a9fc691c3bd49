//! Servers that end in good order.

use super::*;
use crate::client::wait;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// Three servers, one of which takes its time.
fn servers(spec: &ClusterSpec, slow: usize, delay: Duration) -> Vec<Server> {
    servers_with(spec, slow, delay, &limits())
}

fn servers_with(spec: &ClusterSpec, slow: usize, delay: Duration, limits: &Limits) -> Vec<Server> {
    let one = |(i, name): (usize, &&str)| {
        let delay = if i == slow { delay } else { Duration::ZERO };
        let engine = Relay {
            delay,
            ..Relay::new(&Arc::default())
        };
        let options = limits.clone().into();
        Server::start(spec.clone(), task(name), Arc::new(engine), options).unwrap()
    };
    THREE.iter().enumerate().map(one).collect()
}

/// The answer of a task to a health check, as a number of the protocol: 1 if it serves, 2 if it does not.
fn health(spec: &ClusterSpec, name: &str) -> i32 {
    let address = spec.address(&task(name)).unwrap().to_owned();
    let asked = wait(async move {
        let channel = plain().channel(&address, None, &limits())?;
        let mut client = HealthClient::new(channel);
        let answer = client.check(HealthCheckRequest::default()).await;
        Ok(answer.unwrap().into_inner().status)
    });
    asked.unwrap()
}

#[test]
fn runs_under_way_end_before_their_server_does() {
    let spec = cluster(&THREE);
    let mut servers = servers(&spec, 2, Duration::from_secs(3));
    let client = connect(&spec, THREE[0]).unwrap();
    let program = Document::from(THREE.join(" "));
    let callable = client.prepare(&program).unwrap();
    assert_eq!(health(&spec, THREE[2]), 1);
    let last = servers.pop().unwrap();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| client.call(&callable, &[values(1.0)]));
        std::thread::sleep(Duration::from_millis(300));
        let ending = scope.spawn(|| last.shut_down(Duration::from_secs(9)));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(health(&spec, THREE[2]), 2);
        let said = format!("{} is shutting down", THREE[2]);
        let refused = connect(&spec, THREE[2]).err().unwrap();
        assert_eq!(refused.to_string(), said);
        let other = client.prepare(&Document::from(THREE[1..].join(" ")));
        assert!(other.unwrap_err().to_string().ends_with(&said));
        let y = running.join().unwrap().unwrap();
        assert_eq!(y[0].as_bytes(), values(1.0).as_bytes());
        assert_eq!(ending.join().unwrap(), 0);
    });
    let lost = client.call(&callable, &[values(1.0)]).unwrap_err();
    assert!(
        lost.to_string().contains("lost /job:worker/task:1 at "),
        "{lost}"
    );
    let again = start(&spec, THREE[2], &Arc::default()).unwrap();
    assert!(again.wait(Duration::ZERO).is_none());
    client.call(&callable, &[values(1.0)]).unwrap();
}

#[test]
fn a_task_that_has_done_its_part_waits_for_the_others() {
    let spec = cluster(&THREE);
    let mut servers = servers(&spec, 2, Duration::from_secs(2));
    let client = connect(&spec, THREE[1]).unwrap();
    let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
    // A program without the leaving task goes on after it, and an idle one with it holds up nobody.
    let order = [1, 2].map(|i| THREE[i]).join(" ");
    let other = client.prepare(&Document::from(order)).unwrap();
    let order = [1, 0].map(|i| THREE[i]).join(" ");
    let idle = client.prepare(&Document::from(order)).unwrap();
    let first = servers.remove(0);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| client.call(&callable, &[values(3.0)]));
        // Its part takes no time, that of the last task two seconds.
        std::thread::sleep(Duration::from_millis(800));
        let began = Instant::now();
        assert_eq!(first.shut_down(Duration::from_secs(9)), 0);
        assert!(began.elapsed() > Duration::from_millis(500));
        let y = running.join().unwrap().unwrap();
        assert_eq!(y[0].as_bytes(), values(3.0).as_bytes());
    });
    client.call(&other, &[values(4.0)]).unwrap();
    let lost = client.call(&idle, &[values(5.0)]).unwrap_err();
    assert!(lost.to_string().contains("/job:ps/task:0"), "{lost}");
}

#[test]
fn runs_that_take_longer_than_the_grace_are_cut_off() {
    let spec = cluster(&THREE);
    let mut servers = servers(&spec, 2, Duration::from_secs(20));
    let client = connect(&spec, THREE[0]).unwrap();
    let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
    let last = servers.pop().unwrap();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| client.call(&callable, &[values(1.0)]));
        std::thread::sleep(Duration::from_millis(300));
        let began = Instant::now();
        assert_eq!(last.shut_down(Duration::from_millis(100)), 1);
        let cut = running.join().unwrap().unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(4));
        assert_eq!(cut.category(), ErrorKind::DeviceFailed);
        let said = format!("{} is shutting down", THREE[2]);
        assert!(cut.to_string().ends_with(&said), "{cut}");
    });
}

#[test]
fn a_session_hears_the_end_of_its_task() {
    let spec = cluster(&THREE);
    let mut servers = servers(&spec, 0, Duration::from_millis(500));
    let client = connect(&spec, THREE[0]).unwrap();
    // The input and the output travel in pieces.
    let order = [1, 0].map(|i| THREE[i]).join(" ");
    let callable = client.prepare(&Document::from(order)).unwrap();
    let own = servers.remove(0);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| client.call(&callable, &[values(7.0)]));
        std::thread::sleep(Duration::from_millis(200));
        let ending = scope.spawn(|| own.shut_down(Duration::from_secs(9)));
        std::thread::sleep(Duration::from_millis(50));
        let refused = client.call(&callable, &[values(8.0)]).unwrap_err();
        let said = format!("{} is shutting down", THREE[0]);
        assert_eq!(refused.to_string(), said);
        let y = running.join().unwrap().unwrap();
        assert_eq!(y[0].as_bytes(), values(7.0).as_bytes());
        assert_eq!(ending.join().unwrap(), 0);
        let over = client.call(&callable, &[values(9.0)]).unwrap_err();
        assert_eq!(over.to_string(), said);
        assert_eq!(over.hint.as_deref(), Some("open another session"));
    });
}

#[test]
fn a_run_without_an_end_names_who_is_waited_for() {
    let spec = cluster(&THREE);
    let impatient = Limits {
        beat: Duration::from_millis(200),
        abort: Duration::from_secs(9),
        ..limits()
    };
    let servers = servers_with(&spec, 1, Duration::from_secs(4), &impatient);
    let (client, told) = told_of_stalls(&spec, Duration::from_secs(1));
    let program = Document::from([0, 2, 1].map(|i| THREE[i]).join(" "));
    let callable = client.prepare(&program).unwrap();
    let error = client.call(&callable, &[values(1.0)]).unwrap_err();
    let place = format!("{} (runs, for 0 s)", THREE[1]);
    let expected = format!("a run took longer than 1s, and waits for {place}");
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.category(), ErrorKind::DeviceFailed);
    assert!(told.try_recv().is_err());
    // No task was lost: all keep their parts, for this client and others.
    let patient = connect(&spec, THREE[0]).unwrap();
    let same = patient.prepare(&program).unwrap();
    patient.call(&same, &[values(2.0)]).unwrap();
    let n_registered = servers[0].task.last_id.load(Ordering::SeqCst);
    assert_eq!(n_registered, 1);
}

/// A client of the first task with a longest time of its runs, and what it is told of stalls.
fn told_of_stalls(
    spec: &ClusterSpec,
    run: Duration,
) -> (Client, std::sync::mpsc::Receiver<String>) {
    let (tell, told) = std::sync::mpsc::channel();
    let options = ClientOptions {
        on_stall: Some(Arc::new(move |stall| tell.send(stall.to_owned()).unwrap())),
        ..Limits { run, ..limits() }.into()
    };
    let target = format!("grpc://{}", spec.address(&task(THREE[0])).unwrap());
    let client = Client::connect(&target, "1.0".into(), options);
    (client.unwrap(), told)
}

#[test]
fn clients_hear_of_runs_that_do_not_get_on() {
    let spec = cluster(&THREE);
    let watchful = Limits {
        beat: Duration::from_millis(100),
        stall: Duration::from_millis(300),
        ..limits()
    };
    let _servers = servers_with(&spec, 2, Duration::from_secs(2), &watchful);
    let (client, told) = told_of_stalls(&spec, Duration::from_secs(60));
    let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
    let y = client.call(&callable, &[values(1.0)]).unwrap();
    assert_eq!(y[0].as_bytes(), values(1.0).as_bytes());
    let stalls: Vec<String> = told.try_iter().collect();
    let expected = format!("no part of a run gets on: {} (runs, for 0 s)", THREE[2]);
    assert_eq!(stalls[0], expected);
    // After 0.3, 0.6 and 1.2 seconds, or a little later.
    assert!([2, 3].contains(&stalls.len()), "{stalls:?}");

    // A second run of the program waits for the first one; both clients hear of it.
    let (other, other_told) = told_of_stalls(&spec, Duration::from_secs(1));
    let same = other.prepare(&Document::from(THREE.join(" "))).unwrap();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| client.call(&callable, &[values(2.0)]));
        std::thread::sleep(Duration::from_millis(200));
        let late = other.call(&same, &[values(3.0)]).unwrap_err();
        let expected = "a run took longer than 1s, and waits for an earlier run of the same model";
        assert_eq!(late.to_string(), expected);
        running.join().unwrap().unwrap();
    });
    let expected = "a run waits for an earlier one of the same model";
    assert_eq!(other_told.try_recv().unwrap(), expected);
    assert!(told.try_recv().is_ok());
}
