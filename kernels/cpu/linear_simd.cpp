// y = x @ W^T + bias in vectors, bf16 or fp32. A lane is an output: its products are summed in one fp32 accumulator,
// inputs ascending, with one fused multiply-add each (with AVX512-BF16 one dot product for every two inputs). None of
// this depends on the number of rows, on a row's position or on threads, so a row's bits do not either.
//
// The caller packs the weights (kernels/cpu/linear.py) into panels of 16 outputs. For every two inputs, a bf16 panel
// holds 16 words with the even input's weight in the low half; an fp32 panel holds 16 weights of the even input, then
// 16 of the odd one. An odd number of inputs is padded with a weight of zero.
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "simd.h"
#include "team.h"

namespace ll {
namespace {

constexpr int64_t PANEL = 16;               // outputs that are computed together
constexpr int64_t PAIR = 2 * PANEL;         // weights of two inputs in a panel
constexpr int VECS = PANEL / W;             // accumulators of a row in a panel
constexpr int64_t GROUP_BYTES = 1 << 17;    // weights that all rows use before the next: a quarter of a small L2 cache
constexpr int64_t SLAB_BYTES = 1 << 19;     // input rows that a thread holds at once: an L2 cache
constexpr int64_t PARTS = 16;               // approximate number of parts that a thread takes
constexpr int64_t AHEAD = 32;               // pairs of inputs between a prefetch and its use
constexpr int64_t STRETCH = 16;             // pairs of inputs between prefetches of the next group
constexpr int64_t PARALLEL_FROM = 1 << 15;  // weights; below, waking threads costs more than it saves

#if defined(LL_AVX512)
constexpr int MOST_ROWS = 12, MOST_PANELS = 2;  // 24 of 32 registers accumulate
#else
constexpr int MOST_ROWS = 6, MOST_PANELS = 1;  // 12 of 16
#endif

// With few rows more panels are computed at once; otherwise each accumulator would wait for its previous product.
constexpr int panels_of(int rows) { return std::max(MOST_PANELS, 4 / rows); }

LL_INLINE vf half_of(vu words, int odd) { return (vf)(odd ? words & 0xffff0000u : words << 16); }
LL_INLINE vf weights_of(const float* pair, int vec, int odd) { return load(pair + odd * PANEL + vec * W); }
LL_INLINE vf weights_of(const bf16* pair, int vec, int odd) { return half_of(load_as<vu>(pair + 2 * vec * W), odd); }

LL_INLINE void accumulate(vf& sum, vf a, vf b) {
#if defined(LL_AVX2)
    // In assembly, because gcc would move the sums between registers and, with 12 of 16 in use, onto the stack.
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum = fma(a, b, sum);
#endif
}

// Adds the products of two inputs for R rows and P panels.
template <class T, int R, int P>
LL_INLINE void add_pair(vf (&sums)[R][P * VECS], const T* w, int64_t panel_elems, const float* x, int64_t stride) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
        vf weights[P * VECS];
#pragma GCC unroll 16
        for (int v = 0; v < P * VECS; ++v) weights[v] = weights_of(w + v / VECS * panel_elems, v % VECS, odd);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const vf input = splat(x[r * stride + odd]);
#pragma GCC unroll 16
            for (int v = 0; v < P * VECS; ++v) accumulate(sums[r][v], input, weights[v]);
        }
    }
}

#if defined(LL_AVX512)
template <class T, int R, int P>
LL_INLINE void add_pair(vf (&sums)[R][P * VECS], const bf16* w, int64_t panel_elems, const bf16* x, int64_t stride) {
    static_assert(VECS == 1);
    __m512bh weights[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) weights[p] = load_as<__m512bh>(w + p * panel_elems);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const __m512bh inputs = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x + r * stride));
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) sums[r][p] = (vf)_mm512_dpbf16_ps((__m512)sums[r][p], weights[p], inputs);
    }
}
template <class T>
using Input = T;  // the type x is copied as: the dot product takes bf16
#else
template <class T>
using Input = float;
#endif

template <class T>
struct Linear {
    const T *x, *packed, *bias;
    T* out;
    int64_t rows, n_in, n_out, x_stride, out_stride;
    int64_t pairs = (n_in + 1) / 2, panels = (n_out + PANEL - 1) / PANEL, panel_elems = pairs * PAIR;
    // A little more than the inputs: rows a multiple of 4 KiB apart would share one set of the L1 cache.
    int64_t stride = pairs * 2 + PANEL;
    static constexpr int64_t PAIR_BYTES = PAIR * sizeof(T);

    // Prefetches the next group's weights: `step` more bytes for every stretch of pairs computed here, so that all of
    // them have been requested after all blocks of rows.
    struct Ahead {
        const char *asked, *upto;
        int64_t step;
        LL_INLINE void ask() {
            for (upto += step; asked < upto; asked += 64) __builtin_prefetch(asked, 0, 2);
        }
    };

    // Computes P panels for R rows.

    template <int R, int P>
    void pass(int64_t panel, int64_t row, const Input<T>* inputs, Ahead& ahead) const {
        vf sums[R][P * VECS] = {};
        const T* w = packed + panel * panel_elems;
        for (int64_t pair = 0, end; pair < pairs; pair = end) {
            end = std::min(pairs, pair + STRETCH);
            if constexpr (R > 2) ahead.ask();  // not in the inner loop: its variables would push sums out of registers
            for (int64_t i = pair; i < end; ++i, w += PAIR) {
#pragma GCC unroll 16
                for (int p = 0; p < P; ++p)
                    for (int64_t line = 0; line < PAIR_BYTES; line += 64)
                        __builtin_prefetch((const char*)(w + p * panel_elems + AHEAD * PAIR) + line);
                add_pair<T, R, P>(sums, w, panel_elems, inputs + 2 * i, stride);
            }
        }
#pragma GCC unroll 16
        for (int v = 0; v < P * VECS; ++v) {
            const int64_t column = panel * PANEL + v * W, columns = n_out - column;
            if (columns <= 0) break;
            const vf add = bias ? load_upto(bias + column, columns) : vf{};
            T* to = out + row * out_stride + column;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                store_upto(to + r * out_stride, bias ? sums[r][v] + add : sums[r][v], columns);
        }
    }

    template <int R>
    void pass_all(int64_t panel, int64_t end, int64_t row, const Input<T>* inputs, Ahead& ahead) const {
        for (; panel + panels_of(R) <= end; panel += panels_of(R)) pass<R, panels_of(R)>(panel, row, inputs, ahead);
        for (; panel < end; ++panel) pass<R, 1>(panel, row, inputs, ahead);
    }

    void copy_row(const T* from, Input<T>* to) const {
        if constexpr (std::is_same_v<Input<T>, T>)
            std::memcpy(to, from, n_in * sizeof(T));
        else
            for (int64_t i = 0; i < n_in; i += W) store_upto(to + i, load_upto(from + i, n_in - i), n_in - i);
        if (n_in % 2) to[n_in] = Input<T>{};
    }

    // Runs rows [from, to) over the panels of a group, in blocks of nearly equal size.
    template <int... R>
    void group(int64_t panel, int64_t end, int64_t from, int64_t to, const Input<T>* inputs, int64_t next_panel,
               std::integer_sequence<int, R...>) const {
        using Pass = void (Linear::*)(int64_t, int64_t, int64_t, const Input<T>*, Ahead&) const;
        static constexpr Pass PASSES[] = {&Linear::pass_all<R + 1>...};
        const int64_t blocks = (to - from + MOST_ROWS - 1) / MOST_ROWS;
        const char* next = (const char*)(packed + next_panel * panel_elems);
        Ahead ahead{next, next, STRETCH * PAIR_BYTES / blocks};
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = (to - from) * block / blocks, count = (to - from) * (block + 1) / blocks - first;
            (this->*PASSES[count - 1])(panel, end, from + first, inputs + first * stride, ahead);
        }
    }

    void widen(int64_t from, int64_t to, std::vector<Input<T>>& inputs) const {
        inputs.resize(std::max<size_t>(inputs.size(), (to - from) * stride));
        for (int64_t r = from; r < to; ++r) copy_row(x + r * x_stride, inputs.data() + (r - from) * stride);
    }

    // A thread takes some groups of panels for one slab of rows at a time. It widens the slab itself and keeps it in
    // its L2 cache, so that threads that need the same slab do not wait for each other.
    void run(int64_t num_threads) const {
        const int64_t threads = panels * panel_elems < PARALLEL_FROM ? 1 : std::min(num_threads, panels);
        const int64_t fit = SLAB_BYTES / (stride * int64_t(sizeof(Input<T>))) / MOST_ROWS * MOST_ROWS;
        const int64_t slab = rows <= 2 * fit ? rows : std::max<int64_t>(MOST_ROWS, fit), slabs = (rows + slab - 1) / slab;
        const int64_t at_once = panels_of(int(std::min<int64_t>(slab, MOST_ROWS)));  // for few rows: whole passes
        const int64_t most = std::min(GROUP_BYTES / (panel_elems * int64_t(sizeof(T))), panels / (4 * threads));
        const int64_t size = std::max<int64_t>(1, most / at_once) * at_once, groups = (panels + size - 1) / size;
        const int64_t each = std::max<int64_t>(1, slabs * groups / (PARTS * threads)), parts = (groups + each - 1) / each;
        team(threads, [&](Claims& claims) {
            static thread_local std::vector<Input<T>> inputs;
            int64_t held = -1;
            for (int64_t claim = claims.next(), next; claim < slabs * parts; claim = next) {
                next = claims.next();
                const int64_t from = claim / parts * slab, to = std::min(rows, from + slab);
                if (from != held) widen(from, to, inputs), held = from;
                const int64_t begin = claim % parts * each, end = std::min(groups, begin + each);
                for (int64_t g = begin; g < end; ++g) {
                    const int64_t then = g + 1 < end ? g + 1 : next < slabs * parts ? next % parts * each : g;
                    group(g * size, std::min(panels, (g + 1) * size), from, to, inputs.data(), then * size,
                          std::make_integer_sequence<int, MOST_ROWS>());
                }
            }
        });
    }
};

}  // namespace
}  // namespace ll

// x [rows, n_in], out [rows, n_out], bias [n_out] or null. Strides are in elements.
LL_EXPORT int ll_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t n_in,
                        int64_t n_out, int64_t x_stride, int64_t out_stride, int64_t is_bf16, int64_t threads) {
    auto run = [&](auto tag) {
        using T = decltype(tag);
        ll::Linear<T>{static_cast<const T*>(x), static_cast<const T*>(packed), static_cast<const T*>(bias),
                      static_cast<T*>(out), rows, n_in, n_out, x_stride, out_stride}
            .run(threads);
    };
    is_bf16 ? run(ll::bf16{}) : run(float{});
    return 0;
}
