//! The model in this executable, and the machine that it is for.

use crate::args::Args;
use crate::json::{Json, map};
use crate::load::load;
use crate::print_json;
use gristmill_runtime::Error;
use gristmill_runtime::command::given::{cpu_text, dims_text, shapes_text, value_text};
use gristmill_runtime::command::output;
use gristmill_runtime::command::state::variables;
use gristmill_runtime::image::{Image, Variant};
use gristmill_runtime::printable::printable;
use gristmill_runtime::program::IoSpec;

/// Linking of the C library.
const LINKING: &str = if cfg!(target_feature = "crt-static") {
    "static"
} else {
    "dynamic"
};

/// Prints inputs, outputs and requirements of the model.
pub fn info(args: &Args) -> Result<(), Error> {
    let image = load()?;
    match args.json {
        true => print_json("info", to_json(&image)),
        false => print(&image),
    }
    Ok(())
}

fn print(image: &Image) {
    let about = image.about();
    let (name, version, system) = (&about.name, &about.version, &about.system);
    output::text(&format!("image of {name:?}  gristmill {version}"));
    output::text(&format!("for {system}, {}", cpu_text(image)));
    output::text(&format!("C library: {LINKING}"));
    if let Some(program) = image.programs().first() {
        let inputs = program.inputs.iter().map(|i| value_text("input ", i));
        let outputs = program.outputs.iter().map(|o| value_text("output", o));
        let variables = variables(program).into_iter();
        let variables = variables.map(|v| v.to_string());
        inputs
            .chain(outputs)
            .chain(variables)
            .for_each(|line| output::text(&line));
    }
    for v in image.variants() {
        let dims = dims_text(v.fixed.dims.iter());
        let (dims, shapes) = (printable(&dims), shapes_text(v.program));
        output::text(&format!("variant {dims}: {shapes}"));
    }
}

fn to_json(image: &Image) -> Vec<(String, Json)> {
    let about = image.about();
    let features = about.features.iter().map(|f| Json::from(f.as_str()));
    let members = [
        ("image", Json::from(about.name.as_str())),
        ("version", about.version.as_str().into()),
        ("system", about.system.as_str().into()),
        ("features", Json::List(features.collect())),
        ("libc", LINKING.into()),
        (
            "variants",
            Json::List(image.variants().map(variant).collect()),
        ),
    ];
    members.map(|(name, value)| (name.to_owned(), value)).into()
}

fn variant(v: Variant) -> Json {
    let dims = v.fixed.dims.iter();
    let dims = dims.map(|(dim, n)| (dim.clone(), Json::from(*n)));
    let specs = |list: &[IoSpec]| Json::List(list.iter().map(spec).collect());
    map([
        ("dims", Json::Map(dims.collect())),
        ("inputs", specs(&v.program.inputs)),
        ("outputs", specs(&v.program.outputs)),
    ])
}

fn spec(spec: &IoSpec) -> Json {
    map([
        ("name", spec.name.as_str().into()),
        ("dtype", spec.dtype.name().into()),
        ("shape", spec.shape.clone().into()),
    ])
}
