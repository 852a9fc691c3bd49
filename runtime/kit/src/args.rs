//! The command line of an executable.

use gristmill_runtime::Error;
use gristmill_runtime::nearest::nearest;
use std::path::PathBuf;

/// Flags by name, their values and their meaning.
const FLAGS: &[(&str, &str, &str)] = &[
    ("inputs", "FILE.npz", "Inputs by name from a NumPy archive"),
    (
        "outputs",
        "FILE.npz",
        "Write the outputs to a NumPy archive",
    ),
    (
        "labels",
        "FILE.npy",
        "Class labels to compare with the arg-max of the first output",
    ),
    (
        "variable",
        "NAME=FILE.npy",
        "Value of a variable before the run, any number of times",
    ),
    (
        "state",
        "FILE.safetensors",
        "Values of variables before the run, as --save-state writes them",
    ),
    (
        "save-state",
        "FILE.safetensors",
        "Write the values of all variables after the run",
    ),
    ("threads", "N", "Threads to use; all cores by default"),
    ("bench", "", "Time repeated runs"),
    (
        "info",
        "",
        "Print inputs, outputs and requirements of the model, and run nothing",
    ),
    ("json", "", "Print JSON"),
    ("help", "", "Print this"),
    ("version", "", "Print the version"),
];

const EXIT_CODES: &str = "Exit codes: 0 good; 1 internal error; 2 bad command line or input file; 3 unsupported machine; \
5 out of memory or over a declared limit; 6 a device failed.";

/// Parsed flags.
#[derive(Debug, Default, PartialEq)]
pub struct Args {
    pub inputs: Option<PathBuf>,
    pub outputs: Option<PathBuf>,
    pub labels: Option<PathBuf>,
    pub variables: Vec<String>,
    pub state: Option<PathBuf>,
    pub save_state: Option<PathBuf>,
    pub threads: Option<usize>,
    pub bench: bool,
    pub info: bool,
    pub json: bool,
    pub help: bool,
    pub version: bool,
}

impl Args {
    /// Parses arguments without the name of the program.
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Args, Error> {
        let mut args = Args::default();
        let mut rest = arguments;
        while let Some(argument) = rest.next() {
            let (flag, joined) = match argument.split_once('=') {
                Some((flag, value)) => (flag, Some(value.to_owned())),
                None => (&argument[..], None),
            };
            let name = known(flag)?;
            let takes_value = FLAGS.iter().any(|f| f.0 == name && !f.1.is_empty());
            match (takes_value, joined) {
                (true, joined) => args.set(name, joined.or_else(|| rest.next()))?,
                (false, None) => args.switch(name),
                (false, Some(_)) => {
                    return Err(Error::invalid(format!("--{name} takes no value")));
                }
            }
        }
        args.check_together()?;
        Ok(args)
    }

    /// Errors with a flag that another one leaves without effect.
    fn check_together(&self) -> Result<(), Error> {
        if self.help || self.version {
            return Ok(());
        }
        let runs = [
            ("inputs", self.inputs.is_some()),
            ("variable", !self.variables.is_empty()),
            ("state", self.state.is_some()),
            ("threads", self.threads.is_some()),
            ("bench", self.bench),
        ];
        let results = [
            ("outputs", self.outputs.is_some()),
            ("labels", self.labels.is_some()),
            ("save-state", self.save_state.is_some()),
        ];
        let given = |list: &[(&'static str, bool)]| list.iter().find(|f| f.1).map(|f| f.0);
        let (switch, idle) = match (self.info, self.bench) {
            (true, _) => ("--info runs nothing", given(&runs).or(given(&results))),
            (false, true) => ("--bench keeps no results", given(&results)),
            (false, false) => return Ok(()),
        };
        match idle {
            None => Ok(()),
            Some(name) => {
                let message = format!("{switch}: --{name} has no effect with it");
                Err(Error::invalid(message))
            }
        }
    }

    fn set(&mut self, name: &str, value: Option<String>) -> Result<(), Error> {
        let missing = || Error::invalid(format!("--{name} needs a value"));
        let value = value.ok_or_else(missing)?;
        let once = |slot: &mut Option<PathBuf>, value: String| match slot.replace(value.into()) {
            Some(_) => Err(Error::invalid(format!("--{name} is given twice"))),
            None => Ok(()),
        };
        match name {
            "inputs" => once(&mut self.inputs, value),
            "outputs" => once(&mut self.outputs, value),
            "labels" => once(&mut self.labels, value),
            "state" => once(&mut self.state, value),
            "save-state" => once(&mut self.save_state, value),
            "variable" => {
                self.variables.push(value);
                Ok(())
            }
            _ => {
                let n = value.parse::<u16>().ok().filter(|&n| n > 0);
                let wrong = || Error::invalid(format!("--threads {value:?}: expected 1 to 65535"));
                self.threads = Some(usize::from(n.ok_or_else(wrong)?));
                Ok(())
            }
        }
    }

    fn switch(&mut self, name: &str) {
        let slot = match name {
            "bench" => &mut self.bench,
            "info" => &mut self.info,
            "json" => &mut self.json,
            "version" => &mut self.version,
            _ => &mut self.help,
        };
        *slot = true;
    }
}

/// The name of a flag. Errors with the one that is most like it.
fn known(flag: &str) -> Result<&'static str, Error> {
    let mut names = FLAGS.iter().map(|f| f.0);
    let given = match flag {
        "-h" => Some("help"),
        "-V" => Some("version"),
        _ => flag.strip_prefix("--"),
    };
    let found = given.and_then(|given| names.find(|&name| name == given));
    found.ok_or_else(|| {
        let near = nearest(flag.trim_start_matches('-'), FLAGS.iter().map(|f| f.0), 1);
        let near = near.first().map(|n| format!("; did you mean --{n}?"));
        let near = near.unwrap_or_default();
        Error::invalid(format!("unexpected argument {flag:?}{near} (try: --help)"))
    })
}

/// The text of `--help` for an executable of this name.
pub fn usage(program: &str) -> String {
    let mut text = format!("Usage: {program} --inputs FILE.npz [FLAGS]\n\nFlags:\n");
    for (name, value, meaning) in FLAGS {
        let flag = format!("--{name} {value}");
        text += &format!("  {flag:<30} {meaning}\n");
    }
    text + "\n" + EXIT_CODES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &[&str]) -> Result<Args, String> {
        let parsed = Args::parse(list.iter().map(|&a| a.to_owned()));
        parsed.map_err(|e| e.to_string())
    }

    #[test]
    fn flags_have_values_behind_them_or_behind_an_equals_sign() {
        let args = parse(&[
            "--inputs",
            "x.npz",
            "--threads=2",
            "--variable",
            "a/n=n.npy",
        ])
        .unwrap();
        assert_eq!(args.inputs, Some("x.npz".into()));
        assert_eq!((args.threads, args.bench), (Some(2), false));
        assert_eq!(args.variables, ["a/n=n.npy"]);
        assert!(parse(&["--bench", "--json"]).unwrap().bench);
    }

    #[test]
    fn slips_are_named() {
        let error = |list: &[&str]| parse(list).unwrap_err();
        assert_eq!(
            error(&["--input", "x"]),
            "unexpected argument \"--input\"; did you mean --inputs? (try: --help)"
        );
        assert_eq!(error(&["--labels"]), "--labels needs a value");
        assert_eq!(error(&["--json=1"]), "--json takes no value");
        assert_eq!(
            error(&["--threads", "0"]),
            "--threads \"0\": expected 1 to 65535"
        );
        assert_eq!(
            error(&["--inputs", "a", "--inputs=b"]),
            "--inputs is given twice"
        );
        assert_eq!(
            error(&["--variable", "x=f.npy", "--info"]),
            "--info runs nothing: --variable has no effect with it"
        );
        assert_eq!(
            error(&["--info", "--bench"]),
            "--info runs nothing: --bench has no effect with it"
        );
        assert_eq!(
            error(&["--bench", "--labels", "a"]),
            "--bench keeps no results: --labels has no effect with it"
        );
        assert!(parse(&["--info", "--json"]).unwrap().info);
        assert!(parse(&["--info", "--threads=2", "--help"]).unwrap().help);
    }
}
