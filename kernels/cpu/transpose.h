// Transposes words in registers.
#pragma once

#include "simd.h"

namespace ll {

// Transposes W x W words in place.
LL_INLINE void transpose(vf (&rows)[W]) {
#if defined(LL_AVX512)  // shuffles without an index vector take half of the time of others
    __m512d by_four[W];  // [4 i + j]: words j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3
#pragma GCC unroll 4
    for (int i = 0; i < W; i += 4) {
        const __m512 *row = (const __m512*)&rows[i];
        const __m512d a = (__m512d)_mm512_unpacklo_ps(row[0], row[1]), b = (__m512d)_mm512_unpackhi_ps(row[0], row[1]);
        const __m512d c = (__m512d)_mm512_unpacklo_ps(row[2], row[3]), d = (__m512d)_mm512_unpackhi_ps(row[2], row[3]);
        by_four[i] = _mm512_unpacklo_pd(a, c), by_four[i + 1] = _mm512_unpackhi_pd(a, c);
        by_four[i + 2] = _mm512_unpacklo_pd(b, d), by_four[i + 3] = _mm512_unpackhi_pd(b, d);
    }
    constexpr int EVEN = 0x88, ODD = 0xdd;  // the quarters that are taken of each operand
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512d a = by_four[j], b = by_four[4 + j], c = by_four[8 + j], d = by_four[12 + j];
        const __m512d even_ab = _mm512_shuffle_f64x2(a, b, EVEN), odd_ab = _mm512_shuffle_f64x2(a, b, ODD);
        const __m512d even_cd = _mm512_shuffle_f64x2(c, d, EVEN), odd_cd = _mm512_shuffle_f64x2(c, d, ODD);
        rows[j] = (vf)_mm512_shuffle_f64x2(even_ab, even_cd, EVEN);
        rows[4 + j] = (vf)_mm512_shuffle_f64x2(odd_ab, odd_cd, EVEN);
        rows[8 + j] = (vf)_mm512_shuffle_f64x2(even_ab, even_cd, ODD);
        rows[12 + j] = (vf)_mm512_shuffle_f64x2(odd_ab, odd_cd, ODD);
    }
#else
    for (int round = 1; round < W; round *= 2) {  // each round is a perfect shuffle of rows i and i + W/2
        vf next[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; ++i) {
            next[2 * i] = zip_low(rows[i], rows[i + W / 2]);
            next[2 * i + 1] = zip_high(rows[i], rows[i + W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) rows[i] = next[i];
    }
#endif
}

// Loads rows[i] = word i at each of W addresses.
LL_INLINE void load_transposed(const char* const (&at)[W], vf (&rows)[W]) {
#if defined(LL_AVX2)  // the loads already place the halves, so 16 shuffles suffice instead of 48
    vf lows[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // words 0 to 3 (i < 4), or 4 to 7, of addresses i % 4 and i % 4 + 4
        const int from = i / 4 * 16;
        __m128 low = _mm_loadu_ps((const float*)(at[i % 4] + from));
        __m128 high = _mm_loadu_ps((const float*)(at[i % 4 + 4] + from));
        lows[i] = (vf)_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        __m256d a = (__m256d)_mm256_unpacklo_ps((__m256)lows[i], (__m256)lows[i + 1]);
        __m256d b = (__m256d)_mm256_unpackhi_ps((__m256)lows[i], (__m256)lows[i + 1]);
        __m256d c = (__m256d)_mm256_unpacklo_ps((__m256)lows[i + 2], (__m256)lows[i + 3]);
        __m256d d = (__m256d)_mm256_unpackhi_ps((__m256)lows[i + 2], (__m256)lows[i + 3]);
        rows[i] = (vf)_mm256_unpacklo_pd(a, c), rows[i + 1] = (vf)_mm256_unpackhi_pd(a, c);
        rows[i + 2] = (vf)_mm256_unpacklo_pd(b, d), rows[i + 3] = (vf)_mm256_unpackhi_pd(b, d);
    }
#else
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = load_as<vf>(at[i]);
    transpose(rows);
#endif
}

}  // namespace ll
