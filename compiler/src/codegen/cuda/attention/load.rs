//! Tiles of operands in shared memory.

use super::super::emit::{Emitter, Value};
use super::super::text::element_type;
use super::super::vector_access::Runs;
use super::{Attention, BlockPosition, Variant};
use crate::codegen::pull::{Emit, Ix, Puller};
use crate::error::Result;
use crate::ir::ValueId;

/// Bytes of the widest access.
const WIDEST: usize = 16;

/// A tile in shared memory that is loaded from an operand.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Name in shared memory.
    pub(super) name: &'static str,
    pub(super) operand: ValueId,
    /// First row, rows that there are, and rows of the tile.
    pub(super) first: Ix<Value>,
    pub(super) extent: usize,
    pub(super) rows: usize,
    /// Elements of a row, and of a row of the tile.
    pub(super) depth: usize,
    pub(super) padded: usize,
    /// True if the tile is transposed: neighbours in shared memory belong to neighbouring rows.
    pub(super) transposed: bool,
}

/// A run of a tile that a thread loads.
struct TileRun {
    /// Position in the tile.
    row: Ix<Value>,
    column: Ix<Value>,
    /// Index in the operand.
    index: Vec<Ix<Value>>,
    /// Conditions that the run lies inside the operand.
    inside: [Option<Value>; 2],
}

impl Tile {
    /// Run number `i` of `width` elements.
    fn run(&self, e: &mut Emitter, here: &BlockPosition, width: usize, i: Value) -> TileRun {
        // Stores of transposed vectors avoid bank conflicts when neighbouring threads have
        // neighbouring rows.
        let by_row = self.transposed && width > 1;
        let (row, run) = if by_row {
            let (outer, inner) = e.div_rem(Ix::V(i), self.rows);
            (inner, outer)
        } else {
            e.div_rem(Ix::V(i), self.padded / width)
        };
        let (at, column) = (e.add(self.first, row), e.mul(run, width as i64));
        let lead = here.lead.iter().copied();
        TileRun {
            row,
            column,
            index: lead.chain([at, column]).collect(),
            inside: [
                e.below(at, self.extent, self.rows),
                e.below(column, self.depth, self.padded),
            ],
        }
    }
}

impl Attention {
    /// All threads of the block load a tile, padded with zeros outside the operand. Asynchronous
    /// copies into tiles for tensor cores may still be in flight afterwards.
    pub(super) fn load(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        tile: &Tile,
    ) -> Result<()> {
        let axis = p.body.shape(tile.operand).len() - 1;
        let runs = Runs::of(p.body, tile.operand, axis, &|v| p.stored.contains_key(&v));
        let n_runs = tile.rows * (tile.padded / runs.width());
        e.by_thread(n_runs, self.variant.threads(), |e, i| {
            let run = tile.run(e, here, runs.width(), i);
            match self.copied(p, e, &runs, &run.index) {
                Some(source) => self.copy(e, tile, &run, source),
                None => self.pull(p, e, tile, &runs, &run)?,
            }
            Ok(())
        })
    }

    /// Copies a run from a buffer and position, asynchronously.
    fn copy(&self, e: &mut Emitter, tile: &Tile, run: &TileRun, [buffer, from]: [Value; 2]) {
        let to = self.address(e, tile, run.row, run.column);
        let inside: Vec<&str> = run.inside.iter().flatten().map(|&c| e.text(c)).collect();
        let inside = if inside.is_empty() {
            "true".to_owned()
        } else {
            inside.join(" && ")
        };
        let from = format!("{} + {}", e.text(buffer), e.text(from));
        e.line(&format!(
            "gm_copy_chunk(gm_shared({to}), {from}, {inside});"
        ));
    }

    /// Buffer and position of a run that is copied as it is, without passing through registers.
    fn copied(
        &self,
        p: &Puller<Value>,
        e: &mut Emitter,
        runs: &Runs,
        at: &[Ix<Value>],
    ) -> Option<[Value; 2]> {
        let is_tensor = matches!(self.variant, Variant::Tensor { .. });
        let leaf = runs.copied().filter(|_| is_tensor)?;
        let is_whole = runs.width() * p.body.dtype(leaf.value).size_bytes() == WIDEST;
        is_whole.then(|| {
            let from = e.strided(leaf.offset, at, &leaf.strides);
            [p.stored[&leaf.value], e.val(from)]
        })
    }

    /// Address of an element of the tile.
    fn address(&self, e: &mut Emitter, tile: &Tile, row: Ix<Value>, column: Ix<Value>) -> String {
        let (outer, inner, length) = if tile.transposed {
            (column, row, tile.rows)
        } else {
            (row, column, tile.padded)
        };
        let from = e.mul(outer, self.variant.pitch(length) as i64);
        let at = e.add(from, inner);
        format!("{} + {}", tile.name, e.position(at))
    }

    /// Pulls a run into the tile, or zeros where it is outside.
    fn pull(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        tile: &Tile,
        runs: &Runs,
        run: &TileRun,
    ) -> Result<()> {
        let (width, dtype) = (runs.width(), self.variant.shared_dtype(self.x.dtype));
        // A contiguous vector is stored in one access.
        let fits = width * dtype.size_bytes() <= WIDEST;
        let is_vector = !tile.transposed && width > 1 && fits;
        if is_vector {
            e.line(&format!("gm_vector<{}, {width}> x;", element_type(dtype)));
        }
        let to = |e: &mut Emitter, k: Ix<Value>| match is_vector {
            true => format!("x.v[{}]", e.position(k)),
            false => self.element(e, tile, run, k),
        };
        e.guarded(&run.inside, |e| {
            runs.each(p, e, tile.operand, &run.index, |e, k, value| {
                let value = e.cast(value, dtype)?;
                let to = to(e, k);
                e.set(&to, value);
                Ok(())
            })
        })?;
        if run.inside.iter().any(Option::is_some) {
            e.open("else");
            let k = e.open_unrolled(width);
            let (to, zero) = (to(e, Ix::V(k)), e.constant(dtype, 0));
            e.set(&to, zero);
            e.close();
            e.close();
        }
        if is_vector {
            let to = self.address(e, tile, run.row, run.column);
            e.line(&format!("gm_store<{width}>({to}, x);"));
        }
        Ok(())
    }

    /// Element `k` of a run of the tile.
    fn element(&self, e: &mut Emitter, tile: &Tile, run: &TileRun, k: Ix<Value>) -> String {
        let column = e.add(run.column, k);
        format!("*({})", self.address(e, tile, run.row, column))
    }
}
