// The other kernels of a layer: RMS norm, the elementwise half of a gated MLP, RoPE with the write to slots, and block
// copies. One thread computes a whole row (or token, or block), in an order that depends only on its length.
#include <vector>

#include "eight_bits.h"
#include "team.h"

namespace ll {
namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements; with fewer, waking threads costs more than it saves

constexpr int LANES = 8, SUMS = 4, STRIPE = LANES * SUMS;  // elements that torch adds to different sums
constexpr int64_t RUN = 16 * STRIPE;                       // elements before torch begins new sums

// Returns the sum of `sums`, the lanes of SUMS vectors, and of the squares of the fewer than STRIPE elements of `rest`.
inline float sum_of_lanes(float (&sums)[STRIPE], const float* rest, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) sums[lane] += rest[i + lane] * rest[i + lane];
    float sum = 0.f;
    for (; i < n; ++i) sum += rest[i] * rest[i];
    for (int lane = 0; lane < LANES; ++lane)
        sum += ((sums[lane] + sums[LANES + lane]) + sums[2 * LANES + lane]) + sums[3 * LANES + lane];
    return sum;
}

// Adds the squares in the order in which torch adds up to 8192 numbers, so that the norm has the bits of transformers'.
// With ADD, `summed` = x + residual, and the norm is that of `summed`. A weight of x's type (Llama) multiplies the
// rounded norm; an fp32 weight (Gemma) multiplies the norm before rounding.
template <bool ADD, class T, class Weight>
void rms_norm_row(T* out, const T* x, const Weight* weight, const T* residual, T* summed, int64_t n, float eps) {
    constexpr int V = STRIPE / W;
    vf run[V] = {}, total[V] = {};
    const auto read = [&](int64_t i, auto count) __attribute__((always_inline)) {
        vf v = load_upto(x + i, count);
        if constexpr (ADD) {
            v = rounded_to(v + load_upto(residual + i, count), x);
            store_upto(summed + i, v, count);
        }
        return v;
    };
    int64_t i = 0;
    for (; i + STRIPE <= n; i += STRIPE) {
#pragma GCC unroll 4
        for (int k = 0; k < V; ++k) {
            const vf v = read(i + k * W, std::integral_constant<int64_t, W>{});
            run[k] += v * v;
        }
        if ((i + STRIPE) % RUN) continue;
        for (int k = 0; k < V; ++k) total[k] += run[k], run[k] = vf{};
    }
    alignas(64) float sums[STRIPE], rest[STRIPE];
    for (int k = 0; k < V; ++k) store(sums + k * W, run[k] + total[k]);
    for (int64_t at = i; at < n; at += W) store(rest + at - i, read(at, n - at));
    const float mean = sum_of_lanes(sums, rest, n - i) / float(n);
    const vf inverse = splat(1.f / std::sqrt(mean + eps));
    const T* from = ADD ? summed : x;
    for_vectors(n, [&](int64_t at, auto count) {
        vf normed = rounded_to(load_upto(from + at, count) * inverse, weight);
        store_upto(out + at, normed * load_upto(weight + at, count), count);
    });
}

template <bool GELU, class T>
void gate_mul_row(T* out, const T* x, int64_t n) {
    for_vectors(n, [&](int64_t i, auto count) {
        store_upto(out + i, gated<GELU>(load_upto(x + i, count), load_upto(x + n + i, count), x), count);
    });
}

// Rotates src into dst, which may be src. Dimensions from `rotary` on are copied.
template <class D, class T>
void rotate(D* dst, const T* src, const float* cos_sin, int64_t rotary, int64_t d) {
    const int64_t half = rotary / 2;
    for_vectors(half, [&](int64_t i, auto n) {
        vf cos = load_upto(cos_sin + i, n), sin = load_upto(cos_sin + half + i, n);
        vf a = load_upto(src + i, n), b = load_upto(src + half + i, n);
        store_upto(dst + i, a * cos - b * sin, n);
        store_upto(dst + half + i, b * cos + a * sin, n);
    });
    if constexpr (std::is_same_v<D, T>) {
        if (dst != src) std::memcpy(dst + 2 * half, src + 2 * half, (d - 2 * half) * sizeof(T));
    } else {
        for_vectors(d - 2 * half, [&](int64_t i, auto n) {
            store_upto(dst + 2 * half + i, load_upto(src + 2 * half + i, n), n);
        });
    }
}

// Writes src, rotated and rounded once, to a row of a cache. If rotary is 0, src is not rotated.
template <class E, class T>
void write_row(E* row, const T* src, const float* cos_sin, int64_t rotary, int64_t d) {
    if constexpr (IS_8_BITS<E>) {
        static thread_local std::vector<float> exact;
        exact.resize(d);
        rotate(exact.data(), src, cos_sin, rotary, d);
        store_row(row, exact.data(), d);
    } else {
        rotate(row, src, cos_sin, rotary, d);
    }
}

template <class T, class E>
struct Write {
    T *q;
    const T *k, *v;
    const int64_t *positions, *slots;
    E *key_cache, *value_cache;
    const float* cos_sin;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot;
    int64_t tokens, heads, kv_heads, d, num_blocks, block_size, max_pos, rotary;
    bool by_word;  // keys are stored by word (kernels/kv_cache.py)

    int check() const {
        for (int64_t t = 0; t < tokens; ++t) {
            if (slots[t] >= num_blocks * block_size) return 3;
            if (cos_sin && (positions[t] < 0 || positions[t] >= max_pos)) return 3;
        }
        return 0;
    }

    void token(int64_t t) const {
        const float* row = cos_sin ? cos_sin + positions[t] * rotary : nullptr;
        if (row)
            for (int64_t h = 0; h < heads; ++h) {
                T* at = q + t * q_token + h * q_head;
                rotate(at, at, row, rotary, d);
            }
        if (slots[t] < 0) return;
        const int64_t block = slots[t] / block_size, slot = slots[t] % block_size;
        for (int64_t h = 0; h < kv_heads; ++h) {
            E* keys = key_cache + block * kc_block + h * kc_head;
            E* value = value_cache + block * vc_block + h * vc_head + slot * vc_slot;
            const T* key = k + t * k_token + h * k_head;
            if (by_word)
                write_words(keys, slot, key, row);
            else
                write_row(keys + slot * kc_slot, key, row, row ? rotary : 0, d);
            write_row(value, v + t * v_token + h * v_head, nullptr, 0, d);
        }
    }

    void write_words(E* keys, int64_t slot, const T* key, const float* row) const {
        static thread_local std::vector<E> rotated;
        rotated.resize(d);
        write_row(rotated.data(), key, row, row ? rotary : 0, d);
        char* to = reinterpret_cast<char*>(keys) + slot * 4;
        for (int64_t i = 0; i < d * int64_t(sizeof(E)); i += 4, to += block_size * 4)
            std::memcpy(to, reinterpret_cast<const char*>(rotated.data()) + i, 4);
    }

    int run(int threads) const {
        if (int error = check()) return error;
        const bool parallel = threads > 1 && tokens * (heads + 2 * kv_heads) * d >= PARALLEL_FROM;
        team_for(parallel ? threads : 1, tokens, [&](int64_t t) { token(t); });
        return 0;
    }
};

template <class T, class Weight>
void rms_norm(T* out, const T* x, const Weight* weight, const T* residual, T* summed, int64_t rows, int64_t n,
              int64_t x_row, int64_t residual_row, int64_t threads, float eps) {
    team_for(rows * n >= PARALLEL_FROM ? threads : 1, rows, [&](int64_t r) {
        const T* row = x + r * x_row;
        residual ? rms_norm_row<true>(out + r * n, row, weight, residual + r * residual_row, summed + r * n, n, eps)
                 : rms_norm_row<false>(out + r * n, row, weight, (const T*)nullptr, (T*)nullptr, n, eps);
    });
}

template <bool GELU, class T>
void gate_mul(T* out, const T* x, int64_t rows, int64_t n, int64_t x_row, int64_t threads) {
    team_for(rows * n >= PARALLEL_FROM ? threads : 1, rows,
             [&](int64_t r) { gate_mul_row<GELU>(out + r * n, x + r * x_row, n); });
}

template <bool GELU>
int gate_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t x_row, int64_t is_bf16, int64_t threads) {
    if (is_bf16)
        gate_mul<GELU>(static_cast<bf16*>(out), static_cast<const bf16*>(x), rows, n, x_row, threads);
    else
        gate_mul<GELU>(static_cast<float*>(out), static_cast<const float*>(x), rows, n, x_row, threads);
    return 0;
}

}  // namespace
}  // namespace ll

LL_EXPORT int ll_rms_norm(void* out, const void* x, const void* weight, const void* residual, void* summed,
                          int64_t rows, int64_t n, int64_t x_row, int64_t residual_row, int64_t is_bf16,
                          int64_t is_wide, int64_t threads, float eps) {
    auto run = [&](auto tag, auto weight_tag) {
        using T = decltype(tag);
        ll::rms_norm(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const decltype(weight_tag)*>(weight),
                     static_cast<const T*>(residual), static_cast<T*>(summed), rows, n, x_row, residual_row, threads,
                     eps);
    };
    if (!is_bf16) return run(float{}, float{}), 0;
    is_wide ? run(ll::bf16{}, float{}) : run(ll::bf16{}, ll::bf16{});
    return 0;
}

LL_EXPORT int ll_silu_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t x_row, int64_t is_bf16,
                          int64_t threads) {
    return ll::gate_mul<false>(out, x, rows, n, x_row, is_bf16, threads);
}

LL_EXPORT int ll_gelu_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t x_row, int64_t is_bf16,
                          int64_t threads) {
    return ll::gate_mul<true>(out, x, rows, n, x_row, is_bf16, threads);
}

// x[i] = cap * tanh(x[i] / cap), in place.
LL_EXPORT int ll_softcap(float* x, int64_t n, int64_t threads, float cap) {
    using namespace ll;
    team_for(n >= PARALLEL_FROM ? threads : 1, (n + W - 1) / W, [&](int64_t i) {
        const int64_t left = n - i * W;
        store_upto(x + i * W, capped(load_upto(x + i * W, left), 1.f, cap), left);
    });
    return 0;
}

LL_EXPORT int ll_write_blocks(void* q, const void* k, const void* v, const int64_t* positions, const int64_t* slots,
                              void* key_cache, void* value_cache, const float* cos_sin, int64_t q_token,
                              int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head,
                              int64_t kc_block, int64_t kc_head, int64_t kc_slot, int64_t vc_block, int64_t vc_head,
                              int64_t vc_slot, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d,
                              int64_t num_blocks, int64_t block_size, int64_t max_pos, int64_t rotary,
                              int64_t by_word, int64_t is_bf16, int64_t kv_type, int64_t threads) {
    return ll::for_types(is_bf16, kv_type, [&](auto q_tag, auto kv_tag) {
        using T = decltype(q_tag);
        using E = decltype(kv_tag);
        ll::Write<T, E> w{static_cast<T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), positions, slots,
                          static_cast<E*>(key_cache), static_cast<E*>(value_cache), cos_sin, q_token, q_head, k_token,
                          k_head, v_token, v_head, kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot, tokens,
                          heads, kv_heads, d, num_blocks, block_size, max_pos, rotary, by_word != 0};
        return w.run(int(threads));
    });
}

LL_EXPORT int ll_copy_blocks(const char* src, char* dst, const int64_t* src_ids, const int64_t* dst_ids,
                             int64_t src_row, int64_t dst_row, int64_t src_blocks, int64_t dst_blocks, int64_t bytes,
                             int64_t n, int64_t threads) {
    for (int64_t i = 0; i < n; ++i)
        if (src_ids[i] < 0 || src_ids[i] >= src_blocks || dst_ids[i] < 0 || dst_ids[i] >= dst_blocks) return 4;
    ll::team_for(n * bytes >= (1 << 18) ? threads : 1, n,
                 [&](int64_t i) { std::memcpy(dst + dst_ids[i] * dst_row, src + src_ids[i] * src_row, bytes); });
    return 0;
}
