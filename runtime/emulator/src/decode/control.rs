//! Branches, calls, barriers, and exchanges between the lanes of a warp.

use super::{
    Decoder, Fixup, Ins, malformed,
    operands::describe,
    program::{
        Action, AtomicOp, Barrier, BarrierKind, Guard, NONE, Shuffle, Vote, WarpOp, WarpSync,
    },
    unsupported,
};
use crate::{
    fault::{Fault, FaultKind, Result},
    lanes::Slots,
    parse::ast::{Function, Operand},
    types::Type,
};

impl<'a> Decoder<'a> {
    /// `false` if the opcode is none of these.
    pub(super) fn control(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.root() {
            "bra" => self.branch(ins)?,
            "ret" => self.ret(),
            "exit" => self.emit(Action::Exit, Slots::default()),
            "trap" | "brkpt" => self.emit(Action::Trap, Slots::default()),
            "call" => self.call(ins)?,
            "mov" => return self.clock(ins),
            "bar" | "barrier" if ins.has("warp") => self.warp_barrier(ins)?,
            "bar" | "barrier" if !ins.has("cluster") => return self.barrier(ins),
            "shfl" => self.shuffle(ins)?,
            "vote" => self.vote(ins)?,
            "match" => self.match_lanes(ins)?,
            "redux" => return self.redux(ins),
            "elect" => self.elect(ins)?,
            "activemask" => {
                let d = self.target(ins.operand(0)?, Type::B32)?;
                self.emit(
                    Action::ActiveMask,
                    Slots {
                        d,
                        ..Slots::default()
                    },
                );
            }
            "membar" | "nanosleep" | "pmevent" | "griddepcontrol" | "setmaxnreg" | "prefetch"
            | "prefetchu" | "discard" | "applypriority" => {
                self.emit(Action::Nothing, Slots::default())
            }
            "fence" if !ins.has("proxy") => self.emit(Action::Nothing, Slots::default()),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn branch(&mut self, ins: &Ins<'a>) -> Result<()> {
        let Operand::Label(label) = *ins.operand(0)? else {
            return Err(malformed(format!(
                "expected a label, found {}",
                describe(ins.operand(0)?)
            )));
        };
        self.jump(label);
        Ok(())
    }

    fn jump(&mut self, label: usize) {
        self.fixups.push(Fixup {
            at: self.code.len(),
            entry: self.label_list,
            label,
        });
        self.emit(Action::Branch(0), Slots::default());
    }

    /// Ends the thread in an entry; in an inlined function leads to its end.
    fn ret(&mut self) {
        if self.stack.len() == 1 {
            self.emit(Action::Exit, Slots::default());
        } else {
            let end = self.function_now().labels.len();
            self.jump(end);
        }
    }

    /// `call (results), name, (arguments);`, inlined. A guard becomes a branch around the body.
    fn call(&mut self, ins: &Ins<'a>) -> Result<()> {
        let (results, rest): (&[Operand], _) = match ins.operands {
            [Operand::List(results), rest @ ..] => (results, rest),
            rest => (&[], rest),
        };
        let (name, arguments): (_, &[Operand]) = match rest {
            [Operand::Global(name, 0)] => (name, &[]),
            [Operand::Global(name, 0), Operand::List(arguments)] => (name, arguments),
            _ => return Err(unsupported("calls through a pointer")),
        };
        if matches!(name.as_str(), "vprintf" | "malloc" | "free") {
            return Err(unsupported(format!("`{name}`")));
        }
        if name == "__assertfail" {
            self.emit(Action::Trap, Slots::default());
            return Ok(());
        }
        let function = self
            .source
            .functions
            .get(name)
            .ok_or_else(|| unsupported(format!("no body of function `{name}`")))?;
        let given = (arguments.len(), results.len());
        if given != (function.params.len(), function.returns.len()) {
            return Err(malformed(format!(
                "wrong number of arguments or results of `{name}`"
            )));
        }
        let (guard, line, loc) = (
            std::mem::replace(&mut self.guard, Guard::ALWAYS),
            self.line,
            self.loc,
        );
        let skip = (guard.predicate != NONE).then(|| {
            self.guard = Guard {
                predicate: guard.predicate,
                flip: !guard.flip,
            };
            self.emit(Action::Branch(0), Slots::default());
            self.guard = Guard::ALWAYS;
            self.code.len() - 1
        });
        // The frame must exist before its parameters can be written.
        if !self.frames.contains_key(name) {
            let frame = self.new_frame(function);
            self.frames.insert(name.clone(), frame);
        }
        for (argument, parameter) in arguments.iter().zip(&function.params) {
            let (from, bytes) = self.local_variable(argument)?;
            self.copy_local(from, self.place_of(function, *parameter)?, bytes);
        }
        self.function(function)?;
        (self.line, self.loc) = (line, loc);
        for (result, variable) in results.iter().zip(&function.returns) {
            let (to, bytes) = self.local_variable(result)?;
            self.copy_local(self.place_of(function, *variable)?, to, bytes);
        }
        if let Some(at) = skip {
            let here = self.code.len() as u32;
            self.code[at].action = Action::Branch(here);
        }
        Ok(())
    }

    fn copy_local(&mut self, from: usize, to: usize, bytes: usize) {
        self.guard = Guard::ALWAYS;
        self.emit(Action::CopyLocal { from, to, bytes }, Slots::default());
    }

    fn place_of(&self, function: &Function, variable: usize) -> Result<usize> {
        match self.frames[&function.name].places[variable] {
            Some(super::Place::Local(at)) => Ok(at),
            _ => Err(Fault::at(
                FaultKind::Syntax,
                function.line,
                "a parameter that is not in `.param` space",
            )),
        }
    }

    /// `mov.u32 %r, %clock` and its kin; other moves are not for this module.
    fn clock(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let Some(Operand::Special(name)) = ins.operands.get(1) else {
            return Ok(false);
        };
        if !matches!(
            name.as_str(),
            "%clock" | "%clock_hi" | "%clock64" | "%globaltimer" | "%globaltimer_lo"
        ) {
            return Ok(false);
        }
        let ty = ins.ty()?;
        let d = self.target(ins.operand(0)?, ty)?;
        self.emit(
            Action::Clock {
                wide: ty.units() == 2,
            },
            Slots {
                d,
                ..Slots::default()
            },
        );
        Ok(true)
    }

    fn warp_sync(&mut self, op: WarpOp, members: u32, slots: Slots) {
        self.emit(Action::Sync(Box::new(WarpSync { op, members })), slots);
    }

    fn warp_barrier(&mut self, ins: &Ins<'a>) -> Result<()> {
        let members = self.source(ins.operand(0)?, Type::B32)?;
        self.warp_sync(WarpOp::Barrier, members, Slots::default());
        Ok(())
    }

    /// `bar.sync`, `barrier.cta.arrive`, `bar.red.popc.u32 d, a, {b,} c` and so on.
    fn barrier(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let mut slots = Slots {
            d: NONE,
            p: NONE,
            ..Slots::default()
        };
        let (kind, first) = if ins.has("sync") {
            (BarrierKind::Sync, 0)
        } else if ins.has("arrive") {
            (BarrierKind::Arrive, 0)
        } else if ins.has("red") {
            let (r, flip) = self.condition(
                ins.operands
                    .last()
                    .ok_or_else(|| malformed("no operands"))?,
            )?;
            slots.r = r;
            let op = if ins.has("popc") {
                slots.d = self.target(ins.operand(0)?, Type::U32)?;
                Vote::Count
            } else {
                slots.p = self.predicate(ins.operand(0)?)?;
                if ins.has("and") { Vote::All } else { Vote::Any }
            };
            (BarrierKind::Reduce { op, flip }, 1)
        } else {
            return Ok(false);
        };
        let is_aligned = ins.root() == "bar" || ins.has("aligned");
        let last = ins.operands.len() - usize::from(matches!(kind, BarrierKind::Reduce { .. }));
        let id = self.source(ins.operand(first)?, Type::U32)?;
        let threads = if last > first + 1 {
            self.source(ins.operand(first + 1)?, Type::U32)?
        } else {
            NONE
        };
        self.emit(
            Action::Barrier(Box::new(Barrier {
                id,
                threads,
                is_aligned,
                kind,
            })),
            slots,
        );
        Ok(true)
    }

    /// `shfl.sync.bfly.b32 d|p, a, b, c, members`
    fn shuffle(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(5)
            .map_err(|_| unsupported("shuffles without a member mask"))?;
        let (d, p) = match ins.operand(0)? {
            Operand::Pair(d, p) => (self.target(d, Type::B32)?, self.predicate(p)?),
            d => (self.target(d, Type::B32)?, NONE),
        };
        let mode = match ins
            .parts
            .iter()
            .find(|p| ["up", "down", "bfly", "idx"].contains(p))
        {
            Some(&"up") => Shuffle::Up,
            Some(&"down") => Shuffle::Down,
            Some(&"bfly") => Shuffle::Butterfly,
            Some(_) => Shuffle::Index,
            None => return Err(malformed("no mode")),
        };
        let a = self.source(ins.operand(1)?, Type::B32)?;
        let (b, c) = (
            self.source(ins.operand(2)?, Type::B32)?,
            self.source(ins.operand(3)?, Type::B32)?,
        );
        let members = self.source(ins.operand(4)?, Type::B32)?;
        self.warp_sync(
            WarpOp::Shuffle { mode },
            members,
            Slots {
                d,
                a,
                b,
                c,
                p,
                ..Slots::default()
            },
        );
        Ok(())
    }

    fn vote(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(3)
            .map_err(|_| unsupported("votes without a member mask"))?;
        let mut slots = Slots {
            d: NONE,
            p: NONE,
            ..Slots::default()
        };
        let op = match ins
            .parts
            .iter()
            .find(|p| ["all", "any", "uni", "ballot"].contains(p))
        {
            Some(&"all") => Vote::All,
            Some(&"any") => Vote::Any,
            Some(&"uni") => Vote::Uniform,
            Some(_) => Vote::Ballot,
            None => return Err(malformed("no mode")),
        };
        match op {
            Vote::Ballot => slots.d = self.target(ins.operand(0)?, Type::B32)?,
            _ => slots.p = self.predicate(ins.operand(0)?)?,
        }
        let (r, flip) = self.condition(ins.operand(1)?)?;
        slots.r = r;
        let members = self.source(ins.operand(2)?, Type::B32)?;
        self.warp_sync(WarpOp::Vote { op, flip }, members, slots);
        Ok(())
    }

    fn match_lanes(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(3)?;
        let all = ins.has("all");
        let wide = ins.has("b64");
        let (d, p) = match ins.operand(0)? {
            Operand::Pair(d, p) => (self.target(d, Type::B32)?, self.predicate(p)?),
            d => (self.target(d, Type::B32)?, NONE),
        };
        let a = self.source(ins.operand(1)?, if wide { Type::B64 } else { Type::B32 })?;
        let members = self.source(ins.operand(2)?, Type::B32)?;
        self.warp_sync(
            WarpOp::Match { all, wide },
            members,
            Slots {
                d,
                a,
                p,
                ..Slots::default()
            },
        );
        Ok(())
    }

    /// `redux.sync.add.u32 d, a, members`
    fn redux(&mut self, ins: &Ins<'a>) -> Result<bool> {
        ins.expect_operands(3)?;
        let op = match ins.parts.get(2) {
            Some(&"add") => AtomicOp::Add,
            Some(&"min") => AtomicOp::Min,
            Some(&"max") => AtomicOp::Max,
            Some(&"and") => AtomicOp::And,
            Some(&"or") => AtomicOp::Or,
            Some(&"xor") => AtomicOp::Xor,
            _ => return Ok(false),
        };
        let ty = ins.ty()?;
        if ty.units() != 1 || ins.has("abs") || ins.has("NaN") {
            return Ok(false);
        }
        let (d, a) = (
            self.target(ins.operand(0)?, ty)?,
            self.source(ins.operand(1)?, ty)?,
        );
        let members = self.source(ins.operand(2)?, Type::B32)?;
        self.warp_sync(
            WarpOp::Reduce { op, ty },
            members,
            Slots {
                d,
                a,
                ..Slots::default()
            },
        );
        Ok(true)
    }

    /// `elect.sync d|p, members`
    fn elect(&mut self, ins: &Ins<'a>) -> Result<()> {
        let Operand::Pair(d, p) = ins.operand(0)? else {
            return Err(malformed("expected `d|p`"));
        };
        let (d, p) = (self.target(d, Type::B32)?, self.predicate(p)?);
        let members = self.source(ins.operand(1)?, Type::B32)?;
        self.warp_sync(
            WarpOp::Elect,
            members,
            Slots {
                d,
                p,
                ..Slots::default()
            },
        );
        Ok(())
    }
}
