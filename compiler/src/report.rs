//! The compile report: work and time of each stage.

use crate::codegen::kernel_forms::Choice;
use crate::cost::Nanos;
use crate::options::Precision;
use crate::units::{count, plural, printable, size, time_ns};
use crate::{cluster, rewrite};
use std::fmt::{self, Write};
use std::time::Duration;

macro_rules! passes {
    ($($(#[doc = $doc:literal])* $pass:ident $name:literal;)*) => {
        /// A part of compilation whose time is reported.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Pass { $($(#[doc = $doc])* $pass),* }

        impl Pass {
            /// Name in reports.
            pub fn name(self) -> &'static str {
                match self { $(Pass::$pass => $name),* }
            }
        }
    };
}

passes! {
    /// Constant folding, common subexpressions, quantised forms.
    Fold "fold";
    /// Equality saturation.
    Rewrite "rewrite";
    /// A batch over several devices.
    Divide "divide";
    /// Products of one operand become one.
    Merge "merge";
    /// Products of lower precision.
    Precision "precision";
    /// Fusion into kernels.
    Cluster "cluster";
    /// Kernels of any shape get sizes.
    Bind "bind";
    /// Devices of all clusters.
    Place "place";
    /// One graph per device.
    Partition "partition";
    /// Variants of GPU kernels, by their times.
    Tune "tune";
    /// Schedules, memory plans and machine code.
    Codegen "codegen";
}

/// Shapes that the decisions of a compilation were made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The given ones alone.
    #[default]
    Alone,
    /// Kernels were chosen once, for all shapes of the model; their devices for the given ones.
    AllShapes,
    /// Kernels, and their order on the only device, were chosen once, for all shapes of the model.
    OneDevice,
}

/// Work, choices and times of a compilation.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Time of each pass in ns, in the order of their first runs.
    pub passes: Vec<(Pass, u64)>,
    /// Rules and costs of rewriting.
    pub rewrite: rewrite::Report,
    /// Products that compute in a lower precision than the model's, and which; none where none was asked for.
    pub lowered: Option<(Precision, usize)>,
    /// Shapes that the decisions were made for.
    pub scope: Scope,
    /// Kernels and bytes before and after fusion.
    pub cluster: cluster::Report,
    /// Things the user should know although compilation went on, e.g. a soft-placement downgrade.
    pub warnings: Vec<String>,
    /// Things that explain a choice and need no action.
    pub notes: Vec<String>,
    /// Ops that run in generated loops on a CPU although they have a kernel.
    pub fallbacks: Vec<Fallback>,
    /// Arena bytes of each device, and the least possible.
    pub arenas: Vec<(String, usize, usize)>,
    /// Convolutions that minimal filtering sums in another order, each with the pixels on a side of its tiles: see
    /// [`ConvAlgorithm`](crate::options::ConvAlgorithm).
    pub filtered: Vec<(String, usize)>,
    /// Forms of the GPU kernels that there is a choice for.
    pub choices: Vec<Choice>,
    /// Clusters whose forms have been timed, now or earlier.
    pub tuned: Vec<Tuned>,
    /// Bytes of constants, packed weights included.
    pub constant_bytes: usize,
    /// Bytes of machine code for CPUs that was generated.
    pub code_bytes: usize,
}

/// An op that runs in generated loops although it has a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// Path of the node in the user's model.
    pub node: String,
    /// Name of the op.
    pub op: &'static str,
    /// Device that computes it.
    pub device: String,
    /// Why no kernel does.
    pub why: String,
    /// Predicted loss of time per execution, compared with a kernel.
    pub loss: Nanos,
}

/// Fallbacks that are predicted to lose this much are warned of.
const WORTH_A_WARNING: Nanos = Nanos(1_000_000);

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({} on {}) runs in generated loops: {}; {} slower than by a kernel, as predicted",
            printable(&self.node),
            self.op,
            self.device,
            self.why,
            self.loss
        )
    }
}

/// The form of a cluster that took the least time on its GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuned {
    /// Where in the model the cluster is.
    pub node: String,
    /// The form of its kernels, in words.
    pub form: String,
    /// Its time in ns, and that of the form that predicted times choose.
    pub ns: [Option<u64>; 2],
}

impl Report {
    /// Adds to the time of a pass.
    pub fn add_time(&mut self, pass: Pass, time: Duration) {
        let ns = time.as_nanos() as u64;
        match self.passes.iter_mut().find(|(p, _)| *p == pass) {
            Some((_, total)) => *total += ns,
            None => self.passes.push((pass, ns)),
        }
    }

    /// Time of a pass in ns; `None` when it did not run.
    pub fn time_ns(&self, pass: Pass) -> Option<u64> {
        let found = self.passes.iter().find(|(p, _)| *p == pass);
        found.map(|(_, ns)| *ns)
    }

    /// A table of the forms that were timed; nothing without any.
    pub fn tuned_text(&self) -> String {
        let time = |ns: Option<u64>| ns.map_or("failed".to_owned(), time_ns);
        let row = |t: &Tuned| {
            let [chosen, predicted] = t.ns.map(time);
            let node = printable(&t.node);
            format!("{chosen:>10}  {predicted:>10}  {}  ({node})\n", t.form)
        };
        match self.tuned.is_empty() {
            true => String::new(),
            false => {
                format!("{:>10}  {:>10}  form\n", "chosen", "predicted")
                    + &self.tuned.iter().map(row).collect::<String>()
            }
        }
    }

    /// Adds a fallback, with a warning where it is predicted to cost a millisecond or more.
    pub fn add_fallback(&mut self, fallback: Fallback) {
        if fallback.loss >= WORTH_A_WARNING {
            self.warnings.push(fallback.to_string());
        }
        self.fallbacks.push(fallback);
    }

    /// Text for people: 1 = stages and times, 2 = rewrites, 3 = kernels and missed fusions.
    pub fn text(&self, verbosity: u8) -> String {
        let mut out = String::new();
        self.write_times(&mut out);
        self.write_sizes(&mut out);
        self.write_remarks(&mut out);
        if verbosity >= 2 {
            self.write_rewrites(&mut out);
        }
        if verbosity >= 3 {
            self.write_kernels(&mut out);
        }
        out
    }

    fn write_times(&self, out: &mut String) {
        for (pass, ns) in &self.passes {
            row(out, pass.name(), time_ns(*ns));
        }
        let total: u64 = self.passes.iter().map(|(_, ns)| ns).sum();
        row(out, "total", time_ns(total));
    }

    fn write_sizes(&self, out: &mut String) {
        let c = &self.cluster;
        let n_kernels: usize = c.kernels.values().sum();
        let (before, after) = (size(c.bytes_before), size(c.bytes_after));
        let scope = match self.scope {
            Scope::Alone => "",
            Scope::AllShapes => ", chosen once for all shapes",
            Scope::OneDevice => ", chosen, placed and ordered once for all shapes",
        };
        row(
            out,
            "fusion",
            format_args!(
                "{} -> {}{scope}",
                plural(c.ops_before, "op"),
                plural(n_kernels, "kernel")
            ),
        );
        row(out, "bytes moved", format_args!("{before} -> {after}"));
        if let Some((precision, n)) = self.lowered {
            let n = count(n as u64);
            row(
                out,
                "precision",
                format_args!("{precision} for {n} products"),
            );
        }
        self.write_filtered(out);
        if let Some(f) = &c.fused {
            let (before, after) = (time_ns(f.before.0), time_ns(f.after.0));
            row(
                out,
                "predicted",
                format_args!("{before} -> {after} by fusion"),
            );
        }
        for (device, arena, least) in &self.arenas {
            let (arena, least) = (size(*arena as u64), size(*least as u64));
            let _ = writeln!(out, "{device}  arena {arena}  (least possible {least})");
        }
        row(out, "constants", size(self.constant_bytes as u64));
        row(out, "code", size(self.code_bytes as u64));
    }

    /// Convolutions in another order of sums, and the bound of their errors.
    fn write_filtered(&self, out: &mut String) {
        for (tile, bound) in [(2, "2e-6"), (4, "2e-5")] {
            let n = self.filtered.iter().filter(|(_, t)| *t == tile).count();
            if n > 0 {
                let n = plural(n, "convolution");
                let value = format!(
                    "{n} by F({tile}, 3), errors up to {bound} of the largest output (--conv direct: 5e-7)"
                );
                row(out, "filtering", value);
            }
        }
    }

    fn write_remarks(&self, out: &mut String) {
        for fallback in &self.fallbacks {
            row(out, "fallback", fallback);
        }
        for note in &self.notes {
            row(out, "note", note);
        }
    }

    fn write_rewrites(&self, out: &mut String) {
        let _ = writeln!(out, "{}", self.rewrite);
        if let Some(f) = &self.cluster.fused {
            let _ = write!(out, "{}", f.phase);
        }
    }

    fn write_kernels(&self, out: &mut String) {
        for (kind, n) in &self.cluster.kernels {
            let _ = writeln!(out, "{:>6}  {kind:?} kernels", count(*n as u64));
        }
        for (node, tile) in &self.filtered {
            let _ = writeln!(out, "F({tile}, 3): {}", printable(node));
        }
        for choice in &self.choices {
            let _ = writeln!(out, "{}: {choice}", choice.kernel);
        }
        for (node, reason) in &self.cluster.missed {
            let _ = writeln!(out, "not fused: {}: {reason}", printable(node));
        }
    }
}

/// A line of the table: its label in 12 columns, and its value. Writing to a string does not fail.
fn row(out: &mut String, label: &str, value: impl fmt::Display) {
    let _ = writeln!(out, "{label:<12} {value}");
}
