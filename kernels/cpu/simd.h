// Vectors of W floats for one instruction set, which a -DLL_* flag selects. Every operation is elementwise or has a
// fixed order, so an element's result does not depend on the number of other elements.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(LL_AVX512) || defined(LL_AVX2)
#include <immintrin.h>
#endif

#include "entries.h"

#define LL_INLINE inline __attribute__((always_inline))

namespace ll {

#if defined(LL_AVX512)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};

LL_INLINE vf splat(float x) { return x - vf{}; }  // vf{} + x would lose the sign of -0
LL_INLINE vi splat_i(int32_t x) { return vi{} + x; }

template <class V>
LL_INLINE V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

LL_INLINE vf fma(vf a, vf b, vf c) {
#if defined(LL_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(LL_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;  // rounds twice; a library call for every fma would be far slower
#endif
}

LL_INLINE vf vmax(vf a, vf b) {  // returns b if either is NaN
#if defined(LL_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// Uses intrinsics because gcc 12 compiles __builtin_convertvector to two to five instructions.
LL_INLINE vf widen(vh h) {
#if defined(LL_AVX512)
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(LL_AVX2)
    return (vf)((vu)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

// Rounds to bf16 (to nearest even) in the upper half of every word. NaN becomes a quiet NaN. The lower halves are
// undefined.
LL_INLINE vu to_upper_half(vf x) {
    vu u = (vu)x;
    vu rounded = u + 0x7fffu + ((u >> 16) & 1u), quiet = u | 0x400000u;
    return (x != x) ? quiet : rounded;
}

LL_INLINE vh narrow(vf x) {
    vu words = to_upper_half(x) >> 16;
#if defined(LL_AVX512)
    return (vh)_mm512_cvtepi32_epi16((__m512i)words);
#elif defined(LL_AVX2)
    __m256i halves = _mm256_packus_epi32((__m256i)words, (__m256i)words);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
#else
    return __builtin_convertvector(words, vh);
#endif
}

LL_INLINE vf load(const float* p) { return load_as<vf>(p); }
LL_INLINE vf load(const bf16* p) { return widen(load_as<vh>(p)); }
LL_INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
LL_INLINE void store(bf16* p, vf x) {
    vh h = narrow(x);
    std::memcpy(p, &h, sizeof h);
}

// Load and store n < W elements. The remaining elements are zero after a load, and are not stored.
template <class T>
LL_INLINE vf load_n(const T* p, int n) {
    alignas(64) T buffer[W] = {};
    std::memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}
template <class T>
LL_INLINE void store_n(T* p, vf x, int n) {
    alignas(64) T buffer[W];
    store(buffer, x);
    std::memcpy(p, buffer, n * sizeof(T));
}
template <class T>
LL_INLINE vf load_upto(const T* p, int64_t n) {
    return n >= W ? load(p) : load_n(p, int(n));
}
template <class T>
LL_INLINE void store_upto(T* p, vf x, int64_t n) {
    if (n >= W)
        store(p, x);
    else
        store_n(p, x, int(n));
}

// Calls part(i, n) for elements [i, i + n) of n_all. n is the constant W except in the last call, so that the loop has
// no branch.
template <class F>
LL_INLINE void for_vectors(int64_t n_all, F&& part) {
    int64_t i = 0;
    for (; i + W <= n_all; i += W) part(i, std::integral_constant<int64_t, W>{});
    if (i < n_all) part(i, n_all - i);
}

// Rounds x to the dtype of the pointer. Returns floats.
LL_INLINE vf rounded_to(vf x, const float*) { return x; }
LL_INLINE vf rounded_to(vf x, const bf16*) { return (vf)(to_upper_half(x) & 0xffff0000u); }

// Adds the upper half of a vector to its lower half, until one element is left.
LL_INLINE float hsum(vf x) {
#if defined(LL_AVX512)
    const __m512 v = (__m512)x;
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float a[W];
    store(a, x);
    for (int width = W / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a[i] = a[i] + a[i + width];
    return a[0];
#endif
}

LL_INLINE float hmax(vf x) {
#if defined(LL_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float a[W];
    store(a, x);
    float m = a[0];
    for (int i = 1; i < W; ++i) m = a[i] > m ? a[i] : m;
    return m;
#endif
}

// Returns 2^x for x <= 127, and 0 below -126, with an error of at most 2 ulp. The polynomial is Cephes' exp2f on [-0.5,
// 0.5].
LL_INLINE vf exp2v(vf x) {
    const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf shifted = x + magic;
    vf r = x - (shifted - magic);
    vf p = splat(1.535336188319500e-4f);
    p = fma(p, r, splat(1.339887440266574e-3f));
    p = fma(p, r, splat(9.618437357674640e-3f));
    p = fma(p, r, splat(5.550332471162809e-2f));
    p = fma(p, r, splat(2.402264791363012e-1f));
    p = fma(p, r, splat(6.931472028550421e-1f));
    p = fma(p, r, splat(1.f));
    vu n = (vu)shifted << 23;  // shifts out the high bits of the magic number
    vf y = (vf)((vu)p + n);
    return x < splat(-126.f) ? splat(0.f) : y;
}

constexpr float LOG2E = 1.44269504088896341f;

// Returns e^x for x <= 88, and 0 below -87.33, with an error of at most 1 ulp and the bits of torch's own vectors. This
// is Sleef's expf (Shibata and Petrogalli 2020): ln 2 is subtracted in two parts.
LL_INLINE vf expv(vf x) {
    const vf magic = splat(12582912.f);
    vf shifted = x * splat(LOG2E) + magic;
    vf n = shifted - magic;
    vf r = fma(n, splat(-1.428606765330187045e-06f), fma(n, splat(-0.693145751953125f), x));
    vf p = splat(1.98527617612853646e-4f);
    p = fma(p, r, splat(1.39304355252534151e-3f));
    p = fma(p, r, splat(8.33336077630519867e-3f));
    p = fma(p, r, splat(4.16664853692054749e-2f));
    p = fma(p, r, splat(1.66666671633720398e-1f));
    p = fma(p, r, splat(0.5f));
    p = splat(1.f) + fma(r * r, p, r);
    vf y = (vf)((vu)p + ((vu)shifted << 23));
    return x < splat(-87.33f) ? splat(0.f) : y;
}

// Returns e^-x for any x; infinity below -88, so that silu of a very negative gate is -0.
LL_INLINE vf exp_minus(vf x) {
    const vf limit = splat(88.f);
    return -x > limit ? splat(INFINITY) : expv(-x > limit ? limit : -x);
}

// Returns activation(gate) * up, both of type T. The activations are gate * sigmoid(z). silu: z = gate. gelu, in its
// tanh form: z = 2 sqrt(2/pi) (gate + 0.044715 gate^3), because 1 + tanh(y) = 2 sigmoid(2y).
template <bool GELU, class T>
LL_INLINE vf gated(vf gate, vf up, const T* type) {
    vf z = gate;
    if constexpr (GELU) z = gate * fma(gate * gate, splat(0.0713548162726f), splat(1.59576912161f));
    return rounded_to(gate / (splat(1.f) + exp_minus(z)), type) * up;
}

// Returns cap * tanh(x * scale / cap), the softcap that Gemma 2 applies to scores and logits.
LL_INLINE vf capped(vf x, float scale, float cap) {
    const vf y = x * splat(scale / cap), most = splat(20.f);  // tanh is 1 beyond it
    const vf magnitude = vmax(y, -y), bounded = magnitude > most ? most : magnitude;
    const vf e = exp2v(bounded * splat(-2.f * LOG2E));
    const vf t = (splat(1.f) - e) / (splat(1.f) + e);
    return splat(cap) * (y < vf{} ? -t : t);
}

#if defined(LL_AVX512)
#define LL_LO 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LL_HI 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define LL_LO 0, 8, 1, 9, 2, 10, 3, 11
#define LL_HI 4, 12, 5, 13, 6, 14, 7, 15
#endif

// Every 32-bit word holds two bf16. lower_half and upper_half extract one of them; zip_low and zip_high interleave both
// again.
LL_INLINE vf lower_half(vf words) { return (vf)((vu)words << 16); }
LL_INLINE vf upper_half(vf words) { return (vf)((vu)words & 0xffff0000u); }
LL_INLINE vf zip_low(vf lower, vf upper) { return __builtin_shufflevector(lower, upper, LL_LO); }
LL_INLINE vf zip_high(vf lower, vf upper) { return __builtin_shufflevector(lower, upper, LL_HI); }

}  // namespace ll
