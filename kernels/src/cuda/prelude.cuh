// gristmill's device prelude: element types, and primitive ops whose meaning differs from that of C++'s operators.

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

// Half types are storage: programs widen to f32, compute, and round once.
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

#define GM_DEVICE __device__ __forceinline__

// The unsigned type of a type's width, and the width.
template <class T> struct gm_unsigned;
template <> struct gm_unsigned<i8> { typedef u8 type; };
template <> struct gm_unsigned<i16> { typedef u16 type; };
template <> struct gm_unsigned<i32> { typedef u32 type; };
template <> struct gm_unsigned<i64> { typedef u64 type; };
template <> struct gm_unsigned<u8> { typedef u8 type; };
template <> struct gm_unsigned<u16> { typedef u16 type; };
template <> struct gm_unsigned<u32> { typedef u32 type; };
template <> struct gm_unsigned<u64> { typedef u64 type; };

template <class T> GM_DEVICE constexpr bool gm_is_signed() { return T(-1) < T(0); }
template <class T> GM_DEVICE constexpr u32 gm_width() { return 8 * sizeof(T); }

// Faults: the greatest status of a launch stays.
GM_DEVICE void gm_fault(u32* status, u32 code) { atomicMax(status, code); }

// Integers wrap.
template <class T> GM_DEVICE T gm_neg(T x) { typedef typename gm_unsigned<T>::type U; return T(U(0) - U(x)); }
template <class T> GM_DEVICE T gm_add(T a, T b) { typedef typename gm_unsigned<T>::type U; return T(U(U(a) + U(b))); }
template <class T> GM_DEVICE T gm_sub(T a, T b) { typedef typename gm_unsigned<T>::type U; return T(U(U(a) - U(b))); }
// The product of two 16-bit numbers must not be one of signed ints, which may overflow.
template <class T> GM_DEVICE T gm_mul(T a, T b) { return T(u64(a) * u64(b)); }
GM_DEVICE i32 gm_mul(i32 a, i32 b) { return i32(u32(a) * u32(b)); }
GM_DEVICE u32 gm_mul(u32 a, u32 b) { return a * b; }

template <class T> GM_DEVICE T gm_abs(T x) { return x < T(0) ? gm_neg(x) : x; }
template <class T> GM_DEVICE T gm_sign(T x) { return T(x > T(0)) - T(x < T(0)); }
// NaN and zeros of both signs are kept.
GM_DEVICE f32 gm_sign(f32 x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
GM_DEVICE f64 gm_sign(f64 x) { return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x; }

template <class T> GM_DEVICE T gm_min(T a, T b) { return b < a ? b : a; }
template <class T> GM_DEVICE T gm_max(T a, T b) { return b > a ? b : a; }
// NaN wins, and -0 is less than +0.
GM_DEVICE f32 gm_min(f32 a, f32 b) {
#if __CUDA_ARCH__ >= 800
    f32 r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
#else
    return a != a || b != b ? __uint_as_float(0x7fc00000u) : fminf(a, b);
#endif
}
GM_DEVICE f32 gm_max(f32 a, f32 b) {
#if __CUDA_ARCH__ >= 800
    f32 r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
#else
    return a != a || b != b ? __uint_as_float(0x7fc00000u) : fmaxf(a, b);
#endif
}
GM_DEVICE f64 gm_min(f64 a, f64 b) { return a != a || b != b ? __longlong_as_double(0x7ff8000000000000ll) : fmin(a, b); }
GM_DEVICE f64 gm_max(f64 a, f64 b) { return a != a || b != b ? __longlong_as_double(0x7ff8000000000000ll) : fmax(a, b); }

// Truncating division and both remainders. A zero divisor is a fault, and gives 0; the least integer divided by -1 wraps.
template <class T> GM_DEVICE T gm_div(T a, T b, u32* status) {
    if (b == T(0)) {
        gm_fault(status, 2);
        return T(0);
    }
    if (gm_is_signed<T>() && b == T(-1)) return gm_neg(a);
    return a / b;
}
template <class T> GM_DEVICE T gm_rem(T a, T b, u32* status) {
    if (b == T(0)) {
        gm_fault(status, 2);
        return T(0);
    }
    if (gm_is_signed<T>() && b == T(-1)) return T(0);
    return a % b;
}
template <class T> GM_DEVICE T gm_mod(T a, T b, u32* status) {
    T r = gm_rem(a, b, status);
    return r != T(0) && (r < T(0)) != (b < T(0)) ? T(r + b) : r;
}
// The sign of the divisor, for a zero too.
GM_DEVICE f32 gm_mod(f32 a, f32 b) {
    f32 r = fmodf(a, b);
    return r == 0.0f ? copysignf(r, b) : (r < 0.0f) != (b < 0.0f) ? r + b : r;
}
GM_DEVICE f64 gm_mod(f64 a, f64 b) {
    f64 r = fmod(a, b);
    return r == 0.0 ? copysign(r, b) : (r < 0.0) != (b < 0.0) ? r + b : r;
}

// Wrapping power by repeated squaring; a negative exponent gives the truncated quotient.
template <class T> GM_DEVICE T gm_pow(T base, T exponent) {
    if (gm_is_signed<T>() && exponent < T(0)) {
        return base == T(1) ? T(1) : base == T(-1) ? (exponent & T(1) ? T(-1) : T(1)) : T(0);
    }
    T result = T(1);
    for (u64 n = u64(exponent); n != 0; n >>= 1) {
        if (n & 1) result = gm_mul(result, base);
        base = gm_mul(base, base);
    }
    return result;
}

// A count of the width or more, read as unsigned, leaves only the fill.
template <class T> GM_DEVICE T gm_shl(T x, T n) {
    typedef typename gm_unsigned<T>::type U;
    return U(n) < U(gm_width<T>()) ? T(U(U(x) << U(n))) : T(0);
}
template <class T> GM_DEVICE T gm_shr(T x, T n) {
    typedef typename gm_unsigned<T>::type U;
    if (U(n) < U(gm_width<T>())) return T(x >> n);
    return gm_is_signed<T>() && x < T(0) ? T(-1) : T(0);
}

// Float to integer: truncates and saturates; NaN gives 0.
template <class T> struct gm_from_float;
template <> struct gm_from_float<i32> {
    static GM_DEVICE i32 of(f32 x) { return x != x ? 0 : __float2int_rz(x); }
    static GM_DEVICE i32 of(f64 x) { return x != x ? 0 : __double2int_rz(x); }
};
template <> struct gm_from_float<u32> {
    static GM_DEVICE u32 of(f32 x) { return x != x ? 0 : __float2uint_rz(x); }
    static GM_DEVICE u32 of(f64 x) { return x != x ? 0 : __double2uint_rz(x); }
};
template <> struct gm_from_float<i64> {
    static GM_DEVICE i64 of(f32 x) { return x != x ? 0 : __float2ll_rz(x); }
    static GM_DEVICE i64 of(f64 x) { return x != x ? 0 : __double2ll_rz(x); }
};
template <> struct gm_from_float<u64> {
    static GM_DEVICE u64 of(f32 x) { return x != x ? 0 : __float2ull_rz(x); }
    static GM_DEVICE u64 of(f64 x) { return x != x ? 0 : __double2ull_rz(x); }
};
template <class T, i32 LEAST, i32 MOST> struct gm_narrow {
    template <class F> static GM_DEVICE T of(F x) {
        i32 n = gm_from_float<i32>::of(x);
        return T(n < LEAST ? LEAST : n > MOST ? MOST : n);
    }
};
template <> struct gm_from_float<i8> : gm_narrow<i8, -128, 127> {};
template <> struct gm_from_float<i16> : gm_narrow<i16, -32768, 32767> {};
template <> struct gm_from_float<u8> : gm_narrow<u8, 0, 255> {};
template <> struct gm_from_float<u16> : gm_narrow<u16, 0, 65535> {};

// Half types to and from floats; to nearest, ties to even.
GM_DEVICE f32 gm_f32(f16 x) {
    f32 r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
    return r;
}
GM_DEVICE f32 gm_f32(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
GM_DEVICE f16 gm_f16(f32 x) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}
GM_DEVICE f16 gm_f16(f64 x) {
    f16 r;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(r.bits) : "d"(x));
    return r;
}
// One instruction from sm_80 on, as for f16; NaN has one representation there. Without it, NaN keeps its sign and upper bits and becomes quiet.
GM_DEVICE bf16 gm_bf16(f32 x) {
    bf16 r;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    u32 upper = bits >> 16;
    r.bits = u16(x != x ? upper | 0x40u : (bits + 0x7fffu + (upper & 1u)) >> 16);
#endif
    return r;
}
// f32 rounded to odd: what is cut off leaves a mark, so that a second rounding to fewer bits goes as the only one would.
GM_DEVICE f32 gm_odd_f32(f64 x) {
    f32 cut = __double2float_rz(x);
    u32 bits = __float_as_uint(cut);
    return __uint_as_float(x == x && f64(cut) != x ? bits | 1u : bits);
}
GM_DEVICE bf16 gm_bf16(f64 x) { return gm_bf16(gm_odd_f32(x)); }
