// y += scale * (x A^T) B^T for rows that have an adapter (LoRA), bf16 or fp32, with sums in fp32. Other rows are not
// changed. The order of a row's sums depends only on n_in and the rank: the rows of a tile share loads of A and B, but
// not accumulators. A row's bits therefore depend neither on the other rows, nor on their adapters, nor on the number
// of threads.
#include "lora.h"

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace ll {
namespace {

constexpr int64_t PARALLEL_FROM = 1 << 16;  // multiply-adds; with fewer, waking threads costs more than it saves
#if defined(LL_AVX512)
constexpr int SUMS = 4;  // number of vectors over which a row's products are distributed in turn
#else
constexpr int SUMS = 2;
#endif

template <class T, int R>
struct Tile {
    const T* x[R];
    T* out[R];
    int64_t n_in;

    // low[r] = scale * the product of row r with every row of A.
    void shrink(const LoraPart& part, float (&low)[R][LORA_MOST_RANK]) const {
        const T* a = static_cast<const T*>(part.a);
        for (int64_t j = 0; j < part.rank; ++j, a += n_in) {
            vf sums[R][SUMS] = {};
            const auto add = [&](int64_t i, int k, auto count) __attribute__((always_inline)) {
                const vf weights = load_upto(a + i, count);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sums[r][k] = fma(load_upto(x[r] + i, count), weights, sums[r][k]);
            };
            int64_t i = 0;
            for (; i + SUMS * W <= n_in; i += SUMS * W)
#pragma GCC unroll 4
                for (int k = 0; k < SUMS; ++k) add(i + k * W, k, std::integral_constant<int64_t, W>{});
#pragma GCC unroll 4
            for (int k = 0; k < SUMS; ++k)
                if (i + k * W < n_in) add(i + k * W, k, n_in - i - k * W);
            for (int r = 0; r < R; ++r) {
                vf sum = sums[r][0];
                for (int k = 1; k < SUMS; ++k) sum = sum + sums[r][k];
                low[r][j] = hsum(sum) * float(part.scale);
            }
        }
    }

    template <int V, class Count>
    LL_INLINE void expand_at(const LoraPart& part, const float (&low)[R][LORA_MOST_RANK], int64_t i,
                             Count count) const {
        vf sums[R][V] = {};
        const T* b = static_cast<const T*>(part.b) + i;
        for (int64_t j = 0; j < part.rank; ++j, b += part.n_out) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const vf weights = load_upto(b + v * W, count);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sums[r][v] = fma(splat(low[r][j]), weights, sums[r][v]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                T* at = out[r] + part.at + i + v * W;
                store_upto(at, load_upto(at, count) + sums[r][v], count);
            }
    }

    void expand(const LoraPart& part, const float (&low)[R][LORA_MOST_RANK]) const {
        constexpr int V = R > 2 ? 2 : 4;
        int64_t i = 0;
        for (; i + V * W <= part.n_out; i += V * W)
            expand_at<V>(part, low, i, std::integral_constant<int64_t, W>{});
        for (; i + W <= part.n_out; i += W) expand_at<1>(part, low, i, std::integral_constant<int64_t, W>{});
        if (i < part.n_out) expand_at<1>(part, low, i, part.n_out - i);
    }

    void run(const LoraProduct& product) const {
        float low[R][LORA_MOST_RANK];
        for (int64_t p = 0; p < product.num_parts; ++p) {
            shrink(product.parts[p], low);
            expand(product.parts[p], low);
        }
    }
};

template <class T>
struct Lora {
    const T* x;
    T* out;
    int64_t n_in, x_row, out_row;

    template <int R>
    void run(const LoraProduct& product, const LoraTile& tile) const {
        Tile<T, R> rows{{}, {}, n_in};
        for (int r = 0; r < R; ++r) {
            rows.x[r] = x + tile.rows[r] * x_row;
            rows.out[r] = out + tile.rows[r] * out_row;
        }
        rows.run(product);
    }

    void tile(const LoraProduct& product, const LoraTile& tile) const {
        static_assert(LORA_TILE_ROWS == 4);
        switch (tile.num_rows) {
            case 1: return run<1>(product, tile);
            case 2: return run<2>(product, tile);
            case 3: return run<3>(product, tile);
            default: return run<4>(product, tile);
        }
    }
};

int64_t work_of(const LoraProduct& product, int64_t n_in) {
    int64_t sum = 0;
    for (int64_t p = 0; p < product.num_parts; ++p)
        sum += product.parts[p].rank * (n_in + product.parts[p].n_out) * LORA_TILE_ROWS;
    return sum;
}

}  // namespace
}  // namespace ll

// x [rows, n_in], out [rows, >= at + n_out of every part]; strides in elements.
LL_EXPORT int ll_lora(const void* x, void* out, const ll::LoraStep* step, int64_t site, int64_t n_in, int64_t x_row,
                      int64_t out_row, int64_t is_bf16, int64_t threads) {
    int64_t work = 0;
    for (int64_t t = 0; t < step->num_tiles; ++t) work += ll::work_of(step->adapters[step->tiles[t].adapter][site], n_in);
    if (!work) return 0;
    auto run = [&](auto tag) {
        using T = decltype(tag);
        const ll::Lora<T> lora{static_cast<const T*>(x), static_cast<T*>(out), n_in, x_row, out_row};
        ll::team_for(work >= ll::PARALLEL_FROM ? threads : 1, step->num_tiles, [&](int64_t t) {
            const ll::LoraTile& tile = step->tiles[t];
            lora.tile(step->adapters[tile.adapter][site], tile);
        });
    };
    is_bf16 ? run(ll::bf16{}) : run(float{});
    return 0;
}
