// The product of weights of 4 or 8 bits and bf16 inputs, in integers (AVX512-VNNI). An instruction multiplies four
// values of a lane, and 8-bit values are used as they are stored.
//
// A block is up to 256 inputs of a group. Its inputs become integers of 15 bits, q = round(x / unit) = 256 * high +
// low, where unit is 2^-13 of the power of two that its largest input reaches. Inputs of at least 1/64 of the largest
// are exact, because bf16 has 8 significant bits. The error of the others is at most 2^-14 of the largest, whose own
// rounding to bf16 has an error of up to 2^-9. A value v is taken as the unsigned byte v + SHIFT, and -SHIFT * sum(q)
// corrects this. Sums of integers are exact in any order. They are multiplied by scale * unit and added in the order of
// the blocks, as is offset * sum(x). A block with infinity or NaN makes its row NaN.
#pragma once

#include <cstddef>

#include "int_panels.h"

#if defined(LL_AVX512)
namespace ll {

// Adds the products with four signed bytes of every lane. In assembly, because gcc 12 would copy every sum first.
template <int P>
LL_INLINE void add_products(vi (&sums)[P], const vi (&unsigned_bytes)[P], const int8_t* four) {
    if constexpr (P == 1) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[0]) : "v"(unsigned_bytes[0]), "m"(*(const int32_t*)four));
    } else {
        const vi bytes = splat_i(load_as<int32_t>(four));
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) asm("vpdpbusd %2, %1, %0" : "+v"(sums[p]) : "v"(unsigned_bytes[p]), "v"(bytes));
    }
}

template <int BITS>
struct IntDots : IntPanels<BITS> {
    using Panels = IntPanels<BITS>;
    using Panels::data, Panels::group, Panels::groups, Panels::header, Panels::padded_in, Panels::panel_bytes,
        Panels::scale_size, Panels::scales, Panels::UNIT, Panels::UNIT_BYTES, Panels::values;
    using Element = bf16;
    using Input = uint16_t;  // four inputs' high bytes, then their low bytes
    // Each row of a panel has two sums: 24 of 32 registers. Two panels share every broadcast input.
    static constexpr int MOST_ROWS = 6, FEW = 2;
    static constexpr int panels_of(int rows) { return std::max(1, std::min(4, 12 / rows)); }
    static constexpr int64_t BLOCK = 256;  // 256 * 255 * 2^14 < 2^31
    static constexpr int SHIFT = 1 << (BITS - 1);

    // The corrections of a block's sums, for one row.
    struct Block {
        float unit, sum;     // sum: of the inputs
        int32_t correction;  // -SHIFT * (sum of q)
    };
    int64_t group_blocks = (group + BLOCK - 1) / BLOCK;
    static constexpr int64_t BLOCK_FLOATS = sizeof(Block) / sizeof(float);
    int64_t num_sums = groups * group_blocks * BLOCK_FLOATS;
    int64_t step = panel_bytes / (groups * group_blocks);

    bool many(int64_t) const { return false; }
    int64_t working_bytes(int64_t) const { return panel_bytes; }
    void unpack(int64_t, int64_t, Input*) const {}

    void copy_row(const bf16* from, int64_t n_in, Input* to, float* sums) const {
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t i = g * group, end = i + group; i < end; i += BLOCK, sums += BLOCK_FLOATS) {
                const int64_t n = std::min(BLOCK, end - i), count = std::min(n, std::max<int64_t>(0, n_in - i));
                const Block block = copy_block(from + i, count, (int8_t*)(to + i), n);
                std::memcpy(sums, &block, sizeof block);
            }
    }

    // Turns `count` inputs, and zeros up to n, into integers.
    static Block copy_block(const bf16* from, int64_t count, int8_t* to, int64_t n) {
        const auto inputs = [&](int64_t i) { return i < count ? load_upto(from + i, count - i) : vf{}; };
        vu largest = {};
        for (int64_t i = 0; i < count; i += W)
            largest = (vu)_mm512_max_epu32((__m512i)largest, (__m512i)((vu)inputs(i) & 0x7fffffffu));
        // At least 30, so that no unit is denormal.
        const uint32_t exponent = std::max(30u, _mm512_reduce_max_epu32((__m512i)largest) >> 23);
        const bool is_finite = exponent < 255;
        const float unit = is_finite ? power_of_two(exponent - 13) : NAN;
        const vf inverse = splat(is_finite ? power_of_two(254 + 13 - exponent) : 0.f);
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += W) {
            const __m512i q = _mm512_cvtps_epi32((__m512)(inputs(i) * inverse));
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
            sum = _mm512_add_epi32(sum, q);
            const __m128i highs = in_order(_mm512_cvtepi32_epi8(high)), lows = in_order(_mm512_cvtepi32_epi8(q));
            _mm_storeu_si128((__m128i*)(to + 2 * i), _mm_unpacklo_epi32(highs, lows));
            if (n - i >= W) _mm_storeu_si128((__m128i*)(to + 2 * i + W), _mm_unpackhi_epi32(highs, lows));
        }
        const int32_t total = _mm512_reduce_add_epi32(sum);
        return {unit, unit * float(total), int32_t(-SHIFT * uint32_t(total))};
    }
    static float power_of_two(uint32_t biased) {
        biased <<= 23;
        return load_as<float>(&biased);
    }
    // The order in which the words of `values` hold the inputs of a unit.
    static __m128i in_order(__m128i bytes) {
        if constexpr (BITS == 8) return bytes;
        return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    }

    // Word `word` of a unit's values, as unsigned bytes.
    LL_INLINE vi bytes_of(const char* unit, int word) const {
        if constexpr (BITS == 8) return (vi)(load_as<vu>(unit + 64 * word) ^ 0x80808080u);
        return (vi)((load_as<vu>(unit) >> 4 * word & 0x0f0f0f0fu) ^ 0x08080808u);
    }

    // A block of a row's inputs and the values that they are multiplied with, in the first of P panels.
    struct Place {
        const char *values, *asked, *scales;
        const int8_t* inputs;
        const float* of_inputs;
        int64_t size, stride;
    };

    // Adds the products of a block.
    template <int R, int P>
    LL_INLINE void add_block(vf (&sums)[R][P], const Place& at) const {
        const auto block = [&](int r, size_t part) { return at.of_inputs + r * num_sums + part / sizeof(float); };
        vi high[R][P] = {}, low[R][P];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) low[r][p] = splat_i(load_as<int32_t>(block(r, offsetof(Block, correction))));
        const char *w = at.values, *asked = at.asked;
        const int8_t* inputs = at.inputs;
        for (int64_t i = 0; i < at.size; i += UNIT, w += UNIT_BYTES, asked += UNIT_BYTES, inputs += 2 * UNIT) {
            this->template prefetch<P, 2>(asked);
#pragma GCC unroll 2
            for (int word = 0; word < 2; ++word) {
                vi weights[P];
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) weights[p] = bytes_of(w + p * panel_bytes, word);
                const int8_t* x = inputs + 8 * word;
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r, x += at.stride) {
                    asm("" : "+r"(x));  // as in add_pair
                    add_products<P>(high[r], weights, x);
                    add_products<P>(low[r], weights, x + 4);
                }
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const vf scale = this->factor(at.scales + p * panel_bytes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const vf sum = __builtin_convertvector((high[r][p] << 8) + low[r][p], vf);
                sums[r][p] = fma(sum, scale * splat(*block(r, offsetof(Block, unit))), sums[r][p]);
            }
        }
        if (header.has_offsets)
            for (int p = 0; p < P; ++p)
                for (int r = 0; r < R; ++r) {
                    const vf offset = this->factor(at.scales + scales + p * panel_bytes);
                    sums[r][p] = fma(splat(*block(r, offsetof(Block, sum))), offset, sums[r][p]);
                }
    }
    // This is not inlined for many rows, because gcc 12 would keep every sum in two registers, or on the stack.
    template <int R, int P>
    __attribute__((noinline)) void add_block_apart(vf (&sums)[R][P], const Place& at) const {
        add_block<R, P>(sums, at);
    }

    template <int R, int P>
    LL_INLINE void add(vf (&sums)[R][P], int64_t panel, int64_t, const Input* inputs, int64_t stride,
                       const float* of_inputs, const Input*, Ahead& ahead) const {
        const char *begin = data + panel * panel_bytes, *end = begin + panel_bytes;
        Place at{begin + values, nullptr, begin, (const int8_t*)inputs, of_inputs, 0, 2 * stride};
        for (int64_t g = 0; g < groups; ++g, at.scales += PANEL * scale_size)
            for (int64_t left = group; left > 0; left -= at.size) {
                at.size = std::min(BLOCK, left);
                at.asked = this->asked(at.values, end, ahead.then);
                if constexpr (R <= FEW) {
                    add_block<R, P>(sums, at);
                } else {
                    for (int p = 0; p < P; ++p) ahead.ask();
                    add_block_apart<R, P>(sums, at);
                }
                at.values += at.size * PANEL * BITS / 8, at.inputs += 2 * at.size, at.of_inputs += BLOCK_FLOATS;
            }
    }
};

}  // namespace ll
#endif
