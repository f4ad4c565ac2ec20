// Attention of bf16 queries over one piece of bf16 keys and values on Intel's AMX tiles (long: few and many rows are
// scored in different ways). It replaces `attend` (piece.h) of the build for AVX-512, where the system permits tiles.
//
// The bits of a row do not depend on its tile: TDPBF16PS sums each row in an order of its own (linear_amx.cpp). A score
// adds 32 elements of head_dim at a time, an output the values of 32 keys at a time, beginning at multiples of 32 keys.
// Weights are rounded to bf16 for the second product, while their sum is that of unrounded weights.
#include <vector>

#include "piece.h"

namespace {

using ll::bf16;
using ll::PANEL;
using ll::PIECE;
using ll::W;
using Tile = ll::Tile<bf16, bf16>;

constexpr int ROWS = 16;                     // rows of a tile
constexpr int WORDS = 16;                    // pairs of elements in a row of a tile
constexpr int KEYS = ll::GROUP_KEYS;          // keys whose values are summed by one product
constexpr int64_t WEIGHT_BYTES = PIECE * 2;  // of a row

// Lines that are prefetched in each part of a piece's work, in proportion to its time, since attention waits for memory
// least if it never asks for much at once. Together they are four fifths of the piece's keys and values; the hardware
// fetches the others.
constexpr int SCORE_LINES = 7;     // for 16 keys and 32 elements of head_dim
constexpr int SOFTMAX_SHARE = 12;  // softmax prefetches one line of this many
constexpr int PACK_LINES = 8;      // for 16 keys and 32 elements of head_dim
constexpr int SUM_LINES = 8;       // for 32 keys and 16 elements of head_dim

// A configuration of the tiles. Tiles 0 to 3 are sums, tile 4 is the left operand of a product, and tiles 5 to 7 are
// right operands.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};

    Shapes(int sum_rows, int columns) {
        for (int tile = 0; tile < 8; ++tile) {
            rows[tile] = uint8_t(tile < 5 ? sum_rows : ROWS);
            bytes_per_row[tile] = uint16_t(4 * (tile == 4 ? WORDS : columns));
        }
    }
};

// The configurations for 1 to 16 rows or columns. They are kept, because loading one that was just written is slow.
struct Configurations {
    std::vector<Shapes> of_rows, of_columns;
    Configurations() {
        for (int n = 1; n <= ROWS; ++n) of_rows.emplace_back(n, ROWS), of_columns.emplace_back(ROWS, n);
    }
};
const Configurations configurations;

void configure(const Shapes& shapes) {
    _tile_loadconfig(&shapes);
    asm volatile("" ::: "memory");  // gcc does not know that tiles are loaded from memory
}

// Calls work(first row) for each tile of rows, while the tiles are configured for it.
template <class F>
void for_row_tiles(int rows, F&& work) {
    for (int row = 0; row < rows; row += ROWS) {
        const int n = std::min(ROWS, rows - row);
        if (row == 0 || n < ROWS) configure(configurations.of_rows[n - 1]);
        work(row);
    }
}

// Adds N products to the sums in tiles 0 to N - 1, of one left operand and of the right operands that begin `at` bytes
// after each of b.
template <int N>
LL_INLINE void add_products(const char* a, int64_t a_row, const char* const (&b)[N], int64_t at, int64_t b_row) {
    static_assert(N == 2 || N == 4, "the tiles are named by constants");
    _tile_loadd(4, a, a_row);
    _tile_loadd(5, b[0] + at, b_row);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, b[1] + at, b_row);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (N == 4) {
        _tile_loadd(7, b[2] + at, b_row);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, b[3] + at, b_row);
        _tile_dpbf16ps(3, 4, 5);
    }
}

template <int N>
LL_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (N == 4) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <int N>
LL_INLINE void store_sums(float* to, int64_t row_bytes) {
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + ROWS, row_bytes);
    if constexpr (N == 4) {
        _tile_stored(2, to + 2 * ROWS, row_bytes);
        _tile_stored(3, to + 3 * ROWS, row_bytes);
    }
}

// Prefetches while N vectors of keys are multiplied by WORDS words of the queries. The piece's own values are selected
// if the thread does not know its next piece.
template <int N>
LL_INLINE void prefetch_in_scores(const Tile& t) {
    t.ahead->values.ask(N * WORDS);
    t.ahead->keys.ask(N * SCORE_LINES);
}

// Computes the scores of a tile of rows for N vectors of keys, starting at vector g of the piece. The words of a vector
// are `step` floats apart.
template <int N, bool AHEAD>
void score(Tile& t, int row, const float* const* vectors, int64_t step, int g) {
    const char* keys[N];
    for (int i = 0; i < N; ++i) keys[i] = reinterpret_cast<const char*>(vectors[i]);
    zero_sums<N>();
    for (int word = 0; word < t.words; word += WORDS) {
        if constexpr (AHEAD) prefetch_in_scores<N>(t);
        const char* queries = reinterpret_cast<const char*>(t.q_row(row) + word);
        add_products<N>(queries, t.words * 4, keys, word * step * 4, step * 4);
    }
    store_sums<N>(t.scores + int64_t(row) * PIECE + g * W, PIECE * 4);
}

// Computes the scores of at most ROWS rows for vectors [first, last) of keys that are stored by word, which are right
// operands as they are.
template <bool AHEAD>
void score_words(Tile& t, int first, int last) {
    configure(configurations.of_rows[t.rows - 1]);
    for (; first + 4 <= last; first += 4) score<4, AHEAD>(t, 0, t.by_word + first, t.word_step, first);
    if (first < last) score<2, AHEAD>(t, 0, t.by_word + first, t.word_step, first);
}

// Sets right operands to the queries of a few rows: a row of an operand has a pair of elements of each query.
void pack_queries(Tile& t) {
    for (int word = 0; word < t.words; ++word)
        for (int row = 0; row < t.rows; ++row) t.kpack[word * t.rows + row] = t.q_row(row)[word];
}

// Returns the distance in bytes between neighbours of 16 keys, or 0 if it is not the same for all of them.
int64_t distance_of(const bf16* const* keys) {
    const int64_t distance = keys[1] - keys[0];
    bool same = true;
    for (int i = 2; i < ROWS; ++i) same &= keys[i] - keys[i - 1] == distance;
    return same ? distance * int64_t(sizeof(bf16)) : 0;
}

// Reads the scores of 16 keys, [16, ROW_LENGTH], and writes them to the first ROW_LENGTH rows, [.., PIECE].
template <int ROW_LENGTH>
void store_transposed(const float* from, int rows, float* to) {
    __m512 by_row[ROW_LENGTH];
    if constexpr (ROW_LENGTH == 4) {
        const __m512i early = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        const __m512i late = _mm512_add_epi32(early, _mm512_set1_epi32(2));
        const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 16);
        const __m512 c = _mm512_load_ps(from + 32), d = _mm512_load_ps(from + 48);
        for (int i = 0; i < 4; i += 2) {
            const __m512i which = i == 0 ? early : late;
            const __m512 first = _mm512_permutex2var_ps(a, which, b), second = _mm512_permutex2var_ps(c, which, d);
            by_row[i] = _mm512_shuffle_f32x4(first, second, 0x44);
            by_row[i + 1] = _mm512_shuffle_f32x4(first, second, 0xee);
        }
    } else {
        ll::vf block[ROWS];
        for (int i = 0; i < ROWS; ++i) block[i] = ll::load(from + i * ROW_LENGTH);
        ll::transpose(block);
        for (int i = 0; i < ROWS; ++i) by_row[i] = (__m512)block[i];
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROW_LENGTH; ++row)
        if (row < rows) _mm512_storeu_ps(to + row * PIECE, by_row[row]);
}

// Rows of a left operand in memory: 16 keys, `stride` bytes apart.
struct Keys {
    const char* at;
    int64_t stride;
};

// Returns the keys of vector g of the piece, or a copy of them if they are not equally far apart.
Keys locate(const Tile& t, int g, bf16* copy) {
    const bf16* const* keys = t.keys + g * W;
    const int64_t bytes = t.d * int64_t(sizeof(bf16));
    if (const int64_t distance = distance_of(keys)) return {reinterpret_cast<const char*>(keys[0]), distance};
    for (int i = 0; i < ROWS; ++i) std::memcpy(copy + i * t.d, keys[i], bytes);
    asm volatile("" ::: "memory");
    return {reinterpret_cast<const char*>(copy), bytes};
}

// Computes the scores of at most ROW_LENGTH rows for N vectors of keys, starting at vector g of the piece. The keys are
// the left operand, so they need not be packed: multiplications commute, and the order of the sums is the same.
template <int ROW_LENGTH, int N, bool AHEAD>
void score_few(Tile& t, int g) {
    Keys keys[N];
    for (int i = 0; i < N; ++i) keys[i] = locate(t, g + i, reinterpret_cast<bf16*>(t.vpack) + i * ROWS * t.d);
    zero_sums<N>();
    for (int word = 0; word < t.words; word += WORDS) {
        if constexpr (AHEAD) prefetch_in_scores<N>(t);
        _tile_loadd(5, t.kpack + word * t.rows, t.rows * 4);
        _tile_loadd(4, keys[0].at + word * 4, keys[0].stride);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(4, keys[1].at + word * 4, keys[1].stride);
        _tile_dpbf16ps(1, 4, 5);
        if constexpr (N == 4) {
            _tile_loadd(4, keys[2].at + word * 4, keys[2].stride);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(4, keys[3].at + word * 4, keys[3].stride);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    alignas(64) float scores[N][ROWS * ROW_LENGTH];
    _tile_stored(0, scores[0], ROW_LENGTH * 4);
    _tile_stored(1, scores[1], ROW_LENGTH * 4);
    if constexpr (N == 4) {
        _tile_stored(2, scores[2], ROW_LENGTH * 4);
        _tile_stored(3, scores[3], ROW_LENGTH * 4);
    }
    for (int i = 0; i < N; ++i) store_transposed<ROW_LENGTH>(scores[i], t.rows, t.scores + (g + i) * W);
}

// Computes the scores of at most ROW_LENGTH rows for vectors [first, last) of keys.
template <int ROW_LENGTH, bool AHEAD>
void score_few(Tile& t, int first, int last) {
    pack_queries(t);
    configure(configurations.of_columns[t.rows - 1]);
    for (; first + 4 <= last; first += 4) score_few<ROW_LENGTH, 4, AHEAD>(t, first);
    if (first < last) score_few<ROW_LENGTH, 2, AHEAD>(t, first);
}

// Computes the scores of all rows for vectors [first, last) of keys.
template <bool AHEAD>
void score_all(Tile& t, int first, int last) {
    for (int g = first; g < last; g += PANEL) {
        const int n = std::min(PANEL, last - g);
        for (int i = 0; i < n; ++i) ll::pack_keys<bf16, bf16, AHEAD>(t, g + i, i);
        for_row_tiles(t.rows, [&](int row) {
            int at = 0;
            for (; at + 4 <= n; at += 4) score<4, false>(t, row, t.packed + at, PANEL * W, g + at);
            if (at < n) score<2, false>(t, row, t.packed + at, PANEL * W, g + at);
        });
    }
}

// Packs the values of KEYS keys, starting at `first`, as right operands. A row of an operand has two values of each of
// 16 columns. As in `Columns`, 32 columns form an operand with the even columns and one with the odd columns.
template <bool AHEAD>
void pack_values(Tile& t, int first) {
    char* to = reinterpret_cast<char*>(t.vpack) + int64_t(first) * t.d * 2;
    for (int col = 0; col < t.d; col += 2 * W, to += 2 * ROWS * 64)
        for (int pair = 0; pair < KEYS / 2; ++pair) {
            if (AHEAD && pair % 8 == 0) t.ahead->keys.ask(PACK_LINES);
            __m512i even, odd;
            ll::load_pairs(t.values[first + 2 * pair] + col, t.values[first + 2 * pair + 1] + col, even, odd);
            _mm512_store_si512(to + pair * 64, even);
            _mm512_store_si512(to + (ROWS + pair) * 64, odd);
        }
}

// Computes N * 16 columns of the output of a tile of rows over keys [from, to).
template <int N, bool AHEAD>
void sum_values(const Tile& t, int row, int col, int from, int to) {
    const char* values[N];
    for (int i = 0; i < N; ++i) values[i] = reinterpret_cast<const char*>(t.vpack) + col * KEYS * 2 + i * ROWS * 64;
    zero_sums<N>();
    for (int key = from; key < to; key += KEYS) {
        if constexpr (AHEAD) t.ahead->keys.ask(N * SUM_LINES);
        const char* weights = reinterpret_cast<const char*>(t.weights + int64_t(row) * PIECE + key);
        add_products<N>(weights, WEIGHT_BYTES, values, int64_t(key) * t.d * 2, 64);
    }
    store_sums<N>(t.o + int64_t(row) * t.dpad + col, t.dpad * 4);
}

template <bool AHEAD>
void score_piece(Tile& t, int lo, int hi) {
    ll::widen_to_groups(t, lo, hi);
    if (t.word_step && t.rows <= ROWS)
        score_words<AHEAD>(t, lo / W, hi / W);
    else if (t.rows <= 4)
        score_few<4, AHEAD>(t, lo / W, hi / W);
    else if (t.rows <= ROWS)
        score_few<ROWS, AHEAD>(t, lo / W, hi / W);
    else
        score_all<AHEAD>(t, lo / W, hi / W);
}

template <bool AHEAD>
void sum_piece(Tile& t, int lo, int hi) {
    ll::widen_to_groups(t, lo, hi);
    const int lines = int((hi - lo) * t.d * 2 * int64_t(sizeof(bf16)) / 64 / SOFTMAX_SHARE / t.rows);
    for (int row = 0; row < t.rows; ++row) {
        if constexpr (AHEAD) t.ahead->keys.ask(lines);
        ll::softmax_row<bf16, bf16, true>(t, row, lo, hi);
    }
    for (int key = lo; key < hi; key += KEYS) pack_values<AHEAD>(t, key);
    for_row_tiles(t.rows, [&](int row) {
        int col = 0;
        for (; col + 4 * W <= t.d; col += 4 * W) sum_values<4, AHEAD>(t, row, col, lo, hi);
        if (col < t.d) sum_values<2, AHEAD>(t, row, col, lo, hi);
    });
}

}  // namespace

// `tiles` are n Tile<bf16, bf16> whose d is a multiple of 32. The arguments are those of `attend` in piece.h.
LL_EXPORT void ll_amx_attend(void* tiles, int n, int lo, int hi) {
    Tile* all = static_cast<Tile*>(tiles);
    const bool sums_ask = all->ahead->keys.count > 0, scores_ask = sums_ask || all->ahead->values.count > 0;
    for (int i = 0; i < n; ++i) scores_ask ? score_piece<true>(all[i], lo, hi) : score_piece<false>(all[i], lo, hi);
    for (int i = 0; i < n; ++i) sums_ask ? sum_piece<true>(all[i], lo, hi) : sum_piece<false>(all[i], lo, hi);
    _tile_release();
}

// Returns the size of a tile of queries, which both builds must agree about.
LL_EXPORT int ll_amx_tile_bytes() { return int(sizeof(Tile)); }
