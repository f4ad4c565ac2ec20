// Attention over one piece (KV split) of the key axis (long: it is inlined as a whole). It computes a tile of query
// rows against up to PIECE keys of one KV head. Decode and prefill share it.
//
// Reproducibility: the bits of a row do not depend on the tile that contains it. In vectors, a score is one chain of
// multiply-adds over head_dim, and a row's output is accumulated over keys in ascending absolute order; on AMX tiles,
// attention_amx.cpp says the orders. Keys that a row does not see have a weight of exactly 0. Pieces begin at multiples
// of PIECE tokens and are merged in ascending order.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <type_traits>

#include "transpose.h"
#include "words.h"

namespace ll {

constexpr int PIECE = 256;           // keys; a different number would change bits
constexpr int GROUP_KEYS = 32;       // keys whose weights are rounded at once, and whose values an AMX product sums
// The constants below do not affect bits.
constexpr int PANEL = 12;            // vectors of keys that are packed at once; they are scored while in the L1 cache
constexpr int STRETCH = 64;          // keys whose values are added to all rows while they are in the L1 cache
constexpr int ROWS = 6;              // maximum query rows of a register block
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// Returns the number of vectors per row in a register block of `rows` rows. 8 to 12 sums hide the latency of a
// multiply-add, and more do not fit into the registers.
constexpr int columns_beside(int rows) {
#if defined(LL_AVX512)
    return rows <= 2 ? 8 : 4;
#else
    return rows == 1 ? 8 : rows == 2 ? 4 : 2;
#endif
}

// Scratch memory of one thread: a single allocation that grows and never shrinks.
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

// The runs of memory that a thread will probably need next. They are prefetched a few cache lines at a time, spread
// over the arithmetic. A burst of prefetches would stall on memory, and without prefetches memory would be idle during
// the arithmetic. They go to the L2 cache, which has room for them and can wait for more lines than the L1 cache. For
// each line that they read, packing prefetches 3/4 of a line, scoring 1/3 (one, if it reads the blocks) and summing
// values one. Together this is a little more than what is read.
struct Ahead {
    struct Run {
        const char *from, *to;
    };
    Run runs[PIECE + 1];  // the last entry is read but not used
    int count = 0, at = 0, rate = 0;  // rate: the memory to prefetch, as a multiple of what is read
    const char* line;

    template <class T>
    void add(const T* from, int64_t elems) {
        if (count == PIECE) return;
        runs[count++] = {reinterpret_cast<const char*>(from), reinterpret_cast<const char*>(from + elems)};
    }
    void begin(int rate_) { at = 0, rate = rate_, line = runs[0].from; }
    LL_INLINE void ask(int lines) {
        for (lines *= rate; lines > 0 && at < count;) {
            const int n = int(std::min<int64_t>(lines, (runs[at].to - line + 63) / 64));
            for (int i = 0; i < n; ++i, line += 64) __builtin_prefetch(line, 0, 2);
            lines -= n;
            if (line >= runs[at].to) line = runs[++at].from;
        }
    }
};

// What is prefetched while a piece is computed: its values during its scores, and the next keys during its sums. On tiles
// (attention_amx.cpp), `keys` also has the next values, and all of it is prefetched at all times.
struct Prefetch {
    Ahead values, keys;
    void clear() { values.count = keys.count = 0; }
};

// Whether softmax has the bits of torch's for contexts of one piece: its weights are powers of e, and they are divided by
// their sum before they multiply values. The other weights are powers of 2, which takes less time, and the sum divides
// the output.
template <class T, class E>
constexpr bool AS_TORCH = std::is_same_v<T, float> && std::is_same_v<E, float>;
template <class T, class E>
constexpr float UNIT = AS_TORCH<T, E> ? 1.f : LOG2E;  // a score of 1 is this exponent of a weight

// Whether values are multiplied in pairs of bf16, with rounded weights: by AVX512-BF16, or on AMX tiles if d is a
// multiple of 32 (attention_amx.cpp).
#if defined(LL_AVX512)
template <class T, class E>
constexpr bool IN_PAIRS = std::is_same_v<T, bf16> && std::is_same_v<E, bf16>;
#else
template <class T, class E>
constexpr bool IN_PAIRS = false;
#endif

// The power whose exponent is x.
template <class T, class E>
LL_INLINE vf power(vf x) { return AS_TORCH<T, E> ? expv(x) : exp2v(x); }

// A tile of query rows, with all intermediate results. A row is a pair of a query token and a head of the KV head's
// group. Queries have the type T; keys and values have the type E, which is T or a type of 8 bits.
template <class T, class E>
struct Tile {
    int rows, d, dpad, words;  // dpad: padded(d); words: 32-bit words of a key
    float scale, softcap;      // softcap 0: none
    float* qpack;              // [rows, words, TERMS]
    float* kpack;              // [words, PANEL, W]
    const float* packed[PANEL];  // the vectors of the panel
    // If keys are stored by word (kernels/kv_cache.py): the vectors of the piece's keys, and the distance of a vector's
    // words in floats. Otherwise word_step is 0, and `keys` is used.
    const float* by_word[PIECE / W];
    int64_t word_step;
    float* scores;             // [rows, PIECE], then weights, unless they are rounded
    float* o;                  // [rows, dpad] output of this piece, with columns in the order of Columns
    E* zeros;                  // [d]
    float* m;                  // [rows] maximum in this piece, in units of UNIT; NEG_INF: the row sees no key in it
    float* l;                  // [rows] sum of weights in this piece
    float* sinks;              // [rows] a logit without a value after the last key, in units of UNIT; NEG_INF: none
    float* total_o;            // [rows, dpad] output of all pieces so far; likewise total_m, total_l
    float* total_m;
    float* total_l;
    int* lo;                   // [rows] first visible key, relative to the piece
    int* hi;                   // [rows] one past the last visible key
    const E* keys[PIECE];      // [d] each; `zeros` for a key that no row of the tile sees
    const E* values[PIECE];
    float key_scales[PIECE];   // of keys and values of 8 bits; 0 for a key that no row of the tile sees
    float value_scales[PIECE];
    int16_t* weights;          // [rows, PIECE] as integers, if IN_INTEGERS; as bf16, if IN_PAIRS
    float* vpack;              // [PIECE, d] values as operands of tiles, if IN_PAIRS
    float *q_scales, *weight_scales;  // of each row's query and weights, if IN_INTEGERS
    Prefetch* ahead;

    static constexpr size_t WEIGHT_FLOATS = IN_INTEGERS<T, E> || IN_PAIRS<T, E> ? PIECE / 2 : 0;  // of a row
    static size_t value_floats(int d) { return IN_PAIRS<T, E> ? size_t(PIECE) * d / 2 : 0; }

    // The number of columns of an output: d, rounded up to those that are computed together.
    static int padded(int d) {
        constexpr int TO = IN_INTEGERS<T, E> ? INTEGER_COLUMNS : W;
        return (d + TO - 1) / TO * TO;
    }
    static size_t bytes(int rows, int d) {
        size_t dpad = padded(d);
        size_t floats = size_t(rows) * (d + PIECE + WEIGHT_FLOATS + 2 * dpad + 11) + size_t(PANEL) * W * d + d + 16 * 22;
        return (floats + value_floats(d) + 15) / 16 * 64;
    }
    void place(char* base, int rows_, int d_, float scale_, float softcap_) {
        rows = rows_, d = d_, dpad = padded(d), words = d / DotOf<T, E>::PER_WORD;
        scale = scale_, softcap = softcap_;
        float* p = reinterpret_cast<float*>(base);
        auto take = [&](size_t n) { float* r = p; p += (n + 15) & ~size_t(15); return r; };
        kpack = take(size_t(PANEL) * W * words);
        for (int i = 0; i < PANEL; ++i) packed[i] = kpack + i * W;
        scores = take(size_t(rows) * PIECE), o = take(size_t(rows) * dpad);
        total_o = take(size_t(rows) * dpad), qpack = take(size_t(rows) * words * DotOf<T, E>::TERMS);
        q_scales = take(rows), weight_scales = take(rows);
        weights = reinterpret_cast<int16_t*>(take(size_t(rows) * WEIGHT_FLOATS)), vpack = take(value_floats(d));
        m = take(rows), l = take(rows), total_m = take(rows), total_l = take(rows), sinks = take(rows);
        lo = reinterpret_cast<int*>(take(rows)), hi = reinterpret_cast<int*>(take(rows));
        zeros = reinterpret_cast<E*>(take(d));
        std::memset(zeros, 0, d * sizeof(E));
    }
    float* q_row(int row) const { return qpack + size_t(row) * words * DotOf<T, E>::TERMS; }
};

// Packs vector g of the piece (W keys) into position `at` of the panel, transposed: a packed vector holds one word of
// each of the W keys.
template <class T, class E, bool AHEAD>
void pack_keys(Tile<T, E>& t, int g, int at) {
    constexpr int WIDTH = DotOf<T, E>::PER_WORD;
    constexpr bool CONVERTS = IS_8_BITS<E> && !IN_INTEGERS<T, E>;
    float* dst = t.kpack + at * W;
    if (t.word_step) {
        const float* from = t.by_word[g];
        for (int s = 0; s < t.words; ++s, dst += PANEL * W, from += t.word_step) {
            if (AHEAD && s % W == 0) t.ahead->values.ask(W * W * int(sizeof(float)) * 3 / 256);
            store(dst, load(from));
        }
        return;
    }
    vf block[W];
    int s = 0;
    for (; s + W <= t.words; s += W, dst += PANEL * W * W) {
        if constexpr (AHEAD) t.ahead->values.ask(W * W * WIDTH * int(sizeof(E)) * 3 / 256);
        if constexpr (CONVERTS) {
#pragma GCC unroll 16
            for (int j = 0; j < W; ++j) block[j] = Words<T>::of(t.keys[g * W + j] + s * WIDTH, W);
            transpose(block);
        } else {
            const char* from[W];
#pragma GCC unroll 16
            for (int j = 0; j < W; ++j) from[j] = reinterpret_cast<const char*>(t.keys[g * W + j]) + s * sizeof(float);
            load_transposed(from, block);
        }
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) store(dst + j * PANEL * W, block[j]);
    }
    if (s == t.words) return;
    for (int j = 0; j < W; ++j) {
        const E* key = t.keys[g * W + j] + s * WIDTH;
        if constexpr (CONVERTS)
            block[j] = Words<T>::of(key, t.words - s);
        else
            block[j] = load_n(reinterpret_cast<const float*>(key), t.words - s);
    }
    transpose(block);
    for (int j = 0; s + j < t.words; ++j) store(dst + j * PANEL * W, block[j]);
}

template <class D, int R, int C, int TERM>
LL_INLINE void score_term(const vf (&words)[C], const float* q, int q_width, vf (&acc)[R][C]) {
    vf kv[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) kv[c] = D::template term<TERM>(words[c]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const float word = q[size_t(r) * q_width + TERM];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = D::madd(kv[c], word, acc[r][c]);
    }
}

// How scores read keys: from the panel, from the panel while they prefetch, or where the keys are stored by word.
enum class From { PANEL, PANEL_AHEAD, BLOCKS };

// Computes the scores of R rows, starting at `row`, for C vectors of the panel, starting at `at`. The panel begins with
// vector g of the piece.
template <class T, class E, int R, int C, From FROM>
void score_block(Tile<T, E>& t, int row, int at, int g) {
    using D = DotOf<T, E>;
    vf acc[R][C] = {};
    const int q_width = t.words * D::TERMS;
    const float *k = t.kpack + at * W, *q = t.q_row(row);
    const float* blocks[C];
    const int64_t step = t.word_step;
    constexpr int STEP = FROM == From::BLOCKS ? 2 : 8;  // words between prefetches; few, so that loads need not wait
    if constexpr (FROM == From::BLOCKS)
        for (int c = 0; c < C; ++c) blocks[c] = t.by_word[g + at + c];
    for (int s = 0, end; s < t.words; s = end) {
        end = std::min(t.words, s + STEP);
        constexpr int LINES = C * W * D::PER_WORD * int(sizeof(E)) * STEP / 64;  // of keys that are read
        if constexpr (FROM == From::BLOCKS) t.ahead->values.ask(LINES);
        if constexpr (FROM == From::PANEL_AHEAD) t.ahead->values.ask(std::max(1, LINES / 3));
        for (int i = s; i < end; ++i, k += PANEL * W, q += D::TERMS) {
            vf words[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                words[c] = FROM == From::BLOCKS ? load(blocks[c] + i * step) : load(k + c * W);
#if defined(LL_AVX512)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) asm("" : "+v"(words[c]));  // without this, gcc loads them again for each row
#endif
            score_term<D, R, C, 0>(words, q, q_width, acc);
            if constexpr (D::TERMS == 2) score_term<D, R, C, 1>(words, q, q_width, acc);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const int key = (g + at + c) * W;
            if constexpr (IN_INTEGERS<T, E>) acc[r][c] = D::sum(acc[r][c]) * splat(t.q_scales[row + r]);
            if constexpr (IS_8_BITS<E>) acc[r][c] *= load(t.key_scales + key);
            store(t.scores + size_t(row + r) * PIECE + key, acc[r][c]);
        }
}

template <class T, class E, int R, From FROM>
void score_rows(Tile<T, E>& t, int row, int g, int n) {
    constexpr int C = columns_beside(R) == 2 && R + DotOf<T, E>::TERMS <= 5 ? 3 : columns_beside(R);  // bf16: 4 x 3 spills
    int at = 0;
    for (; at + C <= n; at += C) score_block<T, E, R, C, FROM>(t, row, at, g);
    for (; at + 2 <= n; at += 2) score_block<T, E, R, 2, FROM>(t, row, at, g);
    if (at < n) score_block<T, E, R, 1, FROM>(t, row, at, g);
}

#if defined(LL_AVX512)
// Rounds two vectors to bf16, and denormal numbers to zero.
LL_INLINE void store_rounded(int16_t* to, vf a, vf b) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    std::memcpy(to, &rounded, sizeof rounded);
}
#else
LL_INLINE void store_rounded(int16_t*, vf, vf) {}  // there are no tiles
#endif

// Replaces one row's scores by weights, the powers of score * scale - m, and by 0 for the rest of the tile's range [lo,
// hi). Weights of values of 8 bits are multiplied by the values' scales after they have been summed. With ROUNDS, the
// weights are rounded to bf16 and stored in `weights`, and lo and hi are multiples of 2 W.
template <class T, class E, bool ROUNDS = false>
void softmax_row(Tile<T, E>& t, int row, int lo, int hi) {
    float* x = t.scores + size_t(row) * PIECE;
    const int first = t.lo[row], last = t.hi[row];
    if (first >= last) {
        t.m[row] = NEG_INF, t.l[row] = 0.f;
        if constexpr (IN_INTEGERS<T, E>)
            std::memset(t.weights + size_t(row) * PIECE, 0, PIECE * sizeof(int16_t)), t.weight_scales[row] = 0.f;
        if constexpr (ROUNDS)
            std::memset(t.weights + size_t(row) * PIECE + lo, 0, size_t(hi - lo) * sizeof(bf16));
        else
            std::memset(x + lo / W * W, 0, size_t((hi + W - 1) / W - lo / W) * W * sizeof(float));
        return;
    }
    alignas(64) int32_t lanes[W];
    for (int i = 0; i < W; ++i) lanes[i] = i;
    const vi lane = load_as<vi>(lanes), from = splat_i(first), to = splat_i(last);
    auto seen = [&](int g, vf v, float otherwise) {
        if (g * W >= first && g * W + W <= last) return v;
        vi key = lane + g * W;
        return ((key >= from) & (key < to)) ? v : splat(otherwise);
    };
    float scale = t.scale * UNIT<T, E>;
    if (t.softcap != 0.f) {
        for (int g = first / W; g * W < last; ++g) store(x + g * W, capped(load(x + g * W), t.scale, t.softcap));
        scale = UNIT<T, E>;
    }
    vf top = splat(NEG_INF);
    for (int g = first / W; g * W < last; ++g) top = vmax(top, seen(g, load(x + g * W), NEG_INF));
    float m = hmax(top) * scale;
    if (m == NEG_INF) m = 0.f;  // all scores are NaN or -inf: the row must become NaN instead of zeros
    m = std::max(m, t.sinks[row]);
    const vf by = splat(scale), minus_m = splat(-m);
    vf sum = {};
    auto weight_of = [&](int g) {
        const vf score = load(x + g * W);
        const vf exponent = AS_TORCH<T, E> ? score * by + minus_m : fma(score, by, minus_m);
        const vf weight = seen(g, power<T, E>(exponent), 0.f);
        sum += weight;
        return weight;
    };
    if constexpr (ROUNDS) {
        for (int g = lo / W; g * W < hi; g += 2) {
            const vf even = weight_of(g), odd = weight_of(g + 1);
            store_rounded(t.weights + size_t(row) * PIECE + g * W, even, odd);
        }
    } else {
        for (int g = lo / W; g * W < hi; ++g) {
            vf weight = weight_of(g);
            if constexpr (IS_8_BITS<E>) weight = seen(g, weight * load(t.value_scales + g * W), 0.f);
            store(x + g * W, weight);
        }
    }
    if (t.sinks[row] != NEG_INF) sum[last % W] += power<T, E>(splat(t.sinks[row] - m))[0];
    t.m[row] = m, t.l[row] = hsum(sum);
    if constexpr (AS_TORCH<T, E>) {
        const vf inverse = splat(1.f / t.l[row]);
        for (int g = lo / W; g * W < hi; ++g) store(x + g * W, load(x + g * W) * inverse);
    }
    if constexpr (IN_INTEGERS<T, E>) {
        vf most = {}, spoiled = {};
        for (int g = lo / W; g * W < hi; ++g) {
            const vf v = load(x + g * W);
            most = vmax(v, most), spoiled += v - v;
        }
        const float largest = hmax(most);
        const vf inverse = splat(largest >= LEAST_MAGNITUDE ? MOST_16 / largest : 0.f);
        for (int g = lo / W; g * W < hi; ++g)
            store_16(t.weights + size_t(row) * PIECE + g * W, load(x + g * W) * inverse);
        t.weight_scales[row] = largest / MOST_16 + hsum(spoiled);
    }
}

// Adds weight * value for keys [from, to) to C column vectors, starting at `col`, of R rows. C == 1: the last columns.
template <class T, class E, int R, int C, bool AHEAD>
void value_block(Tile<T, E>& t, int row, int col, int from, int to, int lo) {
    vf acc[R][C];
    float* o = t.o + size_t(row) * t.dpad + col;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = from == lo ? vf{} : load(o + size_t(r) * t.dpad + c * W);
    const float* p = t.scores + size_t(row) * PIECE;
    for (int k = from, end; k < to; k = end) {
        end = std::min(to, k + 8);
        if constexpr (AHEAD) t.ahead->keys.ask(C * W * sizeof(E) / 8);
        for (int i = k; i < end; ++i) {
            vf v[C];
            if constexpr (C > 1)
                Columns<E>::load_block(t.values[i] + col, v);
            else
                v[0] = load_upto(t.values[i] + col, t.d - col);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                vf weight = splat(p[size_t(r) * PIECE + i]);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, v[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)  // + 0 turns -0 into +0, so that the signs of unseen values have no effect
            store(o + size_t(r) * t.dpad + c * W, acc[r][c] + splat(0.f));
}

#if defined(LL_AVX512)
// Returns the values of two keys in pairs, of 32 columns: the pairs of the even columns, then those of the odd ones, as
// in `Columns`.
LL_INLINE void load_pairs(const bf16* a, const bf16* b, __m512i& even, __m512i& odd) {
    const __m512i low = _mm512_set1_epi32(0xffff), x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    constexpr int CHOOSE = 0xca;  // the first operand selects the second or the third
    even = _mm512_ternarylogic_epi32(low, x, _mm512_slli_epi32(y, 16), CHOOSE);
    odd = _mm512_ternarylogic_epi32(low, _mm512_srli_epi32(x, 16), y, CHOOSE);
}

// Likewise of the last n columns, at most 16, in order.
LL_INLINE __m512i load_last_pairs(const bf16* a, const bf16* b, int n) {
    return (__m512i)((vu)load_upto(b, n) | (vu)load_upto(a, n) >> 16);
}

// value_block for values in pairs: a row's output is accumulated over pairs of keys. Every product adds two keys.
template <class T, class E, int R, int C, bool AHEAD>
void value_pairs(Tile<T, E>& t, int row, int col, int from, int to, int lo) {
    vf acc[R][C];
    float* o = t.o + size_t(row) * t.dpad + col;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = from == lo ? vf{} : load(o + size_t(r) * t.dpad + c * W);
    const int16_t* weights = t.weights + size_t(row) * PIECE;
    for (int k = from; k < to; k += 8) {
        for (int i = k; i < k + 8; i += 2) {
            if constexpr (AHEAD) t.ahead->keys.ask(C * W * sizeof(E) / 32);
            __m512i v[C];
            if constexpr (C > 1)
#pragma GCC unroll 4
                for (int c = 0; c < C; c += 2)
                    load_pairs(t.values[i] + col + c * W, t.values[i + 1] + col + c * W, v[c], v[c + 1]);
            else
                v[0] = load_last_pairs(t.values[i] + col, t.values[i + 1] + col, t.d - col);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const auto pair = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(weights + r * PIECE + i));
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) acc[r][c] = (vf)_mm512_dpbf16_ps((__m512)acc[r][c], (__m512bh)v[c], pair);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(o + size_t(r) * t.dpad + c * W, acc[r][c]);
}
#endif

#if defined(LL_INTEGERS)
// Sets columns [col, col + INTEGER_COLUMNS) of R rows to the sums of weight * value over keys [lo, hi), in integers. Four
// values of a column form a word. Vector j of the words has columns 4 j to 4 j + 3 of every 16; finish_row restores the
// order.
template <class T, class E, int R, bool AHEAD>
void value_integers(Tile<T, E>& t, int row, int col, int lo, int hi) {
    constexpr int N = W == 16 ? 4 : 2;  // vectors whose sums fit into the registers
    const int left = t.d - col;
    for (int first = 0; first < 4; first += N) {
        vi acc[R][N] = {};
        for (int k = lo / 4 * 4; k < hi; k += 4) {
            if constexpr (AHEAD) t.ahead->keys.ask(INTEGER_COLUMNS * N / 64);
            vi v[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) v[i] = load_bytes(t.values[k + i] + col, left);
            vi words[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; n += 2) {
                const bool low = first + n == 0;
                const vi even = low ? zip_low_8(v[0], v[2]) : zip_high_8(v[0], v[2]);
                const vi odd = low ? zip_low_8(v[1], v[3]) : zip_high_8(v[1], v[3]);
                words[n] = zip_low_16(even, odd), words[n + 1] = zip_high_16(even, odd);
            }
            const int16_t* weights = t.weights + size_t(row) * PIECE + k;
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const vi early = low_bytes(words[n]), late = high_bytes(words[n]);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    acc[r][n] = madd_pairs(early, splat_word(weights + r * PIECE), acc[r][n]);
                    acc[r][n] = madd_pairs(late, splat_word(weights + r * PIECE + 2), acc[r][n]);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n)
                store(t.o + size_t(row + r) * t.dpad + col + (first + n) * W,
                      to_floats(acc[r][n]) * splat(t.weight_scales[row + r]));
    }
}
#endif

template <class T, class E, int R, bool AHEAD>
void value_rows(Tile<T, E>& t, int row, int from, int to, int lo) {
#if defined(LL_INTEGERS)
    if constexpr (IN_INTEGERS<T, E>) {
        for (int col = 0; col < t.d; col += INTEGER_COLUMNS) value_integers<T, E, R, AHEAD>(t, row, col, from, to);
        return;
    }
#endif
    const auto block = [&](int col, auto columns, auto asks) {
#if defined(LL_AVX512)
        if constexpr (IN_PAIRS<T, E>) return value_pairs<T, E, R, columns.value, asks.value>(t, row, col, from, to, lo);
#endif
        value_block<T, E, R, columns.value, asks.value>(t, row, col, from, to, lo);
    };
    constexpr std::bool_constant<AHEAD> asks;
    constexpr int C = columns_beside(R);
    int col = 0;
    for (; col + C * W <= t.d; col += C * W) block(col, std::integral_constant<int, C>(), asks);
    for (; col + 2 * W <= t.d; col += 2 * W) block(col, std::integral_constant<int, 2>(), asks);
    for (; col < t.d; col += W) block(col, std::integral_constant<int, 1>(), std::false_type());
}

// Calls work(row, number of rows) for blocks of at most ROWS rows. The number of rows is a compile-time constant.
template <int R = ROWS, class F>
LL_INLINE void for_row_blocks(int row, int rows, F&& work) {
    for (; row + R <= rows; row += R) work(row, std::integral_constant<int, R>{});
    if constexpr (R > 1)
        if (row < rows) for_row_blocks<R - 1>(row, rows, work);
}

// Widens [lo, hi) to whole groups of keys. The values of keys that are added are zeros, and their weights will be 0.
template <class T, class E>
LL_INLINE void widen_to_groups(Tile<T, E>& t, int& lo, int& hi) {
    const int begin = lo / GROUP_KEYS * GROUP_KEYS, end = (hi + GROUP_KEYS - 1) / GROUP_KEYS * GROUP_KEYS;
    std::fill(t.values + begin, t.values + lo, t.zeros), std::fill(t.values + hi, t.values + end, t.zeros);
    lo = begin, hi = end;
}

// Computes the scores of the piece. [lo, hi) covers all keys that any row of the tile sees.
template <class T, class E>
void score_piece(Tile<T, E>& t, int lo, int hi) {
    const int end = (hi + W - 1) / W;
    if (t.word_step && t.rows <= ROWS) {  // packing pays only if several blocks of rows read the panel
        for_row_blocks(0, t.rows, [&](int row, auto r) {
            score_rows<T, E, r.value, From::BLOCKS>(t, row, lo / W, end - lo / W);
        });
        return;
    }
    const bool asks = t.ahead->values.count > 0;
    for (int g = lo / W; g < end; g += PANEL) {
        const int n = end - g < PANEL ? end - g : PANEL;
        for (int i = 0; i < n; ++i) asks ? pack_keys<T, E, true>(t, g + i, i) : pack_keys<T, E, false>(t, g + i, i);
        for_row_blocks(0, t.rows, [&](int row, auto r) {
            row == 0 && asks ? score_rows<T, E, r.value, From::PANEL_AHEAD>(t, row, g, n)
                             : score_rows<T, E, r.value, From::PANEL>(t, row, g, n);
        });
    }
}

// Computes m, l and o of the piece from its scores.
template <class T, class E>
void sum_piece(Tile<T, E>& t, int lo, int hi) {
    if constexpr (IN_PAIRS<T, E>) widen_to_groups(t, lo, hi);
    for (int r = 0; r < t.rows; ++r) softmax_row<T, E, IN_PAIRS<T, E>>(t, r, lo, hi);
    const bool asks = t.ahead->keys.count > 0;
    constexpr int TOGETHER = IN_INTEGERS<T, E> ? PIECE : STRETCH;
    for (int from = lo; from < hi; from += TOGETHER) {
        const int to = hi - from < TOGETHER ? hi : from + TOGETHER;
        for_row_blocks(0, t.rows, [&](int row, auto r) {
            row == 0 && asks ? value_rows<T, E, r.value, true>(t, row, from, to, lo)
                                    : value_rows<T, E, r.value, false>(t, row, from, to, lo);
        });
    }
}

// Computes m, l and o of this piece for n tiles, of different KV heads. `keys` or `by_word`, and `values`, must be set
// in [lo, hi). All scores come first, because the keys of these heads are neighbours in memory, and so are the values.
template <class T, class E>
void attend(Tile<T, E>* tiles, int n, int lo, int hi) {
    for (int i = 0; i < n; ++i) score_piece(tiles[i], lo, hi);
    for (int i = 0; i < n; ++i) sum_piece(tiles[i], lo, hi);
}

// Merges the result of a later piece into the total (Milakov and Gimelshein 2018). A row starts with total_m = NEG_INF.
template <class T, class E>
LL_INLINE void merge_row(float* total_o, float& total_m, float& total_l, const float* o, float m, float l, int dpad) {
    if (m == NEG_INF) return;
    if (total_m == NEG_INF) {
        std::memcpy(total_o, o, dpad * sizeof(float));
        total_m = m, total_l = l;
        return;
    }
    const float top = m > total_m ? m : total_m;
    vf a = power<T, E>(splat(total_m - top)), b = power<T, E>(splat(m - top));
    const vf own = splat(l), before = splat(total_l), sum = fma(own, b, before * a);
    if constexpr (AS_TORCH<T, E>) a = a * before / sum, b = b * own / sum;
    for (int i = 0; i < dpad; i += W) store(total_o + i, fma(load(o + i), b, load(total_o + i) * a));
    total_l = sum[0];
    total_m = top;
}

// Writes the row's output. With IN_PAIRS, -0 becomes +0: products of pairs flush small sums to zeros whose signs depend
// on the number of unseen keys.
template <class E, class T>
LL_INLINE void finish_row(T* out, const float* total_o, float total_m, float total_l, int d) {
    const vf l = splat(total_m == NEG_INF || AS_TORCH<T, E> ? 1.f : total_l), zero = splat(IN_PAIRS<T, E> ? 0.f : -0.f);
    auto at = [&](int i) { return total_m == NEG_INF ? vf{} : load(total_o + i) / l + zero; };
    int i = 0;
    if constexpr (IN_INTEGERS<T, E>) {
        for (; i < d; i += INTEGER_COLUMNS) {
            alignas(64) float part[INTEGER_COLUMNS], ordered[INTEGER_COLUMNS];
            for (int j = 0; j < INTEGER_COLUMNS; j += W) store(part + j, at(i + j));
            for (int j = 0; j < INTEGER_COLUMNS; j += 4) std::memcpy(ordered + j, part + j / 4 % 4 * W + j / 16 * 4, 16);
            for (int j = 0; j < INTEGER_COLUMNS && i + j < d; j += W) store_upto(out + i + j, load(ordered + j), d - i - j);
        }
        return;
    }
    for (; i + 2 * W <= d; i += 2 * W) {
        vf a = at(i), b = at(i + W);
        Columns<E>::in_order(a, b);
        store(out + i, a), store(out + i + W, b);
    }
    for (; i < d; i += W) store_upto(out + i, at(i), d - i);
}

}  // namespace ll
