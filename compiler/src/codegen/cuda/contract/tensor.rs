//! Operands of tensor cores: the instruction for a product, and the way operands get into tiles.

use super::super::Options;
use super::super::fusion::flops;
use super::operand::{Chunks, Side, k_is_inner, narrowed};
use super::{CHEAP_FLOPS, Sizes};
use crate::codegen::body::Body;
use crate::codegen::phases::MatchContext;
use crate::ir::{Node, ValueId};
use gristmill_runtime::DType;

/// Multiplications from which an operand that would be pulled in every tile is rather stored first, so that tiles are copied.
const MANY_PRODUCTS: usize = 1 << 29;

/// An instruction, by the dtypes of its operands in tiles and of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) name: &'static str,
    /// Of the left-hand side and the right-hand side; equally wide.
    elements: [DType; 2],
    pub(super) acc: DType,
}

impl Instruction {
    /// Dtype of an operand's elements.
    pub(super) fn element(&self, side: Side) -> DType {
        self.elements[usize::from(side == Side::Rhs)]
    }

    /// Width of an element.
    pub(super) fn size_bytes(&self) -> usize {
        self.elements[0].size_bytes()
    }
}

/// The instruction for the product of two values, if the architecture has one, and the values that must be in memory for it.
fn instruction(
    body: &Body,
    around: &MatchContext,
    options: &Options,
    node: &Node,
) -> Option<(Instruction, Vec<ValueId>)> {
    use DType::{BF16, F16, F32, I8, I32, U8};
    let own = body.dtype(node.inputs[0]);
    let narrow: Vec<(DType, ValueId)> = node
        .inputs
        .iter()
        .map(|&v| narrowed(body, around.in_memory, v).unwrap_or((own, v)))
        .collect();
    let elements = widened([narrow[0].0, narrow[1].0]);
    let capability = options.arch.capability();
    let name = match (elements, own) {
        ([F16, F16], _) if capability >= 75 => "f16",
        ([BF16, BF16], _) if capability >= 80 => "bf16",
        ([F32, F32], F32) if options.tf32 && capability >= 80 => "tf32",
        ([I8 | U8, I8 | U8], I8 | U8 | I32) if capability >= 80 => match elements {
            [I8, I8] => "i8",
            [I8, _] => "i8_u8",
            [_, I8] => "u8_i8",
            _ => "u8",
        },
        _ => return None,
    };
    let acc = if elements[0].is_float() { F32 } else { I32 };
    Some((
        Instruction {
            name,
            elements,
            acc,
        },
        narrow.into_iter().map(|n| n.1).collect(),
    ))
}

/// Floats of 8 bits are multiplied as the half type of the other operand, which holds them all: the products of tensor cores of their own are summed
/// up in fewer bits than `f32` has.
fn widened(elements: [DType; 2]) -> [DType; 2] {
    let half = elements
        .into_iter()
        .find(|d| matches!(d, DType::F16 | DType::BF16))
        .unwrap_or(DType::F16);
    elements.map(|d| if d.is_float8() { half } else { d })
}

/// Source of an operand's tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Loading {
    Copied(Chunks),
    Pulled { along_k: bool },
}

impl Loading {
    /// True if rows of the tile lie along the summed axis.
    pub(super) fn along_k(&self) -> bool {
        match self {
            Loading::Copied(chunks) => chunks.along_k,
            Loading::Pulled { along_k } => *along_k,
        }
    }

    /// Part of the prelude's name of the loader.
    pub(super) fn verb(&self) -> &'static str {
        match self {
            Loading::Copied(_) => "copied",
            Loading::Pulled { .. } => "pulled",
        }
    }
}

/// The operands of a product for tensor cores.
#[derive(Clone, Debug)]
pub(super) struct Operands {
    pub(super) instruction: Instruction,
    pub(super) lhs: Loading,
    pub(super) rhs: Loading,
}

impl Operands {
    /// The operands of a product for tensor cores, if the GPU has them, and the values that must be
    /// stored first.
    pub(super) fn find(
        body: &Body,
        around: &MatchContext,
        options: &Options,
        node: &Node,
        sizes: Sizes,
    ) -> Option<(Operands, Vec<ValueId>)> {
        let (instruction, values) = instruction(body, around, options, node)?;
        let mut needs = Vec::new();
        for (side, &v) in Side::BOTH.into_iter().zip(&values) {
            let element = instruction.element(side);
            let dear = flops(body, around, v).is_none_or(|f| f > CHEAP_FLOPS);
            let now = || chunks(body, around.in_memory, node, side, element).is_some();
            let then = || {
                chunks(
                    body,
                    &|x| x == v || (around.in_memory)(x),
                    node,
                    side,
                    element,
                )
                .is_some()
            };
            if dear || sizes.n_products() >= MANY_PRODUCTS && !now() && then() {
                needs.push(v);
            }
        }
        let lies = |v: ValueId| (around.in_memory)(v) || needs.contains(&v);
        let [lhs, rhs] = Side::BOTH.map(|side| {
            match chunks(body, &lies, node, side, instruction.element(side)) {
                Some(chunks) => Loading::Copied(chunks),
                None => Loading::Pulled {
                    along_k: instruction.size_bytes() != 2 || k_is_inner(body, &lies, node, side),
                },
            }
        });
        Some((
            Operands {
                instruction,
                lhs,
                rhs,
            },
            needs,
        ))
    }

    /// Both operands, if both are copied.
    pub(super) fn copied(&self) -> Option<[&Chunks; 2]> {
        match (&self.lhs, &self.rhs) {
            (Loading::Copied(lhs), Loading::Copied(rhs)) => Some([lhs, rhs]),
            _ => None,
        }
    }
}

/// Where an operand can be copied from. Only 16-bit elements can be transposed on their way out of a tile.
fn chunks(
    body: &Body,
    in_memory: &dyn Fn(ValueId) -> bool,
    node: &Node,
    side: Side,
    element: DType,
) -> Option<Chunks> {
    Chunks::find(body, in_memory, node, side, element)
        .filter(|c| c.along_k || element.size_bytes() == 2)
}
