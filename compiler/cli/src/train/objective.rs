//! The loss of a model from a file, and the update of its weights, by flags.

use super::super::output::{errln, warning};
use crate::heading;
use clap::{Args, ValueEnum};
use gristmill::DType;
use gristmill::ir::{Bindings, Op, ScalarOp, Type, ValueId};
use gristmill::onnx;
use gristmill::train::{
    Adagrad, Adam, FineTuning, Model, Objective, Optimizer, Pretrained, RmsProp, Schedule, Sgd,
    Update, WeightDecay, loss,
};
use gristmill::{Error, Result};
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::units::{plural, printable};
use std::collections::BTreeMap;

/// Flags of the loss and of the trainable weights.
#[derive(Args, Clone)]
pub struct ObjectiveArgs {
    /// Loss of an output. Classification losses work on logits; a final softmax or sigmoid is skipped.
    #[arg(long, value_enum, default_value_t = Loss::CrossEntropy, help_heading = heading::TRAINING)]
    pub loss: Loss,
    /// Output to compute the loss on. Default: the model's only output.
    #[arg(long, value_name = "NAME", help_heading = heading::TRAINING)]
    pub output: Option<String>,
    /// Axis of the classes, for --loss cross-entropy.
    #[arg(long, value_name = "AXIS", default_value_t = -1, allow_negative_numbers = true, help_heading = heading::TRAINING)]
    pub class_axis: i64,
    /// Part of each label's probability to spread over all classes, from 0 to 1, for --loss cross-entropy.
    #[arg(long, value_name = "PART", default_value_t = 0.0, allow_negative_numbers = true, help_heading = heading::TRAINING)]
    pub label_smoothing: f64,
    /// Error beyond which the loss grows linearly, for --loss huber.
    #[arg(long, value_name = "DELTA", default_value_t = 1.0, allow_negative_numbers = true, help_heading = heading::TRAINING)]
    pub huber_delta: f64,
    /// Train only the weights whose names match a regular expression. Default: all float weights except scalars and factors of one element.
    #[arg(long, value_name = "REGEX", help_heading = heading::TRAINING)]
    pub trainable: Option<String>,
}

/// `--loss`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Loss {
    /// For classes: labels are integers, one per row of the output.
    CrossEntropy,
    /// For independent probabilities: labels from 0 to 1, of the output's dtype.
    BinaryCrossEntropy,
    /// Mean squared error; labels have the output's dtype.
    Mse,
    /// Mean absolute error; labels have the output's dtype.
    Mae,
    /// Huber loss: squared for small errors, linear for large ones. Labels have the output's dtype.
    Huber,
}

impl ObjectiveArgs {
    /// Errors on flags of another loss.
    fn check(&self) -> Result<()> {
        if self.label_smoothing != 0.0 && self.loss != Loss::CrossEntropy {
            let message = "--label-smoothing is for --loss cross-entropy";
            return Err(Error::invalid(message));
        }
        if self.huber_delta != 1.0 && self.loss != Loss::Huber {
            return Err(Error::invalid("--huber-delta is for --loss huber"));
        }
        Ok(())
    }

    /// The loss with its settings. Without label smoothing it is the name alone, as in checkpoints of earlier versions.
    pub fn loss_fact(&self) -> String {
        let (name, smoothing) = (name(self.loss), self.label_smoothing);
        match self.loss {
            Loss::CrossEntropy if smoothing != 0.0 => {
                format!("{name} with label smoothing {smoothing}")
            }
            Loss::Huber => format!("{name} with delta {}", self.huber_delta),
            _ => name,
        }
    }
}

/// Flags of an update.
#[derive(Args, Clone)]
pub struct UpdateArgs {
    /// Optimiser.
    #[arg(long, value_enum, default_value_t = OptimizerArg::Adam, help_heading = heading::TRAINING)]
    pub optimizer: OptimizerArg,
    /// Learning rate.
    #[arg(long, default_value_t = 1e-3, allow_negative_numbers = true, help_heading = heading::TRAINING)]
    pub lr: f64,
    /// Learning rate as a function of the step.
    #[arg(long, value_enum, default_value_t = ScheduleArg::Constant, help_heading = heading::TRAINING)]
    pub schedule: ScheduleArg,
    /// Steps over which the learning rate rises from 0.
    #[arg(long, value_name = "STEPS", default_value_t = 0, help_heading = heading::TRAINING)]
    pub warmup: u64,
    /// Momentum, for --optimizer sgd and rmsprop.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true, help_heading = heading::TRAINING)]
    pub momentum: f64,
    /// Weight decay: decoupled for adamw, otherwise an L2 term of the gradient. Default: 0, or 0.01 for adamw.
    #[arg(long, allow_negative_numbers = true, help_heading = heading::TRAINING)]
    pub weight_decay: Option<f64>,
    /// Clip all gradients together to this norm.
    #[arg(long, value_name = "NORM", allow_negative_numbers = true, help_heading = heading::TRAINING)]
    pub clip_norm: Option<f64>,
}

/// `--optimizer`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerArg {
    /// Adam.
    Adam,
    /// Adam with decoupled weight decay.
    Adamw,
    /// Gradient descent, with --momentum.
    Sgd,
    /// RMSProp, with --momentum.
    Rmsprop,
    /// Adagrad.
    Adagrad,
}

/// `--schedule`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleArg {
    /// The same in every step.
    Constant,
    /// Half a cosine down to 0 at the last step.
    Cosine,
    /// A line down to 0 at the last step.
    Linear,
}

impl UpdateArgs {
    /// The update for a number of steps.
    pub fn update(&self, n_steps: u64) -> Update {
        Update {
            weight_decay: self.decay(),
            clip_norm: self.clip_norm,
            ..self.optimizer(n_steps).into()
        }
    }

    fn learning_rate(&self, n_steps: u64) -> Schedule {
        let n_steps = n_steps.max(1);
        let schedule = match self.schedule {
            ScheduleArg::Constant => Schedule::Constant(self.lr),
            ScheduleArg::Cosine => Schedule::cosine(self.lr, n_steps),
            ScheduleArg::Linear => Schedule::linear(self.lr, 0.0, n_steps),
        };
        match self.warmup {
            0 => schedule,
            steps => schedule.warmed_up(steps),
        }
    }

    fn optimizer(&self, n_steps: u64) -> Optimizer {
        let learning_rate = self.learning_rate(n_steps);
        match self.optimizer {
            OptimizerArg::Adam | OptimizerArg::Adamw => Optimizer::from(Adam {
                learning_rate,
                ..Adam::default()
            }),
            OptimizerArg::Sgd => Optimizer::from(Sgd {
                learning_rate,
                momentum: self.momentum,
                ..Sgd::default()
            }),
            OptimizerArg::Rmsprop => Optimizer::from(RmsProp {
                learning_rate,
                momentum: self.momentum,
                ..RmsProp::default()
            }),
            OptimizerArg::Adagrad => Optimizer::from(Adagrad {
                learning_rate,
                ..Adagrad::default()
            }),
        }
    }

    fn decay(&self) -> WeightDecay {
        match (self.optimizer, self.weight_decay) {
            (OptimizerArg::Adamw, decay) => WeightDecay::Decoupled(decay.unwrap_or(0.01)),
            (_, Some(decay)) => WeightDecay::L2(decay),
            (_, None) => WeightDecay::None,
        }
    }

    /// Errors on flags that the optimiser does not have.
    pub fn check(&self) -> Result<()> {
        let takes_momentum = matches!(self.optimizer, OptimizerArg::Sgd | OptimizerArg::Rmsprop);
        if self.momentum != 0.0 && !takes_momentum {
            let message = "--momentum is for --optimizer sgd and --optimizer rmsprop";
            return Err(Error::invalid(message));
        }
        Ok(())
    }
}

/// The name of a value of a flag.
pub fn name(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |v| v.get_name().to_owned())
}

/// A model from a file with a loss of one of its outputs.
pub struct Aim {
    /// The model.
    pub net: Pretrained,
    output: String,
    loss: Loss,
    label_smoothing: f64,
    huber_delta: f64,
    class_axis: i64,
    label: String,
    /// True when `--trainable` says which weights learn.
    is_chosen: bool,
}

impl Aim {
    /// The model, and the loss that the flags say; the label is an input of this name.
    pub fn new(
        model: &onnx::Model,
        args: &ObjectiveArgs,
        dims: Bindings,
        label: &str,
    ) -> Result<Aim> {
        args.check()?;
        let outputs = model.declared_outputs()?;
        let known = || outputs.iter().map(|o| o.name.as_str());
        let output = match &args.output {
            Some(name) if known().any(|k| k == name) => name.clone(),
            Some(name) => return Err(Error::invalid(unknown("output", name, known()))),
            None if outputs.len() == 1 => outputs[0].name.clone(),
            None => {
                let names = known().collect::<Vec<_>>().join(", ");
                let e = Error::invalid(format!("the model has several outputs: {names}"));
                return Err(e.hint("--output NAME chooses the one that the loss is of"));
            }
        };
        let tuning = FineTuning {
            trainable: args.trainable.clone(),
            outputs: vec![output.clone()],
            dims,
        };
        let net = Pretrained::new(model, &tuning)?;
        if net.inputs().any(|(name, _)| name == label) {
            let message = format!("the model has an input {label:?}, the name of the labels");
            return Err(Error::invalid(message).hint("another key in the archive"));
        }
        Ok(Aim {
            net,
            output,
            loss: args.loss,
            label_smoothing: args.label_smoothing,
            huber_delta: args.huber_delta,
            class_axis: args.class_axis,
            label: label.to_owned(),
            is_chosen: args.trainable.is_some(),
        })
    }

    /// Errors, with the reasons, when nothing learns.
    pub fn check_learning(&self) -> Result<()> {
        let weights = self.net.weights();
        if weights.iter().any(|w| w.frozen.is_none()) {
            return Ok(());
        }
        for w in weights {
            let why = w.frozen.as_deref().unwrap_or_default();
            errln!("{}: {}", printable(&w.name), printable(why));
        }
        let fixed = self.net.fixed();
        for t in fixed {
            errln!("{}: {}", printable(&t.name), t.why);
        }
        let (n, n_fixed) = (weights.len(), plural(fixed.len(), "tensor"));
        let message = match (n, fixed.len()) {
            (_, 0) => format!("none of the model's {n} float initialisers is trainable"),
            (0, _) => format!(
                "nothing is trainable: the model has no float initialisers; possible weights are in nodes or quantised ({n_fixed})"
            ),
            _ => format!(
                "none of the model's {n} float initialisers is trainable; further possible weights are in nodes or quantised ({n_fixed})"
            ),
        };
        let e = Error::invalid(message);
        Err(match fixed.is_empty() {
            true => e,
            false => e.hint("export the weights as f32 initialisers"),
        })
    }

    /// Warns of tensors that may be weights and do not learn whatever `--trainable` says, once for each reason.
    pub fn warn_of_fixed(&self) {
        let mut by_reason: BTreeMap<&str, Vec<(&str, &Type)>> = BTreeMap::new();
        let learns = |t: &Type| matches!(t.dtype, DType::F32 | DType::F64);
        for w in self.net.weights().iter().filter(|w| !learns(&w.ty)) {
            let why = w.frozen.as_deref().unwrap_or_default();
            by_reason.entry(why).or_default().push((&w.name, &w.ty));
        }
        for t in self.net.fixed() {
            by_reason.entry(t.why).or_default().push((&t.name, &t.ty));
        }
        if self.is_chosen {
            return;
        }
        for (why, tensors) in by_reason {
            let (name, ty) = tensors[0];
            let others = match tensors.len() - 1 {
                0 => String::new(),
                n => format!(", and {n} more"),
            };
            warning(format_args!(
                "{}: {ty} is not trainable{others}: {why}",
                printable(name)
            ));
        }
    }

    /// Adds the model and its loss. The label has a dtype.
    pub fn build(&self, m: &mut Model, label: DType) -> Result<Objective> {
        let outputs = m.pretrained(&self.net, &[])?;
        let output = outputs.get(&self.output).copied();
        let output = output.ok_or_else(|| Error::internal("an output was lost"))?;
        m.scope("loss", |m| self.loss_of(m, output, label))
    }

    /// Number of classes of the labels, where they are classes and it is known.
    pub fn n_classes(&self) -> Option<usize> {
        let (_, axis) = self.class_axis()?;
        self.output_type()?.shape[axis].as_usize()
    }

    /// Number of axes of the output, and the axis of classes, where labels are classes.
    pub fn class_axis(&self) -> Option<(usize, usize)> {
        if self.loss != Loss::CrossEntropy {
            return None;
        }
        let rank = self.output_type()?.rank();
        Some((rank, self.axis(rank).ok()?))
    }

    /// True when labels are from 0 to 1.
    pub fn takes_probabilities(&self) -> bool {
        self.loss == Loss::BinaryCrossEntropy
    }

    fn output_type(&self) -> Option<&Type> {
        let mut outputs = self.net.outputs();
        outputs
            .find(|(name, _)| *name == self.output)
            .map(|(_, ty)| ty)
    }

    fn loss_of(&self, m: &mut Model, output: ValueId, label: DType) -> Result<Objective> {
        self.check_end(m, output)?;
        let guess = match self.loss {
            Loss::CrossEntropy => return self.cross_entropy(m, output, label),
            Loss::BinaryCrossEntropy => loss::sigmoid_logits(m.builder(), output),
            Loss::Mse | Loss::Mae | Loss::Huber => output,
        };
        let y = self.like(m, guess);
        let b = m.builder();
        let loss = match self.loss {
            Loss::BinaryCrossEntropy => loss::binary_cross_entropy(b, guess, y)?,
            Loss::Mae => loss::mean_absolute_error(b, guess, y)?,
            Loss::Huber => loss::huber(b, guess, y, self.huber_delta)?,
            _ => loss::mean_squared_error(b, guess, y)?,
        };
        Ok(Objective::new(loss))
    }

    /// Errors when the model ends in the function of another loss: it would not compute what is learnt.
    fn check_end(&self, m: &mut Model, output: ValueId) -> Result<()> {
        let node = m.builder().graph().def_node(output);
        let (end, other) = match (self.loss, node.map(|node| &node.op)) {
            (Loss::CrossEntropy, Some(Op::Map(ScalarOp::Sigmoid))) => {
                ("a sigmoid", "binary-cross-entropy")
            }
            (Loss::BinaryCrossEntropy, Some(Op::Softmax { .. })) => ("a softmax", "cross-entropy"),
            _ => return Ok(()),
        };
        let output = &self.output;
        let e = Error::invalid(format!(
            "output {output:?} is {end}, which is not for this loss"
        ));
        Err(e.hint(format!("--loss {other}")))
    }

    fn cross_entropy(&self, m: &mut Model, output: ValueId, label: DType) -> Result<Objective> {
        let output = self.with_classes_last(m, output)?;
        let logits = loss::logits(m.builder(), output);
        let mut shape = m.builder().ty(logits).shape.0.clone();
        if shape.pop().is_none() {
            let message = "cross-entropy: the output is a scalar, expected an axis of classes";
            return Err(Error::invalid(message));
        }
        let y = m.input(&self.label, label, shape);
        let accuracy = loss::accuracy(m.builder(), logits, y)?;
        let loss = loss::CrossEntropy {
            label_smoothing: self.label_smoothing,
            ..Default::default()
        };
        let loss = loss.build(m.builder(), logits, y)?;
        Ok(Objective::new(loss).metric("accuracy", accuracy))
    }

    /// The output, or the operand of its softmax, with the axis of classes at the end.
    fn with_classes_last(&self, m: &mut Model, output: ValueId) -> Result<ValueId> {
        let b = m.builder();
        let rank = b.ty(output).rank();
        let axis = self.axis(rank)?;
        if axis + 1 == rank {
            return Ok(output);
        }
        let logits = loss::logits_along(b, output, axis);
        let mut perm: Vec<usize> = (0..rank).filter(|&i| i != axis).collect();
        perm.push(axis);
        b.transpose(logits, &perm)
    }

    /// The axis of classes of an output.
    fn axis(&self, rank: usize) -> Result<usize> {
        let wanted = self.class_axis;
        let axis = if wanted < 0 {
            wanted + rank as i64
        } else {
            wanted
        };
        let axis = usize::try_from(axis).ok().filter(|axis| *axis < rank);
        axis.ok_or_else(|| {
            Error::invalid(format!("--class-axis {wanted}: the output has {rank} axes"))
        })
    }

    /// The label of an output, of its type.
    fn like(&self, m: &mut Model, output: ValueId) -> ValueId {
        let ty = m.builder().ty(output).clone();
        m.input(&self.label, ty.dtype, ty.shape.0)
    }
}
