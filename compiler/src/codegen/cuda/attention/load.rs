//! Tiles of operands in shared memory.

use super::super::emit::{Emitter, Value};
use super::super::runs::Runs;
use super::super::text::{element_type, literal};
use super::{Attention, Form, Here};
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
    pub(super) turned: bool,
}

impl Attention {
    /// All threads of the block load a tile, padded with zeros outside the operand. Asynchronous
    /// copies into tiles for tensor cores may still be in flight afterwards.
    pub(super) fn load(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        tile: &Tile,
    ) -> Result<()> {
        let axis = p.body.shape(tile.operand).len() - 1;
        let runs = Runs::of(p.body, tile.operand, axis, &|v| p.stored.contains_key(&v));
        let width = runs.width();
        let per_row = tile.padded / width;
        let (items, threads) = (
            (tile.rows * per_row).to_string(),
            self.form.threads().to_string(),
        );
        e.counted(["ix(threadIdx.x)", &items, &threads], |e, i| {
            // Stores of transposed vectors avoid bank conflicts when neighbouring threads have
            // neighbouring rows.
            let by_row = tile.turned && width > 1;
            let (outer, inner) = e.div_rem(Ix::V(i), if by_row { tile.rows } else { per_row });
            let (row, run) = if by_row {
                (inner, outer)
            } else {
                (outer, inner)
            };
            let (at, column) = (e.add(tile.first, row), e.mul(run, width as i64));
            let index: Vec<Ix<Value>> = here.lead.iter().copied().chain([at, column]).collect();
            let inside = [
                e.below(at, tile.extent, tile.rows),
                e.below(column, tile.depth, tile.padded),
            ];
            let Some((base, from)) = self.copied(p, e, &runs, &index) else {
                return self.run(p, e, tile, &runs, [row, column], &index, &inside);
            };
            let to = self.position(e, tile, row, column);
            let all: Vec<&str> = inside.iter().flatten().map(|&c| e.text(c)).collect();
            let inside = if all.is_empty() {
                "true".to_owned()
            } else {
                all.join(" && ")
            };
            let line = format!(
                "gm_copy_chunk(gm_shared({to}), {} + {}, {inside});",
                e.text(base),
                e.text(from)
            );
            e.line(&line);
            Ok(())
        })
    }

    /// Buffer and position of a run that is copied as it is, without passing through registers.
    fn copied(
        &self,
        p: &Puller<Value>,
        e: &mut Emitter,
        runs: &Runs,
        at: &[Ix<Value>],
    ) -> Option<(Value, Value)> {
        let leaf = runs
            .copied()
            .filter(|_| matches!(self.form, Form::Tensor { .. }))?;
        let is_whole = runs.width() * p.body.dtype(leaf.value).size_bytes() == WIDEST;
        is_whole.then(|| {
            let from = e.strided(leaf.offset, at, &leaf.strides);
            (p.stored[&leaf.value], e.val(from))
        })
    }

    /// Address of an element of the tile.
    fn position(&self, e: &mut Emitter, tile: &Tile, row: Ix<Value>, column: Ix<Value>) -> String {
        let (outer, inner) = if tile.turned {
            (column, row)
        } else {
            (row, column)
        };
        let pitch = self
            .form
            .pitch(if tile.turned { tile.rows } else { tile.padded });
        let from = e.mul(outer, pitch as i64);
        let at = e.add(from, inner);
        let at = e.val(at);
        format!("{} + {}", tile.name, e.text(at))
    }

    /// Pulls a run into the tile, or zeros where it is outside.
    #[allow(clippy::too_many_arguments)]
    fn run(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        tile: &Tile,
        runs: &Runs,
        [row, column]: [Ix<Value>; 2],
        index: &[Ix<Value>],
        inside: &[Option<Value>],
    ) -> Result<()> {
        let (width, dtype) = (runs.width(), self.form.shared_dtype(self.x.dtype));
        let own = p.body.dtype(tile.operand);
        // A vector that stays one is stored as one.
        let whole = !tile.turned && width > 1 && width * dtype.size_bytes() <= WIDEST;
        if whole {
            e.line(&format!("gm_vector<{}, {width}> x;", element_type(dtype)));
        }
        let to = |e: &mut Emitter, k: Ix<Value>| {
            if whole {
                let k = e.val(k);
                return format!("x.v[{}]", e.text(k));
            }
            let column = e.add(column, k);
            format!("*({})", self.position(e, tile, row, column))
        };
        e.guarded(inside, |e| {
            runs.each(p, e, tile.operand, index, |e, k, value| {
                let value = e.convert(value, own, dtype)?;
                let line = format!("{} = {};", to(e, k), e.text(value));
                e.line(&line);
                Ok(())
            })
        })?;
        if inside.iter().any(Option::is_some) {
            e.open("else");
            let k = e.open_unrolled(width);
            let line = format!("{} = {};", to(e, Ix::V(k)), literal(dtype, 0));
            e.line(&line);
            (0..2).for_each(|_| e.close());
        }
        if whole {
            let to = self.position(e, tile, row, column);
            e.line(&format!("gm_store<{width}>({to}, x);"));
        }
        Ok(())
    }
}
