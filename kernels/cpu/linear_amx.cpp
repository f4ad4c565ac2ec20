// y = x @ W^T + bias in bf16 on Intel's AMX tiles (long: one, some and many rows are multiplied in different ways). An
// output's products are summed in the same order for any number of rows, so a row's bits do not depend on the other
// rows.
//
// TDPBF16PS, the product of two tiles, adds the products of 16 even inputs in one fp32 sum that begins at zero, those of
// the 16 odd inputs in another, and then the sum of both to the accumulator (Intel's Software Developer's Manual,
// volume 2). It fuses each multiplication with its addition, and takes denormal numbers as zero. One or two rows are
// multiplied in vectors, in the same order, because vectors read the weights faster.
//
// The caller packs the weights (kernels/cpu/amx.py) into panels of 32 outputs. For every 32 inputs a panel holds two
// tiles of 16 outputs. In a tile, element [r][c][e] belongs to input 2 r + e and output c (TDPBF16PS' second operand).
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "team.h"

namespace {

constexpr int64_t TILE = 16;              // rows and columns of an accumulator
constexpr int64_t DEPTH = 32;             // inputs of one tile product
constexpr int64_t PANEL = 2 * TILE;       // outputs that are computed together
constexpr int64_t TILE_ELEMS = TILE * DEPTH;
constexpr int64_t GROUP_BYTES = 1 << 19;  // weights of a group of panels: a part of the L2 cache
constexpr int64_t MANY_GROUP_BYTES = 3 << 18;  // the same for many rows, which are read once for each group
constexpr int64_t MANY_TILES = 16;        // least number of tiles of many rows
constexpr int64_t AHEAD = 4;              // distance of the prefetch, in steps of DEPTH inputs
constexpr int64_t MAX_VECTOR_ROWS = 2;    // largest number of rows that are multiplied in vectors

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// While an object of this type exists, the calling thread computes with denormal numbers as zero, as the tiles do.
struct NoDenormals {
    NoDenormals() { _mm_setcsr(before | 0x8040); }  // FTZ and DAZ
    ~NoDenormals() { _mm_setcsr(before); }
    const unsigned before = _mm_getcsr();
};

struct Rows {  // 16 rows of x, or the padded copy of its last rows
    const uint16_t* at;
    int64_t stride_bytes;
    int64_t valid;
};

float as_float(uint16_t number) {
    const uint32_t bits = uint32_t(number) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Stores the sums of `valid` rows and up to 16 outputs, with the bias.
void store(const float* sums, int64_t valid, uint16_t* out, int64_t stride, const uint16_t* bias, int64_t columns) {
    const __mmask16 mask = __mmask16((1u << columns) - 1);
    __m512 add = _mm512_setzero_ps();
    if (bias) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias));
        add = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    for (int64_t row = 0; row < valid; ++row) {
        __m512 sum = _mm512_load_ps(sums + row * TILE);
        if (bias) sum = _mm512_add_ps(sum, add);
        _mm256_mask_storeu_epi16(out + row * stride, mask, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

// The weights of the panels that are multiplied together, and of those that are next.
struct Weights {
    const uint16_t* at;
    int64_t depth, panel_elems;

    const uint16_t* step(int64_t panel, int64_t k) const { return at + panel * panel_elems + k * 2 * TILE_ELEMS; }

    // Returns the weights AHEAD steps after `k`, which may be those of the next PANELS panels.
    template <int PANELS>
    const uint16_t* ahead(int64_t panel, int64_t k) const {
        const int64_t then = k + AHEAD;
        return then < depth ? step(panel, then) : step(panel + PANELS, std::min(then, 2 * depth - 1) - depth);
    }
};

void prefetch_step(const uint16_t* tiles) {
#pragma GCC unroll 32
    for (int line = 0; line < 32; ++line) _mm_prefetch(tiles + line * 32, _MM_HINT_T0);
}

// Computes one or two panels of outputs for 16 rows. sums[2 PANELS][16][16]: the two halves of each panel.
template <int PANELS>
void multiply(const Rows& a, const Weights& weights, float* sums) {
    static_assert(PANELS <= 2, "there are four accumulators");
    _tile_zero(0);
    _tile_zero(1);
    if (PANELS == 2) _tile_zero(2);
    if (PANELS == 2) _tile_zero(3);
    for (int64_t k = 0; k < weights.depth; ++k) {
        for (int panel = 0; panel < PANELS; ++panel) prefetch_step(weights.ahead<PANELS>(panel, k));
        _tile_loadd(4, a.at + k * DEPTH, a.stride_bytes);
        const uint16_t* tiles = weights.step(0, k);
        _tile_loadd(6, tiles, 64);
        _tile_loadd(7, tiles + TILE_ELEMS, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (PANELS == 2) {
            tiles = weights.step(1, k);
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + TILE_ELEMS, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE * TILE, 64);
    if (PANELS == 2) _tile_stored(2, sums + 2 * TILE * TILE, 64);
    if (PANELS == 2) _tile_stored(3, sums + 3 * TILE * TILE, 64);
}

// The outputs of one panel for 32 rows. sums[4][16][16]: the two halves of the panel for the first 16 rows, then those
// for the others.
struct Finished {
    const float* sums = nullptr;
    uint16_t* at = nullptr;
    const uint16_t* bias = nullptr;  // of this panel, or null
    int64_t stride = 0;
    __mmask32 columns = 0;

    // Prefetches the memory of a row for writing.
    void claim(int64_t row) const { __builtin_prefetch(at + row * stride, 1, 3); }

    // Rounds and stores a row.
    void put(int64_t row) const {
        const float* from = sums + (row + (row & TILE)) * TILE;
        __m512 low = _mm512_load_ps(from), high = _mm512_load_ps(from + TILE * TILE);
        if (bias) {
            const __m512i add = _mm512_maskz_loadu_epi16(columns, bias);
            low = _mm512_add_ps(low, widened(_mm512_castsi512_si256(add)));
            high = _mm512_add_ps(high, widened(_mm512_extracti64x4_epi64(add, 1)));
        }
        _mm512_mask_storeu_epi16(at + row * stride, columns, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    static __m512 widened(__m256i halves) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
};

// The outputs of all panels, starting at one row.
struct Outputs {
    uint16_t* at;
    const uint16_t* bias;  // or null
    int64_t stride, columns;

    Finished of(int64_t panel, const float* sums) const {
        const int64_t column = panel * PANEL, left = columns - column;
        const __mmask32 mask = left >= PANEL ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
        return {sums, at + column, bias ? bias + column : nullptr, stride, mask};
    }
};

// Memory that is prefetched into the L2 cache, a few lines at each step of DEPTH inputs.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    int64_t per_step = 0;

    Ahead() = default;
    Ahead(const uint16_t* from, int64_t elems, int64_t steps)
        : at(reinterpret_cast<const char*>(from)), end(at + elems * 2), per_step((elems / 32 + steps - 1) / steps) {}
    void step() {
        for (int64_t i = 0; i < per_step && at < end; ++i, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// Computes panels [first, last) of outputs for 32 rows of x. While a panel is multiplied, the sums of the previous one
// are rounded and stored. `fresh` weights are not in the L2 cache yet. With `claims`, outputs are prefetched too.
void multiply_pair(const Rows& a0, const Rows& a1, Weights weights, int64_t first, int64_t last, bool fresh,
                   bool claims, Ahead& next_rows, Ahead& next_weights, const Outputs& outputs) {
    alignas(64) float sums[2][4 * TILE * TILE];
    const int64_t rows = TILE + a1.valid, per_step = (2 * TILE + weights.depth - 1) / weights.depth;
    Finished before;
    int64_t put = rows;
    for (int64_t panel = first; panel < last; ++panel, put = 0, weights.at += weights.panel_elems) {
        float* to = sums[panel % 2];
        const Finished now = outputs.of(panel, to);
        int64_t claimed = claims ? 0 : rows;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < weights.depth; ++k) {
            if (fresh) prefetch_step(weights.ahead<1>(0, k));
            next_rows.step();
            next_weights.step();
            const uint16_t* tiles = weights.step(0, k);
            _tile_loadd(4, a0.at + k * DEPTH, a0.stride_bytes);
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + TILE_ELEMS, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1.at + k * DEPTH, a1.stride_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            for (int64_t i = 0; i < per_step && claimed < rows; ++i) now.claim(claimed++);
            for (int64_t i = 0; i < per_step && put < rows; ++i) before.put(put++);
        }
        _tile_stored(0, to, 64);
        _tile_stored(1, to + TILE * TILE, 64);
        _tile_stored(2, to + 2 * TILE * TILE, 64);
        _tile_stored(3, to + 3 * TILE * TILE, 64);
        before = now;
    }
    for (int64_t row = 0; row < rows; ++row) before.put(row);
}

// Computes one or two panels of outputs for ROWS rows of x, in fp32 [ROWS, n_in]. sums[2 PANELS][16][16], as above. It
// is not inlined, so that its arithmetic stays within the life of the caller's NoDenormals.
template <int ROWS, int PANELS>
[[gnu::noinline]] void multiply_vectors(const float* x, int64_t n_in, const Weights& weights, float* sums) {
    constexpr int HALVES = 2 * PANELS;
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    __m512 total[ROWS][HALVES];
    for (auto& of_row : total)
        for (__m512& one : of_row) one = _mm512_setzero_ps();
    for (int64_t k = 0; k < weights.depth; ++k, x += DEPTH) {
        __m512 even[ROWS][HALVES], odd[ROWS][HALVES];
        for (int row = 0; row < ROWS; ++row)
            for (int half = 0; half < HALVES; ++half) even[row][half] = odd[row][half] = _mm512_setzero_ps();
        const uint16_t *at[PANELS], *ahead[PANELS];
        for (int panel = 0; panel < PANELS; ++panel) {
            at[panel] = weights.step(panel, k);
            ahead[panel] = weights.ahead<PANELS>(panel, k);
        }
        for (int64_t pair = 0; pair < DEPTH / 2; ++pair) {
#pragma GCC unroll 4
            for (int half = 0; half < HALVES; ++half) {
                const int64_t line = half % 2 * TILE_ELEMS + pair * 32;
                _mm_prefetch(ahead[half / 2] + line, _MM_HINT_T0);
                const __m512i words = _mm512_loadu_si512(at[half / 2] + line);
                const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
                const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(words, high));
#pragma GCC unroll 2
                for (int row = 0; row < ROWS; ++row) {
                    const float* inputs = x + row * n_in + 2 * pair;
                    even[row][half] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[0]), first, even[row][half]);
                    odd[row][half] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[1]), second, odd[row][half]);
                }
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (int half = 0; half < HALVES; ++half)
                total[row][half] = _mm512_add_ps(total[row][half], _mm512_add_ps(even[row][half], odd[row][half]));
    }
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < HALVES; ++half)
            _mm512_store_ps(sums + (half * TILE + row) * TILE, total[row][half]);
}

decltype(&ll::run_team) others = nullptr;

}  // namespace

// This build uses the threads of another build, so that a pass with two builds does not keep two teams awake.
void ll::run_team(int64_t threads, Work work, void* context) noexcept {
    if (threads > 1 && others) return others(threads, work, context);
    Claims claims;
    work(context, claims);
}

extern "C" {

// Requests the tile registers from the operating system. Returns 0 if this process may use them. `team`: the result of
// ll_team() from the other build in use, or null for one thread.
__attribute__((visibility("default"))) int ll_amx_init(void* team) {
    others = reinterpret_cast<decltype(others)>(team);
    return int(syscall(SYS_arch_prctl, 0x1023, 18));
}

// x [rows, n_in], out [rows, n_out], bias [n_out] or null; n_in is a multiple of 32. Strides are in elements.
__attribute__((visibility("default"))) int ll_amx_linear(
    const uint16_t* x, const uint16_t* packed, const uint16_t* bias, uint16_t* out, int64_t rows, int64_t n_in,
    int64_t n_out, int64_t x_stride, int64_t out_stride, int64_t num_threads) {
    const int64_t depth = n_in / DEPTH, panels = (n_out + PANEL - 1) / PANEL, panel_elems = PANEL * n_in;
    const int64_t tiles = (rows + TILE - 1) / TILE, tail = rows % TILE;
    const bool in_vectors = rows <= MAX_VECTOR_ROWS;
    if (rows == 0) return 0;
    std::vector<uint16_t> padded;
    if (tail && !in_vectors) {
        padded.resize(TILE * n_in, 0);
        for (int64_t row = 0; row < tail; ++row)
            std::memcpy(padded.data() + row * n_in, x + (rows - tail + row) * x_stride, n_in * 2);
    }
    const auto rows_of = [&](int64_t tile) {
        if (tail && tile == tiles - 1) return Rows{padded.data(), n_in * 2, tail};
        return Rows{x + tile * TILE * x_stride, x_stride * 2, TILE};
    };
    const auto put = [&](const float* sums, int64_t row, int64_t valid, int64_t panel) {
        for (int64_t half = 0; half < 2; ++half) {
            const int64_t column = panel * PANEL + half * TILE, columns = std::min(TILE, n_out - column);
            if (columns <= 0) break;
            store(sums + half * TILE * TILE, valid, out + row * out_stride + column, out_stride,
                  bias ? bias + column : nullptr, columns);
        }
    };
    std::vector<float> x_fp32(in_vectors ? rows * n_in : 0);
    if (in_vectors)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = 0; i < n_in; ++i) x_fp32[row * n_in + i] = as_float(x[row * x_stride + i]);
    const auto vectors = [&](int64_t panel, bool two, float* sums) {
        const auto chosen = rows == 1 ? two ? multiply_vectors<1, 2> : multiply_vectors<1, 1>
                                      : two ? multiply_vectors<2, 2> : multiply_vectors<2, 1>;
        {
            const NoDenormals guard;
            chosen(x_fp32.data(), n_in, {packed + panel * panel_elems, depth, panel_elems}, sums);
        }
        put(sums, 0, rows, panel);
        if (two) put(sums + 2 * TILE * TILE, 0, rows, panel + 1);
    };
    const auto tiled = [&](int64_t tile, int64_t panel, bool two, float* sums) {
        const Weights weights{packed + panel * panel_elems, depth, panel_elems};
        const Rows a = rows_of(tile);
        two ? multiply<2>(a, weights, sums) : multiply<1>(a, weights, sums);
        put(sums, tile * TILE, a.valid, panel);
        if (two) put(sums + 2 * TILE * TILE, tile * TILE, a.valid, panel + 1);
    };
    const bool many = tiles >= MANY_TILES;
    // Multiplies 32 rows, and prefetches the next ones and a part of the next panels.
    const auto twice_tiled = [&](int64_t tile, int64_t first, int64_t last, bool fresh, Ahead& next_weights) {
        Ahead next_rows;
        if ((tile + 4) * TILE <= rows)
            next_rows = {x + (tile + 2) * TILE * x_stride, 2 * TILE * x_stride, (last - first) * depth};
        multiply_pair(rows_of(tile), rows_of(tile + 1), {packed + first * panel_elems, depth, panel_elems}, first, last,
                      fresh, many, next_rows, next_weights, {out + tile * TILE * out_stride, bias, out_stride, n_out});
    };
    const int64_t threads = std::max<int64_t>(1, std::min(num_threads, panels));
    const int64_t most = std::min((many ? MANY_GROUP_BYTES : GROUP_BYTES) / (panel_elems * 2),
                                  panels / ((many ? 2 : 4) * threads));  // several for each thread
    const int64_t size = std::max<int64_t>(2, (most + 1) / 2 * 2);  // even, for pairs of panels
    const int64_t groups = (panels + size - 1) / size;
    ll::team(threads, [&](ll::Claims& claims) {
        const TileConfig config;
        if (!in_vectors) _tile_loadconfig(&config);
        alignas(64) float sums[4 * TILE * TILE];
        const auto first_of = [&](int64_t group) { return std::min(panels, group * size); };
        for (int64_t group, expected = -1; (group = claims.next()) < groups;) {
            const bool fresh = !many || group != expected;
            const int64_t next = expected = group + threads;  // if all threads are equally fast
            const int64_t first = first_of(group), last = first_of(group + 1);
            Ahead next_weights;
            if (many && next < groups) {
                const int64_t elems = (first_of(next + 1) - first_of(next)) * panel_elems;
                next_weights = {packed + first_of(next) * panel_elems, elems, tiles / 2 * (last - first) * depth};
            }
            if (in_vectors)
                for (int64_t panel = first; panel < last; panel += 2) vectors(panel, panel + 1 < last, sums);
            else
                for (int64_t tile = 0; tile < tiles; tile += 2)
                    if (tile + 1 < tiles)
                        twice_tiled(tile, first, last, fresh && (tile == 0 || !many), next_weights);
                    else
                        for (int64_t panel = first; panel < last; panel += 2)
                            tiled(tile, panel, panel + 1 < last, sums);
        }
        if (!in_vectors) _tile_release();
    });
    return 0;
}

}  // extern "C"
