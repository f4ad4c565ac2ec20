// Keys and values of 8 bits: one row per token and head, with conversions to and from floats.
//
// An int8 row is d integers in [-127, 127], followed by their scale, a float: the row's largest magnitude / 127. An
// e4m3 row is d numbers without a scale. A row depends only on its own token. bf16 represents int8 and e4m3 numbers
// exactly.
#pragma once

#include "simd.h"

namespace ll {

struct i8 {
    int8_t bits;
};
struct e4m3 {
    uint8_t bits;
};
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vsb __attribute__((vector_size(W)));

template <class E>
constexpr bool IS_8_BITS = std::is_same_v<E, i8> || std::is_same_v<E, e4m3>;

// Number of elements in a row after its d numbers.
template <class E>
constexpr int64_t SCALE_WIDTH = std::is_same_v<E, i8> ? sizeof(float) : 0;

// Returns the factor by which to multiply the floats that `load` returns.
LL_INLINE float scale_of(const i8* row, int64_t d) {
    float scale;
    std::memcpy(&scale, row + d, sizeof scale);
    return scale;
}
LL_INLINE float scale_of(const e4m3*, int64_t) { return 256.f; }

LL_INLINE vf load(const i8* p) {
#if defined(LL_AVX512)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(LL_AVX2)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(load_as<vsb>(p), vi), vf);
#endif
}

// Except for NaN, the shifted bits of an e4m3 number x are those of the half-precision number x * 2^-8.
LL_INLINE vf load(const e4m3* p) {
#if defined(LL_AVX512) || defined(LL_AVX2)
    typedef int16_t halves __attribute__((vector_size(2 * W)));
#if defined(LL_AVX512)
    const halves wide = (halves)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)) << 8;
#else
    const halves wide = (halves)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)) << 8;
#endif
    halves half = (wide >> 1) & int16_t(0xbf80);
    half |= (half + int16_t(0x80)) & int16_t(0x4000);  // NaN, 0x7f, is the only magnitude from which 1 carries
#if defined(LL_AVX512)
    return (vf)_mm512_cvtph_ps((__m256i)half);
#else
    return (vf)_mm256_cvtph_ps((__m128i)half);
#endif
#else
    const vu bits = __builtin_convertvector(load_as<vb>(p), vu), magnitude = bits & 0x7fu;
    const vf value = (vf)((bits & 0x80u) << 24 | magnitude << 20) * splat(0x1p112f);
    return magnitude == 0x7fu ? splat(NAN) : value;
#endif
}

// Stores the lowest byte of each of n words.
LL_INLINE void store_bytes(void* p, vu words, int64_t n) {
#if defined(LL_AVX512)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)words);
#else
    const vb bytes = __builtin_convertvector(words, vb);
#endif
    std::memcpy(p, &bytes, n >= W ? W : size_t(n));
}

constexpr float LEAST_MAGNITUDE = 0x1p-100f;  // smaller rows become zeros, because the inverse may overflow

LL_INLINE vf magnitude_of(vf x) { return (vf)((vu)x & 0x7fffffffu); }

// Rounds to nearest even. A row with NaN or infinity has the scale NaN.
LL_INLINE void store_row(i8* row, const float* x, int64_t d) {
    vf top = {}, spoiled = {};
    for_vectors(d, [&](int64_t i, auto n) {
        const vf v = load_upto(x + i, n);
        top = vmax(magnitude_of(v), top), spoiled += v - v;
    });
    const float most = hmax(top), scale = most / 127.f + hsum(spoiled);
    const vf inverse = splat(most >= LEAST_MAGNITUDE ? 127.f / most : 0.f), magic = splat(12582912.f);  // 1.5 * 2^23
    for_vectors(d, [&](int64_t i, auto n) {
        store_bytes(row + i, (vu)(load_upto(x + i, n) * inverse + magic), n);
    });
    std::memcpy(row + d, &scale, sizeof scale);
}

// Rounds to nearest even and saturates at +-448; NaN stays NaN.
LL_INLINE void store_row(e4m3* row, const float* x, int64_t d) {
    for_vectors(d, [&](int64_t i, auto n) {
        const vf v = load_upto(x + i, n), size = magnitude_of(v), most = splat(448.f);
        const vf bounded = size > most ? most : size;  // not NaN: comparisons with NaN are false
        const vu u = (vu)bounded, normal = ((u + 0x7ffffu + ((u >> 20) & 1u)) >> 20) - (120u << 3);
        const vu small = (vu)(bounded + splat(16384.f)) - (vu)splat(16384.f);  // in units of 2^-9
        const vu rounded = (vu)(bounded < splat(0x1p-6f) ? small : normal);
        store_bytes(row + i, ((vu)v >> 31) << 7 | (vu)(v != v ? vu{} + 0x7fu : rounded), n);
    });
}

// Calls work(a query, a cached element) with values of the types that an entry point's is_bf16 and kv_type select.
template <class F>
int for_types(int64_t is_bf16, int64_t kv_type, F&& work) {
    const auto with = [&](auto q) {
        return kv_type == LL_KV_INT8 ? work(q, i8{}) : kv_type == LL_KV_E4M3 ? work(q, e4m3{}) : work(q, q);
    };
    return is_bf16 ? with(bf16{}) : with(float{});
}

}  // namespace ll
