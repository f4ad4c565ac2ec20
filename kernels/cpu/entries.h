// Entry points that other C++ files call, declared here so that the compiler checks definitions against callers.
#pragma once

#include <cstdint>

// Types of cached keys and values (kernels/cpu/ops.py): that of the queries, or a type of 8 bits (eight_bits.h).
enum LlKvType : int64_t { LL_KV_AS_QUERY = 0, LL_KV_INT8 = 1, LL_KV_E4M3 = 2 };

#define LL_EXPORT extern "C" __attribute__((visibility("default")))

LL_EXPORT int ll_rms_norm(void* out, const void* x, const void* weight, const void* residual, void* summed,
                          int64_t rows, int64_t n, int64_t x_row, int64_t residual_row, int64_t is_bf16,
                          int64_t is_wide, int64_t threads, float eps);
LL_EXPORT int ll_silu_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t x_row, int64_t is_bf16,
                          int64_t threads);
LL_EXPORT int ll_gelu_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t x_row, int64_t is_bf16,
                          int64_t threads);
LL_EXPORT int ll_softcap(float* x, int64_t n, int64_t threads, float cap);
LL_EXPORT int ll_sample(int64_t* out, const float* logits, const float* temperature, const float* top_p,
                        const float* min_p, const int64_t* top_k, const int64_t* seeds, const int64_t* samples,
                        const int64_t* positions, int64_t batch, int64_t n, int64_t row, int64_t threads);
LL_EXPORT int ll_route(float* weights, int64_t* experts, const void* scores, int64_t rows, int64_t num_experts,
                       int64_t per_token, int64_t renormalize, int64_t round_weights, int64_t is_bf16);
LL_EXPORT int ll_write_blocks(void* q, const void* k, const void* v, const int64_t* positions, const int64_t* slots,
                              void* key_cache, void* value_cache, const float* cos_sin, int64_t q_token,
                              int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head,
                              int64_t kc_block, int64_t kc_head, int64_t kc_slot, int64_t vc_block, int64_t vc_head,
                              int64_t vc_slot, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d,
                              int64_t num_blocks, int64_t block_size, int64_t max_pos, int64_t rotary,
                              int64_t by_word, int64_t is_bf16, int64_t kv_type, int64_t threads);
LL_EXPORT int ll_attention(void* out, const void* q, const void* k, const void* v, const int32_t* block_table,
                           const int32_t* context_lens, const int32_t* cu_seqlens_q, int64_t out_token,
                           int64_t out_head, int64_t q_token, int64_t q_head, int64_t k_block, int64_t k_head,
                           int64_t k_slot, int64_t v_block, int64_t v_head, int64_t v_slot, int64_t table_row,
                           int64_t num_blocks, int64_t max_blocks, int64_t total_q, int64_t num_seqs, int64_t heads,
                           int64_t kv_heads, int64_t block_size, int64_t d, int64_t window, int64_t by_word,
                           int64_t is_bf16, int64_t kv_type, int64_t threads, const float* sinks, float scale,
                           float softcap);
LL_EXPORT int ll_gated_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows,
                              int64_t n_in, int64_t n_out, int64_t gelu, int64_t is_bf16, int64_t threads);
LL_EXPORT int ll_linear(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t n_in,
                        int64_t n_out, int64_t x_stride, int64_t out_stride, int64_t is_bf16, int64_t threads);
LL_EXPORT int ll_linear_sums(const void* x, const void* packed, float* out, int64_t rows, int64_t n_in, int64_t n_out,
                             int64_t x_stride, int64_t is_bf16, int64_t threads);
LL_EXPORT int ll_linear_int(const void* x, const void* packed, const void* bias, void* out, int64_t rows, int64_t n_in,
                            int64_t n_out, int64_t x_stride, int64_t out_stride, int64_t threads);

namespace ll {
struct LoraStep;
}
LL_EXPORT int ll_lora(const void* x, void* out, const ll::LoraStep* step, int64_t site, int64_t n_in, int64_t x_row,
                      int64_t out_row, int64_t is_bf16, int64_t threads);
