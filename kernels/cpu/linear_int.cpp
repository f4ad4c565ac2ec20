// y = x @ W^T + bias with weights of 4 or 8 bits, stored as int_panels.h describes. Within a group, a lane sums the
// products of its output's values in fp32 as linear_simd.cpp does. These sums times the scales are added in the order
// of the groups, as are the offsets times the sum of the group's inputs. With AVX512, bf16 inputs are multiplied as
// integers (int_dots.h). A row's bits depend neither on the other rows nor on the number of threads.
#include "int_dots.h"
#include "int_panels.h"

namespace ll {
namespace {

#if defined(LL_AVX512)
constexpr int MOST_SUMS = 24;  // of 32 registers, for rows times panels
#else
constexpr int MOST_SUMS = 6;  // of two registers each: 12 of 16
#endif

// Value number `input` of W words: of four of 8 bits, times 2^24, or of eight of 4 bits.
LL_INLINE vf bytes_of(vu words, int input) {
    // The shuffle control of word i of four: byte `input` becomes the highest byte, and the others become zero.
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
struct Ints : IntPanels<BITS> {
    using Panels = IntPanels<BITS>;
    using Panels::data, Panels::group, Panels::groups, Panels::header, Panels::padded_in, Panels::panel_bytes,
        Panels::UNIT, Panels::UNIT_BYTES;
    using Element = T;
    using Input = float;
    static constexpr int MOST_ROWS = MOST_ROWS_AT_ONCE;
    // The sums of a group stay in registers; those of all groups need not.
    static constexpr int panels_of(int rows) { return std::max(1, std::min(4, MOST_SUMS / rows)); }

    int64_t num_sums = header.has_offsets ? groups : 0, step = panel_bytes / groups;

    bool many(int64_t rows) const { return rows > MOST_ROWS; }
    int64_t working_bytes(int64_t rows) const {
        return many(rows) ? padded_in * PANEL * int64_t(sizeof(Input)) : panel_bytes;
    }

    // Copies the inputs, and computes the sum of each group in ascending order.
    void copy_row(const T* from, int64_t n_in, float* row, float* sums) const {
        copy_padded(from, n_in, row, padded_in);
        for (int64_t g = 0; g < num_sums; ++g) {
            vf sum = {};
            for_vectors(group, [&](int64_t i, auto count) { sum = sum + load_upto(row + g * group + i, count); });
            sums[g] = hsum(sum);
        }
    }

    // The values of a panel from a group on.
    const char* values_of(int64_t panel, int64_t g) const {
        return data + panel * panel_bytes + this->values + g * group * PANEL * BITS / 8;
    }
    // The scales (part 0) or offsets (part 1) of a group, for a vector of outputs.
    LL_INLINE vf factor_of(int64_t part, int64_t panel, int64_t g, int vec) const {
        return this->factor(data + panel * panel_bytes + part * this->scales +
                            (g * PANEL + vec * W) * this->scale_size);
    }

    // Panels as linear_simd.cpp stores them, for more than one block of rows: the same products in the same order.
    void unpack(int64_t panel, int64_t end, Input* to) const {
        for (; panel < end; ++panel) {
            const char* w = values_of(panel, 0);
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
        const char *w = values_of(panel, g), *asked = this->asked(w, data + (panel + 1) * panel_bytes, then);
        for (int64_t i = 0; i < group; i += UNIT, w += UNIT_BYTES, asked += UNIT_BYTES) {
            this->template prefetch<P, 3>(asked);
            add_unit<R, P>(sums, w, x + i, stride);
        }
    }
    LL_INLINE vf scale_of(int64_t panel, int64_t g, int vec) const {
        return factor_of(0, panel, g, vec) * splat(BITS == 8 ? 0x1p-24f : 1.f);
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
                const vf scale = scale_of(panel + v / VECS, g, v % VECS);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) sums[r][v] = fma(of_group[r][v], scale, sums[r][v]);
            }
            if (header.has_offsets)
                for (int v = 0; v < P * VECS; ++v) {
                    const vf offset = factor_of(1, panel + v / VECS, g, v % VECS);
                    for (int r = 0; r < R; ++r)
                        sums[r][v] = fma(splat(of_inputs[r * num_sums + g]), offset, sums[r][v]);
                }
        }
    }
};

#if defined(LL_AVX512)
template <class T, int BITS>
using Weights = std::conditional_t<std::is_same_v<T, bf16>, IntDots<BITS>, Ints<T, BITS>>;
#else
template <class T, int BITS>
using Weights = Ints<T, BITS>;
#endif

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
            using Weights = ll::Weights<T, bits()>;
            const Weights weights{{section + ll::HEADER_BYTES, header, (n_in + header.group - 1) / header.group}};
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
