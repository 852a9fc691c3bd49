//! BERT-base over two tasks.

use crate::cluster::{Tasks, device, one_process};
use crate::median;
use gristmill::ir::{Graph, GraphBuilder, Op, Real, ScalarOp, ValueId};
use gristmill::{Compiled, DType, Options, Result, Session, Tensor};
use std::time::Instant;

const WIDTH: usize = 768;
const HEADS: usize = 12;
const BLOCKS: usize = 12;
const TOKENS: usize = 128;

/// A net with weights of its own.
struct Net {
    b: GraphBuilder,
    random: u64,
}

impl Net {
    /// A constant of small numbers, another one each time.
    fn weight(&mut self, shape: &[usize]) -> Result<ValueId> {
        let mut next = || {
            self.random = self
                .random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (self.random >> 40) as f32 / (1 << 24) as f32 * 0.04 - 0.02
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        let value = Tensor::from_slice(&values, shape)?;
        Ok(self.b.constant(value))
    }

    fn dense(&mut self, x: ValueId, from: usize, to: usize) -> Result<ValueId> {
        let (weight, bias) = (self.weight(&[from, to])?, self.weight(&[to])?);
        let y = self.b.matmul(x, weight)?;
        self.b.add_(y, bias)
    }

    fn heads(&mut self, x: ValueId) -> Result<ValueId> {
        let split = self.b.reshape(x, [1, TOKENS, HEADS, WIDTH / HEADS])?;
        self.b.transpose(split, &[0, 2, 1, 3])
    }

    fn norm(&mut self, x: ValueId) -> Result<ValueId> {
        let (scale, shift) = (self.weight(&[WIDTH])?, self.weight(&[WIDTH])?);
        let op = Op::LayerNorm {
            axis: 2,
            epsilon: Real(1e-12),
        };
        self.b.add1(op, &[x, scale, shift])
    }

    /// Devlin et al., "BERT: pre-training of deep bidirectional transformers" (2019), section 3.
    fn block(&mut self, x: ValueId) -> Result<ValueId> {
        let mut parts = Vec::new();
        for _ in 0..3 {
            let part = self.dense(x, WIDTH, WIDTH)?;
            parts.push(self.heads(part)?);
        }
        let op = Op::Attention {
            scale: Real(1.0 / ((WIDTH / HEADS) as f64).sqrt()),
            causal: false,
        };
        let seen = self.b.add1(op, &parts)?;
        let seen = self.b.transpose(seen, &[0, 2, 1, 3])?;
        let seen = self.b.reshape(seen, [1, TOKENS, WIDTH])?;
        let seen = self.dense(seen, WIDTH, WIDTH)?;
        let x = self.b.add_(x, seen)?;
        let x = self.norm(x)?;
        let wide = self.dense(x, WIDTH, 4 * WIDTH)?;
        let wide = self.b.map(ScalarOp::Tanh, &[wide])?;
        let y = self.dense(wide, 4 * WIDTH, WIDTH)?;
        let x = self.b.add_(x, y)?;
        self.norm(x)
    }
}

/// The blocks of BERT-base (85 million weights): the first half on one device, the second on another.
fn bert(devices: [&str; 2]) -> Result<Graph> {
    let mut net = Net {
        b: GraphBuilder::new("bert"),
        random: 1,
    };
    let mut x = net.b.input("x", DType::F32, [1, TOKENS, WIDTH]);
    for i in 0..BLOCKS {
        let scope = net.b.enter_device(devices[i / (BLOCKS / 2)])?;
        x = net.block(x)?;
        net.b.exit_scope(scope)?;
    }
    net.b.output("y", x);
    net.b.finish()
}

/// A compiled program, the seconds until its first outputs were there, and these.
fn first_call(session: &Session, graph: &Graph) -> Result<(Compiled, f64, Tensor)> {
    let input = Tensor::from_slice(&vec![0.5f32; TOKENS * WIDTH], &[1, TOKENS, WIDTH])?;
    let started = Instant::now();
    let program = session.compile(graph, &Options::default())?;
    let y = program.run_ordered(&[input])?["y"].clone();
    Ok((program, started.elapsed().as_secs_f64(), y))
}

/// Prints the seconds of a first call on two devices of this process.
pub fn alone() -> Result<()> {
    let graph = bert(["/cpu:0", "/cpu:1"])?;
    println!("{}", first_call(&one_process(2)?, &graph)?.1);
    Ok(())
}

/// The same in a process of its own, whose memory is as new as a task's.
fn new_process() -> Result<f64> {
    let program = std::env::current_exe().map(std::process::Command::new);
    let ran =
        crate::here(program.and_then(|mut program| program.args(["bert", "alone"]).output()))?;
    let said = String::from_utf8_lossy(&ran.stdout);
    Ok(said.trim().parse().expect("it prints seconds"))
}

/// Prints the times of first calls.
pub fn measure(n_rounds: usize) -> Result<()> {
    let names = [device(0), device(1)];
    let here = bert(["/cpu:0", "/cpu:1"])?;
    let expected = first_call(&one_process(2)?, &here)?.2;
    let there = bert([&names[0], &names[1]])?;
    let mut seconds = [vec![], vec![], vec![]];
    for _ in 0..n_rounds {
        let own = new_process()?;
        let tasks = Tasks::start(2, None)?;
        let (first, second) = (tasks.session()?, tasks.session()?);
        let (_kept, new, y) = first_call(&first, &there)?;
        assert_eq!(y, expected, "two tasks compute as one process does");
        let (_, known, y) = first_call(&second, &there)?;
        assert_eq!(y, expected);
        for (all, one) in seconds.iter_mut().zip([own, new, known]) {
            all.push(one);
        }
    }
    let [own, new, known] = seconds.map(|all| median(&all));
    println!("one process     {own:7.3} s");
    println!(
        "two tasks       {new:7.3} s  {:.2} of one process",
        new / own
    );
    println!(
        "second session  {known:7.3} s  {:.2} of the first",
        known / new
    );
    Ok(())
}
