// One piece of the key axis: a tile of query rows against up to PIECE keys of one KV head. The core that decode and
// prefill share.
//
// Bits: every row does the same operations on its own numbers whatever tile it sits in. A score is one chain of
// multiply-adds over head_dim; a row's maximum, sum and output run over keys in ascending absolute order; keys a row
// does not see have weight exactly 0. Pieces begin at multiples of PIECE tokens and merge in ascending order.
#pragma once

#include <cstdlib>
#include <limits>
#include <new>

#include "simd.h"

namespace ll {

constexpr int PIECE = 256;           // keys; a change of it changes bits
constexpr int GROUPS = PIECE / W;    // vectors of keys in a piece
#if defined(LL_AVX512)
constexpr int ROWS = 6, COLS = 4;    // register block: ROWS query rows times COLS vectors
#else
constexpr int ROWS = 4, COLS = 2;
#endif
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// How q and k are held for the dot product: `step` words of head_dim per multiply-add.
template <class T>
struct Dot {  // fp32 multiply-adds, one element a step
    using Word = float;
    static constexpr int PER_STEP = 1;
    static LL_INLINE vf load_words(const T* p) { return load(p); }
    static LL_INLINE vf load_words_n(const T* p, int n) { return load_n(p, n); }
    static LL_INLINE void pack_q(float* dst, const T* q, int d) {
        for (int i = 0; i < d; i += W) store_upto(dst + i, load_upto(q + i, d - i), d - i);
    }
    static LL_INLINE vf madd(vf k, float q, vf acc) { return fma(k, splat(q), acc); }
};

#if defined(LL_AVX512)
template <>
struct Dot<bf16> {  // vdpbf16ps: a pair of elements a step
    using Word = float;  // the bits of a pair
    static constexpr int PER_STEP = 2;
    static LL_INLINE vf load_words(const bf16* p) { return load_as<vf>(p); }
    static LL_INLINE vf load_words_n(const bf16* p, int n) {
        return (vf)_mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p);
    }
    static LL_INLINE void pack_q(float* dst, const bf16* q, int d) { std::memcpy(dst, q, d * sizeof(bf16)); }
    static LL_INLINE vf madd(vf k, float q, vf acc) {
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512)k, (__m512bh)_mm512_set1_ps(q));
    }
};
#endif

// Scratch of one thread. Grows, never shrinks; one allocation.
struct Scratch {
    char* base = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(base); }
    char* reserve(size_t bytes) {
        if (bytes > size) {
            std::free(base);
            size = (bytes + 4095) & ~size_t(4095);
            base = static_cast<char*>(std::aligned_alloc(4096, size));
            if (!base) throw std::bad_alloc();
        }
        return base;
    }
};

// A tile of query rows and everything computed about it. Rows are (query token, head of the KV head's group).
template <class T>
struct Tile {
    int rows, d, dpad, steps;  // dpad: head_dim up to a multiple of W
    float scale_log2;          // softmax_scale * log2(e)
    float* qpack;              // [rows, steps]
    float* kpack;              // [GROUPS, steps, W]
    float* scores;             // [rows, PIECE], then weights
    float* o;                  // [rows, dpad] of this piece
    float* m;                  // [rows] of this piece, in units of log2; NEG_INF: the row sees no key here
    float* l;                  // [rows] of this piece
    float* total_o;            // [rows, dpad] merged
    float* total_m;
    float* total_l;
    int* lo;                   // [rows] first visible key, relative to the piece
    int* hi;                   // [rows] one past the last
    const T* keys[PIECE];      // [d] each, null where no row of the tile looks
    const T* values[PIECE];
    const T* ahead_keys[PIECE];  // what this thread will probably want next, from index 0
    const T* ahead_values[PIECE];
    int num_ahead;

    static size_t bytes(int rows, int d) {
        size_t dpad = (d + W - 1) / W * W;
        size_t floats = size_t(rows) * (d + PIECE + 2 * dpad + 8) + size_t(PIECE) * d + 16 * 16;
        return floats * 4;
    }
    void place(char* base, int rows_, int d_, float scale) {
        rows = rows_, d = d_, dpad = (d + W - 1) / W * W, steps = d / Dot<T>::PER_STEP;
        scale_log2 = scale * LOG2E;
        float* p = reinterpret_cast<float*>(base);
        auto take = [&](size_t n) { float* r = p; p += (n + 15) & ~size_t(15); return r; };
        kpack = take(size_t(PIECE) * steps), scores = take(size_t(rows) * PIECE), o = take(size_t(rows) * dpad);
        total_o = take(size_t(rows) * dpad), qpack = take(size_t(rows) * steps);
        m = take(rows), l = take(rows), total_m = take(rows), total_l = take(rows);
        lo = reinterpret_cast<int*>(take(rows)), hi = reinterpret_cast<int*>(take(rows));
    }
};

// Called for key i of n: spreads the reads of what comes next over the arithmetic of what is here.
template <class T>
LL_INLINE void prefetch_ahead(const Tile<T>& t, int i, int n) {
    const int each = (t.num_ahead + n - 1) / n, end = (i + 1) * each;
    for (int j = i * each; j < end && j < t.num_ahead; ++j) {
        const char* key = reinterpret_cast<const char*>(t.ahead_keys[j]);
        const char* value = reinterpret_cast<const char*>(t.ahead_values[j]);
        for (size_t b = 0; b < t.d * sizeof(T); b += 64)
            __builtin_prefetch(key + b, 0, 2), __builtin_prefetch(value + b, 0, 2);
    }
}

// Keys [lo, hi) of the piece -> kpack, transposed so that a vector holds one step of W keys.
template <class T>
void pack_keys(Tile<T>& t, int lo, int hi) {
    using D = Dot<T>;
    for (int g = lo / W; g * W < hi; ++g) {
        float* dst = t.kpack + size_t(g) * t.steps * W;
        for (int s = 0; s < t.steps; s += W) {
            int n = t.steps - s < W ? t.steps - s : W;
            vf block[W];
#pragma GCC unroll 16
            for (int j = 0; j < W; ++j) {
                const T* key = t.keys[g * W + j];
                if (!key) {
                    block[j] = vf{};
                    continue;
                }
                const T* at = key + s * D::PER_STEP;
                block[j] = n == W ? D::load_words(at) : D::load_words_n(at, n);
            }
            transpose(block);
            for (int j = 0; j < n; ++j) store(dst + size_t(s + j) * W, block[j]);
        }
    }
}

template <class T, int R, int C>
LL_INLINE void score_block(Tile<T>& t, int row, int g) {
    vf acc[R][C] = {};
    const float* k = t.kpack + size_t(g) * t.steps * W;
    const float* q = t.qpack + size_t(row) * t.steps;
    for (int s = 0; s < t.steps; ++s) {
        vf kv[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) kv[c] = load(k + (size_t(c) * t.steps + s) * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float word = q[size_t(r) * t.steps + s];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = Dot<T>::madd(kv[c], word, acc[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(t.scores + size_t(row + r) * PIECE + (g + c) * W, acc[r][c]);
}

template <class T, int R>
void score_rows(Tile<T>& t, int row, int lo, int hi) {
    int g = lo / W, end = (hi + W - 1) / W;
    for (; g + COLS <= end; g += COLS) score_block<T, R, COLS>(t, row, g);
    for (; g < end; ++g) score_block<T, R, 1>(t, row, g);
}

// scores -> weights 2^(score * scale - m) of one row; the rest of the tile's range [lo, hi) becomes 0.
template <class T>
void softmax_row(Tile<T>& t, int row, int lo, int hi) {
    float* x = t.scores + size_t(row) * PIECE;
    const int first = t.lo[row], last = t.hi[row];
    if (first >= last) {
        t.m[row] = NEG_INF, t.l[row] = 0.f;
        std::memset(x + lo / W * W, 0, size_t((hi + W - 1) / W - lo / W) * W * sizeof(float));
        return;
    }
    alignas(64) int32_t lanes[W];
    for (int i = 0; i < W; ++i) lanes[i] = i;
    const vi lane = load_as<vi>(lanes), from = splat_i(first), to = splat_i(last);
    vf top = splat(NEG_INF);
    for (int g = first / W; g * W < last; ++g) {
        vi key = lane + g * W;
        top = vmax(top, ((key >= from) & (key < to)) ? load(x + g * W) : splat(NEG_INF));
    }
    float m = hmax(top) * t.scale_log2;
    if (m == NEG_INF) m = 0.f;  // nothing but NaN or -inf: the row becomes NaN, it does not vanish
    const vf scale = splat(t.scale_log2), minus_m = splat(-m);
    vf sum = {};
    for (int g = lo / W; g * W < hi; ++g) {
        vi key = lane + g * W;
        vf weight = exp2v(fma(load(x + g * W), scale, minus_m));
        weight = ((key >= from) & (key < to)) ? weight : vf{};
        sum += weight;
        store(x + g * W, weight);
    }
    t.m[row] = m, t.l[row] = hsum(sum);
}

template <class T, int R, int C>
LL_INLINE void value_block(Tile<T>& t, int row, int col, int lo, int hi) {
    vf acc[R][C] = {};
    const bool first = row == 0 && col == 0;
    const float* p = t.scores + size_t(row) * PIECE;
    const int left = t.d - col;
    for (int k = lo; k < hi; ++k) {
        if (first) prefetch_ahead(t, k - lo, hi - lo);
        vf v[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) v[c] = C > 1 ? load(t.values[k] + col + c * W) : load_upto(t.values[k] + col, left);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            vf weight = splat(p[size_t(r) * PIECE + k]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, v[c], acc[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)  // + 0: a sum of only zeros is +0, whatever signs the unseen values had
            store(t.o + size_t(row + r) * t.dpad + col + c * W, acc[r][c] + splat(0.f));
}

template <class T, int R>
void value_rows(Tile<T>& t, int row, int lo, int hi) {
    int col = 0;
    for (; col + COLS * W <= t.d; col += COLS * W) value_block<T, R, COLS>(t, row, col, lo, hi);
    for (; col < t.d; col += W) value_block<T, R, 1>(t, row, col, lo, hi);
}

template <class T, int R>
LL_INLINE void rows_dispatch(Tile<T>& t, int row, int n, int lo, int hi, bool values) {
    if constexpr (R > 1)
        if (n < R) return rows_dispatch<T, R - 1>(t, row, n, lo, hi, values);
    if (values)
        value_rows<T, R>(t, row, lo, hi);
    else
        score_rows<T, R>(t, row, lo, hi);
}

// m, l, o of this piece. [lo, hi) covers what any row of the tile sees; keys and values are set there.
template <class T>
void attend(Tile<T>& t, int lo, int hi) {
    pack_keys(t, lo, hi);
    for (int r = 0; r < t.rows; r += ROWS) rows_dispatch<T, ROWS>(t, r, t.rows - r, lo, hi, false);
    for (int r = 0; r < t.rows; ++r) softmax_row(t, r, lo, hi);
    for (int r = 0; r < t.rows; r += ROWS) rows_dispatch<T, ROWS>(t, r, t.rows - r, lo, hi, true);
}

// total <- total merged with a later piece (Milakov and Gimelshein 2018). Rows start with total_m = NEG_INF.
LL_INLINE void merge_row(float* total_o, float& total_m, float& total_l, const float* o, float m, float l, int dpad) {
    if (m == NEG_INF) return;
    if (total_m == NEG_INF) {
        std::memcpy(total_o, o, dpad * sizeof(float));
        total_m = m, total_l = l;
        return;
    }
    const float top = m > total_m ? m : total_m;
    const vf a = exp2v(splat(total_m - top)), b = exp2v(splat(m - top));
    for (int i = 0; i < dpad; i += W) store(total_o + i, fma(load(o + i), b, load(total_o + i) * a));
    total_l = fma(splat(l), b, splat(total_l) * a)[0];
    total_m = top;
}

template <class T>
LL_INLINE void finish_row(T* out, const float* total_o, float total_m, float total_l, int d) {
    const vf l = splat(total_m == NEG_INF ? 1.f : total_l);
    for (int i = 0; i < d; i += W) {
        vf x = total_m == NEG_INF ? vf{} : load(total_o + i) / l;
        store_upto(out + i, x, d - i);
    }
}

}  // namespace ll
