// y = x @ W^T + bias in vectors, bf16 or fp32. Every output has its own lane. Its products are summed in one fp32
// accumulator, in ascending order of inputs, with one fused multiply-add each (or, with AVX512-BF16, one dot product
// for every two inputs). The bits of a row therefore depend neither on the number of rows, nor on the row's position,
// nor on the number of threads.
//
// The caller packs the weights (kernels/cpu/linear.py) into panels of 16 outputs. For every two inputs, a bf16 panel
// holds 16 words with the even input's weight in the low half; an fp32 panel holds 16 weights of the even input, then
// 16 of the odd one. An odd number of inputs is padded with a weight of zero.
#include "panels.h"

namespace ll {
namespace {

constexpr int64_t AHEAD = 64;    // distance of the prefetch, in pairs of inputs
constexpr int64_t STRETCH = 16;  // pairs of inputs between decisions about what is prefetched

// The level of __builtin_prefetch for the weights of `blocks` blocks of rows. 3: into the L1 cache; 2: into the L2 cache,
// which can wait for more lines. One or two blocks wait for memory; with more, the arithmetic takes longer.
constexpr int level_for(int64_t blocks) { return blocks <= 2 ? 2 : 3; }

#if defined(LL_AVX512)
constexpr int MOST_PANELS = 2;  // with 12 rows, 24 of 32 registers are accumulators
#else
constexpr int MOST_PANELS = 1;  // with 6 rows, 12 of 16 registers are accumulators
#endif

template <class T>
struct Dense {
    using Element = T;
    using Input = ll::Input<T>;
    static constexpr int MOST_ROWS = MOST_ROWS_AT_ONCE;
    static constexpr bool GATED = false;
    // For few rows, more panels are computed at once; otherwise each accumulator would wait for its previous product.
    static constexpr int panels_of(int rows) { return std::max(MOST_PANELS, 4 / rows); }
    static constexpr int64_t PAIR_BYTES = PAIR * sizeof(T), num_sums = 0, step = PAIR_BYTES;

    const char* data;
    int64_t pairs, padded_in = 2 * pairs, panel_bytes = pairs * PAIR_BYTES;

    int64_t working_bytes(int64_t) const { return panel_bytes; }
    bool many(int64_t) const { return false; }
    void unpack(int64_t, int64_t, Input*) const {}
    void copy_row(const T* from, int64_t n_in, Input* to, float*) const { copy_padded(from, n_in, to, padded_in); }

    template <int R, int P>
    LL_INLINE void add(vf (&sums)[R][P * VECS], int64_t panel, int64_t, const Input* inputs, int64_t stride,
                       const float*, const Input*, Ahead& ahead) const {
        const T* w = (const T*)(data + panel * panel_bytes);
        if (ahead.step == step)
            stream<R, P>(sums, w, panel, inputs, stride, ahead.then);
        else if (2 * ahead.step == step)
            reuse<R, P, level_for(2)>(sums, w, inputs, stride, ahead);
        else
            reuse<R, P, level_for(3)>(sums, w, inputs, stride, ahead);
    }

    // For the only block of rows: the weights come from memory, and the same panels are prefetched.
    template <int R, int P>
    LL_INLINE void stream(vf (&sums)[R][P * VECS], const T* w, int64_t panel, const Input* inputs, int64_t stride,
                          const char* then) const {
        for (int64_t pair = 0, end; pair < pairs; pair = end) {
            end = std::min(pairs, pair + STRETCH);
            const char* asked = (const char*)(w + AHEAD * PAIR);
            if (pair + AHEAD >= pairs) asked += then - (data + (panel + 1) * panel_bytes);
            for (int64_t i = pair; i < end; ++i, w += PAIR, asked += PAIR_BYTES) {
#pragma GCC unroll 16
                for (int p = 0; p < P; ++p) prefetch_pair<level_for(1)>(asked + p * panel_bytes);
                add_pair<T, R, P>(sums, w, pairs * PAIR, inputs + 2 * i, stride);
            }
        }
    }

    // For one of several blocks of rows: all of them read the group's weights, and together prefetch the next group.
    template <int R, int P, int LEVEL>
    LL_INLINE void reuse(vf (&sums)[R][P * VECS], const T* w, const Input* inputs, int64_t stride, Ahead& ahead) const {
        const char* asked = ahead.asked;
        for (int64_t i = 0; i < pairs; ++i, w += PAIR, asked += P * ahead.step) {
            prefetch_pair<LEVEL>(asked);
            add_pair<T, R, P>(sums, w, pairs * PAIR, inputs + 2 * i, stride);
        }
        ahead.asked = asked;
    }

    template <int LEVEL>
    static LL_INLINE void prefetch_pair(const char* pair) {
        for (int64_t line = 0; line < PAIR_BYTES; line += 64) __builtin_prefetch(pair + line, 0, LEVEL);
    }
};

#if defined(LL_AVX512)
// The gates and the values of a gated MLP, whose panels are the first and the second half of the weights. An output is
// activation(gate) * up. The sums are those of Dense and are rounded like its outputs, so the bits are the same as if
// they went through memory.
template <class T>
struct Gated : Dense<T> {
    using typename Dense<T>::Input;
    using Dense<T>::data, Dense<T>::pairs, Dense<T>::panel_bytes, Dense<T>::step;
    static constexpr bool GATED = true;
    static constexpr int panels_of(int) { return 1; }

    int64_t up;  // elements from the panel of some gates to that of their values
    bool gelu;

    int64_t working_bytes(int64_t) const { return 2 * panel_bytes; }

    vf activated(vf gate, vf value) const {
        const T* type = nullptr;
        const vf a = rounded_to(gate, type), b = rounded_to(value, type);
        return gelu ? gated<true>(a, b, type) : gated<false>(a, b, type);
    }

    template <int R, int P>
    LL_INLINE void add(vf (&sums)[R][2 * P * VECS], int64_t panel, int64_t, const Input* inputs, int64_t stride,
                       const float*, const Input*, Ahead& ahead) const {
        static_assert(P == 1);
        2 * ahead.step >= step ? add_all<R, level_for(2)>(sums, panel, inputs, stride, ahead)
                               : add_all<R, level_for(3)>(sums, panel, inputs, stride, ahead);
    }

    template <int R, int LEVEL>
    LL_INLINE void add_all(vf (&sums)[R][2 * VECS], int64_t panel, const Input* inputs, int64_t stride,
                           Ahead& ahead) const {
        const T* w = (const T*)(data + panel * panel_bytes);
        const int64_t up_bytes = up * int64_t(sizeof(T));
        const bool once = ahead.step == step;  // for the only block of rows: the next pairs, otherwise the next group
        const char* asked = once ? (const char*)(w + AHEAD * PAIR) : ahead.asked;
        for (int64_t i = 0; i < pairs; ++i, w += PAIR, asked += ahead.step) {
            if (once && i + AHEAD == pairs) asked = ahead.then;
            Dense<T>::template prefetch_pair<LEVEL>(asked), Dense<T>::template prefetch_pair<LEVEL>(asked + up_bytes);
            add_pair<T, R, 2>(sums, w, up, inputs + 2 * i, stride);
        }
        if (!once) ahead.asked = asked;
    }
};
#endif

}  // namespace
}  // namespace ll

// x [rows, n_in], out [rows, n_out], bias [n_out] or null. Strides are in elements.
LL_EXPORT int ll_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t n_in,
                        int64_t n_out, int64_t x_stride, int64_t out_stride, int64_t is_bf16, int64_t threads) {
    auto run = [&](auto tag) {
        using T = decltype(tag);
        const ll::Dense<T> weights{static_cast<const char*>(packed), (n_in + 1) / 2};
        ll::Product<ll::Dense<T>>{weights, static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out),
                                  rows, n_in, n_out, x_stride, out_stride}
            .run(threads);
    };
    is_bf16 ? run(ll::bf16{}) : run(float{});
    return 0;
}

// The same product in fp32, for x of either type, without a bias: out [rows, n_out] is contiguous.
LL_EXPORT int ll_linear_sums(const void* x, const void* packed, float* out, int64_t rows, int64_t n_in, int64_t n_out,
                             int64_t x_stride, int64_t is_bf16, int64_t threads) {
    auto run = [&](auto tag) {
        using T = decltype(tag);
        const ll::Dense<T> weights{static_cast<const char*>(packed), (n_in + 1) / 2};
        ll::Product<ll::Dense<T>, float>{weights, static_cast<const T*>(x), nullptr, out, rows, n_in, n_out, x_stride, n_out}
            .run(threads);
    };
    is_bf16 ? run(ll::bf16{}) : run(float{});
    return 0;
}

// out = activation(gate) * up for gates and values of a gated MLP: packed and bias have n_out gates, then n_out values.
// x [rows, n_in] and out [rows, n_out] are contiguous. Returns -1 if this build computes the two steps separately, or
// n_out is no multiple of a panel.
LL_EXPORT int ll_gated_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows,
                              int64_t n_in, int64_t n_out, int64_t gelu, int64_t is_bf16, int64_t threads) {
#if defined(LL_AVX512)
    if (n_out % ll::PANEL) return -1;
    auto run = [&](auto tag) {
        using T = decltype(tag);
        const int64_t pairs = (n_in + 1) / 2;
        const ll::Gated<T> weights{{static_cast<const char*>(packed), pairs}, n_out * pairs * 2, gelu != 0};
        ll::Product<ll::Gated<T>>{weights, static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out),
                                  rows, n_in, n_out, n_in, n_out}
            .run(threads);
    };
    is_bf16 ? run(ll::bf16{}) : run(float{});
    return 0;
#else
    return -1;
#endif
}
