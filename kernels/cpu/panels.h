// The loops of y = x @ W^T + bias: the distribution of rows, and of panels of 16 outputs, to threads and blocks. A
// `Weights` class (linear_simd.cpp, linear_int.cpp) defines how weights are stored and how products are summed:
//
//   Element, Input           type of x, bias and y; type of the copy of x
//   MOST_ROWS, panels_of(R)  rows of the largest block; panels that are computed at once for R rows
//   padded_in, panel_bytes   number of inputs with padding; size of a stored panel
//   data                     the first panel
//   copy_row(...)            copies a row of x with padding, and computes `num_sums` fp32 values from it
//   working_bytes(rows)      size of a panel during its use
//   many(rows), unpack(...)  whether panels are unpacked before use; unpacks them
//   add<R, P>(...)           adds the products of R rows with P panels
//   GATED                    whether a panel has two sums per output, which `activated` turns into the output
//
// Every output has its own lane. The order of its sum depends neither on the number of rows, nor on a row's position,
// nor on the number of threads.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "simd.h"
#include "team.h"

namespace ll {

constexpr int64_t PANEL = 16;               // outputs that are computed together
constexpr int64_t PAIR = 2 * PANEL;         // weights of two inputs in a panel
constexpr int VECS = PANEL / W;             // accumulators of a row in a panel
constexpr int64_t GROUP_BYTES = 1 << 17;    // weights of a group of panels: a quarter of a small L2 cache
constexpr int64_t SLAB_BYTES = 1 << 19;     // input rows that a thread copies at once: the size of an L2 cache
constexpr int64_t PARTS = 16;               // approximate number of parts per thread
constexpr int64_t PARALLEL_FROM = 1 << 15;  // weights; with fewer, waking threads costs more time than it saves
#if defined(LL_AVX512)
constexpr int MOST_ROWS_AT_ONCE = 12;
#else
constexpr int MOST_ROWS_AT_ONCE = 6;
#endif

LL_INLINE vf half_of(vu words, int odd) { return (vf)(odd ? words & 0xffff0000u : words << 16); }
LL_INLINE vf weights_of(const float* pair, int vec, int odd) { return load(pair + odd * PANEL + vec * W); }
LL_INLINE vf weights_of(const bf16* pair, int vec, int odd) { return half_of(load_as<vu>(pair + 2 * vec * W), odd); }

LL_INLINE void accumulate(vf& sum, vf a, vf b) {
#if defined(LL_AVX2)
    // This is assembly because gcc would move the sums between registers and, with 12 of 16 in use, onto the stack.
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
    for (int r = 0; r < R; ++r, x += stride) {
        const __m512bh inputs = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x));
        asm("" : "+r"(x));  // without this, gcc keeps the addresses of all rows, for which it lacks registers
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) sums[r][p] = (vf)_mm512_dpbf16_ps((__m512)sums[r][p], weights[p], inputs);
    }
}
template <class T>
using Input = T;  // the type of the copy of x; the dot product takes bf16
#else
template <class T>
using Input = float;
#endif

// Copies n elements, as `To`, and zeros up to `padded`.
template <class To, class From>
void copy_padded(const From* from, int64_t n, To* to, int64_t padded) {
    if constexpr (std::is_same_v<To, From>)
        std::memcpy(to, from, n * sizeof(To));
    else
        for (int64_t i = 0; i < n; i += W) store_upto(to + i, load_upto(from + i, n - i), n - i);
    std::fill(to + n, to + padded, To{});
}

// The prefetch of the next group's weights, while the blocks of rows use the current group. `step` is a block's part of
// Weights::step, the memory that one step of the loop over inputs reads: the blocks together prefetch a whole group.
// With a single block, `step` is Weights::step.
struct Ahead {
    const char *asked, *upto;
    int64_t step;
    const char* then;  // the panels after the current ones
    LL_INLINE void ask() {
        for (upto += step; asked < upto; asked += 64) __builtin_prefetch(asked, 0, 2);
    }
};

// `Sum` is the type of y.
template <class Weights, class Sum = typename Weights::Element>
struct Product {
    using T = typename Weights::Element;
    using Input = typename Weights::Input;
    static constexpr int MOST_ROWS = Weights::MOST_ROWS;

    const Weights weights;
    const T *x, *bias;
    Sum* out;
    int64_t rows, n_in, n_out, x_stride, out_stride;
    int64_t panels = (n_out + PANEL - 1) / PANEL;
    // A little more than the inputs, because rows at a distance of a multiple of 4 KiB would share one set of the L1
    // cache.
    int64_t stride = weights.padded_in + PANEL;

    // A thread's copy of the input rows of a slab. `unpacked` holds the panels of a group if the weights are unpacked.
    struct Slab {
        std::vector<Input> inputs, unpacked;
        std::vector<float> sums;
    };

    // Computes P panels for R rows; `first` is the first panel of the group.
    template <int R, int P>
    void pass(int64_t panel, int64_t row, int64_t in_slab, const Slab& slab, int64_t first, Ahead& ahead) const {
        constexpr int N = P * VECS;
        vf sums[R][Weights::GATED ? 2 * N : N] = {};
        weights.template add<R, P>(sums, panel, first, slab.inputs.data() + in_slab * stride, stride,
                                   slab.sums.data() + in_slab * weights.num_sums,
                                   weights.many(rows) ? slab.unpacked.data() : nullptr, ahead);
#pragma GCC unroll 16
        for (int v = 0; v < N; ++v) {
            const int64_t column = panel * PANEL + v * W, columns = n_out - column;
            if (columns <= 0) break;
            const vf add = bias ? load_upto(bias + column, columns) : vf{};
            Sum* to = out + row * out_stride + column;
            if constexpr (Weights::GATED) {
                const vf add_up = bias ? load_upto(bias + n_out + column, columns) : vf{};
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const vf gate = sums[r][v], up = sums[r][N + v];
                    const vf y = weights.activated(bias ? gate + add : gate, bias ? up + add_up : up);
                    store_upto(to + r * out_stride, y, columns);
                }
                continue;
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                store_upto(to + r * out_stride, bias ? sums[r][v] + add : sums[r][v], columns);
        }
    }

    template <int R>
    void pass_all(int64_t panel, int64_t end, int64_t row, int64_t in_slab, const Slab& slab, Ahead& ahead) const {
        constexpr int P = Weights::panels_of(R);
        const int64_t first = panel;
        const char* next = ahead.then;
        const auto after = [&](int64_t p) { return p < end ? weights.data + p * weights.panel_bytes : next; };
        for (; panel + P <= end; panel += P) {
            ahead.then = after(panel + P);
            pass<R, P>(panel, row, in_slab, slab, first, ahead);
        }
        for (; panel < end; ++panel) pass<R, 1>(panel, row, in_slab, slab, first, ahead);
        ahead.then = next;
    }

    // Computes rows [from, to) with the panels of a group, in blocks of nearly equal size.
    template <int... R>
    void group(int64_t panel, int64_t end, int64_t from, int64_t to, Slab& slab, int64_t next_panel,
               std::integer_sequence<int, R...>) const {
        using Pass = void (Product::*)(int64_t, int64_t, int64_t, int64_t, const Slab&, Ahead&) const;
        static constexpr Pass PASSES[] = {&Product::pass_all<R + 1>...};
        const int64_t blocks = (to - from + MOST_ROWS - 1) / MOST_ROWS;
        const char* next = weights.data + next_panel * weights.panel_bytes;
        Ahead ahead{next, next, weights.step / blocks, next};
        if (weights.many(rows)) {
            slab.unpacked.resize(std::max<size_t>(slab.unpacked.size(), (end - panel) * weights.padded_in * PANEL));
            weights.unpack(panel, end, slab.unpacked.data());
        }
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = (to - from) * block / blocks, count = (to - from) * (block + 1) / blocks - first;
            (this->*PASSES[count - 1])(panel, end, from + first, first, slab, ahead);
        }
    }

    void widen(int64_t from, int64_t to, Slab& slab) const {
        slab.inputs.resize(std::max<size_t>(slab.inputs.size(), (to - from) * stride));
        slab.sums.resize(std::max<size_t>(slab.sums.size(), (to - from) * weights.num_sums));
        for (int64_t r = from; r < to; ++r) {
            const int64_t in_slab = r - from;
            weights.copy_row(x + r * x_stride, n_in, slab.inputs.data() + in_slab * stride,
                             slab.sums.data() + in_slab * weights.num_sums);
        }
    }

    // Runs the product. A thread takes some groups of panels for one slab of rows at a time. It makes its own copy of
    // the slab and keeps it in its L2 cache, so that threads with the same slab do not wait for each other.
    void run(int64_t num_threads) const {
        const int64_t threads = panels * weights.padded_in * PANEL < PARALLEL_FROM ? 1 : std::min(num_threads, panels);
        const int64_t fit = SLAB_BYTES / (stride * int64_t(sizeof(Input))) / MOST_ROWS * MOST_ROWS;
        const int64_t slab = rows <= 2 * fit ? rows : std::max<int64_t>(MOST_ROWS, fit), slabs = (rows + slab - 1) / slab;
        const int64_t blocks = (slab + MOST_ROWS - 1) / MOST_ROWS;
        const int64_t at_once = Weights::panels_of(int((slab + blocks - 1) / blocks));  // whole passes
        const int64_t most = std::min(GROUP_BYTES / weights.working_bytes(rows), panels / (4 * threads));
        const int64_t size = std::max<int64_t>(1, most / at_once) * at_once, groups = (panels + size - 1) / size;
        const int64_t each = std::max<int64_t>(1, slabs * groups / (PARTS * threads)), parts = (groups + each - 1) / each;
        team(threads, [&](Claims& claims) {
            static thread_local Slab held;
            int64_t held_from = -1;
            for (int64_t claim = claims.next(), next; claim < slabs * parts; claim = next) {
                next = claims.next();
                const int64_t from = claim / parts * slab, to = std::min(rows, from + slab);
                if (from != held_from) widen(from, to, held), held_from = from;
                const int64_t begin = claim % parts * each, end = std::min(groups, begin + each);
                for (int64_t g = begin; g < end; ++g) {
                    const int64_t then = g + 1 < end ? g + 1 : next < slabs * parts ? next % parts * each : g;
                    group(g * size, std::min(panels, (g + 1) * size), from, to, held, then * size,
                          std::make_integer_sequence<int, MOST_ROWS>());
                }
            }
        });
    }
};

}  // namespace ll
