// Layers with a recurrent state in blocks: a short causal convolution and a gated linear recurrence. Contract:
// kernels/recurrence.py. A tile of channels processes all tokens of a step in order. Its state therefore stays in the
// CPU cache, a later sequence of the step can read the state that an earlier one has stored, and a row's bits do not
// depend on other rows.
#include <algorithm>
#include <vector>

#include "simd.h"
#include "team.h"

namespace ll {
namespace {

constexpr int V = 4;                 // vectors of a tile
constexpr int64_t TILE = V * W;      // channels of a tile
constexpr int64_t MOST_TAPS = 16;    // maximum length of a convolution
constexpr int BAD_TABLE = 1, BAD_CHUNK = 2;

// The sequences of a step, and the locations of their states.
struct Batch {
    float* states;
    const int32_t *table, *lens, *starts;
    int64_t state_block, table_row, num_blocks, max_blocks, num_seqs, total, block_size;

    int check() const {
        if (starts[0] != 0 || starts[num_seqs] != total) return BAD_CHUNK;
        for (int64_t s = 0; s < num_seqs; ++s) {
            const int64_t count = starts[s + 1] - starts[s], end = lens[s];
            if (count < 0 || count > end) return BAD_CHUNK;
            if (count == 0) continue;
            if ((end - 1) / block_size >= max_blocks) return BAD_TABLE;
            for (int64_t i = std::max<int64_t>(end - count - 1, 0) / block_size; i <= (end - 1) / block_size; ++i)
                if (uint32_t(table[s * table_row + i]) >= uint64_t(num_blocks)) return BAD_TABLE;
        }
        return 0;
    }

    float* state_at(int64_t s, int64_t position) const {
        return states + table[s * table_row + position / block_size] * state_block;
    }

    // Runs one tile over all sequences. Calls begin(state or null) for each sequence, token(row) for each of its
    // tokens, and end(state) after each token that completes a block or the chunk.
    template <class Begin, class Token, class End>
    void run(Begin&& begin, Token&& token, End&& end) const {
        for (int64_t s = 0; s < num_seqs; ++s) {
            const int64_t last = lens[s], first = last - (starts[s + 1] - starts[s]);
            if (first == last) continue;
            begin(first > 0 ? state_at(s, first - 1) : nullptr);
            for (int64_t t = first; t < last; ++t) {
                token(starts[s] + t - first);
                if ((t + 1) % block_size == 0 || t + 1 == last) end(state_at(s, t));
            }
        }
    }
};

LL_INLINE vf silu(vf x) { return x / (splat(1.f) + exp_minus(x)); }

template <class T>
struct Convolution {
    T* out;
    const T *x, *weight, *bias;
    int64_t out_row, x_row, channels, taps;
    bool activates;

    void tile(const Batch& batch, int64_t c0) const {
        const int64_t count = std::min(TILE, channels - c0), past = taps - 1;
        alignas(64) float w[MOST_TAPS][TILE] = {}, b[TILE] = {}, window[MOST_TAPS][TILE] = {};
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t k = 0; k < taps; ++k) w[k][i] = load_n(weight + (c0 + i) * taps + k, 1)[0];
            if (bias) b[i] = load_n(bias + c0 + i, 1)[0];
        }
        batch.run(
            [&](const float* state) {
                for (int64_t k = 0; k < past; ++k)
                    for_vectors(count, [&](int64_t i, auto n) {
                        store(window[k] + i, state ? load_upto(state + k * channels + c0 + i, n) : splat(0.f));
                    });
            },
            [&](int64_t row) {
                for_vectors(count, [&](int64_t i, auto n) {
                    store(window[past] + i, load_upto(x + row * x_row + c0 + i, n));
                    vf sum = load(b + i);
                    for (int64_t k = 0; k < taps; ++k) sum = fma(load(w[k] + i), load(window[k] + i), sum);
                    store_upto(out + row * out_row + c0 + i, activates ? silu(sum) : sum, n);
                    for (int64_t k = 0; k < past; ++k) store(window[k] + i, load(window[k + 1] + i));
                });
            },
            [&](float* state) {
                for (int64_t k = 0; k < past; ++k)
                    for_vectors(count, [&](int64_t i, auto n) {
                        store_upto(state + k * channels + c0 + i, load(window[k] + i), n);
                    });
            });
    }
};

struct Recurrence {
    float* out;
    const float *values, *keys, *queries, *decay, *beta, *rates;  // beta or rates may be null
    int64_t heads, groups, n_state, width;

    // Computes one tile of NV vectors of a head. DELTA: the state's answer to the key is subtracted from the value.
    // CHANNELS: every element of the state decays at its own rate.
    template <int NV, bool DELTA, bool CHANNELS>
    void tile(const Batch& batch, int64_t h, int64_t p0, float* S) const {
        const int64_t count = width - p0, group = h / (heads / groups);
        const int64_t at = h * n_state * width + p0;  // offset of this tile in a state
        auto each = [&](auto&& part) {
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) part(v, v + 1 < NV ? W : std::min<int64_t>(W, count - v * W));
        };
        batch.run(
            [&](const float* state) {
                for (int64_t n = 0; n < n_state; ++n)
                    each([&](int v, int64_t m) {
                        const vf old = state ? load_upto(state + at + n * width + v * W, m) : splat(0.f);
                        store(S + (n * NV + v) * W, old);
                    });
            },
            [&](int64_t row) {
                const float* key = keys + (row * groups + group) * n_state;
                const float* query = queries + (row * groups + group) * n_state;
                const int64_t here = (row * heads + h) * width + p0;
                vf u[NV], y[NV], faded[NV];
                each([&](int v, int64_t m) {
                    u[v] = load_upto(values + here + v * W, m);
                    y[v] = splat(0.f);
                    faded[v] = CHANNELS ? load_upto(decay + here + v * W, m) : splat(decay[row * heads + h]);
                });
                if constexpr (DELTA) {
                    vf known[NV] = {};
                    for (int64_t n = 0; n < n_state; ++n)
                        each([&](int v, int64_t) {
                            float* at_n = S + (n * NV + v) * W;
                            const vf now = load(at_n) * faded[v];
                            store(at_n, now);
                            known[v] = fma(now, splat(key[n]), known[v]);
                        });
                    const vf rate = splat(beta[row * heads + h]);
                    each([&](int v, int64_t) { u[v] = (u[v] - known[v]) * rate; });
                }
                for (int64_t n = 0; n < n_state; ++n)
                    each([&](int v, int64_t m) {
                        float* at_n = S + (n * NV + v) * W;
                        vf old = load(at_n);
                        if constexpr (CHANNELS)
                            old = old * exp2v(faded[v] * load_upto(rates + n * width + p0 + v * W, m));
                        else if constexpr (!DELTA)
                            old = old * faded[v];
                        const vf now = fma(u[v], splat(key[n]), old);
                        store(at_n, now);
                        y[v] = fma(now, splat(query[n]), y[v]);
                    });
                each([&](int v, int64_t m) { store_upto(out + here + v * W, y[v], m); });
            },
            [&](float* state) {
                for (int64_t n = 0; n < n_state; ++n)
                    each([&](int v, int64_t m) {
                        store_upto(state + at + n * width + v * W, load(S + (n * NV + v) * W), m);
                    });
            });
    }

    template <int NV>
    void tile_of(const Batch& batch, int64_t h, int64_t p0, float* S) const {
        if (rates)
            tile<NV, false, true>(batch, h, p0, S);
        else if (beta)
            tile<NV, true, false>(batch, h, p0, S);
        else
            tile<NV, false, false>(batch, h, p0, S);
    }

    void tile_at(const Batch& batch, int64_t h, int64_t p0, float* S) const {
        switch (std::min<int64_t>(V, (width - p0 + W - 1) / W)) {
            case 1: return tile_of<1>(batch, h, p0, S);
            case 2: return tile_of<2>(batch, h, p0, S);
            case 3: return tile_of<3>(batch, h, p0, S);
            default: return tile_of<V>(batch, h, p0, S);
        }
    }
};

}  // namespace
}  // namespace ll

LL_EXPORT int ll_convolution(void* out, const void* x, const void* weight, const void* bias, float* states,
                             const int32_t* table, const int32_t* lens, const int32_t* starts, int64_t out_row,
                             int64_t x_row, int64_t state_block, int64_t table_row, int64_t num_blocks,
                             int64_t max_blocks, int64_t num_seqs, int64_t total, int64_t block_size, int64_t channels,
                             int64_t taps, int64_t activates, int64_t is_bf16, int64_t threads) {
    const ll::Batch batch{states,     table,      lens,     starts, state_block, table_row,
                          num_blocks, max_blocks, num_seqs, total,  block_size};
    if (int code = batch.check()) return code;
    auto run = [&](auto tag) {
        using T = decltype(tag);
        const ll::Convolution<T> layer{static_cast<T*>(out),
                                       static_cast<const T*>(x),
                                       static_cast<const T*>(weight),
                                       static_cast<const T*>(bias),
                                       out_row,
                                       x_row,
                                       channels,
                                       taps,
                                       activates != 0};
        ll::team_for(threads, (channels + ll::TILE - 1) / ll::TILE,
                     [&](int64_t i) { layer.tile(batch, i * ll::TILE); });
    };
    is_bf16 ? run(ll::bf16{}) : run(float{});
    return 0;
}

LL_EXPORT int ll_recurrence(float* out, const float* values, const float* keys, const float* queries,
                            const float* decay, const float* beta, const float* rates, float* states,
                            const int32_t* table, const int32_t* lens, const int32_t* starts, int64_t state_block,
                            int64_t table_row, int64_t num_blocks, int64_t max_blocks, int64_t num_seqs, int64_t total,
                            int64_t block_size, int64_t heads, int64_t groups, int64_t n_state, int64_t width,
                            int64_t threads) {
    const ll::Batch batch{states,     table,      lens,     starts, state_block, table_row,
                          num_blocks, max_blocks, num_seqs, total,  block_size};
    if (int code = batch.check()) return code;
    const ll::Recurrence layer{out, values, keys, queries, decay, beta, rates, heads, groups, n_state, width};
    const int64_t tiles = (width + ll::TILE - 1) / ll::TILE;
    ll::team_for(threads, heads * tiles, [&](int64_t i) {
        static thread_local std::vector<float> state;  // aligned below
        state.resize(n_state * ll::TILE + 16);
        const auto address = reinterpret_cast<uintptr_t>(state.data());
        float* aligned = state.data() + (64 - address % 64) % 64 / 4;
        layer.tile_at(batch, i / tiles, i % tiles * ll::TILE, aligned);
    });
    return 0;
}
