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
    let own = body.dtype(node.inputs[0]);
    let narrow = |&v: &ValueId| narrowed(body, around.in_memory, v).unwrap_or((own, v));
    let (dtypes, values): (Vec<DType>, Vec<ValueId>) = node.inputs.iter().map(narrow).unzip();
    let elements = widened([dtypes[0], dtypes[1]]);
    let is_float = elements[0].is_float();
    let instruction = Instruction {
        name: instruction_name(elements, own, options)?,
        elements,
        acc: if is_float { DType::F32 } else { DType::I32 },
    };
    Some((instruction, values))
}

/// The prelude's name of the instruction that multiplies such elements of operands of dtype `own`.
fn instruction_name(elements: [DType; 2], own: DType, options: &Options) -> Option<&'static str> {
    use DType::{BF16, F16, F32, I8, I32, U8};
    let capability = options.arch.capability();
    if capability < 80 {
        return (elements == [F16, F16] && capability >= 75).then_some("f16");
    }
    match (elements, own) {
        ([F16, F16], _) => Some("f16"),
        ([BF16, BF16], _) => Some("bf16"),
        ([F32, F32], F32) if options.tf32 => Some("tf32"),
        ([I8, I8], I8 | U8 | I32) => Some("i8"),
        ([I8, U8], I8 | U8 | I32) => Some("i8_u8"),
        ([U8, I8], I8 | U8 | I32) => Some("u8_i8"),
        ([U8, U8], I8 | U8 | I32) => Some("u8"),
        _ => None,
    }
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
    fn of(
        body: &Body,
        in_memory: &dyn Fn(ValueId) -> bool,
        node: &Node,
        side: Side,
        instruction: &Instruction,
    ) -> Loading {
        if let Some(chunks) = chunks(body, in_memory, node, side, instruction.element(side)) {
            return Loading::Copied(chunks);
        }
        // Only elements of 16 bits can be transposed on their way to the tensor cores.
        let is_wide = instruction.size_bytes() != 2;
        Loading::Pulled {
            along_k: is_wide || k_is_inner(body, in_memory, node, side),
        }
    }
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
            let is_dear = flops(body, around, v).is_none_or(|f| f > CHEAP_FLOPS);
            let is_copied = |in_memory: &dyn Fn(ValueId) -> bool| {
                chunks(body, in_memory, node, side, instruction.element(side)).is_some()
            };
            let gains =
                || !is_copied(around.in_memory) && is_copied(&|x| x == v || (around.in_memory)(x));
            if is_dear || sizes.n_products() >= MANY_PRODUCTS && gains() {
                needs.push(v);
            }
        }
        let in_memory = |v: ValueId| (around.in_memory)(v) || needs.contains(&v);
        let [lhs, rhs] =
            Side::BOTH.map(|side| Loading::of(body, &in_memory, node, side, &instruction));
        let operands = Operands {
            instruction,
            lhs,
            rhs,
        };
        Some((operands, needs))
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
