//! Keys of tasks and clients: certificates, and what their names allow.
//!
//! A folder has the certificate of the cluster's authority, `ca.pem`, and for each holder a certificate and a private key: `worker-0.pem` and
//! `worker-0.key` of `/job:worker/task:0`, `client.pem` and `client.key` of clients. (TLS with certificates on both sides: RFC 8446; names of
//! certificates: RFC 5280, section 4.2.1.6.)

use crate::TaskName;
use crate::messages::Fault;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, TrustAnchor, UnixTime};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};
use webpki::{ALL_VERIFICATION_ALGS, EndEntityCert, KeyUsage, anchor_from_trusted_cert};

/// The file of the authority's certificate.
pub(crate) const AUTHORITY: &str = "ca.pem";

/// Name in the certificates of all tasks: clients accept any.
const ANY_TASK: &str = "task.gristmill";

/// Name in the certificates of clients.
const CLIENT: &str = "client.gristmill";

/// Whom a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// A task: it serves, and gives orders to other tasks.
    Task(TaskName),
    /// Clients: they open sessions.
    Client,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Holder::Task(name) => name.fmt(f),
            Holder::Client => f.write_str("clients"),
        }
    }
}

impl Holder {
    /// Name of its files, without an ending.
    pub(crate) fn stem(&self) -> String {
        match self {
            Holder::Task(name) => format!("{}-{}", name.job, name.task),
            Holder::Client => "client".to_owned(),
        }
    }

    /// Names in its certificate.
    pub(crate) fn names(&self) -> Vec<String> {
        match self {
            Holder::Task(name) => vec![name_of(name), ANY_TASK.to_owned()],
            Holder::Client => vec![CLIENT.to_owned()],
        }
    }

    /// The name no other holder has.
    fn own_name(&self) -> String {
        match self {
            Holder::Task(name) => name_of(name),
            Holder::Client => CLIENT.to_owned(),
        }
    }
}

/// A task's name in certificates. These names ignore case and have few letters, so other ones are written as `_` and hexadecimal digits.
fn name_of(task: &TaskName) -> String {
    let mut job = String::new();
    for byte in task.job.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' => job.push(char::from(byte)),
            _ => job.push_str(&format!("_{byte:02x}")),
        }
    }
    format!("{}.{job}.{ANY_TASK}", task.task)
}

/// A certificate with its private key, and the certificate of the authority whose signature it and all others have.
#[derive(Clone)]
pub struct Keys(Arc<Pair>);

struct Pair {
    authority: Certificate,
    identity: Identity,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys")
    }
}

impl Keys {
    /// The keys of a task, from a folder with at least `ca.pem`, `JOB-TASK.pem` and `JOB-TASK.key`.
    ///
    /// Errors with `InvalidInput`, naming the file, when one is absent or no certificate or key, when the certificate is not the task's, has
    /// expired, or is of another authority.
    pub fn of_task(folder: &Path, task: &TaskName) -> Result<Keys, Fault> {
        Keys::read(folder, &Holder::Task(task.clone()))
    }

    /// The keys of clients, from a folder with at least `ca.pem`, `client.pem` and `client.key`.
    ///
    /// Errors as [`Keys::of_task`] does.
    pub fn of_client(folder: &Path) -> Result<Keys, Fault> {
        Keys::read(folder, &Holder::Client)
    }

    pub(crate) fn read(folder: &Path, holder: &Holder) -> Result<Keys, Fault> {
        let path = |name: String| folder.join(name);
        let [authority, certificate, key] = [
            path(AUTHORITY.to_owned()),
            path(format!("{}.pem", holder.stem())),
            path(format!("{}.key", holder.stem())),
        ];
        let text = |path: &Path| std::fs::read_to_string(path).map_err(|e| unfit(path, e));
        let [authority_pem, pem, key_pem] = [text(&authority)?, text(&certificate)?, text(&key)?];
        check(holder, (&authority, &authority_pem), (&certificate, &pem))?;
        let keys = Keys::of_pem([authority_pem, pem, key_pem]);
        let server = tonic::transport::Server::builder().tls_config(keys.of_server());
        server.map_err(|e| {
            let [key, certificate] = [&key, &certificate].map(|path| path.display());
            let why = crate::rpc::innermost(&e);
            Fault::invalid(format!("{key} with {certificate}: {why}"))
        })?;
        Ok(keys)
    }

    /// The authority, the certificate and the private key, unchecked.
    pub(crate) fn of_pem([authority, certificate, key]: [String; 3]) -> Keys {
        // tonic panics where a program has two providers of cryptography and has chosen none. If it has chosen, this has no effect.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Keys(Arc::new(Pair {
            authority: Certificate::from_pem(authority),
            identity: Identity::from_pem(certificate, key),
        }))
    }

    pub(crate) fn of_server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new()
            .identity(self.0.identity.clone())
            .client_ca_root(self.0.authority.clone())
    }

    /// To a task; to any if none is given.
    pub(crate) fn to(&self, task: Option<&TaskName>) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .identity(self.0.identity.clone())
            .ca_certificate(self.0.authority.clone())
            .domain_name(task.map_or_else(|| ANY_TASK.to_owned(), name_of))
    }
}

/// Errors when a certificate is not what its holder needs.
fn check(
    holder: &Holder,
    (authority_path, authority): (&Path, &str),
    (path, pem): (&Path, &str),
) -> Result<(), Fault> {
    let (authority, own) = (der(authority_path, authority)?, der(path, pem)?);
    let chain = CertificateDer::pem_slice_iter(pem.as_bytes()).skip(1);
    let chain: Vec<CertificateDer<'_>> = chain.filter_map(Result::ok).collect();
    let anchor = anchor_from_trusted_cert(&authority);
    let anchor = anchor.map_err(|e| unfit(authority_path, e))?;
    verify(holder, anchor, &own, &chain).map_err(|e| match e {
        webpki::Error::CertExpired { .. } => unfit(path, "it has expired"),
        webpki::Error::CertNotValidYet { .. } => {
            unfit(path, "it is not valid yet: is the clock right?")
        }
        webpki::Error::UnknownIssuer => {
            let authority = authority_path.display();
            unfit(path, format!("it was not signed by {authority}"))
        }
        e => unfit(path, format!("it is not for {holder}: {e}")),
    })?;
    match is_valid_for(&own, &holder.own_name()) {
        true => Ok(()),
        false => Err(unfit(path, format!("it is not for {holder}"))),
    }
}

fn unfit(path: &Path, why: impl fmt::Display) -> Fault {
    Fault::invalid(format!("{}: {why}", path.display()))
}

fn der(path: &Path, pem: &str) -> Result<CertificateDer<'static>, Fault> {
    let parsed = CertificateDer::from_pem_slice(pem.as_bytes());
    parsed.map_err(|e| unfit(path, format!("expected a certificate in PEM: {e}")))
}

/// Errors unless a certificate is valid now, signed by the authority, and for its holder's use.
fn verify(
    holder: &Holder,
    authority: TrustAnchor<'_>,
    own: &CertificateDer<'_>,
    chain: &[CertificateDer<'_>],
) -> Result<(), webpki::Error> {
    // A task serves, and is a client of other tasks.
    let usages = match holder {
        Holder::Task(_) => vec![KeyUsage::server_auth(), KeyUsage::client_auth()],
        Holder::Client => vec![KeyUsage::client_auth()],
    };
    let (certificate, now) = (EndEntityCert::try_from(own)?, UnixTime::now());
    let anchors = [authority];
    let algorithms = ALL_VERIFICATION_ALGS;
    for usage in usages {
        certificate.verify_for_usage(algorithms, &anchors, chain, now, usage, None, None)?;
    }
    Ok(())
}

/// The reason of TLS for a failed connection.
pub(crate) fn reason(error: &rustls::Error) -> String {
    use rustls::{CertificateError as Bad, Error};
    let said = match error {
        Error::InvalidCertificate(bad) => match bad {
            Bad::UnknownIssuer | Bad::BadSignature => "its certificate is of another authority",
            Bad::Expired | Bad::ExpiredContext { .. } => "its certificate has expired",
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => {
                "its certificate is not valid yet: do the clocks agree?"
            }
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                "its certificate is for another task, or for clients"
            }
            Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => {
                "its certificate is not for a server"
            }
            _ => return error.to_string(),
        },
        Error::AlertReceived(alert) => return refusal(&format!("{alert:?}")),
        Error::InvalidMessage(_) => "there is no TLS: is it a server without keys?",
        _ => return error.to_string(),
    };
    said.to_owned()
}

/// The meaning of an alert of the other end. Its name is the one in RFC 8446, section 6.
pub(crate) fn refusal(alert: &str) -> String {
    match alert {
        "UnknownCA" | "DecryptError" => "it has keys of another authority".to_owned(),
        "CertificateExpired" => {
            "it says that this certificate has expired, or is not valid yet".to_owned()
        }
        _ => format!("it refuses this certificate: {alert}"),
    }
}

/// True for a name of the form in certificates.
pub(crate) fn is_name(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
}

fn is_valid_for(certificate: &CertificateDer<'_>, name: &str) -> bool {
    let (Ok(certificate), Ok(name)) = (
        EndEntityCert::try_from(certificate),
        ServerName::try_from(name),
    ) else {
        return false;
    };
    certificate.verify_is_valid_for_subject_name(&name).is_ok()
}

/// The other end of a connection to a task.
#[derive(Clone)]
pub(crate) enum Peer {
    /// Whoever reaches a server without keys.
    Anyone,
    /// A holder of keys of the cluster.
    Holder(CertificateDer<'static>),
}

impl Peer {
    /// Errors unless this is the task.
    pub(crate) fn check_task(&self, name: &TaskName) -> Result<(), Fault> {
        self.check(&name_of(name), &name.to_string())
    }

    /// Errors unless this is a task.
    pub(crate) fn check_any_task(&self) -> Result<(), Fault> {
        self.check(ANY_TASK, "a task")
    }

    /// Errors unless this is a client.
    pub(crate) fn check_client(&self) -> Result<(), Fault> {
        self.check(CLIENT, "a client")
    }

    fn check(&self, name: &str, who: &str) -> Result<(), Fault> {
        match self {
            Peer::Holder(certificate) if !is_valid_for(certificate, name) => {
                let message = format!("it takes the keys of {who}, and others were used");
                Err(Fault::invalid(message))
            }
            _ => Ok(()),
        }
    }
}
