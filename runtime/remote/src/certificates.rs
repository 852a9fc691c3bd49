//! Makes the keys of a cluster: an authority, and a certificate with a private key for each task and for clients.

use crate::ClusterSpec;
use crate::contents::Digest;
use crate::keys::{AUTHORITY, Holder, Keys, is_name};
use crate::messages::Fault;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use time::{Duration, OffsetDateTime};

/// The file of the authority's private key.
const AUTHORITY_KEY: &str = "ca.key";

/// Time for which an authority is valid, in days.
const AUTHORITY_DAYS: u16 = 3650;

/// Files with keys: new ones, and those of earlier calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MadeKeys {
    /// New files.
    pub made: Vec<PathBuf>,
    /// Certificates of earlier calls, which stay as they are.
    pub kept: Vec<PathBuf>,
}

/// Makes the keys of a cluster in a folder: of its authority, of tasks and of clients. Nothing is written over: what is not there yet is added.
///
/// Errors with `InvalidInput`, naming the file, when one cannot be read or written, when one of a pair is absent, and on a job name too long
/// for a certificate.
pub fn make_keys(folder: &Path, cluster: &ClusterSpec, days: u16) -> Result<MadeKeys, Fault> {
    std::fs::create_dir_all(folder).map_err(|e| fail(folder, e))?;
    let tasks = cluster.tasks();
    let tasks = tasks.map(|(name, _)| Holder::Task(name.clone()));
    let holders: Vec<Holder> = tasks.chain([Holder::Client]).collect();
    let mut files = MadeKeys::default();
    let issuer = authority(folder, &holders, &mut files)?;
    for holder in &holders {
        let paths = files_of(folder, holder);
        if !is_there(&paths)? {
            pair(folder, holder, &issuer, days)?;
            files.made.extend(paths);
            continue;
        }
        let hint = "delete both files of this pair, and they are made again";
        Keys::read(folder, holder).map_err(|fault| fault.with_hint(hint))?;
        let [certificate, _] = paths;
        files.kept.push(certificate);
    }
    Ok(files)
}

/// The certificate and the private key of a holder.
fn files_of(folder: &Path, holder: &Holder) -> [PathBuf; 2] {
    ["pem", "key"].map(|ending| folder.join(format!("{}.{ending}", holder.stem())))
}

/// Makes a certificate and a private key.
fn pair(
    folder: &Path,
    holder: &Holder,
    issuer: &Issuer<'static, KeyPair>,
    days: u16,
) -> Result<(), Fault> {
    if holder.names().iter().any(|name| !is_name(name)) {
        let message =
            format!("keys for {holder}: the name of its job is too long for a certificate");
        return Err(Fault::invalid(message));
    }
    let made = KeyPair::generate().and_then(|key| {
        let certificate = parameters(holder, days)?.signed_by(&key, issuer)?;
        Ok([certificate.pem(), key.serialize_pem()])
    });
    let contents = made.map_err(|e| Fault::invalid(format!("keys for {holder}: {e}")))?;
    let paths = files_of(folder, holder);
    write(&paths, &contents)?;
    // An authority of another make signs under another name.
    Keys::read(folder, holder).map(drop).map_err(|fault| {
        // They are of no use; nobody else has seen them.
        paths
            .iter()
            .for_each(|path| drop(std::fs::remove_file(path)));
        let authority = folder.join(AUTHORITY);
        fault.context(format!(
            "{}: it was not made by this program",
            authority.display()
        ))
    })
}

fn fail(path: &Path, e: impl std::fmt::Display) -> Fault {
    Fault::invalid(format!("{}: {e}", path.display()))
}

/// True with both files of a pair. Errors with one of them.
fn is_there(paths: &[PathBuf; 2]) -> Result<bool, Fault> {
    match paths.each_ref().map(|path| path.exists()) {
        [true, true] => Ok(true),
        [false, false] => Ok(false),
        [has_first, _] => {
            let [there, absent] = match has_first {
                true => [&paths[0], &paths[1]],
                false => [&paths[1], &paths[0]],
            };
            let (there, absent) = (there.display(), absent.display());
            let hint = "bring the other file of this pair";
            Err(Fault::invalid(format!("{there} is there without {absent}")).with_hint(hint))
        }
    }
}

/// The authority of a folder. It is made if the folder has none, and no pairs of one either.
fn authority(
    folder: &Path,
    holders: &[Holder],
    files: &mut MadeKeys,
) -> Result<Issuer<'static, KeyPair>, Fault> {
    let paths = [AUTHORITY, AUTHORITY_KEY].map(|name| folder.join(name));
    if is_there(&paths)? {
        let key = std::fs::read_to_string(&paths[1]).map_err(|e| fail(&paths[1], e))?;
        let key = KeyPair::from_pem(&key).map_err(|e| fail(&paths[1], e))?;
        let parameters = of_authority(&key).map_err(|e| fail(&paths[1], e))?;
        let [certificate, _] = paths;
        files.kept.push(certificate);
        return Ok(Issuer::new(parameters, key));
    }
    let mut pairs = holders.iter().flat_map(|holder| files_of(folder, holder));
    if let Some(path) = pairs.find(|path| path.exists()) {
        let message = format!("{} is there without its authority", path.display());
        let hint = "bring ca.pem and ca.key, or make all keys again in another folder";
        return Err(Fault::invalid(message).with_hint(hint));
    }
    let issuer = new_authority(&paths)?;
    files.made.extend(paths);
    Ok(issuer)
}

fn new_authority(paths: &[PathBuf; 2]) -> Result<Issuer<'static, KeyPair>, Fault> {
    let made = KeyPair::generate().and_then(|key| {
        let parameters = of_authority(&key)?;
        let certificate = parameters.self_signed(&key)?;
        let contents = [certificate.pem(), key.serialize_pem()];
        Ok((Issuer::new(parameters, key), contents))
    });
    let (issuer, contents) =
        made.map_err(|e| Fault::invalid(format!("keys of an authority: {e}")))?;
    write(paths, &contents)?;
    Ok(issuer)
}

/// The authority of a private key. Its name follows from the key, and is another one than those of other authorities.
pub(crate) fn of_authority(key: &KeyPair) -> Result<CertificateParams, rcgen::Error> {
    let digest = Digest::of(key.public_key_raw()).to_string();
    let subject = format!("gristmill authority {}", &digest[..16]);
    let mut parameters = named(&subject, AUTHORITY_DAYS, vec![])?;
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(parameters)
}

pub(crate) fn parameters(holder: &Holder, days: u16) -> Result<CertificateParams, rcgen::Error> {
    let mut parameters = named(&holder.to_string(), days, holder.names())?;
    let uses = match holder {
        Holder::Task(_) => vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ],
        Holder::Client => vec![ExtendedKeyUsagePurpose::ClientAuth],
    };
    parameters.extended_key_usages = uses;
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    Ok(parameters)
}

fn named(subject: &str, days: u16, names: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut parameters = CertificateParams::new(names)?;
    let mut whole = DistinguishedName::new();
    whole.push(DnType::CommonName, subject);
    parameters.distinguished_name = whole;
    let now = OffsetDateTime::now_utc();
    // Clocks of machines differ.
    parameters.not_before = now - Duration::days(1);
    parameters.not_after = now + Duration::days(i64::from(days));
    Ok(parameters)
}

/// Writes a certificate and its key.
fn write(paths: &[PathBuf; 2], contents: &[String; 2]) -> Result<(), Fault> {
    // The key first: a certificate without one would look whole.
    for i in [1, 0] {
        let (path, is_private) = (&paths[i], i == 1);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        {
            use std::os::unix::fs::OpenOptionsExt;
            options.mode(if is_private { 0o600 } else { 0o644 });
        }
        let written = options
            .open(path)
            .and_then(|mut file| file.write_all(contents[i].as_bytes()));
        written.map_err(|e| fail(path, e))?;
    }
    Ok(())
}
