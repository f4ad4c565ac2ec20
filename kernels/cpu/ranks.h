// A process's connections to the ranks of its worker (kernels/cpu/ranks.py has the same layout).
#pragma once

#include "entries.h"

namespace ll {

struct Ranks {
    const int64_t* sockets;  // a stream socket to each rank; that of this rank is not used
    int64_t size, rank;
    int64_t rehearses;  // if set, nothing is exchanged, and this rank's sum is used for every peer
};

}  // namespace ll

LL_EXPORT int ll_row_parallel(const void* x, const void* const* packed, const void* bias, void* out, float* sums,
                              const ll::Ranks* ranks, int64_t num_parts, int64_t rows, int64_t n_in, int64_t n_out,
                              int64_t x_stride, int64_t is_bf16, int64_t threads);
