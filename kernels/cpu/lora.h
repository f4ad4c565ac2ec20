// Low-rank corrections of packed products (LoRA): what kernels/cpu/lora.py lays out and ll_lora reads.
#pragma once

#include <cstdint>

namespace ll {

constexpr int64_t LORA_MOST_PARTS = 3, LORA_MOST_RANK = 512, LORA_TILE_ROWS = 4;

// out[at, at + n_out) += scale * (x A^T) B^T for one projection of a packed product. A is [rank, n_in]; B is stored
// transposed, [rank, n_out].
struct LoraPart {
    const void *a, *b;
    int64_t rank, at, n_out;
    double scale;
};

struct LoraProduct {
    LoraPart parts[LORA_MOST_PARTS];
    int64_t num_parts;
};

// Up to LORA_TILE_ROWS rows of one adapter.
struct LoraTile {
    int32_t adapter, num_rows;
    int32_t rows[LORA_TILE_ROWS];
};

// The adapters of a step. adapters[i] has one product for every site, which is a packed product of the model.
struct LoraStep {
    const LoraProduct* const* adapters;
    const LoraTile* tiles;
    int64_t num_tiles;
};

}  // namespace ll
