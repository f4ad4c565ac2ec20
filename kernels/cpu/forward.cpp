// A whole pass of a decoder in one call (long: the order of a pass is in one place). It makes the same calls to the
// other entry points as engine/models/decoder.py, so the bits are the same. It saves some thirty calls per layer
// through Python and torch, each of which also lets other Python threads run.
//
// The structures have the same layout as in kernels/cpu/forward.py: pointers and 64-bit integers, then floats.
#include <cstring>
#include <vector>

#include "lora.h"
#include "ranks.h"
#include "simd.h"
#include "team.h"

namespace ll {
namespace {

using Entry = int (*)(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t n_in,
                          int64_t n_out, int64_t x_stride, int64_t out_stride, int64_t threads);

struct Linear {
    const void *packed, *bias;
    Entry entry;  // the kernel that reads `packed`; null: ll_linear
    const void* const* parts;  // the weights of each part of the inputs (row_parallel.cpp), instead of `packed`
    int64_t n_in, n_out, num_parts;
    int64_t site;  // number of the site for adapters; -1: none
};

struct Layer {
    const void *input_norm, *q_norm, *k_norm, *attention_norm, *mlp_norm, *output_norm;
    void *keys, *values;
    const float* cos_sin;
    const Linear* experts;  // gate_up and down of each in turn; null: one MLP
    Linear qkv, o, gate_up, down, router;
    int64_t group, window;  // index of the KV group; 0: no window
};

struct Model {
    const char* embed;  // null: a stage that takes the states of the previous stage
    const Layer* layers;
    const void* norm;  // null: a stage that passes its states on
    const Ranks* ranks;  // null if there is a single rank
    Linear lm_head;
    int64_t num_sums;  // number of sums in memory at a time for products in parts; 0 if there are none
    int64_t num_layers, hidden, vocab, heads, kv_heads, d, max_pos, rotary, is_bf16;
    int64_t inner, gelu, wide_norms, num_experts, per_token, renormalize, round_weights;
    int64_t num_blocks, block_size, cache_block, cache_head, cache_slot, by_word, kv_type;
    float eps, scale, softcap, logits_softcap, embed_scale;  // scale and softcap of attention's scores; softcap 0: none
};

// Slots that the layers of a KV group write, and block tables that they read.
struct Group {
    const int64_t* slots;
    const int32_t* table;
    int64_t table_row, table_width;
};

// The tokens to draw from the logits, and the parameters of ll_sample.
struct Draw {
    int64_t* ids;
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k, *seeds, *samples, *positions;
};

struct Pass {
    const int64_t *tokens, *positions;
    const Group* groups;
    const int32_t *context_lens, *cu_seqlens_q;  // null cu_seqlens_q: one query per sequence
    const int64_t* rows;                         // null: logits of every token
    void* scratch;
    char* states;  // [T, h], inputs and outputs of a stage; null: the model is whole
    float* logits;
    const LoraStep *lora, *lora_of_rows;  // corrections of tokens and, in the last layer, of rows; null: none
    const Draw* draw;                     // null: no tokens
    int64_t num_tokens, num_seqs, num_rows, threads;
};

// Scratch memory that is allocated from the front. kernels/cpu/forward.py counts in the same way.
struct Room {
    char* free;
    char* take(int64_t bytes) {
        char* at = free;
        free += (bytes + 63) / 64 * 64;
        return at;
    }
};

// x += y * weight, rounded as two operations.
template <class T>
void add_scaled(T* x, const T* y, float weight, int64_t n) {
    for_vectors(n, [&](int64_t i, auto count) {
        const vf scaled = rounded_to(load_upto(y + i, count) * splat(weight), x);
        store_upto(x + i, load_upto(x + i, count) + scaled, count);
    });
}

struct Forward {
    const Model& m;
    const Pass& p;
    const int64_t size = m.is_bf16 ? 2 : 4, hidden = m.hidden, q_width = m.heads * m.d;
    const int64_t qkv_width = (m.heads + 2 * m.kv_heads) * m.d;
    Room room{static_cast<char*>(p.scratch)};
    char *residual = p.states ? p.states : room.take(p.num_tokens * hidden * size),
         *normed = room.take(p.num_tokens * hidden * size),
         *projected = room.take(p.num_tokens * hidden * size);
    float* sums = reinterpret_cast<float*>(room.take(m.num_sums * p.num_tokens * hidden * 4));

    // The product, with the corrections of the rows' adapters.
    int adapted(const Linear& l, const void* x, void* out, int64_t rows, const LoraStep* lora) const {
        if (int error = linear(l, x, out, rows)) return error;
        if (!lora || l.site < 0) return 0;
        return ll_lora(x, out, lora, l.site, l.n_in, l.n_in, l.n_out, m.is_bf16, p.threads);
    }

    int linear(const Linear& l, const void* x, void* out, int64_t rows) const {
        if (l.parts)
            return ll_row_parallel(x, l.parts, l.bias, out, sums, m.ranks, l.num_parts, rows, l.n_in, l.n_out, l.n_in,
                                   m.is_bf16, p.threads);
        if (l.entry) return l.entry(x, l.packed, l.bias, out, rows, l.n_in, l.n_out, l.n_in, l.n_out, p.threads);
        return ll_linear(x, l.packed, l.bias, out, rows, l.n_in, l.n_out, l.n_in, l.n_out, m.is_bf16, p.threads);
    }

    // normed = norm(residual). With `add`, residual += add comes first.
    int norm(const void* weight, const void* add, int64_t rows) const {
        const void* x = add ? add : residual;
        return ll_rms_norm(normed, x, weight, add ? residual : nullptr, add ? residual : nullptr, rows, hidden, hidden,
                           hidden, m.is_bf16, m.wide_norms, p.threads, m.eps);
    }

    // projected = norm(projected), if the layer normalizes the output of a sublayer.
    int norm_output(const void* weight, int64_t rows) const {
        return !weight ? 0 : ll_rms_norm(projected, projected, weight, nullptr, nullptr, rows, hidden, hidden, hidden,
                                         m.is_bf16, m.wide_norms, p.threads, m.eps);
    }

    template <class T>
    void scale_row(T* to, const T* from) const {
        for_vectors(hidden, [&](int64_t i, auto count) {
            store_upto(to + i, load_upto(from + i, count) * splat(m.embed_scale), count);
        });
    }

    int embed() const {
        for (int64_t t = 0; t < p.num_tokens; ++t) {
            if (p.tokens[t] < 0 || p.tokens[t] >= m.vocab) return 5;
            char* to = residual + t * hidden * size;
            const char* from = m.embed + p.tokens[t] * hidden * size;
            if (m.embed_scale == 1.f)
                std::memcpy(to, from, hidden * size);
            else if (m.is_bf16)
                scale_row(reinterpret_cast<bf16*>(to), reinterpret_cast<const bf16*>(from));
            else
                scale_row(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from));
        }
        return 0;
    }

    // Normalizes the heads of every token separately, in place.
    void head_norms(const Layer& layer, char* qkv) const {
        team_for(p.num_tokens >= 16 ? p.threads : 1, p.num_tokens, [&](int64_t t) {
            char *q = qkv + t * qkv_width * size, *k = q + q_width * size;
            ll_rms_norm(q, q, layer.q_norm, nullptr, nullptr, m.heads, m.d, m.d, 0, m.is_bf16, m.wide_norms, 1, m.eps);
            ll_rms_norm(k, k, layer.k_norm, nullptr, nullptr, m.kv_heads, m.d, m.d, 0, m.is_bf16, m.wide_norms, 1,
                        m.eps);
        });
    }

    // Sets `counts` to the cumulative numbers of each sequence's wanted rows. Returns whether these are its last rows.
    bool count_last(std::vector<int32_t>& counts) const {
        for (int64_t s = 0, i = 0; s < p.num_seqs; ++s) {
            const int64_t end = p.cu_seqlens_q ? p.cu_seqlens_q[s + 1] : s + 1, first = i;
            while (i < p.num_rows && p.rows[i] < end) ++i;
            if (i > first && p.rows[first] != end - (i - first)) return false;
            counts.push_back(int32_t(i));
        }
        return true;
    }

    // Computes `attended` from `normed`. In the last layer, keeps the wanted rows of `attended` and of the residual.
    int attend(const Layer& layer, char* qkv, char* attended, bool is_last) const {
        if (int error = adapted(layer.qkv, normed, qkv, p.num_tokens, p.lora)) return error;
        if (layer.q_norm) head_norms(layer, qkv);
        const Group& group = p.groups[layer.group];
        char *k = qkv + q_width * size, *v = k + m.kv_heads * m.d * size;
        if (int error = ll_write_blocks(qkv, k, v, p.positions, group.slots, layer.keys, layer.values, layer.cos_sin,
                                        qkv_width, m.d, qkv_width, m.d, qkv_width, m.d, m.cache_block, m.cache_head,
                                        m.cache_slot, m.cache_block, m.cache_head, m.cache_slot, p.num_tokens, m.heads,
                                        m.kv_heads, m.d, m.num_blocks, m.block_size, m.max_pos, m.rotary, m.by_word,
                                        m.is_bf16, m.kv_type, p.threads))
            return error;
        std::vector<int32_t> counts{0};
        const bool selects = is_last && p.rows, early = selects && count_last(counts);  // early: only wanted rows attend
        if (early) keep_wanted(qkv, qkv_width);
        const int error = ll_attention(
            attended, qkv, layer.keys, layer.values, group.table, p.context_lens, early ? counts.data() : p.cu_seqlens_q,
            q_width, m.d, qkv_width, m.d, m.cache_block, m.cache_head, m.cache_slot, m.cache_block, m.cache_head,
            m.cache_slot, group.table_row, m.num_blocks, group.table_width, early ? p.num_rows : p.num_tokens, p.num_seqs,
            m.heads, m.kv_heads, m.block_size, m.d, layer.window, m.by_word, m.is_bf16, m.kv_type, p.threads, nullptr,
            m.scale, m.softcap);
        if (selects && !early) keep_wanted(attended, q_width);
        if (selects) keep_wanted(residual, hidden);
        return error;
    }

    // Moves row rows[i] of `from` to row i, in place. The rows must ascend; the caller has checked this.
    void keep_wanted(char* from, int64_t width) const {
        for (int64_t i = 0; i < p.num_rows; ++i)
            if (p.rows[i] != i) std::memcpy(from + i * width * size, from + p.rows[i] * width * size, width * size);
    }

    // out = down(activation(gate) * up) of x.
    int gated(const Linear& gate_up, const Linear& down, const void* x, void* out, int64_t rows, Room room,
              const LoraStep* lora = nullptr) const {
        const int64_t inner = down.n_in;
        char *both = room.take(rows * 2 * inner * size), *product = room.take(rows * inner * size);
        const bool is_plain = !gate_up.parts && !gate_up.entry && !(lora && gate_up.site >= 0);
        if (!is_plain || ll_gated_linear(x, gate_up.packed, gate_up.bias, product, rows, gate_up.n_in, inner, m.gelu,
                                         m.is_bf16, p.threads)) {
            if (int error = adapted(gate_up, x, both, rows, lora)) return error;
            (m.gelu ? ll_gelu_mul : ll_silu_mul)(product, both, rows, inner, 2 * inner, m.is_bf16, p.threads);
        }
        return adapted(down, product, out, rows, lora);
    }

    // projected = the weighted sum of the outputs of each row's experts for `normed`, added in the order of their
    // numbers. An expert computes all of its rows at once.
    int mixture(const Layer& layer, int64_t rows, Room room) const {
        const int64_t k = m.per_token, row_bytes = hidden * size;
        char* scores = room.take(rows * m.num_experts * size);
        float* weights = reinterpret_cast<float*>(room.take(rows * k * 4));
        int64_t* chosen = reinterpret_cast<int64_t*>(room.take(rows * k * 8));
        int64_t* members = reinterpret_cast<int64_t*>(room.take(rows * 8));
        char *inputs = room.take(rows * row_bytes), *outputs = room.take(rows * row_bytes);
        if (int error = linear(layer.router, normed, scores, rows)) return error;
        ll_route(weights, chosen, scores, rows, m.num_experts, k, m.renormalize, m.round_weights, m.is_bf16);
        std::memset(projected, 0, rows * row_bytes);
        for (int64_t e = 0; e < m.num_experts; ++e) {
            int64_t count = 0;
            for (int64_t i = 0; i < rows * k; ++i)
                if (chosen[i] == e) members[count++] = i;
            if (!count) continue;
            for (int64_t i = 0; i < count; ++i)
                std::memcpy(inputs + i * row_bytes, normed + members[i] / k * row_bytes, row_bytes);
            const Linear& gate_up = layer.experts[2 * e];
            if (int error = gated(gate_up, layer.experts[2 * e + 1], inputs, outputs, count, room)) return error;
            for (int64_t i = 0; i < count; ++i)
                add_row(projected + members[i] / k * row_bytes, outputs + i * row_bytes, weights[members[i]]);
        }
        return 0;
    }

    void add_row(char* to, const char* from, float weight) const {
        m.is_bf16 ? add_scaled(reinterpret_cast<bf16*>(to), reinterpret_cast<const bf16*>(from), weight, hidden)
                  : add_scaled(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), weight, hidden);
    }

    // Adds `projected`, the output of attention, to the residual, then the MLP's output. normed = the norm of the sum,
    // unless next_norm is null.
    int mlp(const Layer& layer, const void* next_norm, int64_t rows, const LoraStep* lora) {
        if (int error = norm_output(layer.attention_norm, rows)) return error;
        if (int error = norm(layer.mlp_norm, projected, rows)) return error;
        if (int error = layer.experts ? mixture(layer, rows, room)
                                      : gated(layer.gate_up, layer.down, normed, projected, rows, room, lora))
            return error;
        if (int error = norm_output(layer.output_norm, rows)) return error;
        if (next_norm) return norm(next_norm, projected, rows);
        for (int64_t i = 0; i < rows; ++i) add_row(residual + i * hidden * size, projected + i * hidden * size, 1.f);
        return 0;
    }

    int logits(Room room) const {
        const int64_t n = p.num_rows * m.lm_head.n_out;
        if (m.is_bf16) {
            char* rounded = room.take(n * size);
            if (int error = linear(m.lm_head, normed, rounded, p.num_rows)) return error;
            const bf16* from = reinterpret_cast<const bf16*>(rounded);
            team_for(n >= (1 << 16) ? p.threads : 1, (n + W - 1) / W, [&](int64_t i) {
                store_upto(p.logits + i * W, load_upto(from + i * W, n - i * W), n - i * W);
            });
        } else if (int error = linear(m.lm_head, normed, p.logits, p.num_rows)) {
            return error;
        }
        return m.logits_softcap ? ll_softcap(p.logits, n, p.threads, m.logits_softcap) : 0;
    }

    int draw(const Draw& d) const {
        return ll_sample(d.ids, p.logits, d.temperature, d.top_p, d.min_p, d.top_k, d.seeds, d.samples, d.positions,
                         p.num_rows, m.lm_head.n_out, m.lm_head.n_out, p.threads);
    }

    int run() {
        const Awake awake;
        if (int error = m.embed ? embed() : 0) return error;
        if (int error = norm(m.layers[0].input_norm, nullptr, p.num_tokens)) return error;
        Room attention = room;
        char *qkv = attention.take(p.num_tokens * qkv_width * size),
             *attended = attention.take(p.num_tokens * q_width * size);
        for (int64_t i = 0; i < m.num_layers; ++i) {
            const Layer& layer = m.layers[i];
            const bool is_last = m.norm && i + 1 == m.num_layers;
            if (int error = attend(layer, qkv, attended, is_last)) return error;
            if (is_last && p.num_rows == 0) return 0;
            const int64_t rows = is_last ? p.num_rows : p.num_tokens;
            const LoraStep* lora = is_last ? p.lora_of_rows : p.lora;
            if (int error = adapted(layer.o, attended, projected, rows, lora)) return error;
            const void* next_norm = i + 1 == m.num_layers ? m.norm : m.layers[i + 1].input_norm;
            if (int error = mlp(layer, next_norm, rows, lora)) return error;
        }
        if (!m.norm) return 0;
        const int error = logits(room);
        return error || !p.draw ? error : draw(*p.draw);
    }
};

}  // namespace
}  // namespace ll

LL_EXPORT int ll_forward(const void* model, const void* pass) {
    return ll::Forward{*static_cast<const ll::Model*>(model), *static_cast<const ll::Pass*>(pass)}.run();
}
