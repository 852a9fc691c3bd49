//! Products as a library computes them: column-major matrices in device memory.

use crate::codes::Code;
use crate::execute::code_of;
use crate::world::{ProductError, World};
use gristmill_emulator::{Device, Fault};
use half::{bf16, f16};
use std::ffi::c_int;

/// `D[b] = act(op(A[b]) x op(B[b]) + bias)`, all column-major.
#[derive(Clone)]
pub struct ProductCall {
    /// Rows and columns of D, and the extent of the sums.
    pub sizes: [u64; 3],
    pub n_batch: u64,
    pub a: Matrix,
    pub b: Matrix,
    pub d: Matrix,
    pub transposes: [bool; 2],
    /// Elements are cut to 10 bits of fraction.
    pub rounds: bool,
    pub epilogue: Epilogue,
    /// Address and bytes; the contents are overwritten.
    pub workspace: (u64, u64),
}

/// The first of the matrices of a batch. `element` is a `cudaDataType_t`; strides are in elements.
#[derive(Clone)]
pub struct Matrix {
    pub address: u64,
    pub element: c_int,
    pub leading: u64,
    pub batch_stride: u64,
}

/// Operations after the sums.
#[derive(Clone)]
pub struct Epilogue {
    /// An element of D's type for every row of D.
    pub bias: Option<u64>,
    pub relu: bool,
}

/// Byte that the workspace is filled with.
const USED: u8 = 0xa5;

impl Matrix {
    fn element_bytes(&self) -> u64 {
        match self.element {
            3 => 1,
            2 | 14 => 2,
            1 => 8,
            _ => 4,
        }
    }

    fn value(&self, bytes: &[u8]) -> f64 {
        match (self.element, bytes) {
            (0, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
            (10, &[a, b, c, d]) => f64::from(i32::from_le_bytes([a, b, c, d])),
            (1, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
            (2, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
            (14, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
            (_, &[a, ..]) => f64::from(a as i8),
            (_, []) => f64::NAN,
        }
    }

    fn bytes(&self, value: f64) -> Vec<u8> {
        match self.element {
            1 => value.to_le_bytes().to_vec(),
            2 => f16::from_f32(value as f32).to_le_bytes().to_vec(),
            10 => (value as i64 as i32).to_le_bytes().to_vec(),
            14 => bf16::from_f32(value as f32).to_le_bytes().to_vec(),
            _ => (value as f32).to_le_bytes().to_vec(),
        }
    }

    fn column_at(&self, batch: u64, column: u64) -> u64 {
        self.address + (batch * self.batch_stride + column * self.leading) * self.element_bytes()
    }

    /// `rows` by `columns` elements, column after column.
    fn read(
        &self,
        device: &Device,
        batch: u64,
        [rows, columns]: [u64; 2],
    ) -> Result<Vec<f64>, Fault> {
        let size = self.element_bytes();
        let mut values = Vec::with_capacity((rows * columns) as usize);
        for column in 0..columns {
            let mut bytes = vec![0; (rows * size) as usize];
            device.copy_out(&mut bytes, self.column_at(batch, column))?;
            values.extend(bytes.chunks_exact(size as usize).map(|b| self.value(b)));
        }
        Ok(values)
    }
}

/// Elements of an operand, column by column as they are in memory.
struct OperandValues {
    values: Vec<f64>,
    /// Rows in memory.
    n_rows: u64,
    is_transposed: bool,
}

impl OperandValues {
    fn at(&self, row: u64, column: u64) -> f64 {
        let index = if self.is_transposed {
            row * self.n_rows + column
        } else {
            column * self.n_rows + row
        };
        self.values[index as usize]
    }
}

impl ProductCall {
    fn run(&self, device: &Device, wrong: Option<ProductError>) -> Result<(), Fault> {
        let [m, n, k] = self.sizes;
        if self.workspace.1 > 0 {
            device.fill(self.workspace.0, USED, self.workspace.1 as usize)?;
        }
        let bias = match self.epilogue.bias {
            Some(address) => Matrix {
                address,
                ..self.d.clone()
            }
            .read(device, 0, [m, 1])?,
            None => vec![0.0; m as usize],
        };
        for batch in 0..self.n_batch {
            let (a, b) = (
                self.operand(device, batch, 0)?,
                self.operand(device, batch, 1)?,
            );
            for column in 0..n {
                let mut bytes = Vec::new();
                for row in 0..m {
                    let terms = (0..k).map(|i| a.at(row, i) * b.at(i, column));
                    let value = self.sum(terms) + bias[row as usize];
                    bytes.extend(self.d.bytes(self.finish(value, wrong)));
                }
                device.copy_in(self.d.column_at(batch, column), &bytes)?;
            }
        }
        Ok(())
    }

    /// A (0) or B (1) of one product of the batch, in the precision of the arithmetic.
    fn operand(&self, device: &Device, batch: u64, index: usize) -> Result<OperandValues, Fault> {
        let [m, n, k] = self.sizes;
        let (matrix, [rows, columns]) = [(&self.a, [m, k]), (&self.b, [k, n])][index];
        let is_transposed = self.transposes[index];
        let shape = if is_transposed {
            [columns, rows]
        } else {
            [rows, columns]
        };
        let mut values = matrix.read(device, batch, shape)?;
        if self.rounds {
            for value in &mut values {
                *value = f64::from(f32::from_bits((*value as f32).to_bits() & !0x1fff));
            }
        }
        Ok(OperandValues {
            values,
            n_rows: shape[0],
            is_transposed,
        })
    }

    /// The epilogue after the bias.
    fn finish(&self, value: f64, wrong: Option<ProductError>) -> f64 {
        let value = value + f64::from(u8::from(wrong == Some(ProductError::Sum)));
        let is_negative = value < 0.0 || value.is_nan() && wrong == Some(ProductError::Relu);
        if self.epilogue.relu && is_negative {
            0.0
        } else {
            value
        }
    }

    /// In the type of the arithmetic; integers are exact in `f64` as far as an `i32` goes.
    fn sum(&self, terms: impl Iterator<Item = f64>) -> f64 {
        match self.a.element {
            1 | 3 => terms.sum(),
            _ => f64::from(terms.fold(0f32, |sum, term| sum + term as f32)),
        }
    }
}

impl World {
    /// Computes a product.
    pub fn product(&mut self, gpu: usize, call: &ProductCall) -> Result<(), (Code, String)> {
        let n_threads = self
            .settings
            .product_threads
            .unwrap_or(call.n_batch * call.sizes[0] * call.sizes[1]);
        self.count_launch(gpu)?;
        self.gpus[gpu].n_threads += n_threads;
        let done = call.run(&self.gpus[gpu].device, self.settings.wrong_product);
        done.map_err(|fault| (code_of(&fault), format!("a product of cuBLASLt: {fault}")))
    }
}
