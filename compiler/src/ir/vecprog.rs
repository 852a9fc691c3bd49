//! `VecProg`: the scalar program of a fused cluster, in SSA form over primitive element-wise ops.
//!
//! It defines the computation of one element and says nothing about loops or addresses. Interpreter, Cranelift, and later the
//! wide-vector emitter and the CUDA printer, all consume it. Registers are numbered in order of definition.

use crate::ir::scalar::ScalarOp;
use gristmill_runtime::{DType, Tensor};
use std::fmt;

/// A register of a [`VecProg`]: the index of the instruction that defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u32);

/// Operation of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum VecOp {
    /// The element of operand number `n` of the cluster.
    Input(u32),
    /// A constant, as the little-endian bits of its dtype, zero extended.
    Const(u64),
    /// A primitive element-wise op.
    Op(ScalarOp),
}

/// One instruction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Inst {
    /// Operation.
    pub op: VecOp,
    /// Operands, all defined before.
    pub args: Vec<Reg>,
    /// Dtype of the result.
    pub dtype: DType,
}

/// A scalar program: instructions in order, and the registers that are its results.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct VecProg {
    /// Instructions; `insts[i]` defines `Reg(i)`.
    pub insts: Vec<Inst>,
    /// Result registers.
    pub outputs: Vec<Reg>,
}

impl VecProg {
    /// An empty program.
    pub fn new() -> VecProg {
        VecProg::default()
    }

    /// Dtype of a register.
    pub fn dtype(&self, r: Reg) -> DType {
        self.insts[r.0 as usize].dtype
    }

    /// Appends an instruction, or finds the same one again.
    fn push(&mut self, op: VecOp, args: &[Reg], dtype: DType) -> Reg {
        let inst = Inst {
            op,
            args: args.to_vec(),
            dtype,
        };
        let found = self.insts.iter().position(|i| *i == inst);
        let i = found.unwrap_or_else(|| {
            self.insts.push(inst);
            self.insts.len() - 1
        });
        Reg(i as u32)
    }

    /// The element of cluster operand `n`.
    pub fn input(&mut self, n: u32, dtype: DType) -> Reg {
        self.push(VecOp::Input(n), &[], dtype)
    }

    /// A constant given by the bits of its dtype, zero extended to 64.
    pub fn constant(&mut self, dtype: DType, bits: u64) -> Reg {
        self.push(VecOp::Const(bits), &[], dtype)
    }

    /// A constant given as a real number and converted as `Cast` would.
    pub fn real(&mut self, dtype: DType, value: f64) -> Reg {
        self.constant(dtype, real_bits(dtype, value))
    }

    /// A primitive op. Panics when operand dtypes do not fit, which the verifier excludes.
    pub fn op(&mut self, op: ScalarOp, args: &[Reg]) -> Reg {
        debug_assert!(op.spec().primitive, "{op} must be expanded");
        let dtypes: Vec<DType> = args.iter().map(|&a| self.dtype(a)).collect();
        let dtype = op
            .result_dtype(&dtypes)
            .expect("operand dtypes were checked by the verifier");
        self.push(VecOp::Op(op), args, dtype)
    }

    /// The program of one element-wise op over operands of the given dtypes.
    pub fn of_op(op: ScalarOp, operands: &[DType]) -> VecProg {
        let mut p = VecProg::new();
        let args: Vec<Reg> = operands
            .iter()
            .enumerate()
            .map(|(i, &d)| p.input(i as u32, d))
            .collect();
        let r = op.expand(&mut p, &args);
        p.outputs.push(r);
        p
    }
}

/// Bits of a real number in a dtype, zero extended to 64.
pub fn real_bits(dtype: DType, v: f64) -> u64 {
    let t = Tensor::from_f64s(dtype, &[], &[v]).expect("one element fits rank 0");
    let mut bytes = [0; 8];
    bytes[..dtype.size_bytes()].copy_from_slice(t.as_bytes());
    u64::from_le_bytes(bytes)
}

impl fmt::Display for VecProg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, inst) in self.insts.iter().enumerate() {
            write!(f, "r{i}: {} = ", inst.dtype)?;
            match &inst.op {
                VecOp::Input(n) => write!(f, "input {n}")?,
                VecOp::Const(bits) => write!(f, "const 0x{bits:x}")?,
                VecOp::Op(op) => {
                    write!(f, "{op}")?;
                    for a in &inst.args {
                        write!(f, " r{}", a.0)?;
                    }
                }
            }
            writeln!(f)?;
        }
        let outs: Vec<String> = self.outputs.iter().map(|r| format!("r{}", r.0)).collect();
        writeln!(f, "return {}", outs.join(" "))
    }
}
