//! Epilogues of products, computed from the sums and stored: an element at a time, or several
//! neighbours.

use super::super::emit::{Emitter, Value};
use super::super::text::{element_type, memory_type};
use super::{Contract, Place, result_index, within};
use crate::codegen::access::{Expression, expression};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Layout, Op, ValueId};
use gristmill_runtime::DType;

/// Bytes of the widest access.
const WIDEST: usize = 16;

/// The element of the result in a batch, row and column, from its sum: an expression, and the dtype that it has.
pub(super) fn element(
    c: &Contract,
    p: &mut Puller<Value>,
    e: &mut Emitter,
    [batch, row, column]: [Ix<Value>; 3],
    (sum, acc): (&str, DType),
    out: Value,
) -> Result<()> {
    p.scoped(|p| {
        let node = p.body.graph.node(c.node).clone();
        let product = node.outputs[0];
        let at = result_index(p.body, e, &node, batch, row, column);
        let sum = e.named(Kind::Element(acc), sum);
        let sum = e.convert(sum, acc, p.body.dtype(product))?;
        p.remember(product, &at, sum);
        let value = p.value(e, c.result, &at)?;
        let linear = e.linearise(&at, p.body.shape(c.result));
        e.store(p.body.dtype(c.result), value, out, linear);
        Ok(())
    })
}

/// Writes the epilogue of a product whose sums, of dtype `acc`, leave through shared memory: `sums`
/// holds them, slab by slab, each 16 rows of `columns` columns of a warp.
pub(super) fn staged(
    c: &Contract,
    p: &mut Puller<Value>,
    e: &mut Emitter,
    Place {
        part,
        batch,
        row: m0,
        column: n0,
    }: Place,
    Slabs { acc, columns, tile }: Slabs,
    out: Value,
) -> Result<()> {
    let stores = Stores::find(p.body, c, &|v| p.stored.contains_key(&v), WIDEST);
    let width = stores.width();
    let per_row = columns / width;
    let (slab_row, slab_column) = match columns_are_inner(p.body, c) {
        true => (format!("v / {per_row}"), format!("v % {per_row} * {width}")),
        false => ("v % 16".to_owned(), "v / 16".to_owned()),
    };
    e.line("const auto slab = product::slab(shared);");
    e.line("#pragma unroll");
    e.open("for (int i = 0; i < product::slabs; ++i)");
    e.line("sums.put(slab, i);");
    e.open(&format!(
        "for (int v = threadIdx.x % 32; v < {}; v += 32)",
        16 * per_row
    ));
    e.line(&format!(
        "const int slab_row = {slab_row}, slab_column = {slab_column};"
    ));
    let row = e.named(Kind::Index, "ix(product::slab_row(i) + slab_row)");
    let column = e.named(Kind::Index, "ix(product::slab_column(i) + slab_column)");
    let (row, column) = (e.add(m0, Ix::V(row)), e.add(n0, Ix::V(column)));
    let inside = within(e, [(row, c.sizes.m, tile[0]), (column, c.sizes.n, tile[1])])?;
    if let Some(inside) = inside {
        let condition = format!("if ({})", e.text(inside));
        e.open(&condition);
    }
    let sum = "slab[slab_row * product::slab_pitch + slab_column]";
    let place = Place {
        part,
        batch,
        row,
        column,
    };
    if width > 1 {
        e.line(&format!("const auto sum = gm_read<{width}>(&{sum});"));
    }
    stores.emit(
        c,
        p,
        e,
        place,
        (if width > 1 { "sum.v[k]" } else { sum }, acc),
        out,
    )?;
    (0..2 + usize::from(inside.is_some())).for_each(|_| e.close());
    Ok(())
}

/// Layout of sums in shared memory: see [`staged`]. `tile` has the rows and columns of a block's
/// tile.
pub(super) struct Slabs {
    pub(super) acc: DType,
    pub(super) columns: usize,
    pub(super) tile: [usize; 2],
}

/// Granularity of stores of results or partial sums.
pub(super) enum Stores {
    Elements,
    Vectors(Vectors),
    /// Partial sums, so many columns at a time.
    Partial(usize),
}

impl Stores {
    /// In runs of up to `most` columns; `in_memory` says which values are loaded.
    pub(super) fn find(
        body: &Body,
        c: &Contract,
        in_memory: &dyn Fn(ValueId) -> bool,
        most: usize,
    ) -> Stores {
        if c.n_parts() > 1 {
            let width = WIDEST / c.acc().size_bytes();
            return Stores::Partial(if c.sizes.n.is_multiple_of(width) {
                width
            } else {
                1
            });
        }
        Vectors::find(body, c, in_memory, most).map_or(Stores::Elements, Stores::Vectors)
    }

    /// Columns at a time.
    pub(super) fn width(&self) -> usize {
        match self {
            Stores::Elements => 1,
            Stores::Vectors(vectors) => vectors.width,
            Stores::Partial(width) => *width,
        }
    }

    /// Writes the code of the columns that begin at a place. `sum` is an expression, of `k` where there are several columns, and its dtype.
    pub(super) fn emit(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        Place {
            part,
            batch,
            row,
            column,
        }: Place,
        sum: (&str, DType),
        out: Value,
    ) -> Result<()> {
        match self {
            Stores::Elements => element(c, p, e, [batch, row, column], sum, out),
            Stores::Vectors(vectors) => vectors.emit(c, p, e, [batch, row, column], sum, out),
            Stores::Partial(width) => {
                let at = e.linearise(&[part, batch, row, column], &c.partial_shape());
                let at = e.val(at);
                let to = format!("{} + {}", e.text(out), e.text(at));
                if *width == 1 {
                    e.line(&format!("*({to}) = {};", sum.0));
                    return Ok(());
                }
                e.line(&format!("gm_vector<{}, {width}> y;", element_type(sum.1)));
                e.line("#pragma unroll");
                e.line(&format!(
                    "for (int k = 0; k < {width}; ++k) y.v[k] = {};",
                    sum.0
                ));
                e.line(&format!("gm_store<{width}>({to}, y);"));
                Ok(())
            }
        }
    }
}

/// True if neighbouring columns of the product are neighbours in the result.
fn columns_are_inner(body: &Body, c: &Contract) -> bool {
    !matches!(
        body.graph.node(c.node).op,
        Op::Conv {
            layout: Layout::ChannelsFirst,
            ..
        }
    )
}

/// The epilogue of a product in runs of columns whose operands lie side by side, or are constant,
/// along them.
pub(super) struct Vectors {
    expression: Expression,
    product: ValueId,
    /// Columns at a time.
    width: usize,
}

impl Vectors {
    /// For a product all of whose columns fall into runs; `in_memory` says which values are loaded.
    fn find(
        body: &Body,
        c: &Contract,
        in_memory: &dyn Fn(ValueId) -> bool,
        most: usize,
    ) -> Option<Vectors> {
        let product = body.graph.node(c.node).outputs[0];
        let expression = expression(
            body,
            &[c.result],
            &|v| v == product || in_memory(v),
            &|_, _| false,
        )?;
        let moving = |stride: i64| stride != 0;
        let loaded: Vec<_> = expression
            .leaves
            .iter()
            .filter(|l| l.value != product)
            .collect();
        let last = body.shape(c.result).len() - 1;
        let sizes = loaded
            .iter()
            .filter(|l| moving(l.strides[last]))
            .map(|l| body.dtype(l.value).size_bytes());
        let width = most.min(WIDEST / sizes.chain([body.dtype(c.result).size_bytes()]).max()?);
        let whole = |n: i64| n % width as i64 == 0;
        let fits = loaded.iter().all(|l| {
            let outer = || l.strides[..last].iter().all(|s| whole(*s));
            // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
            let aligned = || whole(l.offset) && outer() && whole(body.n_elements(l.value) as i64);
            !moving(l.strides[last]) || l.strides[last] == 1 && aligned()
        });
        let good =
            fits && columns_are_inner(body, c) && width > 1 && c.sizes.n.is_multiple_of(width);
        good.then_some(Vectors {
            expression,
            product,
            width,
        })
    }

    /// Writes the code of the run that begins at a batch, row and column; `sum` is that of column `k`, an expression, and the dtype that it has.
    fn emit(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        [batch, row, column]: [Ix<Value>; 3],
        (sum, acc): (&str, DType),
        out: Value,
    ) -> Result<()> {
        let node = p.body.graph.node(c.node).clone();
        let at = result_index(p.body, e, &node, batch, row, column);
        let names: Vec<Result<Value, String>> = (self.expression.leaves.iter().enumerate())
            .map(|(t, _)| self.load(p, e, t, &at, sum))
            .collect();
        let (to, width) = (p.body.dtype(c.result), self.width);
        e.line(&format!("gm_vector<{}, {width}> y;", memory_type(to)));
        e.line("#pragma unroll");
        e.open(&format!("for (int k = 0; k < {width}; ++k)"));
        let mut inputs = Vec::new();
        for (name, leaf) in names.into_iter().zip(&self.expression.leaves) {
            let dtype = p.body.dtype(leaf.value);
            inputs.push(match name {
                Ok(value) => value,
                Err(element) if leaf.value == self.product => {
                    let sum = e.named(Kind::Element(acc), element);
                    e.convert(sum, acc, dtype)?
                }
                Err(element) => e.define(Kind::Element(dtype), &element),
            });
        }
        let y = e.program(&self.expression.program, &inputs)?[0];
        e.line(&format!("y.v[k] = {};", e.text(y)));
        e.close();
        let linear = e.linearise(&at, p.body.shape(c.result));
        let linear = e.val(linear);
        e.line(&format!(
            "gm_store<{width}>({} + {}, y);",
            e.text(out),
            e.text(linear)
        ));
        Ok(())
    }

    /// Loads an operand: a value that is the same for all columns, or in words element `k` of the run.
    fn load(
        &self,
        p: &Puller<Value>,
        e: &mut Emitter,
        t: usize,
        at: &[Ix<Value>],
        sum: &str,
    ) -> Result<Value, String> {
        let leaf = &self.expression.leaves[t];
        if leaf.value == self.product {
            return Err(sum.to_owned());
        }
        let steps: Vec<Ix<Value>> = at
            .iter()
            .zip(&leaf.strides)
            .map(|(&i, &s)| e.mul(i, s))
            .collect();
        let from = steps
            .into_iter()
            .fold(Ix::C(leaf.offset), |sum, s| e.add(sum, s));
        let (buffer, dtype) = (p.stored[&leaf.value], p.body.dtype(leaf.value));
        if leaf.strides.last() == Some(&0) {
            return Ok(e.load(dtype, buffer, from));
        }
        let from = e.val(from);
        let load = format!(
            "const auto x{t} = gm_load<{}>({} + {});",
            self.width,
            e.text(buffer),
            e.text(from)
        );
        e.line(&load);
        Err(if dtype == DType::Bool {
            format!("x{t}.v[k] != 0")
        } else {
            format!("x{t}.v[k]")
        })
    }
}
