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

fn shuffle_mode(ins: &Ins) -> Option<Shuffle> {
    ins.parts.iter().find_map(|part| match *part {
        "up" => Some(Shuffle::Up),
        "down" => Some(Shuffle::Down),
        "bfly" => Some(Shuffle::Butterfly),
        "idx" => Some(Shuffle::Index),
        _ => None,
    })
}

fn vote_mode(ins: &Ins) -> Option<Vote> {
    ins.parts.iter().find_map(|part| match *part {
        "all" => Some(Vote::All),
        "any" => Some(Vote::Any),
        "uni" => Some(Vote::Uniform),
        "ballot" => Some(Vote::Ballot),
        _ => None,
    })
}

fn redux_op(ins: &Ins) -> Option<AtomicOp> {
    Some(match *ins.parts.get(2)? {
        "add" => AtomicOp::Add,
        "min" => AtomicOp::Min,
        "max" => AtomicOp::Max,
        "and" => AtomicOp::And,
        "or" => AtomicOp::Or,
        "xor" => AtomicOp::Xor,
        _ => return None,
    })
}

fn is_clock(name: &str) -> bool {
    matches!(
        name,
        "%clock" | "%clock_hi" | "%clock64" | "%globaltimer" | "%globaltimer_lo"
    )
}

impl<'a> Decoder<'a> {
    /// `false` if the opcode is none of these.
    pub(super) fn control(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.root() {
            "bra" => self.branch(ins)?,
            "ret" => self.ret(),
            "exit" => self.emit_action(Action::Exit),
            "trap" | "brkpt" => self.emit_action(Action::Trap),
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
                self.emit(Action::ActiveMask, Slots::target(d));
            }
            "membar" | "nanosleep" | "pmevent" | "griddepcontrol" | "setmaxnreg" | "prefetch"
            | "prefetchu" | "discard" | "applypriority" => self.emit_action(Action::Nothing),
            "fence" if !ins.has("proxy") => self.emit_action(Action::Nothing),
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
        self.emit_action(Action::Branch(0));
    }

    /// Ends the thread in an entry; in an inlined function leads to its end.
    fn ret(&mut self) {
        if self.stack.len() == 1 {
            self.emit_action(Action::Exit);
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
            self.emit_action(Action::Trap);
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
        let skip = self.branch_around();
        self.inline(function, arguments, results)?;
        if let Some(at) = skip {
            let here = self.code.len() as u32;
            self.code[at].action = Action::Branch(here);
        }
        Ok(())
    }

    /// Turns the statement's guard into a branch, whose target is still to be set; `None` if there is no guard.
    fn branch_around(&mut self) -> Option<usize> {
        let guard = std::mem::replace(&mut self.guard, Guard::ALWAYS);
        if guard.predicate == NONE {
            return None;
        }
        self.guard = Guard {
            predicate: guard.predicate,
            flip: !guard.flip,
        };
        self.emit_action(Action::Branch(0));
        self.guard = Guard::ALWAYS;
        Some(self.code.len() - 1)
    }

    /// Decodes a body between the copies of its arguments and results.
    fn inline(
        &mut self,
        function: &'a Function,
        arguments: &[Operand],
        results: &[Operand],
    ) -> Result<()> {
        let (line, loc) = (self.line, self.loc);
        // The frame must exist before its parameters can be written.
        self.add_frame(function);
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
        Ok(())
    }

    fn copy_local(&mut self, from: usize, to: usize, bytes: usize) {
        self.guard = Guard::ALWAYS;
        self.emit_action(Action::CopyLocal { from, to, bytes });
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
        if !matches!(ins.operands.get(1), Some(Operand::Special(name)) if is_clock(name)) {
            return Ok(false);
        }
        let ty = ins.ty()?;
        let d = self.target(ins.operand(0)?, ty)?;
        let wide = ty.units() == 2;
        self.emit(Action::Clock { wide }, Slots::target(d));
        Ok(true)
    }

    fn warp_sync(&mut self, op: WarpOp, members: u32, slots: Slots) {
        self.emit(Action::Sync(Box::new(WarpSync { op, members })), slots);
    }

    fn warp_barrier(&mut self, ins: &Ins<'a>) -> Result<()> {
        let members = self.members(ins, 0)?;
        self.warp_sync(WarpOp::Barrier, members, Slots::default());
        Ok(())
    }

    /// Mask of the lanes that take part.
    fn members(&mut self, ins: &Ins<'a>, k: usize) -> Result<u32> {
        self.source(ins.operand(k)?, Type::B32)
    }

    /// Targets `d|p`, or `d` alone.
    fn target_pair(&mut self, ins: &Ins<'a>) -> Result<(u32, u32)> {
        match ins.operand(0)? {
            Operand::Pair(d, p) => Ok((self.target(d, Type::B32)?, self.predicate(p)?)),
            d => Ok((self.target(d, Type::B32)?, NONE)),
        }
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
            (self.barrier_reduction(ins, &mut slots)?, 1)
        } else {
            return Ok(false);
        };
        let last = ins.operands.len() - first;
        let id = self.source(ins.operand(first)?, Type::U32)?;
        let threads = if last > first + 1 {
            self.source(ins.operand(first + 1)?, Type::U32)?
        } else {
            NONE
        };
        let barrier = Barrier {
            id,
            threads,
            is_aligned: ins.root() == "bar" || ins.has("aligned"),
            kind,
        };
        self.emit(Action::Barrier(Box::new(barrier)), slots);
        Ok(true)
    }

    /// The reduction of a barrier: its last operand is the vote, its first the result.
    fn barrier_reduction(&mut self, ins: &Ins<'a>, slots: &mut Slots) -> Result<BarrierKind> {
        let vote = ins.operands.last();
        let vote = vote.ok_or_else(|| malformed("no operands"))?;
        let (r, flip) = self.condition(vote)?;
        slots.r = r;
        let op = if ins.has("popc") {
            slots.d = self.target(ins.operand(0)?, Type::U32)?;
            Vote::Count
        } else {
            slots.p = self.predicate(ins.operand(0)?)?;
            if ins.has("and") { Vote::All } else { Vote::Any }
        };
        Ok(BarrierKind::Reduce { op, flip })
    }

    /// `shfl.sync.bfly.b32 d|p, a, b, c, members`
    fn shuffle(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(5)
            .map_err(|_| unsupported("shuffles without a member mask"))?;
        let (d, p) = self.target_pair(ins)?;
        let mode = shuffle_mode(ins).ok_or_else(|| malformed("no mode"))?;
        let (a, b) = self.lhs_rhs(ins, Type::B32)?;
        let slots = Slots {
            c: self.source(ins.operand(3)?, Type::B32)?,
            p,
            ..Slots::binary(d, a, b)
        };
        let members = self.members(ins, 4)?;
        self.warp_sync(WarpOp::Shuffle { mode }, members, slots);
        Ok(())
    }

    fn vote(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(3)
            .map_err(|_| unsupported("votes without a member mask"))?;
        let op = vote_mode(ins).ok_or_else(|| malformed("no mode"))?;
        let (d, p) = match op {
            Vote::Ballot => (self.target(ins.operand(0)?, Type::B32)?, NONE),
            _ => (NONE, self.predicate(ins.operand(0)?)?),
        };
        let (r, flip) = self.condition(ins.operand(1)?)?;
        let slots = Slots {
            p,
            r,
            ..Slots::target(d)
        };
        let members = self.members(ins, 2)?;
        self.warp_sync(WarpOp::Vote { op, flip }, members, slots);
        Ok(())
    }

    fn match_lanes(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(3)?;
        let (all, wide) = (ins.has("all"), ins.has("b64"));
        let (d, p) = self.target_pair(ins)?;
        let a = self.source(ins.operand(1)?, if wide { Type::B64 } else { Type::B32 })?;
        let slots = Slots {
            p,
            ..Slots::unary(d, a)
        };
        let members = self.members(ins, 2)?;
        self.warp_sync(WarpOp::Match { all, wide }, members, slots);
        Ok(())
    }

    /// `redux.sync.add.u32 d, a, members`
    fn redux(&mut self, ins: &Ins<'a>) -> Result<bool> {
        ins.expect_operands(3)?;
        let Some(op) = redux_op(ins) else {
            return Ok(false);
        };
        let ty = ins.ty()?;
        if ty.units() != 1 || ins.has("abs") || ins.has("NaN") {
            return Ok(false);
        }
        let d = self.target(ins.operand(0)?, ty)?;
        let slots = Slots::unary(d, self.source(ins.operand(1)?, ty)?);
        let members = self.members(ins, 2)?;
        self.warp_sync(WarpOp::Reduce { op, ty }, members, slots);
        Ok(true)
    }

    /// `elect.sync d|p, members`
    fn elect(&mut self, ins: &Ins<'a>) -> Result<()> {
        let Operand::Pair(..) = ins.operand(0)? else {
            return Err(malformed("expected `d|p`"));
        };
        let (d, p) = self.target_pair(ins)?;
        let slots = Slots {
            p,
            ..Slots::target(d)
        };
        let members = self.members(ins, 1)?;
        self.warp_sync(WarpOp::Elect, members, slots);
        Ok(())
    }
}
