// The choice of experts for each token. Each row is computed separately, so it does not depend on the other rows.
#include <cmath>
#include <vector>

#include "simd.h"
#include "team.h"

namespace ll {
namespace {

struct Choice {
    int64_t num_experts, per_token;
    bool renormalize, round_weights;
};

// odds = softmax(scores) in fp32, with the bits of torch's.
template <class T>
void softmax(float* odds, const T* scores, int64_t n) {
    float top = -INFINITY, sum = 0.f;
    for_vectors(n, [&](int64_t i, auto count) { store_upto(odds + i, load_upto(scores + i, count), count); });
    for (int64_t i = 0; i < n; ++i) top = odds[i] > top ? odds[i] : top;
    for_vectors(n, [&](int64_t i, auto count) {
        store_upto(odds + i, expv(load_upto(odds + i, count) - splat(top)), count);
    });
    if (n < W) {
        for (int64_t i = 0; i < n; ++i) sum += odds[i];
    } else {
        vf sums = {};
        for_vectors(n, [&](int64_t i, auto count) { sums += load_upto(odds + i, count); });
        sum = hsum(sums);
    }
    const float inverse = 1.f / sum;
    for (int64_t i = 0; i < n; ++i) odds[i] *= inverse;
}

// Chooses the most likely experts, the first of equally likely ones, and lists them in the order of their numbers.
template <class T>
void route_row(float* weights, int64_t* experts, const T* scores, const Choice& c, float* odds) {
    softmax(odds, scores, c.num_experts);
    static thread_local std::vector<char> is_chosen;
    is_chosen.assign(c.num_experts, 0);
    float sum = 0.f;
    for (int64_t k = 0; k < c.per_token; ++k) {
        int64_t best = -1;
        for (int64_t e = 0; e < c.num_experts; ++e)
            if (!is_chosen[e] && (best < 0 || odds[e] > odds[best])) best = e;
        is_chosen[best] = 1, sum += odds[best];
    }
    for (int64_t e = 0, k = 0; e < c.num_experts; ++e) {
        if (!is_chosen[e]) continue;
        float weight = c.renormalize ? odds[e] / sum : odds[e];
        if (c.round_weights) weight = rounded_to(splat(weight), scores)[0];
        experts[k] = e, weights[k++] = weight;
    }
}

template <class T>
void route(float* weights, int64_t* experts, const T* scores, int64_t rows, const Choice& c) {
    std::vector<float> odds(c.num_experts);
    for (int64_t r = 0; r < rows; ++r)
        route_row(weights + r * c.per_token, experts + r * c.per_token, scores + r * c.num_experts, c, odds.data());
}

}  // namespace
}  // namespace ll

// scores [rows, num_experts]; weights and experts [rows, per_token]. Contract: kernels/experts.py.
LL_EXPORT int ll_route(float* weights, int64_t* experts, const void* scores, int64_t rows, int64_t num_experts,
                       int64_t per_token, int64_t renormalize, int64_t round_weights, int64_t is_bf16) {
    const ll::Choice choice{num_experts, per_token, renormalize != 0, round_weights != 0};
    if (is_bf16)
        ll::route(weights, experts, static_cast<const ll::bf16*>(scores), rows, choice);
    else
        ll::route(weights, experts, static_cast<const float*>(scores), rows, choice);
    return 0;
}
