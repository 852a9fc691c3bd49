//! Matrix products as plain data, for a library of the device: a compiler's alternative to a kernel of its own.
//!
//! The arguments of a step that computes a [`Product`] are the buffers of the left-hand side, the right-hand side and the bias, if there is one,
//! which it reads; then those of the result and of the workspace, if that has any bytes, which it writes. The result overlaps none of the others.

use crate::dtype::DType;
use crate::tensor::ALIGN_BYTES;
use std::fmt;

/// Addresses of workspaces are multiples of this; buffers need not be, so theirs are [`Product::workspace_buffer_bytes`] long.
pub const WORKSPACE_ALIGN_BYTES: usize = 256;
/// The most workspace that it is worth giving a library: the default of cuBLAS on Hopper.
pub const MOST_WORKSPACE_BYTES: usize = 32 << 20;

/// `out[b] = act(lhs[b] x rhs[b] + bias)` for every `b` below `n_batch`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// Name in dumps and profiles; unique in a program.
    pub name: String,
    /// Rows of the left-hand side and of the result.
    pub m: usize,
    /// Columns of the right-hand side and of the result.
    pub n: usize,
    /// Extent of the sum.
    pub k: usize,
    /// Number of products in the batch.
    pub n_batch: usize,
    /// `[m, k]`.
    pub lhs: Matrix,
    /// `[k, n]`.
    pub rhs: Matrix,
    /// `[m, n]`, row-major.
    pub out: Matrix,
    /// Type in which elements are multiplied and accumulated.
    pub compute: Compute,
    /// Where in its buffer the vector begins, in elements of the result's dtype, that is added to every row of the result.
    pub bias: Option<usize>,
    /// True when negative elements become zero at the end.
    pub relu: bool,
    /// Memory that the library may use beside the operands.
    pub workspace_bytes: usize,
}

/// Where the elements of an operand are, in elements of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Element type, which the buffer has as well.
    pub dtype: DType,
    /// Order of the elements.
    pub order: Order,
    /// From one row, or column, to the next.
    pub pitch: usize,
    /// From the matrix of one product to that of the next; 0 when all share it.
    pub batch_stride: usize,
    /// The first element.
    pub offset: usize,
    /// Alignment of first elements in bytes; that of the result is the bias's too. It divides [`ALIGN_BYTES`], the offset
    /// and the size of the buffer, so that it holds for a slice of a larger tensor, which loops hand to their bodies.
    pub align_bytes: usize,
}

/// Order of the elements of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Elements of a row are contiguous.
    Row,
    /// Elements of a column are contiguous.
    Column,
}

/// Arithmetic of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// Sums in `f32` of products of `f32`, `f16` or `bf16`.
    F32,
    /// Sums in `f32` of products of `f32` that are rounded to 10 bits of fraction.
    Tf32,
    /// Sums in `f64` of products of `f64`.
    F64,
    /// Sums in `i32` of products of `i8`.
    I32,
}

impl Matrix {
    /// A dense row-major matrix of so many columns, which all products share.
    pub fn dense(dtype: DType, n_columns: usize) -> Matrix {
        Matrix {
            dtype,
            order: Order::Row,
            pitch: n_columns,
            batch_stride: 0,
            offset: 0,
            align_bytes: ALIGN_BYTES,
        }
    }

    /// One past the last element of `n_batch` matrices of `rows` by `columns`; `None` when that is no number.
    fn end(&self, [rows, columns]: [usize; 2], n_batch: usize) -> Option<usize> {
        let (lines, length) = if self.order == Order::Row {
            (rows, columns)
        } else {
            (columns, rows)
        };
        let last_line = (lines - 1).checked_mul(self.pitch)?.checked_add(length)?;
        (n_batch - 1)
            .checked_mul(self.batch_stride)?
            .checked_add(last_line)?
            .checked_add(self.offset)
    }

    /// First violation of the rules of a matrix in a buffer of this dtype and size.
    fn problem(
        &self,
        shape: [usize; 2],
        n_batch: usize,
        (dtype, size_bytes): (DType, usize),
    ) -> Option<String> {
        let length = if self.order == Order::Row {
            shape[1]
        } else {
            shape[0]
        };
        if self.dtype != dtype {
            return Some(format!("is {}, its buffer {dtype}", self.dtype));
        }
        if self.pitch < length {
            return Some(format!(
                "has a pitch of {} for lines of {length}",
                self.pitch
            ));
        }
        let end = self
            .end(shape, n_batch)
            .and_then(|end| end.checked_mul(dtype.size_bytes()));
        match end {
            Some(end) if end <= size_bytes => self.bad_alignment(self.offset, size_bytes),
            end => Some(format!("ends at byte {end:?} of a buffer of {size_bytes}")),
        }
    }

    /// First violation of [`Matrix::align_bytes`] by an offset into a buffer.
    fn bad_alignment(&self, offset: usize, size_bytes: usize) -> Option<String> {
        let multiples = [ALIGN_BYTES, offset * self.dtype.size_bytes(), size_bytes];
        let good =
            self.align_bytes > 0 && multiples.iter().all(|m| m.is_multiple_of(self.align_bytes));
        (!good).then(|| {
            format!(
                "at multiples of {} bytes, at byte {} of {size_bytes}",
                self.align_bytes, multiples[1]
            )
        })
    }
}

impl Product {
    /// Bytes of the buffer in which the workspace, wherever the buffer begins, can be aligned; 0 without one.
    pub fn workspace_buffer_bytes(&self) -> usize {
        let slack = WORKSPACE_ALIGN_BYTES - ALIGN_BYTES;
        if self.workspace_bytes == 0 {
            0
        } else {
            self.workspace_bytes.saturating_add(slack)
        }
    }

    /// Number of buffers that it reads and writes.
    pub fn n_args(&self) -> usize {
        3 + usize::from(self.bias.is_some()) + usize::from(self.workspace_bytes > 0)
    }

    /// First violation of the product's rules by arguments of these dtypes and sizes in bytes.
    pub fn problem(&self, args: &[(DType, usize)]) -> Option<String> {
        if args.len() != self.n_args() {
            return Some(format!(
                "{} arguments, expected {}",
                args.len(),
                self.n_args()
            ));
        }
        let Product {
            m,
            n,
            k,
            n_batch,
            lhs,
            rhs,
            out,
            ..
        } = self;
        if [m, n, k, n_batch].contains(&&0) {
            return Some(format!("{n_batch} products of {m} x {k} x {n}"));
        }
        let first_out = 2 + usize::from(self.bias.is_some());
        let matrices = [
            ("lhs", lhs, [*m, *k], 0),
            ("rhs", rhs, [*k, *n], 1),
            ("out", out, [*m, *n], first_out),
        ];
        let found = matrices.iter().find_map(|(name, matrix, shape, arg)| {
            matrix
                .problem(*shape, *n_batch, args[*arg])
                .map(|problem| format!("{name} {problem}"))
        });
        found
            .or_else(|| self.bad_result())
            .or_else(|| self.bad_types())
            .or_else(|| {
                let bias = self.bias.and_then(|offset| self.bad_bias(offset, args[2]));
                let workspace = args
                    .get(first_out + 1)
                    .filter(|w| w.1 < self.workspace_buffer_bytes());
                bias.or(workspace.map(|w| {
                    format!(
                        "a workspace of {} bytes in a buffer of {}",
                        self.workspace_bytes, w.1
                    )
                }))
            })
    }

    /// Every element of the result is one element of its buffer.
    fn bad_result(&self) -> Option<String> {
        let out = &self.out;
        let is_apart = self.n_batch == 1 || out.batch_stride >= (self.m - 1) * out.pitch + self.n;
        let good = out.order == Order::Row && is_apart;
        (!good).then(|| format!("out {out:?} of {} x {} x {}", self.n_batch, self.m, self.n))
    }

    fn bad_types(&self) -> Option<String> {
        let [lhs, rhs, out] = [self.lhs.dtype, self.rhs.dtype, self.out.dtype];
        let good = lhs == rhs
            && match (self.compute, lhs) {
                (Compute::F32, DType::F16 | DType::BF16) => out == lhs || out == DType::F32,
                (Compute::F32 | Compute::Tf32, DType::F32) => out == DType::F32,
                (Compute::F64, DType::F64) => out == DType::F64,
                (Compute::I32, DType::I8) => out == DType::I32 && self.bias.is_none() && !self.relu,
                _ => false,
            };
        (!good).then(|| format!("{lhs} x {rhs} -> {out} computed in {:?}", self.compute))
    }

    fn bad_bias(&self, offset: usize, (dtype, size_bytes): (DType, usize)) -> Option<String> {
        let out = self.out.dtype;
        let end = offset
            .checked_add(self.n)
            .and_then(|end| end.checked_mul(out.size_bytes()));
        if dtype != out || end.is_none_or(|end| end > size_bytes) {
            return Some(format!(
                "a bias of {} {out} from {offset} on in {size_bytes} bytes of {dtype}",
                self.n
            ));
        }
        self.out
            .bad_alignment(offset, size_bytes)
            .map(|problem| format!("a bias {problem}"))
    }
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Product {
            m,
            n,
            k,
            n_batch,
            lhs,
            rhs,
            out,
            ..
        } = self;
        let turned = |matrix: &Matrix| {
            if matrix.order == Order::Column {
                "'"
            } else {
                ""
            }
        };
        write!(
            f,
            "{}[{m}, {k}]{} x {}[{k}, {n}]{} -> {}",
            lhs.dtype,
            turned(lhs),
            rhs.dtype,
            turned(rhs),
            out.dtype
        )?;
        write!(f, "[{m}, {n}]")?;
        if *n_batch > 1 {
            write!(f, ", {n_batch} times")?;
        }
        let compute = match self.compute {
            Compute::Tf32 => ", tf32",
            Compute::F32 | Compute::F64 | Compute::I32 => "",
        };
        let bias = if self.bias.is_some() { ", bias" } else { "" };
        let relu = if self.relu { ", relu" } else { "" };
        write!(
            f,
            "{compute}{bias}{relu}, {} bytes of workspace",
            self.workspace_bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 4 products of 3 x 5 by 5 x 2, the right-hand side shared and stored column by column.
    fn product() -> Product {
        let lhs = Matrix {
            batch_stride: 15,
            align_bytes: 16,
            ..Matrix::dense(DType::F32, 5)
        };
        let rhs = Matrix {
            order: Order::Column,
            offset: 8,
            align_bytes: 8,
            ..lhs
        };
        Product {
            name: "p".into(),
            m: 3,
            n: 2,
            k: 5,
            n_batch: 4,
            lhs,
            rhs: Matrix {
                batch_stride: 0,
                ..rhs
            },
            out: Matrix {
                batch_stride: 6,
                align_bytes: 8,
                ..Matrix::dense(DType::F32, 2)
            },
            compute: Compute::F32,
            bias: Some(4),
            relu: true,
            workspace_bytes: 100,
        }
    }

    #[test]
    fn products_that_do_not_fit_their_buffers() {
        let [lhs, rhs, bias, out] =
            [60 * 4, 18 * 4, 6 * 4, 24 * 4].map(|bytes| (DType::F32, bytes));
        let args = [lhs, rhs, bias, out, (DType::U8, 292)];
        assert_eq!(product().problem(&args), None);
        let check = |change: fn(&mut Product), expected: &str| {
            let mut p = product();
            change(&mut p);
            let problem = p.problem(&args).unwrap_or_default();
            assert!(problem.contains(expected), "{problem}, expected {expected}");
        };
        check(|p| p.m = 0, "4 products of 0 x 5 x 2");
        check(|p| p.lhs.batch_stride = 16, "lhs ends at byte Some(252)");
        check(|p| p.lhs.batch_stride = usize::MAX, "lhs ends at byte None");
        check(|p| p.lhs.align_bytes = 32, "lhs at multiples of 32 bytes");
        check(|p| p.rhs.offset = 9, "rhs ends");
        check(
            |p| p.rhs.offset = 7,
            "rhs at multiples of 8 bytes, at byte 28",
        );
        check(|p| p.rhs.pitch = 4, "a pitch of 4 for lines of 5");
        check(|p| p.out.batch_stride = 5, "out Matrix");
        check(|p| p.lhs.dtype = DType::F16, "lhs is f16, its buffer f32");
        check(|p| p.compute = Compute::F64, "computed in F64");
        check(|p| p.bias = Some(5), "a bias of 2 f32 from 5 on");
        check(
            |p| p.bias = Some(3),
            "a bias at multiples of 8 bytes, at byte 12",
        );
        check(|p| p.bias = None, "5 arguments, expected 4");
        check(|p| p.workspace_bytes = 101, "a workspace of 101 bytes");
        let text =
            "f32[3, 5] x f32[5, 2]' -> f32[3, 2], 4 times, bias, relu, 100 bytes of workspace";
        assert_eq!(product().to_string(), text);
    }
}
