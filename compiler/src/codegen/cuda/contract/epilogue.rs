//! Epilogues of products, computed from the sums and stored: an element at a time, or several
//! neighbours.

use super::super::emit::{Emitter, Operand, Value};
use super::super::text::{element_type, memory_type};
use super::{Contract, Place, element_position};
use crate::codegen::access::{Expression, Leaf, expression};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Layout, Op, ValueId};

/// Bytes of the widest access.
const WIDEST: usize = 16;

/// Writes the epilogue of a product whose sums leave through shared memory: `sums` holds them, slab
/// by slab, each 16 rows of `columns` columns of a warp.
pub(super) fn staged(
    c: &Contract,
    p: &mut Puller<Value>,
    e: &mut Emitter,
    place: Place,
    Slabs { columns, tile }: Slabs,
    out: Value,
) -> Result<()> {
    let stores = Stores::find(p.body, c, &|v| p.stored.contains_key(&v), WIDEST);
    let width = stores.width();
    e.line("const auto slab = product::slab(shared);");
    e.line("#pragma unroll");
    e.open("for (int i = 0; i < product::slabs; ++i)");
    e.line("sums.put(slab, i);");
    let own = open_slab(e, columns / width, width, columns_are_inner(p.body, c));
    let place = place.moved(e, own);
    place.guarded(e, c.sizes, tile, |e| {
        let sum = "slab[slab_row * product::slab_pitch + slab_column]";
        if width == 1 {
            return stores.emit(c, p, e, place, sum, out);
        }
        e.line(&format!("const auto sum = gm_read<{width}>(&{sum});"));
        stores.emit(c, p, e, place, "sum.v[k]", out)
    })?;
    (0..2).for_each(|_| e.close());
    Ok(())
}

/// Opens a warp's loop over the runs of a slab, of which a row has `per_row`; gives row and column
/// in the tile. Neighbouring lanes have neighbouring runs of the result.
fn open_slab(e: &mut Emitter, per_row: usize, width: usize, columns_are_inner: bool) -> [Value; 2] {
    let n_runs = 16 * per_row;
    e.open(&format!(
        "for (int v = threadIdx.x % 32; v < {n_runs}; v += 32)"
    ));
    let (row, column) = if columns_are_inner {
        (format!("v / {per_row}"), format!("v % {per_row} * {width}"))
    } else {
        ("v % 16".to_owned(), "v / 16".to_owned())
    };
    e.line(&format!(
        "const int slab_row = {row}, slab_column = {column};"
    ));
    ["row", "column"].map(|axis| {
        let position = format!("ix(product::slab_{axis}(i) + slab_{axis})");
        e.named(Kind::Index, position)
    })
}

/// Layout of sums in shared memory: see [`staged`]. `tile` has the rows and columns of a block's
/// tile.
pub(super) struct Slabs {
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
        if c.n_parts() == 1 {
            let vectors = Vectors::find(body, c, in_memory, most);
            return vectors.map_or(Stores::Elements, Stores::Vectors);
        }
        let width = WIDEST / c.acc().size_bytes();
        let is_whole = c.sizes.n.is_multiple_of(width);
        Stores::Partial(if is_whole { width } else { 1 })
    }

    /// Columns at a time.
    pub(super) fn width(&self) -> usize {
        match self {
            Stores::Elements => 1,
            Stores::Vectors(vectors) => vectors.width,
            Stores::Partial(width) => *width,
        }
    }

    /// Writes the code of the columns that begin at a place. `sum` is an expression for a sum, of
    /// column `k` where there are several columns.
    pub(super) fn emit(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        place: Place,
        sum: &str,
        out: Value,
    ) -> Result<()> {
        match self {
            Stores::Elements => {
                let sum = e.named(Kind::Element(c.acc()), sum);
                c.store(p, e, place.at(), sum, out)
            }
            Stores::Vectors(vectors) => vectors.emit(c, p, e, place.at(), sum, out),
            Stores::Partial(width) => {
                store_partial(c, e, *width, place, (sum, out));
                Ok(())
            }
        }
    }
}

/// Writes partial sums of `width` columns.
fn store_partial(
    c: &Contract,
    e: &mut Emitter,
    width: usize,
    place: Place,
    (sum, out): (&str, Value),
) {
    let Place {
        part,
        batch,
        row,
        column,
    } = place;
    let at = e.linearise(&[part, batch, row, column], &c.partial_shape());
    let to = format!("{} + {}", e.text(out), e.position(at));
    if width == 1 {
        return e.line(&format!("*({to}) = {sum};"));
    }
    let ty = element_type(c.acc());
    e.line(&format!("gm_vector<{ty}, {width}> y;"));
    e.line("#pragma unroll");
    e.line(&format!(
        "for (int k = 0; k < {width}; ++k) y.v[k] = {sum};"
    ));
    e.line(&format!("gm_store<{width}>({to}, y);"));
}

/// True if neighbouring columns of the product are neighbours in the result.
fn columns_are_inner(body: &Body, c: &Contract) -> bool {
    !matches!(
        c.node.of(body).op,
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

/// True if a leaf is constant along the columns or has whole, aligned vectors of `width` there.
fn has_whole_vectors(body: &Body, leaf: &Leaf, width: usize) -> bool {
    let is_whole = |n: i64| n % width as i64 == 0;
    let Some((&inner, outer)) = leaf.strides.split_last() else {
        return true;
    };
    // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
    let is_aligned = is_whole(leaf.offset) && is_whole(body.n_elements(leaf.value) as i64);
    inner == 0 || inner == 1 && is_aligned && outer.iter().all(|&s| is_whole(s))
}

impl Vectors {
    /// For a product all of whose columns fall into runs; `in_memory` says which values are loaded.
    fn find(
        body: &Body,
        c: &Contract,
        in_memory: &dyn Fn(ValueId) -> bool,
        most: usize,
    ) -> Option<Vectors> {
        let product = c.node.own(body);
        let is_leaf = |v: ValueId| v == product || in_memory(v);
        let expression = expression(body, &[c.node.result], &is_leaf, &|_, _| false)?;
        let loaded = || expression.leaves.iter().filter(|l| l.value != product);
        let moving = loaded().filter(|l| l.strides.last() != Some(&0));
        let values = moving.map(|l| l.value).chain([c.node.result]);
        let width = most.min(WIDEST / values.map(|v| body.dtype(v).size_bytes()).max()?);
        let fits = loaded().all(|l| has_whole_vectors(body, l, width));
        let is_whole = width > 1 && c.sizes.n.is_multiple_of(width);
        (fits && is_whole && columns_are_inner(body, c)).then_some(Vectors {
            expression,
            product,
            width,
        })
    }

    /// Writes the code of the run that begins at a batch, row and column; `sum` is the expression for the sum of column `k`.
    fn emit(
        &self,
        c: &Contract,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: [Ix<Value>; 3],
        sum: &str,
        out: Value,
    ) -> Result<()> {
        let at = c.result_index(p.body, e, at);
        let leaves = self.expression.leaves.iter().enumerate();
        let operands: Vec<Operand> = leaves
            .map(|(t, leaf)| match leaf.value == self.product {
                true => Operand::Element(sum.to_owned(), c.acc()),
                false => self.load(p, e, t, &at),
            })
            .collect();
        let (to, width) = (p.body.dtype(c.node.result), self.width);
        e.line(&format!("gm_vector<{}, {width}> y;", memory_type(to)));
        e.line("#pragma unroll");
        e.open(&format!("for (int k = 0; k < {width}; ++k)"));
        let inputs = self.inputs(p.body, e, operands)?;
        let y = e.program(&self.expression.program, &inputs)?[0];
        e.set("y.v[k]", y);
        e.close();
        let linear = e.linearise(&at, p.body.shape(c.node.result));
        let to = format!("{} + {}", e.text(out), e.position(linear));
        e.line(&format!("gm_store<{width}>({to}, y);"));
        Ok(())
    }

    /// Operands of column `k`.
    fn inputs(&self, body: &Body, e: &mut Emitter, operands: Vec<Operand>) -> Result<Vec<Value>> {
        let leaves = operands.into_iter().zip(&self.expression.leaves);
        let input = |(operand, leaf): (Operand, &Leaf)| match operand {
            Operand::Element(sum, acc) if leaf.value == self.product => {
                let sum = e.named(Kind::Element(acc), sum);
                e.cast(sum, body.dtype(leaf.value))
            }
            operand => Ok(operand.value(e)),
        };
        leaves.map(input).collect()
    }

    /// Loads operand number `t`.
    fn load(&self, p: &Puller<Value>, e: &mut Emitter, t: usize, at: &[Ix<Value>]) -> Operand {
        let leaf = &self.expression.leaves[t];
        let from = element_position(e, leaf.offset, at, &leaf.strides);
        let (buffer, dtype) = (p.stored[&leaf.value], p.body.dtype(leaf.value));
        if leaf.strides.last() == Some(&0) {
            return Operand::Same(e.load(dtype, buffer, from));
        }
        e.load_operand(t, (self.width, dtype), buffer, from)
    }
}
