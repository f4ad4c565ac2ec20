// y = x @ W^T + bias in bf16 on Intel's AMX tiles. The products of an output are summed in ascending order of inputs,
// in one fp32 accumulator, for any number of rows, so a row's bits do not depend on the other rows.
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
constexpr int64_t AHEAD = 8;              // distance of the prefetch, in tile products

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Rows {  // 16 rows of x, or the padded copy of its last rows
    const uint16_t* at;
    int64_t stride_bytes;
    int64_t valid;
};

void store(const float* sums, const Rows& rows, uint16_t* out, int64_t stride, const uint16_t* bias,
           int64_t columns) {
    const __mmask16 mask = __mmask16((1u << columns) - 1);
    __m512 add = _mm512_setzero_ps();
    if (bias) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias));
        add = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    for (int64_t row = 0; row < rows.valid; ++row) {
        __m512 sum = _mm512_load_ps(sums + row * TILE);
        if (bias) sum = _mm512_add_ps(sum, add);
        _mm256_mask_storeu_epi16(out + row * stride, mask, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

void prefetch_tile(const uint16_t* tile) {
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) _mm_prefetch(tile + line * 32, _MM_HINT_T0);
}

// Computes one panel of outputs for 16 rows, or for 32 (TWO). sums[4][16][16]: tiles (rows, columns) 00, 01, 10, 11.
template <bool TWO>
void multiply(const Rows& a0, const Rows& a1, const uint16_t* panel, int64_t depth, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) _tile_zero(2);
    if (TWO) _tile_zero(3);
    for (int64_t k = 0; k < depth; ++k) {
        const uint16_t* b = panel + k * 2 * TILE_ELEMS;
        if (!TWO) prefetch_tile(b + 2 * AHEAD * TILE_ELEMS);
        if (!TWO) prefetch_tile(b + (2 * AHEAD + 1) * TILE_ELEMS);
        _tile_loadd(4, a0.at + k * DEPTH, a0.stride_bytes);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + TILE_ELEMS, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, a1.at + k * DEPTH, a1.stride_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE * TILE, 64);
    if (TWO) _tile_stored(2, sums + 2 * TILE * TILE, 64);
    if (TWO) _tile_stored(3, sums + 3 * TILE * TILE, 64);
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
    std::vector<uint16_t> padded;
    if (tail) {
        padded.resize(TILE * n_in, 0);
        for (int64_t row = 0; row < tail; ++row)
            std::memcpy(padded.data() + row * n_in, x + (rows - tail + row) * x_stride, n_in * 2);
    }
    const auto rows_of = [&](int64_t tile) {
        if (tail && tile == tiles - 1) return Rows{padded.data(), n_in * 2, tail};
        return Rows{x + tile * TILE * x_stride, x_stride * 2, TILE};
    };
    const int64_t threads = std::max<int64_t>(1, std::min(num_threads, panels));
    const int64_t most = std::min(GROUP_BYTES / (panel_elems * 2), panels / (4 * threads));  // several for each thread
    const int64_t size = std::max<int64_t>(1, most), groups = (panels + size - 1) / size;
    ll::team(threads, [&](ll::Claims& claims) {
        const TileConfig config;
        _tile_loadconfig(&config);
        alignas(64) float sums[4 * TILE * TILE];
        for (int64_t group; (group = claims.next()) < groups;) {
            const int64_t first = group * size, last = std::min(panels, first + size);
            for (int64_t tile = 0; tile < tiles; tile += 2) {
                const bool two = tile + 1 < tiles;
                const Rows a0 = rows_of(tile), a1 = rows_of(two ? tile + 1 : tile);
                for (int64_t panel = first; panel < last; ++panel) {
                    const uint16_t* b = packed + panel * panel_elems;
                    two ? multiply<true>(a0, a1, b, depth, sums) : multiply<false>(a0, a1, b, depth, sums);
                    for (int64_t half = 0; half < 2; ++half) {
                        const int64_t column = panel * PANEL + half * TILE;
                        const int64_t columns = std::min(TILE, n_out - column);
                        if (columns <= 0) break;
                        const uint16_t* b0 = bias ? bias + column : nullptr;
                        uint16_t* to = out + tile * TILE * out_stride + column;
                        const float* from = sums + half * TILE * TILE;
                        store(from, a0, to, out_stride, b0, columns);
                        if (two) store(from + 2 * TILE * TILE, a1, to + TILE * out_stride, out_stride, b0, columns);
                    }
                }
            }
        }
        _tile_release();
    });
    return 0;
}

}  // extern "C"
