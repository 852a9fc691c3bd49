
// Floats of 8 bits are storage, too. Conversions to them go to nearest, ties to even, and saturate; NaN stays NaN.
template <int FRACTION, int BIAS, u32 LARGEST, u32 NAN_CODE, u32 INFINITE> struct gm_float8 {
    u8 bits;

    // 2 to the exponent of the last place of the smallest numbers, and its inverse.
    static GM_DEVICE f32 step() { return __uint_as_float(u32(128 - BIAS - FRACTION) << 23); }
    static GM_DEVICE f32 steps() { return __uint_as_float(u32(126 + BIAS + FRACTION) << 23); }

    static GM_DEVICE f32 decode(u32 code) {
        u32 body = code & 0x7fu;
        if (body == INFINITE) return code & 0x80u ? __uint_as_float(0xff800000u) : __uint_as_float(0x7f800000u);
        if (body > LARGEST || code == NAN_CODE) return __uint_as_float(0x7fc00000u);
        f32 subnormal = f32(body) * step();
        f32 normal = __uint_as_float((body << (23 - FRACTION)) + (u32(127 - BIAS) << 23));
        f32 r = body >> FRACTION ? normal : subnormal;
        return code & 0x80u ? -r : r;
    }
    static GM_DEVICE u32 encode(f32 x) {
        u32 bits = __float_as_uint(x), body = bits & 0x7fffffffu;
        u32 subnormal = u32(__float2int_rn(fabsf(x) * steps()));
        u32 odd = body >> (23 - FRACTION) & 1u;
        u32 normal = ((body + (1u << (22 - FRACTION)) - 1u + odd) >> (23 - FRACTION)) - (u32(127 - BIAS) << FRACTION);
        u32 code = body < u32(128 - BIAS) << 23 ? subnormal : normal;
        code = code < LARGEST ? code : LARGEST;
        u32 sign = code != 0u || NAN_CODE != 0x80u ? bits >> 24 & 0x80u : 0u;
        return x != x ? NAN_CODE : code | sign;
    }
};

// 128 stands for "no infinity".
typedef gm_float8<3, 7, 0x7e, 0x7f, 128> f8e4m3fn;
typedef gm_float8<3, 8, 0x7f, 0x80, 128> f8e4m3fnuz;
typedef gm_float8<2, 15, 0x7b, 0x7f, 0x7c> f8e5m2;
typedef gm_float8<2, 16, 0x7f, 0x80, 128> f8e5m2fnuz;

template <class T> GM_DEVICE T gm_float8_of(u32 code) {
    T r;
    r.bits = u8(code);
    return r;
}

#if __CUDA_ARCH__ >= 890
// The upper half of the pair is converted for nothing.
GM_DEVICE f32 gm_float8_value(u32 halves) {
    f32 r;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, low;\n\t}" : "=f"(r) : "r"(halves));
    return r;
}
GM_DEVICE f32 gm_f32(f8e4m3fn x) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(x.bits)));
    return gm_float8_value(halves);
}
GM_DEVICE f32 gm_f32(f8e5m2 x) {
    u32 halves;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(u16(x.bits)));
    return gm_float8_value(halves);
}
GM_DEVICE f8e4m3fn gm_f8e4m3fn(f32 x) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return gm_float8_of<f8e4m3fn>(pair);
}
GM_DEVICE f8e5m2 gm_f8e5m2(f32 x) {
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return gm_float8_of<f8e5m2>(pair);
}
#else
GM_DEVICE f32 gm_f32(f8e4m3fn x) { return f8e4m3fn::decode(x.bits); }
GM_DEVICE f32 gm_f32(f8e5m2 x) { return f8e5m2::decode(x.bits); }
GM_DEVICE f8e4m3fn gm_f8e4m3fn(f32 x) { return gm_float8_of<f8e4m3fn>(f8e4m3fn::encode(x)); }
GM_DEVICE f8e5m2 gm_f8e5m2(f32 x) { return gm_float8_of<f8e5m2>(f8e5m2::encode(x)); }
#endif
GM_DEVICE f32 gm_f32(f8e4m3fnuz x) { return f8e4m3fnuz::decode(x.bits); }
GM_DEVICE f32 gm_f32(f8e5m2fnuz x) { return f8e5m2fnuz::decode(x.bits); }
GM_DEVICE f8e4m3fnuz gm_f8e4m3fnuz(f32 x) { return gm_float8_of<f8e4m3fnuz>(f8e4m3fnuz::encode(x)); }
GM_DEVICE f8e5m2fnuz gm_f8e5m2fnuz(f32 x) { return gm_float8_of<f8e5m2fnuz>(f8e5m2fnuz::encode(x)); }

GM_DEVICE f8e4m3fn gm_f8e4m3fn(f64 x) { return gm_f8e4m3fn(gm_odd_f32(x)); }
GM_DEVICE f8e4m3fnuz gm_f8e4m3fnuz(f64 x) { return gm_f8e4m3fnuz(gm_odd_f32(x)); }
GM_DEVICE f8e5m2 gm_f8e5m2(f64 x) { return gm_f8e5m2(gm_odd_f32(x)); }
GM_DEVICE f8e5m2fnuz gm_f8e5m2fnuz(f64 x) { return gm_f8e5m2fnuz(gm_odd_f32(x)); }
