//! Keys: who may do what with which, and what everybody else is told.

use super::*;
use crate::certificates::{make_keys, of_authority, parameters};
use crate::client::wait;
use crate::keys::Holder;
use crate::messages::{
    CallableId, End, Hello, Initialise, Look, Opening, Order, Report, Step, TaskAddress,
    TaskStatus, Welcome,
};
use crate::outbox::{Outbox, Parcel, Way};
use crate::rpc::{self, Failure};
use rcgen::{Issuer, KeyPair};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A folder with the keys of a cluster.
pub(super) fn folder(spec: &ClusterSpec) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    make_keys(folder.path(), spec, 30).unwrap();
    folder
}

pub(super) fn client_keys(folder: &Path) -> Credentials {
    Credentials::Keys(Keys::of_client(folder).unwrap())
}

pub(super) fn task_keys(folder: &Path, name: &str) -> Credentials {
    Credentials::Keys(Keys::of_task(folder, &task(name)).unwrap())
}

fn start_with(spec: &ClusterSpec, name: &str, credentials: Credentials) -> Result<Server, Fault> {
    let engine = Arc::new(Relay::new(&Arc::default()));
    let options = ServerOptions {
        credentials,
        limits: limits(),
        ..ServerOptions::default()
    };
    Server::start(spec.clone(), task(name), engine, options)
}

fn connect_with(spec: &ClusterSpec, name: &str, credentials: Credentials) -> Result<Client, Fault> {
    let target = format!("grpc://{}", spec.address(&task(name)).unwrap());
    let options = ClientOptions {
        credentials,
        ..limits().into()
    };
    Client::connect(&target, "1.0".into(), options)
}

/// The error of a client.
fn refused(spec: &ClusterSpec, name: &str, credentials: Credentials) -> String {
    let fault = connect_with(spec, name, credentials).err().unwrap();
    let address = spec.address(&task(name)).unwrap();
    let hint = fault.hint.unwrap_or_default();
    format!("{} [{hint}]", fault.message.replace(address, "ADDRESS"))
}

/// The texts of keys, with the authority of one folder and a pair of another one.
fn mixed(authority: &Path, folder: &Path, stem: &str) -> Credentials {
    let text = |folder: &Path, name: &str| fs::read_to_string(folder.join(name)).unwrap();
    Credentials::Keys(Keys::of_pem([
        text(authority, "ca.pem"),
        text(folder, &format!("{stem}.pem")),
        text(folder, &format!("{stem}.key")),
    ]))
}

/// Makes a pair whose time is over, with the authority of `own`.
fn expired(own: &Path, holder: &Holder, folder: &Path) {
    let authority = fs::read_to_string(own.join("ca.key")).unwrap();
    let authority = KeyPair::from_pem(&authority).unwrap();
    let issuer = Issuer::new(of_authority(&authority).unwrap(), authority);
    let mut parameters = parameters(holder, 1).unwrap();
    parameters.not_before -= time::Duration::days(10);
    parameters.not_after -= time::Duration::days(2);
    let key = KeyPair::generate().unwrap();
    let certificate = parameters.signed_by(&key, &issuer).unwrap();
    for (ending, text) in [("pem", certificate.pem()), ("key", key.serialize_pem())] {
        fs::write(folder.join(format!("{}.{ending}", holder.stem())), text).unwrap();
    }
}

/// The answer of a task to one question.
fn asked<Q: prost::Message + 'static, A: prost::Message + Default + Send + 'static>(
    spec: &ClusterSpec,
    name: &str,
    credentials: Credentials,
    path: &'static str,
    question: Q,
) -> Result<A, Failure> {
    let address = spec.address(&task(name)).unwrap().to_owned();
    let name = task(name);
    let network = network(credentials);
    let answer = wait(async move {
        let channel = network.channel(&address, Some(&name), &limits())?;
        Ok(rpc::call(&channel, path, question, Duration::from_secs(5), &limits()).await)
    });
    answer.unwrap()
}

#[test]
fn tasks_with_keys_run_programs_of_clients_with_keys() {
    let spec = cluster(&THREE);
    let folder = folder(&spec);
    let servers =
        THREE.map(|name| start_with(&spec, name, task_keys(folder.path(), name)).unwrap());
    let client = connect_with(&spec, THREE[1], client_keys(folder.path())).unwrap();
    let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
    for first in [1.0, 2.0] {
        let outputs = client.call(&callable, &[values(first)]).unwrap();
        assert_eq!(outputs[0].as_bytes(), values(first).as_bytes());
    }
    drop(servers);
}

/// The greeting of a task.
fn hello(spec: &ClusterSpec, from: &str, incarnation: u64) -> Hello {
    let tasks = spec.tasks().map(|(name, address)| TaskAddress {
        job: name.job.clone(),
        task: name.task,
        address: address.to_owned(),
    });
    Hello {
        from: Some(from.to_owned()),
        cluster: tasks.collect(),
        incarnation,
        ..Hello::new("1.0".into())
    }
}

/// The network of somebody with keys.
fn network(credentials: Credentials) -> Network {
    Network {
        environment: Arc::new(Machine),
        credentials,
    }
}

/// Sends a tensor; the error if it is not taken.
fn sent(
    spec: &ClusterSpec,
    to: &str,
    credentials: Credentials,
    opening: &Opening,
) -> Option<String> {
    let (told, lost) = std::sync::mpsc::channel();
    let way = Way {
        task: task(to),
        address: spec.address(&task(to)).unwrap().to_owned(),
        limits: limits(),
        network: network(credentials),
    };
    let parcel = Parcel {
        bytes: values(7.0).as_bytes().to_vec().into(),
        run: 1000,
        opening: Arc::new(opening.clone()),
        lost: Arc::new(move |_, fault| {
            let _ = told.send(fault.message.clone());
        }),
    };
    wait(async move {
        let outbox = Outbox::start(way);
        outbox.send(parcel);
        Ok(())
    })
    .unwrap();
    // Nobody can tell any more once the stream has ended.
    lost.recv().ok()
}

/// The first report of a task on orders.
fn reported(spec: &ClusterSpec, to: &str, credentials: Credentials, orders: Vec<Order>) -> Report {
    let address = spec.address(&task(to)).unwrap().to_owned();
    let to = task(to);
    wait(async move {
        let channel = network(credentials).channel(&address, Some(&to), &limits())?;
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await.unwrap();
        let (more, queue) = tokio::sync::mpsc::channel(8);
        for order in orders {
            more.send(order).await.unwrap();
        }
        let codec = tonic_prost::ProstCodec::<Order, Report>::default();
        let path = http::uri::PathAndQuery::from_static(rpc::STEPS);
        let orders = tonic::Request::new(tokio_stream::wrappers::ReceiverStream::new(queue));
        let reports = client.streaming(orders, path, codec).await.unwrap();
        Ok(reports.into_inner().message().await.unwrap().unwrap())
    })
    .unwrap()
}

/// Reasons in which a connection ended before the other end's reason was read.
const CUT: &str = "it may have refused these keys";

#[test]
fn strangers_are_told_why() {
    let spec = cluster(&THREE[..1]);
    let name = THREE[0];
    let (own, other) = (folder(&spec), folder(&spec));
    let (own, other) = (own.path(), other.path());
    let old = tempfile::tempdir().unwrap();
    for holder in [Holder::Client, Holder::Task(task(name))] {
        expired(own, &holder, old.path());
    }
    let is_refused = |credentials: Credentials, reason: &str| {
        let told = refused(&spec, name, credentials);
        assert!(told.contains(reason) || told.contains(CUT), "{told}");
    };
    let server = start_with(&spec, name, task_keys(own, name)).unwrap();
    let plain = refused(&spec, name, Credentials::Local);
    assert!(
        plain.ends_with("[if it serves with keys, this needs `--keys DIR` too]"),
        "{plain}"
    );
    let of_other = refused(&spec, name, client_keys(other));
    let expected = "lost the task at ADDRESS: its certificate is of another authority []";
    assert_eq!(of_other, expected);
    // The client knows the server, and not the other way round.
    is_refused(
        mixed(own, other, "client"),
        "it has keys of another authority",
    );
    is_refused(
        mixed(own, old.path(), "client"),
        "it says that this certificate has expired",
    );
    let expected = "/job:ps/task:0: Attend: it takes the keys of a client, and others were used []";
    assert_eq!(refused(&spec, name, task_keys(own, name)), expected);
    drop(connect_with(&spec, name, client_keys(own)).unwrap());
    drop(server);
    for (server, reason) in [
        (
            Credentials::Local,
            "there is no TLS: is it a server without keys?",
        ),
        (
            mixed(own, own, "client"),
            "its certificate is not for a server",
        ),
        (
            mixed(own, old.path(), "ps-0"),
            "its certificate has expired",
        ),
    ] {
        let _server = start_with(&spec, name, server).unwrap();
        let told = refused(&spec, name, client_keys(own));
        assert_eq!(told, format!("lost the task at ADDRESS: {reason} []"));
    }
}

#[test]
fn each_task_and_client_does_what_its_keys_allow() {
    let spec = cluster(&THREE);
    let keys = folder(&spec);
    let keys = keys.path();
    let engine = |name| start_with(&spec, name, task_keys(keys, name)).unwrap();
    let mut servers: Vec<Server> = THREE.into_iter().map(engine).collect();
    let hello = |from: &str| hello(&spec, from, 0);
    let greeted = |as_whom: &str, from: &str| {
        let answer: Result<Welcome, _> = asked(
            &spec,
            THREE[0],
            task_keys(keys, as_whom),
            rpc::HELLO,
            hello(from),
        );
        answer
            .map(|_| ())
            .map_err(|failure| failure.fault("it", "ADDRESS").message)
    };
    assert_eq!(greeted(THREE[1], THREE[1]), Ok(()));
    let other = "it takes the keys of /job:worker/task:1, and others were used";
    assert_eq!(greeted(THREE[1], THREE[2]), Err(other.to_owned()));
    // A client gives no orders to workers.
    let looked: Result<TaskStatus, _> = asked(
        &spec,
        THREE[0],
        client_keys(keys),
        rpc::STATUS,
        Look::default(),
    );
    let fault = looked.err().unwrap().fault("it", "ADDRESS");
    let expected = "/job:ps/task:0: Status: it takes the keys of a task, and others were used";
    assert_eq!(fault.message, expected);
    // A tensor comes from the task that has it.
    let client = connect_with(&spec, THREE[0], client_keys(keys)).unwrap();
    let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
    client.call(&callable, &[values(1.0)]).unwrap();
    let id = CallableId {
        master: servers[0].incarnation(),
        number: 1,
    };
    let end = End {
        source: DeviceName::parse(&format!("{}/cpu:0", THREE[1]))
            .unwrap()
            .to_string(),
        destination: cpu().to_string(),
        tensor: "x".into(),
        size_bytes: 4 * N as u64,
    };
    let opening = Opening::of_end(id, end);
    let sent = |as_whom: &str| {
        let credentials = task_keys(keys, as_whom);
        sent(&spec, THREE[2], credentials, &opening)
    };
    assert_eq!(sent(THREE[1]), None);
    let other = "it takes the keys of /job:worker/task:0, and others were used";
    assert_eq!(sent(THREE[0]).as_deref(), Some(other));
    // A task at the address of another one is not taken for it.
    drop(client);
    servers.truncate(2);
    let _impostor = start_with(&spec, THREE[2], mixed(keys, keys, "worker-0")).unwrap();
    let client = connect_with(&spec, THREE[0], client_keys(keys)).unwrap();
    // A program that nobody has had before.
    let program = Document::from([THREE[2], THREE[0]].join(" "));
    let fault = client.prepare(&program).unwrap_err();
    let expected = "its certificate is for another task, or for clients";
    assert!(fault.message.ends_with(expected), "{fault}");
}

#[test]
fn keys_are_checked_when_they_are_read() {
    let spec = cluster(&THREE);
    let (own, other) = (folder(&spec), folder(&spec));
    let folder = own.path();
    let error = |name: &str| {
        let fault = Keys::of_task(folder, &task(name)).err().unwrap();
        fault.message.replace(&format!("{}/", folder.display()), "")
    };
    let put = |from: &Path, to: &str| fs::copy(from, folder.join(to)).unwrap();
    let absent = error("/job:ps/task:7");
    assert_eq!(absent, "ps-7.pem: No such file or directory (os error 2)");
    // Each file in the place of another.
    for ending in ["pem", "key"] {
        put(
            &folder.join(format!("worker-1.{ending}")),
            &format!("ps-7.{ending}"),
        );
        put(
            &folder.join(format!("client.{ending}")),
            &format!("ps-8.{ending}"),
        );
        put(
            &other.path().join(format!("ps-0.{ending}")),
            &format!("ps-9.{ending}"),
        );
    }
    assert_eq!(
        error("/job:ps/task:7"),
        "ps-7.pem: it is not for /job:ps/task:7"
    );
    assert!(error("/job:ps/task:8").starts_with("ps-8.pem: it is not for /job:ps/task:8: "));
    assert_eq!(
        error("/job:ps/task:9"),
        "ps-9.pem: it was not signed by ca.pem"
    );
    put(&folder.join("worker-1.key"), "ps-0.key");
    assert!(
        error(THREE[0]).starts_with("ps-0.key with ps-0.pem: "),
        "{}",
        error(THREE[0])
    );
    expired(folder, &Holder::Task(task(THREE[1])), folder);
    assert_eq!(error(THREE[1]), "worker-0.pem: it has expired");
    fs::write(folder.join("ps-0.pem"), "no certificate").unwrap();
    assert!(error(THREE[0]).starts_with("ps-0.pem: expected a certificate in PEM: "));
}

#[test]
fn making_keys_again_adds_what_is_new() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, all) = (folder.path(), cluster(&THREE));
    let names = |paths: &[std::path::PathBuf]| {
        let mut names: Vec<String> = paths
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        names.sort();
        names.join(" ")
    };
    let first = make_keys(folder, &cluster(&THREE[..1]), 30).unwrap();
    assert_eq!(
        names(&first.made),
        "ca.key ca.pem client.key client.pem ps-0.key ps-0.pem"
    );
    let second = make_keys(folder, &all, 30).unwrap();
    assert_eq!(
        names(&second.made),
        "worker-0.key worker-0.pem worker-1.key worker-1.pem"
    );
    assert_eq!(names(&second.kept), "ca.pem client.pem ps-0.pem");
    // Holders of both calls trust each other.
    for name in THREE {
        Keys::of_task(folder, &task(name)).unwrap();
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |name: &str| {
            fs::metadata(folder.join(name))
                .unwrap()
                .permissions()
                .mode()
        };
        assert_eq!(
            ["ca.key", "ps-0.key"].map(|name| mode(name) & 0o077),
            [0, 0]
        );
    }
    fs::remove_file(folder.join("ps-0.key")).unwrap();
    let half = make_keys(folder, &all, 30).unwrap_err();
    assert!(
        half.message.contains("ps-0.pem is there without "),
        "{half}"
    );
    // Jobs whose names differ in case only, or are long.
    let odd = [
        "/job:Worker/task:0",
        "/job:worker/task:0",
        "/job:a_b_/task:3",
    ];
    let odd = cluster(&odd);
    let other = tempfile::tempdir().unwrap();
    make_keys(other.path(), &odd, 30).unwrap();
    for (name, _) in odd.tasks() {
        Keys::of_task(other.path(), name).unwrap();
    }
    let long = ClusterSpec::new([(
        task(&format!("/job:{}/task:0", "j".repeat(64))),
        "127.0.0.1:1".into(),
    )]);
    let refused = make_keys(other.path(), &long.unwrap(), 30).unwrap_err();
    assert!(
        refused.message.ends_with("too long for a certificate"),
        "{refused}"
    );
    // An authority that another program made.
    let key = KeyPair::from_pem(&fs::read_to_string(other.path().join("ca.key")).unwrap()).unwrap();
    let foreign = of_authority(&KeyPair::generate().unwrap()).unwrap();
    let foreign = foreign.self_signed(&key).unwrap().pem();
    fs::write(other.path().join("ca.pem"), foreign).unwrap();
    let refused = make_keys(other.path(), &all, 30).unwrap_err();
    assert!(
        refused.message.contains("ps-0.pem: it was not signed by "),
        "{refused}"
    );
    assert!(!other.path().join("ps-0.key").exists());
}

#[test]
fn nobody_gives_orders_or_sends_tensors_for_another_task() {
    let spec = cluster(&THREE);
    let keys = folder(&spec);
    let keys = keys.path();
    let servers = THREE.map(|name| start_with(&spec, name, task_keys(keys, name)).unwrap());
    let client = connect_with(&spec, THREE[0], client_keys(keys)).unwrap();
    let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
    client.call(&callable, &[values(1.0)]).unwrap();
    let id = CallableId {
        master: servers[0].incarnation(),
        number: 1,
    };
    // All of this is done with the keys of the second task.
    let own = || task_keys(keys, THREE[1]);
    let fault = |from: &str, incarnation: u64, order: Order| {
        let greeting = Order {
            hello: Some(hello(&spec, from, incarnation)),
            ..Order::default()
        };
        let report = reported(&spec, THREE[2], own(), vec![greeting, order]);
        report.fault.unwrap().message
    };
    let step = Order {
        step: Some(Step {
            callable: Some(id),
            run: 1000,
            feeds: vec![],
            takes_turn: false,
        }),
        number: 1,
        ..Order::default()
    };
    assert_eq!(
        fault(THREE[0], 1, step.clone()),
        "it takes the keys of /job:ps/task:0, and others were used"
    );
    assert_eq!(
        fault(THREE[1], servers[0].incarnation(), step.clone()),
        "/job:worker/task:0 has the incarnation of /job:ps/task:0"
    );
    assert_eq!(
        fault(THREE[1], servers[2].incarnation(), step.clone()),
        "/job:worker/task:0 has the incarnation of /job:worker/task:1"
    );
    let absent = "/job:worker/task:1 does not have this program: was it restarted?";
    assert_eq!(
        fault(THREE[1], servers[1].incarnation(), step.clone()),
        absent
    );
    let two = Order {
        initialise: Some(Initialise { callable: Some(id) }),
        ..step
    };
    assert_eq!(
        fault(THREE[1], servers[1].incarnation(), two),
        "an order to do more than one thing"
    );
    let output = sent(&spec, THREE[0], own(), &Opening::of_fetch(id, 0));
    let of_third = "it takes the keys of /job:worker/task:1, and others were used";
    assert_eq!(output.as_deref(), Some(of_third));
    let input = sent(&spec, THREE[2], own(), &Opening::of_feed(id, 0));
    let of_master = "it takes the keys of /job:ps/task:0, and others were used";
    assert_eq!(input.as_deref(), Some(of_master));
    client.call(&callable, &[values(2.0)]).unwrap();
}

#[test]
fn keys_without_their_authority_stay_as_they_are() {
    let spec = cluster(&THREE[..1]);
    let keys = folder(&spec);
    let keys = keys.path();
    fs::remove_file(keys.join("ca.key")).unwrap();
    let half = make_keys(keys, &spec, 30).unwrap_err();
    assert!(half.message.contains("ca.pem is there without "), "{half}");
    fs::remove_file(keys.join("ca.pem")).unwrap();
    let alone = make_keys(keys, &spec, 30).unwrap_err();
    assert!(
        alone
            .message
            .ends_with("ps-0.pem is there without its authority"),
        "{alone}"
    );
    // An old pair is not taken for a good one.
    let keys = folder(&spec);
    expired(keys.path(), &Holder::Client, keys.path());
    let old = make_keys(keys.path(), &spec, 30).unwrap_err();
    assert!(old.message.ends_with("client.pem: it has expired"), "{old}");
}
