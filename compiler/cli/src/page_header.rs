//! Header of the page of `place --html`: the model and the command.

use gristmill::Options;
use gristmill::ir::Graph;
use gristmill_runtime::command::given::dims_text;
use std::path::Path;

/// Inputs to name.
const N_NAMED: usize = 8;

/// Facts of a model: its file, the given sizes of dims, its inputs with the planned sizes.
pub fn of_model(model: &Path, options: &Options, clusters: &Graph) -> Vec<(&'static str, String)> {
    let mut facts = vec![("model", model.display().to_string())];
    let ranges = options.ranges.iter();
    let mut dims: Vec<String> = ranges
        .map(|(dim, range)| format!("{dim}={range}"))
        .collect();
    let sizes: Vec<(String, usize)> = options.dims.clone().into_iter().collect();
    if !sizes.is_empty() {
        dims.push(dims_text(sizes.iter()));
    }
    if !dims.is_empty() {
        facts.push(("dims", dims.join(", ")));
    }
    let inputs = clusters.input_names.iter().zip(&clusters.inputs);
    let mut inputs: Vec<String> = inputs
        .take(N_NAMED)
        .map(|(name, &v)| format!("{name}: {}", clusters.ty(v)))
        .collect();
    if clusters.inputs.len() > N_NAMED {
        inputs.push(format!("{} more", clusters.inputs.len() - N_NAMED));
    }
    facts.push(("inputs", inputs.join(", ")));
    facts
}

/// The command of this process, as a person types it.
pub fn command() -> String {
    let arguments = std::env::args_os().skip(1);
    let arguments = arguments.map(|a| quoted(&a.to_string_lossy()));
    let words: Vec<String> = std::iter::once("gristmill".to_owned())
        .chain(arguments)
        .collect();
    words.join(" ")
}

/// A word for a shell, in quotes if it needs them.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_=./:,+%@".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted("batch=1..64"), "batch=1..64");
        assert_eq!(quoted("^/enc/.*=gpu:0"), "'^/enc/.*=gpu:0'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
