//! Registers of a warp, and functions over their 32 lanes.
//!
//! Every lane function is a plain loop over arrays of 32 values that the compiler turns into vector code. Each exists twice:
//! portable, and with AVX2 and FMA where the machine has them (without FMA, `mul_add` would call a library for each lane).

use std::sync::LazyLock;

use crate::{
    decode::program::NONE,
    numeric::format::{Bf16, F16, Half},
};

/// Lanes of a warp.
pub(crate) const LANES: usize = 32;

/// 32 lanes of 32 bits: a narrow register, or half of a 64-bit one.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct Unit(pub [u32; LANES]);

/// The registers of one warp.
pub(crate) struct File {
    units: Vec<Unit>,
    /// One bit per lane.
    pub predicates: Vec<u32>,
}

/// Registers of an instruction; its lane function knows their roles.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slots {
    pub d: u32,
    pub a: u32,
    pub b: u32,
    pub c: u32,
    pub e: u32,
    /// Predicates: the result, and one that is read.
    pub p: u32,
    pub r: u32,
}

impl Slots {
    /// `d` alone.
    pub fn target(d: u32) -> Slots {
        Slots {
            d,
            ..Slots::default()
        }
    }

    /// `d` of one source.
    pub fn unary(d: u32, a: u32) -> Slots {
        Slots {
            a,
            ..Slots::target(d)
        }
    }

    /// `d` of two sources.
    pub fn binary(d: u32, a: u32, b: u32) -> Slots {
        Slots {
            b,
            ..Slots::unary(d, a)
        }
    }

    /// Predicate `p` of two sources, registers or predicates.
    pub fn predicate(p: u32, a: u32, b: u32) -> Slots {
        Slots {
            p,
            a,
            b,
            ..Slots::default()
        }
    }
}

/// An instruction's work on the lanes of a mask.
///
/// # Safety
/// Calling one needs the features of [`fast`], if that is true.
pub(crate) type LaneFn = unsafe fn(&mut File, &Slots, u32);

static FAST: LazyLock<bool> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    {
        ["avx2", "fma", "bmi2", "lzcnt", "popcnt"]
            .iter()
            .all(|f| match *f {
                "avx2" => is_x86_feature_detected!("avx2"),
                "fma" => is_x86_feature_detected!("fma"),
                "bmi2" => is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2"),
                "lzcnt" => is_x86_feature_detected!("lzcnt"),
                _ => is_x86_feature_detected!("popcnt"),
            })
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
});

/// True when this machine has AVX2, FMA, BMI, LZCNT and POPCNT.
pub(crate) fn fast() -> bool {
    *FAST
}

impl File {
    pub fn new(units: usize, predicates: usize) -> File {
        File {
            units: vec![Unit([0; LANES]); units],
            predicates: vec![0; predicates],
        }
    }

    #[inline(always)]
    pub fn narrow(&self, slot: u32) -> &[u32; LANES] {
        &self.units[slot as usize].0
    }

    #[inline(always)]
    pub fn narrow_mut(&mut self, slot: u32) -> &mut [u32; LANES] {
        &mut self.units[slot as usize].0
    }

    /// A 64-bit register.
    #[inline(always)]
    pub fn wide(&self, slot: u32) -> &[u64; LANES] {
        let pair: &[Unit; 2] = self.units[slot as usize..slot as usize + 2]
            .try_into()
            .expect("two units");
        // SAFETY: 64 `u32` without padding are 32 `u64` in size, and a unit is aligned for them; any bits are valid.
        unsafe { &*(&raw const *pair).cast() }
    }

    #[inline(always)]
    pub fn wide_mut(&mut self, slot: u32) -> &mut [u64; LANES] {
        let pair: &mut [Unit; 2] = (&mut self.units[slot as usize..slot as usize + 2])
            .try_into()
            .expect("two units");
        // SAFETY: as in `wide`, and the borrow is exclusive.
        unsafe { &mut *(&raw mut *pair).cast() }
    }

    /// Sets `predicate` to `bits` in the lanes of `mask`.
    #[inline(always)]
    pub fn set_predicate(&mut self, predicate: u32, mask: u32, bits: u32) {
        let p = &mut self.predicates[predicate as usize];
        *p = *p & !mask | bits & mask;
    }

    /// Sets a 32-bit register in the lanes of `mask`; does nothing for `_`.
    pub fn put_narrow(&mut self, slot: u32, mask: u32, values: &[u32; LANES]) {
        if slot != NONE {
            blend(self.narrow_mut(slot), mask, values);
        }
    }

    /// The same for a 64-bit register.
    pub fn put_wide(&mut self, slot: u32, mask: u32, values: &[u64; LANES]) {
        if slot != NONE {
            blend(self.wide_mut(slot), mask, values);
        }
    }

    /// The same for a predicate.
    pub fn put_predicate(&mut self, predicate: u32, mask: u32, bits: u32) {
        if predicate != NONE {
            self.set_predicate(predicate, mask, bits);
        }
    }
}

/// A type that registers hold.
pub(crate) trait Lane: Copy + Default + Send + Sync + 'static {
    fn load(file: &File, slot: u32) -> [Self; LANES];
    fn store(file: &mut File, slot: u32, mask: u32, values: &[Self; LANES]);
}

/// Lanes of one type as lanes of another.
#[inline(always)]
fn each<A: Copy, D: Copy + Default>(from: &[A; LANES], f: impl Fn(A) -> D) -> [D; LANES] {
    let mut to = [D::default(); LANES];
    for i in 0..LANES {
        to[i] = f(from[i]);
    }
    to
}

#[inline(always)]
fn blend<T: Copy>(to: &mut [T; LANES], mask: u32, values: &[T; LANES]) {
    if mask == u32::MAX {
        *to = *values;
        return;
    }
    for i in 0..LANES {
        to[i] = if mask >> i & 1 != 0 { values[i] } else { to[i] };
    }
}

macro_rules! lane {
    ($ty:ty, $part:ident, $part_mut:ident, $from:expr, $into:expr) => {
        impl Lane for $ty {
            #[inline(always)]
            fn load(file: &File, slot: u32) -> [$ty; LANES] {
                each(file.$part(slot), $from)
            }
            #[inline(always)]
            fn store(file: &mut File, slot: u32, mask: u32, values: &[$ty; LANES]) {
                blend(file.$part_mut(slot), mask, &each(values, $into));
            }
        }
    };
}

lane!(u32, narrow, narrow_mut, |x| x, |x| x);
lane!(i32, narrow, narrow_mut, |x| x as i32, |x| x as u32);
lane!(f32, narrow, narrow_mut, f32::from_bits, f32::to_bits);
lane!(u16, narrow, narrow_mut, |x| x as u16, u32::from);
lane!(i16, narrow, narrow_mut, |x| x as i16, |x| u32::from(
    x as u16
));
lane!(u8, narrow, narrow_mut, |x| x as u8, u32::from);
lane!(i8, narrow, narrow_mut, |x| x as i8, |x| u32::from(x as u8));
lane!(F16, narrow, narrow_mut, |x| F16(x as u16), |x| u32::from(
    x.0
));
lane!(Bf16, narrow, narrow_mut, |x| Bf16(x as u16), |x| u32::from(
    x.0
));
lane!(u64, wide, wide_mut, |x| x, |x| x);
lane!(i64, wide, wide_mut, |x| x as i64, |x| x as u64);
lane!(f64, wide, wide_mut, f64::from_bits, f64::to_bits);

/// Two values in one register, the first in the lower half.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pair<T>(pub T, pub T);

impl Lane for Pair<f32> {
    #[inline(always)]
    fn load(file: &File, slot: u32) -> [Pair<f32>; LANES] {
        each(file.wide(slot), |x| {
            Pair(f32::from_bits(x as u32), f32::from_bits((x >> 32) as u32))
        })
    }
    #[inline(always)]
    fn store(file: &mut File, slot: u32, mask: u32, values: &[Pair<f32>; LANES]) {
        let pack = |x: Pair<f32>| u64::from(x.0.to_bits()) | u64::from(x.1.to_bits()) << 32;
        blend(file.wide_mut(slot), mask, &each(values, pack));
    }
}

impl<T: Half> Lane for Pair<T> {
    #[inline(always)]
    fn load(file: &File, slot: u32) -> [Pair<T>; LANES] {
        each(file.narrow(slot), |x| {
            Pair(T::from_bits(x as u16), T::from_bits((x >> 16) as u16))
        })
    }
    #[inline(always)]
    fn store(file: &mut File, slot: u32, mask: u32, values: &[Pair<T>; LANES]) {
        let pack = |x: Pair<T>| u32::from(x.0.bits()) | u32::from(x.1.bits()) << 16;
        blend(file.narrow_mut(slot), mask, &each(values, pack));
    }
}

/// The function that a closure without captures stands for.
#[inline(always)]
fn conjure<F: Copy>() -> F {
    const { assert!(size_of::<F>() == 0, "lane functions capture nothing") };
    // SAFETY: reading a value of size zero reads nothing; one existed when the lane function was made, and `F: Copy`
    // allows another.
    unsafe { std::ptr::NonNull::<F>::dangling().read() }
}

/// Defines a maker of lane functions from a closure: its body compiled twice, and chosen by [`fast`].
macro_rules! lane_functions {
    ($(#[$doc:meta])* $name:ident<$($generic:ident: $bound:path),*>(($($arg:ty),*) -> $out:ty), |$f:ident, $file:ident, $s:ident, $mask:ident| $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name<$($generic: $bound,)* F: Fn($($arg),*) -> $out + Copy + 'static>(_: F) -> LaneFn
        where $($generic: 'static),* {
            #[inline(always)]
            fn body<$($generic: $bound,)* F: Fn($($arg),*) -> $out + Copy>($file: &mut File, $s: &Slots, $mask: u32) {
                let $f = conjure::<F>();
                $body
            }
            fn portable<$($generic: $bound,)* F: Fn($($arg),*) -> $out + Copy>(file: &mut File, s: &Slots, mask: u32) {
                body::<$($generic,)* F>(file, s, mask);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
            fn vector<$($generic: $bound,)* F: Fn($($arg),*) -> $out + Copy>(file: &mut File, s: &Slots, mask: u32) {
                body::<$($generic,)* F>(file, s, mask);
            }
            #[cfg(target_arch = "x86_64")]
            if fast() {
                return vector::<$($generic,)* F>;
            }
            portable::<$($generic,)* F>
        }
    };
}

lane_functions! {
    /// `d = f(a)`
    unary<A: Lane, D: Lane>((A) -> D), |f, file, s, mask| {
        let values = each(&A::load(file, s.a), f);
        D::store(file, s.d, mask, &values);
    }
}

lane_functions! {
    /// `d = f(a, b)`
    binary<A: Lane, B: Lane, D: Lane>((A, B) -> D), |f, file, s, mask| {
        let (a, b) = (A::load(file, s.a), B::load(file, s.b));
        let mut values = [D::default(); LANES];
        for i in 0..LANES {
            values[i] = f(a[i], b[i]);
        }
        D::store(file, s.d, mask, &values);
    }
}

lane_functions! {
    /// `d = f(a, b, c)`
    ternary<A: Lane, B: Lane, C: Lane, D: Lane>((A, B, C) -> D), |f, file, s, mask| {
        let (a, b, c) = (A::load(file, s.a), B::load(file, s.b), C::load(file, s.c));
        let mut values = [D::default(); LANES];
        for i in 0..LANES {
            values[i] = f(a[i], b[i], c[i]);
        }
        D::store(file, s.d, mask, &values);
    }
}

lane_functions! {
    /// `d = f(a, b, c, e)`
    quaternary<A: Lane, B: Lane, C: Lane, E: Lane, D: Lane>((A, B, C, E) -> D), |f, file, s, mask| {
        let (a, b, c, e) = (A::load(file, s.a), B::load(file, s.b), C::load(file, s.c), E::load(file, s.e));
        let mut values = [D::default(); LANES];
        for i in 0..LANES {
            values[i] = f(a[i], b[i], c[i], e[i]);
        }
        D::store(file, s.d, mask, &values);
    }
}

lane_functions! {
    /// Predicate `p = f(a, b)`.
    compare<A: Lane>((A, A) -> bool), |f, file, s, mask| {
        let (a, b) = (A::load(file, s.a), A::load(file, s.b));
        let mut bits = [0u32; LANES];
        for i in 0..LANES {
            bits[i] = u32::from(f(a[i], b[i])) << i;
        }
        let result = bits.iter().fold(0, |all, bit| all | bit);
        file.set_predicate(s.p, mask, result);
    }
}

lane_functions! {
    /// `d = if r { a } else { b }`, with the mask of lanes from `f(r)`.
    select<T: Lane>((u32) -> u32), |f, file, s, mask| {
        let (mut a, b) = (T::load(file, s.a), T::load(file, s.b));
        let chosen = f(file.predicates[s.r as usize]);
        for i in 0..LANES {
            a[i] = if chosen >> i & 1 != 0 { a[i] } else { b[i] };
        }
        T::store(file, s.d, mask, &a);
    }
}

lane_functions! {
    /// `(d, carry) = f(a, b, c, carry)`: the carry comes from predicate `r` and goes to predicate `p`.
    carry<T: Lane>((T, T, T, bool) -> (T, bool)), |f, file, s, mask| {
        let (a, b, c) = (T::load(file, s.a), T::load(file, s.b), T::load(file, s.c));
        let (mut values, mut carries) = ([T::default(); LANES], 0);
        let from = file.predicates[s.r as usize];
        for i in 0..LANES {
            let (value, carry) = f(a[i], b[i], c[i], from >> i & 1 != 0);
            values[i] = value;
            carries |= u32::from(carry) << i;
        }
        T::store(file, s.d, mask, &values);
        file.set_predicate(s.p, mask, carries);
    }
}

lane_functions! {
    /// Predicate `p = f(a bits, b bits, c bits)`: `a`, `b` and `c` name predicates.
    logic<>((u32, u32, u32) -> u32), |f, file, s, mask| {
        let [a, b, c] = [s.a, s.b, s.c].map(|slot| file.predicates[slot as usize]);
        file.set_predicate(s.p, mask, f(a, b, c));
    }
}

/// `d = f(a, b, c, variant)` without vector code, for rare instructions: one function serves many instructions by the number in
/// slot `e`, which is no register here.
pub(crate) fn rare<T: Lane, D: Lane>(f: impl Fn(T, T, T, u32) -> D + Copy + 'static) -> LaneFn {
    fn run<T: Lane, D: Lane, F: Fn(T, T, T, u32) -> D + Copy>(
        file: &mut File,
        s: &Slots,
        mask: u32,
    ) {
        let f = conjure::<F>();
        let (a, b, c) = (T::load(file, s.a), T::load(file, s.b), T::load(file, s.c));
        let mut values = [D::default(); LANES];
        for i in 0..LANES {
            if mask >> i & 1 != 0 {
                values[i] = f(a[i], b[i], c[i], s.e);
            }
        }
        D::store(file, s.d, mask, &values);
    }
    fn of<T: Lane, D: Lane, F: Fn(T, T, T, u32) -> D + Copy>(_: F) -> LaneFn {
        run::<T, D, F>
    }
    of::<T, D, _>(f)
}
