// Sampling and log-probabilities, one row per thread. Contract: kernels/sampling.py. top_k first drops most tokens by a
// bound. Selection then uses radix histograms of order-preserving keys, so no row is sorted. Sums over equal keys and
// over buckets run in token-id order.
#include <algorithm>
#include <functional>
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
    constexpr int SUMS = 4;  // so that a vector does not wait for the one before
    vf tops[SUMS];
    for (vf& top : tops) top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + SUMS * W <= n; i += SUMS * W)
#pragma GCC unroll 4
        for (int j = 0; j < SUMS; ++j) tops[j] = vmax(load(x + i + j * W), tops[j]);
    float m = hmax(vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3])));
    for (; i < n; ++i) m = x[i] > m ? x[i] : m;
    return m;
}

constexpr double SMALLEST = 1e-300;  // so that a top_p that is 0 in fp32 keeps one token

// Returns a word in which bit i is set if lane i is. Every lane is 0 or -1.
LL_INLINE uint32_t bits_of(vi lanes) {
#if defined(LL_AVX512)
    return _mm512_cmplt_epi32_mask((__m512i)lanes, _mm512_setzero_si512());
#elif defined(LL_AVX2)
    return uint32_t(_mm256_movemask_ps((__m256)lanes));
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= uint32_t(lanes[i] & 1) << i;
    return bits;
#endif
}

int64_t argmax(const float* x, int64_t n) {
    const float m = row_max(x, n);
    int64_t i = 0;
    for (; i + W <= n; i += W)
        if (const uint32_t bits = bits_of(load(x + i) == splat(m))) return i + __builtin_ctz(bits);
    for (; i < n; ++i)
        if (x[i] == m) return i;
    return 0;
}

// One row's draw. The filters work on the list of candidates, in id order. They drop tokens from the list, or set their
// weight to 0.
struct Row {
    std::vector<float> x;       // logits over temperature, padded to whole vectors with -inf; later the candidates' x
    std::vector<float> weight;  // the candidates' 2^((x - max) log2 e); 0 if it is less than min_p
    std::vector<int32_t> id;    // the candidates' tokens, unless every token is a candidate
    std::vector<uint32_t> key;  // the candidates' keys
    std::vector<float> peaks;   // the largest x of each of several disjoint groups of tokens
    std::vector<double> sums;   // the sums of the weights before each run of RUN candidates
    int64_t count = 0;          // number of candidates
    bool is_whole = true;       // whether every token is a candidate
    double bucket[2048] = {};   // all 0 between calls
    static constexpr int64_t RUN = 256;

    // Computes x and the peaks of at least 4 k groups (for k > 0, if there are so many tokens), and makes a candidate
    // of every token. Returns the largest x.
    float scale(const float* logits, int64_t n, float heat, int64_t k) {
        const int64_t vectors = (n + W - 1) / W, per = k > 0 ? std::max<int64_t>(1, n / (4 * k)) : vectors;
        x.resize(vectors * W), weight.resize(vectors * W), peaks.resize((vectors + per - 1) / per * W);
        std::fill(x.end() - W, x.end(), -INFINITY);
        const vf by = splat(heat);
        float* peak = peaks.data();
        for (int64_t from = 0; from < n; from += per * W, peak += W) {
            vf most = splat(-INFINITY);
            for (int64_t i = from; i < std::min(from + per * W, n); i += W) {
                store_upto(x.data() + i, load_upto(logits + i, n - i) / by, n - i);
                most = vmax(load(x.data() + i), most);
            }
            store(peak, most);
        }
        count = n, is_whole = true;
        return row_max(peaks.data(), int64_t(peaks.size()));
    }

    // Drops the candidates whose number in `values` (x or weight) is less than `least`.
    void drop_below(const std::vector<float>& values, float least) {
        id.resize(x.size());
        int64_t kept = 0;
        for (int64_t from = 0; from < count; from += W) {
            uint32_t bits = bits_of(load(values.data() + from) >= splat(least));
            if (count - from < W) bits &= (1u << (count - from)) - 1;
            for (; bits; bits &= bits - 1) {
                const int64_t i = from + __builtin_ctz(bits);
                id[kept] = is_whole ? int32_t(i) : id[i], x[kept] = x[i], weight[kept++] = weight[i];
            }
        }
        count = kept, is_whole = false;
    }

    // Drops most of the tokens that top_k drops: those below the k-th largest peak, which at least k tokens reach.
    void bound_by_rank(int64_t k) {
        std::nth_element(peaks.begin(), peaks.begin() + (k - 1), peaks.end(), std::greater<float>());
        drop_below(x, peaks[size_t(k - 1)]);
    }

    // Drops most of the tokens that top_p drops: those whose weights sum to at most half of what may be missing.
    void bound_by_mass(double top_p, double sum) { drop_below(weight, float((1 - top_p) * sum / double(2 * count))); }

    // Computes the candidates' weights. Returns how many of them are not 0.
    int64_t weigh(float top, float min_p) {
        const vf log2e = splat(LOG2E);
        vi zeros = splat_i(0);
        for_vectors(count, [&](int64_t i, int64_t n) {
            vf w = exp2v((load_upto(x.data() + i, n) - splat(top)) * log2e);
            w = w >= splat(min_p) ? w : vf{};
            store_upto(weight.data() + i, w, n);
            zeros += n == W ? w == vf{} : vi{};  // -1 in each lane that is 0
        });
        int64_t positive = count;
        for (int i = 0; i < W; ++i) positive += zeros[i];
        for (int64_t i = count - count % W; i < count; ++i) positive -= weight[i] == 0;
        return positive;
    }

    // Keeps the shortest prefix of candidates, in the order (key descending, id ascending), whose measures sum to at
    // least `target`, and drops the others. The measure is 1 (top_k) or the weight (top_p). Only candidates with weight
    // > 0 count.
    template <bool BY_WEIGHT>
    void keep(double target) {
        static constexpr int SHIFT[3] = {21, 10, 0}, BITS[3] = {11, 11, 10};
        const auto measure = [&](int64_t i) { return BY_WEIGHT ? double(weight[i]) : 1.0; };
        id.resize(x.size()), key.resize(x.size());
        uint32_t least = ~0u, most = 0;
        for (int64_t i = 0; i < count; ++i)
            key[i] = key_of(x[i]), least = std::min(least, key[i]), most = std::max(most, key[i]);
        uint32_t prefix = 0, mask = 0;
        double before = 0;  // sum of the measures of all larger keys
        for (int level = 0; level < 3; ++level) {
            const uint32_t width = (1u << BITS[level]) - 1;
            const int64_t first = level == 0 ? least >> SHIFT[0] : 0, last = level == 0 ? most >> SHIFT[0] : width;
            for (int64_t i = 0; i < count; ++i) {
                if ((key[i] & mask) != prefix || weight[i] == 0) continue;
                bucket[(key[i] >> SHIFT[level]) & width] += measure(i);
            }
            int64_t lowest = -1, b = last;
            for (; b >= first; --b) {
                if (bucket[b] == 0) continue;
                lowest = b;
                if (before + bucket[b] >= target) break;
                before += bucket[b];
            }
            const bool is_short = b < first;  // all are needed: the target equals the total up to rounding
            if (is_short && lowest >= 0) before -= bucket[lowest], b = lowest;
            std::fill(bucket + first, bucket + last + 1, 0.0);
            if (is_short && (lowest < 0 || level == 0)) return;
            prefix |= uint32_t(b) << SHIFT[level], mask |= width << SHIFT[level];
        }
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            bool stays = key[i] > prefix && weight[i] > 0;
            if (key[i] == prefix && weight[i] > 0 && before < target) before += measure(i), stays = true;
            id[kept] = is_whole ? int32_t(i) : id[i], x[kept] = x[i], weight[kept] = weight[i];
            kept += stays;  // without a branch, which would often be mispredicted
        }
        count = kept, is_whole = false;
    }

    // Returns the sum of the candidates' weights, added in id order, and stores its value before each run.
    double total() {
        sums.clear();
        double sum = 0;
        for (int64_t from = 0; from < count; from += RUN) {
            sums.push_back(sum);
            for (int64_t i = from; i < std::min(from + RUN, count); ++i) sum += double(weight[i]);
        }
        return sum;
    }

    // Returns the first token up to which the weights sum to more than `target`, or the last token whose weight is not
    // 0. `total` must have been called.
    int64_t token_at(double target) const {
        const int64_t run = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin() - 1;
        double sum = sums[size_t(run)];
        int64_t i = run * RUN;
        while (i < count && (sum += double(weight[i])) <= target) ++i;
        if (i == count)
            for (--i; weight[i] == 0;) --i;
        return is_whole ? i : id[i];
    }

    int64_t pick(const float* logits, int64_t n, float heat, float top_p, float min_p, int64_t top_k, double u) {
        const int64_t k = top_k < n ? std::max<int64_t>(top_k, 0) : 0;  // 0: top_k is off
        const float top = scale(logits, n, heat, k);
        if (!(top > -INFINITY) || top == INFINITY) return argmax(logits, n);  // no token is possible, or one is certain
        if (k > 0) bound_by_rank(k);
        // 2^x is rounded, so a token that was just dropped may pass min_p although fewer than k kept ones do.
        if (weigh(top, min_p) < k) scale(logits, n, heat, k), weigh(top, min_p);
        if (k > 0) keep<false>(double(k));
        if (top_p < 1.f) {
            const double sum = total();
            bound_by_mass(top_p, sum);
            keep<true>(std::max(double(top_p), SMALLEST) * sum);
        }
        return token_at(u * total());
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
