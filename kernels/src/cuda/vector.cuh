// Several neighbouring elements at a time: one access of up to 16 bytes, aligned to its size.

template <int BYTES> struct gm_raw;
template <> struct gm_raw<1> { typedef u8 type; };
template <> struct gm_raw<2> { typedef u16 type; };
template <> struct gm_raw<4> { typedef u32 type; };
template <> struct gm_raw<8> { typedef uint2 type; };
template <> struct gm_raw<16> { typedef uint4 type; };

template <class T, int N> union gm_vector {
    T v[N];
    typename gm_raw<sizeof(T) * N>::type raw;
};

template <int N, class T> GM_DEVICE gm_vector<T, N> gm_load(const T* from) {
    gm_vector<T, N> x;
    x.raw = *reinterpret_cast<const typename gm_raw<sizeof(T) * N>::type*>(from);
    return x;
}
template <int N, class T> GM_DEVICE void gm_store(T* to, const gm_vector<T, N>& x) {
    *reinterpret_cast<typename gm_raw<sizeof(T) * N>::type*>(to) = x.raw;
}

// A run of N neighbouring elements that begins at a multiple of 16 bytes, or of its size if that is less.
template <class T, int N> struct gm_run {
    T v[N];
};
template <int N, class T> GM_DEVICE gm_run<T, N> gm_read(const T* from) {
    const int each = N * sizeof(T) < 16 ? N : 16 / sizeof(T);
    gm_run<T, N> x;
#pragma unroll
    for (int i = 0; i < N; i += each) {
        const auto part = gm_load<each>(from + i);
#pragma unroll
        for (int j = 0; j < each; ++j) x.v[i + j] = part.v[j];
    }
    return x;
}
