//! Training: models with trainable variables.
//!
//! [`Model`] is a graph under construction with named variables and layers; [`Trainer`] adds the gradients of a loss and an
//! [`Update`], and compiles the step. A plain loop drives it:
//!
//! ```
//! use gristmill::train::{Adam, Objective, Trainer, Training, loss};
//! use gristmill::{DType, Options, Tensor};
//! use gristmill::ir::Dim;
//!
//! let adam = Adam { learning_rate: 0.1.into(), ..Adam::default() };
//! let training = Training::from(adam);
//! let trainer = Trainer::new("line", &training, |m| {
//!     let x = m.input("x", DType::F32, [Dim::from("batch"), 1.into()]);
//!     let y = m.input("y", DType::F32, [Dim::from("batch"), 1.into()]);
//!     let guess = m.scope("line", |m| m.dense(x, 1))?;
//!     Ok(Objective::new(loss::mean_squared_error(m.builder(), guess, y)?))
//! })?;
//! let x = Tensor::from_slice(&[0f32, 1.0, 2.0], &[3, 1])?;
//! let y = Tensor::from_slice(&[1f32, 3.0, 5.0], &[3, 1])?;
//! for _ in 0..300 {
//!     trainer.step([("x", x.clone()), ("y", y.clone())])?;
//! }
//! let weights = trainer.resources().get("", "line/weights")?.unwrap();
//! assert!((weights.to_f64s()[0] - 2.0).abs() < 0.05);
//! # Ok::<(), gristmill::Error>(())
//! ```
//!
//! The state between steps (moments, averages, the number of steps) consists of variables too, so a file of the state
//! ([`Resources::save`](crate::Resources::save)) includes it: `optimizer/step`, `optimizer/NAME/SLOT` and `average/NAME`. [`Update::apply`] works
//! without a [`Model`], on any graph with variables and gradients ([`crate::autodiff`]).
//!
//! The formulas are PyTorch's; where Keras' differ, the documentation of the item says so.

mod accumulation;
mod activation;
mod asynchronous;
mod checkpoint;
mod collection;
mod convolution;
mod data;
mod dropout;
mod events;
mod fit;
mod fit_state;
mod idx;
mod init;
mod inspection;
pub mod loss;
mod lrn;
mod metrics;
mod model;
mod names;
mod norm;
mod optimizer;
mod philox;
mod pool;
mod prediction;
mod pretrained;
mod recurrent;
mod schedule;
mod strategy;
#[cfg(test)]
mod tests;
mod trainer;
mod transformer;
mod update;

pub use crate::onnx::variables::FixedTensor;
pub use activation::Activation;
pub use asynchronous::{Gradients, Pulled, Worker};
pub use checkpoint::{Checkpoints, Position, Resumed, latest_checkpoint};
pub use convolution::{Conv, Conv1d, Conv2d, Conv3d};
pub use data::{
    Batch, Batches, Dataset, Epoch, Example, FileDataset, ImageOp, Images, Loading, Map, Random,
    TensorDataset, Tokens, Vocabulary,
};
pub use events::{EventLog, Histogram, LoggedStep};
pub use fit::{
    Callback, CallbackState, EarlyStopping, End, EpochReport, Every, Fit, FitContext, FitReport,
    JsonLines, LearningRateScheduler, ModelCheckpoint, Monitor, Summaries, TensorBoard,
    WorkerReport,
};
pub use idx::read_idx;
pub use init::Init;
pub use lrn::Lrn;
pub use metrics::Metrics;
pub use model::{Model, Variable};
pub use norm::{BatchNorm, BatchStatistics};
pub use optimizer::{Adagrad, Adam, Optimizer, RmsProp, Sgd};
pub use pool::{Pool, Pool1d, Pool2d, Pool3d};
pub use prediction::{Comparison, Prediction};
pub use pretrained::{FineTuning, Pretrained, Weight};
pub use schedule::{Curve, Decay, Exponential, Piecewise, Schedule, WarmUp};
pub use strategy::{Strategy, Updates};
pub use trainer::{Objective, StepOutputs, Trainer, Training, Weights, step_graph};
pub use update::{Group, Parameter, Step, Update, WeightDecay};
