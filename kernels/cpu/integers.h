// Attention of bf16 queries over int8 keys and values in integers, where the instruction set has multiply-adds of
// 16-bit pairs. Queries and weights are rounded to 16 bits with one scale per row, much finer than the 8 bits of keys
// and values. Sums of integers are exact, so their order does not affect bits.
#pragma once

#include "eight_bits.h"

namespace ll {

#if defined(LL_AVX512) || defined(LL_AVX2)
#define LL_INTEGERS
template <class T, class E>
constexpr bool IN_INTEGERS = std::is_same_v<T, bf16> && std::is_same_v<E, i8>;
#else
template <class T, class E>
constexpr bool IN_INTEGERS = false;
#endif

constexpr int INTEGER_COLUMNS = 4 * W;  // columns of values that are loaded together
constexpr float MOST_16 = 32767.f;      // largest magnitude of a query's element or of a weight

#if defined(LL_AVX512)
LL_INLINE vi madd_pairs(vi a, vi b, vi acc) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
LL_INLINE vi low_bytes(vi x) { return (vi)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8); }
LL_INLINE vi high_bytes(vi x) { return (vi)_mm512_srai_epi16((__m512i)x, 8); }
LL_INLINE vi zip_low_8(vi a, vi b) { return (vi)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
LL_INLINE vi zip_high_8(vi a, vi b) { return (vi)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
LL_INLINE vi zip_low_16(vi a, vi b) { return (vi)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
LL_INLINE vi zip_high_16(vi a, vi b) { return (vi)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
LL_INLINE vi splat_word(const void* p) { return splat_i(load_as<int32_t>(p)); }
LL_INLINE vf to_floats(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }
LL_INLINE void store_16(int16_t* p, vf x) {
    const __m256i halves = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)x));
    std::memcpy(p, &halves, sizeof halves);
}
LL_INLINE vi load_bytes(const i8* p, int64_t n) {
    return n >= INTEGER_COLUMNS ? load_as<vi>(p) : (vi)_mm512_maskz_loadu_epi8((1ull << n) - 1, p);
}
#elif defined(LL_AVX2)
LL_INLINE vi madd_pairs(vi a, vi b, vi acc) { return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
LL_INLINE vi low_bytes(vi x) { return (vi)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8); }
LL_INLINE vi high_bytes(vi x) { return (vi)_mm256_srai_epi16((__m256i)x, 8); }
LL_INLINE vi zip_low_8(vi a, vi b) { return (vi)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
LL_INLINE vi zip_high_8(vi a, vi b) { return (vi)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
LL_INLINE vi zip_low_16(vi a, vi b) { return (vi)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
LL_INLINE vi zip_high_16(vi a, vi b) { return (vi)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
LL_INLINE vi splat_word(const void* p) { return splat_i(load_as<int32_t>(p)); }
LL_INLINE vf to_floats(vi x) { return (vf)_mm256_cvtepi32_ps((__m256i)x); }
LL_INLINE void store_16(int16_t* p, vf x) {
    const __m256i words = _mm256_cvtps_epi32((__m256)x), halves = _mm256_packs_epi32(words, words);
    const __m128i together = _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
    std::memcpy(p, &together, sizeof together);
}
LL_INLINE vi load_bytes(const i8* p, int64_t n) {
    if (n >= INTEGER_COLUMNS) return load_as<vi>(p);
    alignas(32) i8 buffer[INTEGER_COLUMNS] = {};
    std::memcpy(buffer, p, n);
    return load_as<vi>(buffer);
}
#endif

#if defined(LL_INTEGERS)
// The dot product of a query of 16 bits and a key, as in Dot: a word holds four elements, and each of the two
// multiply-adds takes two of them. The sums are integers in the bits of floats.
struct IntegerDot {
    static constexpr int PER_WORD = 4, TERMS = 2;
    // Packs a query row, rounded so that a sum over d elements does not overflow. Returns its scale; NaN if q has NaN.
    static float pack_q(float* dst, const bf16* q, int d) {
        vf top = {}, spoiled = {};
        for (int i = 0; i < d; i += W) {
            const vf v = load_upto(q + i, d - i);
            top = vmax(magnitude_of(v), top), spoiled += v - v;
        }
        const float most = hmax(top), limit = d <= 512 ? MOST_16 : float((1ll << 31) / (128ll * d));
        const vf inverse = splat(most >= LEAST_MAGNITUDE ? limit / most : 0.f);
        int16_t* to = reinterpret_cast<int16_t*>(dst);
        for (int i = 0; i < d; i += W) {
            alignas(64) int16_t part[W];
            store_16(part, load_upto(q + i, d - i) * inverse);
            for (int j = 0; j < W && i + j < d; j += 4, to += 4)
                to[0] = part[j], to[1] = part[j + 2], to[2] = part[j + 1], to[3] = part[j + 3];
        }
        return most / limit + hsum(spoiled);
    }
    template <int TERM>
    static LL_INLINE vf term(vf word) { return (vf)(TERM == 0 ? low_bytes((vi)word) : high_bytes((vi)word)); }
    static LL_INLINE vf madd(vf k, float q, vf acc) { return (vf)madd_pairs((vi)k, splat_word(&q), (vi)acc); }
    static LL_INLINE vf sum(vf acc) { return to_floats((vi)acc); }
};
#endif

}  // namespace ll
