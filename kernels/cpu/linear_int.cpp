// y = x @ W^T + bias with weights of 4 or 8 bits: w = value * scale + offset, with one fp32 or bf16 scale (and offset)
// for an output and `group` consecutive inputs. Within a group, a lane sums the products of its output's values in fp32
// as linear_simd.cpp does; these sums times the scales are added in the order of the groups, and so are the offsets
// times the sum of the group's inputs. Values are exact in bf16, so with AVX512-BF16 a dot product takes them as they
// are. A row's bits depend neither on the other rows nor on threads.
//
// The caller packs the weights (kernels/cpu/linear_int.py) in sections of outputs that are stored alike. A section is a
// header of 64 bytes, then panels of 16 outputs. A panel
// holds 16 scales for each group, then 16 offsets for each group if there are any, then the values, each part padded to
// 64 bytes. Values of 8 bits: 16 words for every four inputs, the first in the lowest bits. Of 4 bits: 16 words for every
// eight inputs, with the even inputs in the low half, lowest bits first, and the odd ones in the high half. Inputs are
// padded to whole groups with zeros. Values of 8 bits are taken times 2^24, which the packed scales make good.
#include "panels.h"

namespace ll {
namespace {

constexpr int64_t AHEAD_BYTES = 2048;  // between a prefetch and its use
#if defined(LL_AVX512)
constexpr int MOST_SUMS = 24;  // of 32 registers, for rows times panels
#else
constexpr int MOST_SUMS = 6;  // of two registers each: 12 of 16
#endif

constexpr int64_t HEADER_BYTES = 64;
struct Header {
    int64_t bits, group, has_offsets, wide_scales, is_bf16, n_out;
    int64_t bytes;  // from this header to the next section's; 0: the last section
};

constexpr int64_t to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Value number `input` of W words: of four of 8 bits, times 2^24, or of eight of 4 bits.
LL_INLINE vf bytes_of(vu words, int input) {
    // For each of four words, the places that its bytes come from: `input` on top of zeros.
    [[maybe_unused]] const auto word = [&](int i) { return 0x808080 | (4 * i + input) << 24; };
#if defined(LL_AVX512)
    const __m512i bytes = _mm512_setr_epi32(word(0), word(1), word(2), word(3), word(0), word(1), word(2), word(3),
                                            word(0), word(1), word(2), word(3), word(0), word(1), word(2), word(3));
    return (vf)_mm512_cvtepi32_ps(_mm512_shuffle_epi8((__m512i)words, bytes));
#elif defined(LL_AVX2)
    const __m256i bytes =
        _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(0), word(1), word(2), word(3));
    return (vf)_mm256_cvtepi32_ps(_mm256_shuffle_epi8((__m256i)words, bytes));
#else
    return __builtin_convertvector((vi)(words << (24 - 8 * input) & 0xff000000u), vf);
#endif
}
LL_INLINE vf nibbles_of(vu words, int input) {
    const int from = 4 * (input / 2) + 16 * (input % 2);
    return __builtin_convertvector((vi)(words << (28 - from)) >> 28, vf);
}

template <class T, int BITS>
struct Ints {
    using Element = T;
    using Input = ll::Input<T>;
    static constexpr int MOST_ROWS = MOST_ROWS_AT_ONCE;
    // The sums of a group stay in registers; those of all groups need not.
    static constexpr int panels_of(int rows) { return std::max(1, std::min(4, MOST_SUMS / rows)); }
    static constexpr int64_t UNIT = 8;                              // inputs that are taken at once
    static constexpr int64_t UNIT_BYTES = UNIT * PANEL * BITS / 8;  // their values in a panel

    const char* data;
    Header header;
    int64_t groups;
    int64_t group = header.group, padded_in = groups * group, scale_size = header.wide_scales ? 4 : 2;
    int64_t scales = to_line(groups * PANEL * scale_size), values = scales * (1 + header.has_offsets);
    int64_t group_bytes = group * PANEL * BITS / 8, panel_bytes = values + groups * group_bytes;
    int64_t num_sums = header.has_offsets ? groups : 0, step = panel_bytes / groups;

    bool many(int64_t rows) const { return rows > MOST_ROWS; }
    int64_t working_bytes(int64_t rows) const {
        return many(rows) ? padded_in * PANEL * int64_t(sizeof(Input)) : panel_bytes;
    }
    const char* values_of(int64_t panel) const { return data + panel * panel_bytes + values; }

    // The sum of each group's inputs, ascending.
    void summarise(const Input* row, float* sums) const {
        for (int64_t g = 0; g < num_sums; ++g) {
            vf sum = {};
            for_vectors(group, [&](int64_t i, auto count) { sum = sum + load_upto(row + g * group + i, count); });
            sums[g] = hsum(sum);
        }
    }

    // Panels as linear_simd.cpp stores them, for rows that are more than one block: the same products in the same order.
    void unpack(int64_t panel, int64_t end, Input* to) const {
        for (; panel < end; ++panel) {
            const char* w = values_of(panel);
            for (int64_t i = 0; i < padded_in; i += UNIT, w += UNIT_BYTES)
#pragma GCC unroll 4
                for (int pair = 0; pair < UNIT / 2; ++pair, to += PAIR) unpack_pair(w, pair, to);
        }
    }
    LL_INLINE vf value(const char* unit, int input, int vec) const {
        if constexpr (BITS == 8)
            return bytes_of(load_as<vu>(unit + (input / 4 * PANEL + vec * W) * 4), input % 4);
        else
            return nibbles_of(load_as<vu>(unit + vec * 4 * W), input);
    }
    LL_INLINE void unpack_pair(const char* unit, int pair, float* to) const {
        for (int odd = 0; odd < 2; ++odd)
            for (int v = 0; v < VECS; ++v) store(to + odd * PANEL + v * W, value(unit, 2 * pair + odd, v));
    }
#if defined(LL_AVX512)
    // Two inputs' values as bf16, the even one in the low half of every word.
    LL_INLINE __m512bh pair_of(const char* unit, int pair) const {
        if constexpr (BITS == 8) {
            const vu even = (vu)value(unit, 2 * pair, 0), odd = (vu)value(unit, 2 * pair + 1, 0);
            return (__m512bh)(even >> 16 | odd);
        } else {
            // bf16 of 0 ... 7, -8 ... -1, twice: of an index of five bits, the upper one is not looked at.
            const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
                0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, int16_t(0xc100), int16_t(0xc0e0),
                int16_t(0xc0c0), int16_t(0xc0a0), int16_t(0xc080), int16_t(0xc040), int16_t(0xc000), int16_t(0xbf80)));
            const vu words = load_as<vu>(unit) >> 4 * pair;
            return (__m512bh)_mm512_permutexvar_epi16((__m512i)words, table);
        }
    }
    LL_INLINE void unpack_pair(const char* unit, int pair, bf16* to) const {
        const __m512bh both = pair_of(unit, pair);
        std::memcpy(to, &both, sizeof both);
    }
    template <int R, int P>
    LL_INLINE void add_unit(vf (&sums)[R][P * VECS], const char* unit, const bf16* x, int64_t stride) const {
#pragma GCC unroll 4
        for (int pair = 0; pair < UNIT / 2; ++pair) {
            __m512bh weights[P];
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) weights[p] = pair_of(unit + p * panel_bytes, pair);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const __m512bh inputs = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x + r * stride + 2 * pair));
#pragma GCC unroll 16
                for (int p = 0; p < P; ++p) sums[r][p] = (vf)_mm512_dpbf16_ps((__m512)sums[r][p], weights[p], inputs);
            }
        }
    }
#endif
    template <int R, int P>
    LL_INLINE void add_unit(vf (&sums)[R][P * VECS], const char* unit, const float* x, int64_t stride) const {
#pragma GCC unroll 8
        for (int input = 0; input < UNIT; ++input) {
            vf weights[P * VECS];
#pragma GCC unroll 16
            for (int v = 0; v < P * VECS; ++v) weights[v] = value(unit + v / VECS * panel_bytes, input, v % VECS);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const vf in = splat(x[r * stride + input]);
#pragma GCC unroll 16
                for (int v = 0; v < P * VECS; ++v) accumulate(sums[r][v], in, weights[v]);
            }
        }
    }

    // Products of one group's values, not yet scaled.
    template <int R, int P>
    LL_INLINE void add_group(vf (&sums)[R][P * VECS], int64_t panel, int64_t first, int64_t g, const Input* x,
                             int64_t stride, const Input* unpacked, const char* then) const {
        if (unpacked) {
            const Input* w = unpacked + ((panel - first) * padded_in + g * group) * PANEL;
            for (int64_t i = 0; i < group; i += 2, w += PAIR)
                add_pair<Input, R, P>(sums, w, padded_in * PANEL, x + i, stride);
            return;
        }
        const char *w = values_of(panel) + g * group_bytes, *asked = w + AHEAD_BYTES;
        if (g * group_bytes + AHEAD_BYTES >= groups * group_bytes) asked += then - (data + (panel + 1) * panel_bytes);
        for (int64_t i = 0; i < group; i += UNIT, w += UNIT_BYTES, asked += UNIT_BYTES) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p)
                for (int64_t line = 0; line < UNIT_BYTES; line += 64)
                    __builtin_prefetch(asked + p * panel_bytes + line);
            add_unit<R, P>(sums, w, x + i, stride);
        }
    }
    LL_INLINE vf factor(int64_t part, int64_t panel, int64_t g, int vec) const {
        const char* at = data + panel * panel_bytes + part * scales + (g * PANEL + vec * W) * scale_size;
        return header.wide_scales ? load((const float*)at) : load((const bf16*)at);
    }

    template <int R, int P>
    LL_INLINE void add(vf (&sums)[R][P * VECS], int64_t panel, int64_t first, const Input* inputs, int64_t stride,
                       const float* of_inputs, const Input* unpacked, Ahead& ahead) const {
        for (int64_t g = 0; g < groups; ++g) {
            vf of_group[R][P * VECS] = {};
            if constexpr (R > 2) ahead.ask();
            add_group<R, P>(of_group, panel, first, g, inputs + g * group, stride, unpacked, ahead.then);
#pragma GCC unroll 16
            for (int v = 0; v < P * VECS; ++v) {
                const vf scale = factor(0, panel + v / VECS, g, v % VECS);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) sums[r][v] = fma(of_group[r][v], scale, sums[r][v]);
            }
            if (header.has_offsets)
                for (int v = 0; v < P * VECS; ++v) {
                    const vf offset = factor(1, panel + v / VECS, g, v % VECS);
                    for (int r = 0; r < R; ++r)
                        sums[r][v] = fma(splat(of_inputs[r * num_sums + g]), offset, sums[r][v]);
                }
        }
    }
};

}  // namespace
}  // namespace ll

// x [rows, n_in], out [rows, n_out], bias [n_out] or null, in the dtype that the header of `packed` names. Strides are
// in elements.
LL_EXPORT int ll_linear_int(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t n_in,
                            int64_t n_out, int64_t x_stride, int64_t out_stride, int64_t threads) {
    const char* section = static_cast<const char*>(packed);
    for (int64_t from = 0; from < n_out;) {
        const ll::Header header = ll::load_as<ll::Header>(section);
        auto run = [&](auto tag, auto bits) {
            using T = decltype(tag);
            using Weights = ll::Ints<T, bits()>;
            const Weights weights{section + ll::HEADER_BYTES, header, (n_in + header.group - 1) / header.group};
            const T* add = bias ? static_cast<const T*>(bias) + from : nullptr;
            ll::Product<Weights>{weights, static_cast<const T*>(x), add, static_cast<T*>(out) + from,
                                 rows, n_in, header.n_out, x_stride, out_stride}
                .run(threads);
        };
        auto with_bits = [&](auto tag) {
            header.bits == 4 ? run(tag, std::integral_constant<int, 4>()) : run(tag, std::integral_constant<int, 8>());
        };
        header.is_bf16 ? with_bits(ll::bf16{}) : with_bits(float{});
        from += header.n_out;
        section += header.bytes;
    }
    return 0;
}
