// Sampling and log-probabilities, one row per thread. Contract: kernels/sampling.py. Selection uses radix histograms of
// order-preserving keys, so no row is sorted. Sums over equal keys and over buckets run in token-id order.
#include <algorithm>
#include <vector>

#include "simd.h"
#include "team.h"

namespace ll {
namespace {

struct Philox {
    uint32_t c[4];
};

Philox philox(Philox x, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        uint64_t a = uint64_t(0xD2511F53u) * x.c[0], b = uint64_t(0xCD9E8D57u) * x.c[2];
        x = {{uint32_t(b >> 32) ^ x.c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ x.c[3] ^ k1, uint32_t(a)}};
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return x;
}

double uniform(uint64_t seed, uint64_t sample, uint64_t position) {
    Philox x = philox({{uint32_t(position), uint32_t(position >> 32), uint32_t(sample), uint32_t(sample >> 32)}},
                      uint32_t(seed), uint32_t(seed >> 32));
    return double(((uint64_t(x.c[0]) << 32) | x.c[1]) >> 11) * 0x1p-53;
}

// Returns a key that sorts like x. +0 and -0 have the same key.
uint32_t key_of(float x) {
    uint32_t u;
    x += 0.f;
    std::memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

float row_max(const float* x, int64_t n) {
    vf top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + W <= n; i += W) top = vmax(load(x + i), top);
    float m = hmax(top);
    for (; i < n; ++i) m = x[i] > m ? x[i] : m;
    return m;
}

int64_t argmax(const float* x, int64_t n) {
    const float m = row_max(x, n);
    for (int64_t i = 0; i < n; ++i)
        if (x[i] == m) return i;
    return 0;
}

constexpr double SMALLEST = 1e-300;  // a top_p that is 0 in fp32 keeps one token, as any small one does

struct Row {
    std::vector<float> x, weight;  // logits over temperature; 2^((x - max) log2 e), 0 for tokens that a filter dropped
    std::vector<uint32_t> key;
    double bucket[3][2048];

    // Keeps the shortest prefix of tokens, in the order (key descending, id ascending), whose measures sum to at least
    // `target`, and drops the other tokens. The measure is 1 (top_k) or the weight (top_p). Only tokens with weight > 0
    // count.
    template <bool BY_WEIGHT>
    void keep(double target) {
        const int64_t n = int64_t(weight.size());
        static constexpr int SHIFT[3] = {21, 10, 0}, BITS[3] = {11, 11, 10};
        uint32_t prefix = 0, mask = 0;
        double before = 0;  // sum of the measures of all larger keys
        for (int level = 0; level < 3; ++level) {
            const uint32_t width = (1u << BITS[level]) - 1;
            double* sum = bucket[level];
            std::memset(sum, 0, sizeof bucket[level]);
            for (int64_t i = 0; i < n; ++i)
                if ((key[i] & mask) == prefix && weight[i] > 0)
                    sum[(key[i] >> SHIFT[level]) & width] += BY_WEIGHT ? double(weight[i]) : 1.0;
            int64_t lowest = -1, b = width;
            for (; b >= 0; --b) {
                if (sum[b] == 0) continue;
                lowest = b;
                if (before + sum[b] >= target) break;
                before += sum[b];
            }
            if (b < 0) {  // all tokens are needed, because the target equals the total up to rounding
                if (lowest < 0 || level == 0) return;
                before -= sum[lowest];
                b = lowest;
            }
            prefix |= uint32_t(b) << SHIFT[level], mask |= width << SHIFT[level];
        }
        for (int64_t i = 0; i < n; ++i) {
            if (key[i] > prefix || weight[i] == 0) continue;
            if (key[i] < prefix || before >= target)
                weight[i] = 0;
            else
                before += BY_WEIGHT ? double(weight[i]) : 1.0;
        }
    }

    double total() const {
        double sum = 0;
        for (float w : weight) sum += double(w);
        return sum;
    }

    int64_t pick(const float* logits, int64_t n, float heat, float top_p, float min_p, int64_t top_k, double u) {
        x.resize(n), weight.resize(n), key.resize(n);
        const vf by = splat(heat), log2e = splat(LOG2E);
        for (int64_t i = 0; i < n; i += W) store_upto(x.data() + i, load_upto(logits + i, n - i) / by, n - i);
        const float top = row_max(x.data(), n);
        if (!(top > -INFINITY) || top == INFINITY) return argmax(logits, n);  // no token is possible, or one is certain
        for (int64_t i = 0; i < n; i += W) {
            vf w = exp2v((load_upto(x.data() + i, n - i) - splat(top)) * log2e);
            store_upto(weight.data() + i, w >= splat(min_p) ? w : vf{}, n - i);
        }
        const bool by_rank = top_k > 0 && top_k < n, by_mass = top_p < 1.f;
        if (by_rank || by_mass)
            for (int64_t i = 0; i < n; ++i) key[i] = key_of(x[i]);
        if (by_rank) keep<false>(double(top_k));
        if (by_mass) keep<true>(std::max(double(top_p), SMALLEST) * total());
        const double target = u * total();
        double sum = 0;
        int64_t last = 0;
        for (int64_t i = 0; i < n; ++i) {
            if (weight[i] == 0) continue;
            sum += double(weight[i]), last = i;
            if (sum > target) return i;
        }
        return last;
    }
};

void top_row(const float* x, int64_t n, int64_t id, int64_t k, float* chosen, int64_t* rank, int64_t* ids, float* top) {
    const float m = row_max(x, n);
    double sum = 0;
    for (int64_t i = 0; i < n; i += W) {
        float e[W];
        store(e, exp2v((load_upto(x + i, n - i) - splat(m)) * splat(LOG2E)));
        for (int64_t j = 0; j < W && i + j < n; ++j) sum += double(e[j]);
    }
    const double log_sum = double(m) + std::log(sum);
    int64_t above = 0, held = 0;
    for (int64_t i = 0; i < n; ++i) {
        above += x[i] > x[id];
        if (held == k && (k == 0 || !(x[i] > x[ids[k - 1]]))) continue;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && x[i] > x[ids[at - 1]]; --at) ids[at] = ids[at - 1];
        ids[at] = i;
    }
    *chosen = float(double(x[id]) - log_sum), *rank = above + 1;
    for (int64_t i = 0; i < k; ++i) top[i] = float(double(x[ids[i]]) - log_sum);
}

}  // namespace
}  // namespace ll

LL_EXPORT int ll_sample(int64_t* out, const float* logits, const float* temperature, const float* top_p,
                        const float* min_p, const int64_t* top_k, const int64_t* seeds, const int64_t* samples,
                        const int64_t* positions, int64_t batch, int64_t n, int64_t row, int64_t threads) {
    ll::team(batch * n >= (1 << 16) ? std::min(threads, batch) : 1, [&](ll::Claims& rows) {
        static thread_local ll::Row scratch;
        for (int64_t b; (b = rows.next()) < batch;) {
            const float* x = logits + b * row;
            out[b] = temperature[b] == 0.f
                         ? ll::argmax(x, n)
                         : scratch.pick(x, n, temperature[b], top_p[b], min_p[b], top_k[b],
                                        ll::uniform(uint64_t(seeds[b]), uint64_t(samples[b]), uint64_t(positions[b])));
        }
    });
    return 0;
}

LL_EXPORT int ll_log_softmax_top(float* chosen, int64_t* rank, int64_t* top_ids, float* top, const float* logits,
                                 const int64_t* ids, int64_t batch, int64_t n, int64_t row, int64_t k,
                                 int64_t threads) {
    for (int64_t b = 0; b < batch; ++b)
        if (ids[b] < 0 || ids[b] >= n) return 5;
    ll::team_for(batch * n >= (1 << 16) ? threads : 1, batch, [&](int64_t b) {
        ll::top_row(logits + b * row, n, ids[b], k, chosen + b, rank + b, top_ids + b * k, top + b * k);
    });
    return 0;
}
