// Panels of weights of 4 or 8 bits, packed by kernels/cpu/linear_int.py: w = value * scale + offset, with one fp32 or
// bf16 scale (and offset) for an output and `group` consecutive inputs.
//
// A section contains outputs with the same format. It is a header of 64 bytes, followed by panels of 16 outputs. A
// panel contains 16 scales for each group, 16 offsets for each group (if there are offsets), and the values, each part
// padded to 64 bytes. Values of 8 bits: 16 words for every four inputs, the first in the lowest bits. Values of 4 bits:
// 16 words for every eight inputs, with the even inputs in the low half, lowest bits first, and the odd ones in the
// high half. Inputs are padded to whole groups with zeros.
#pragma once

#include "panels.h"

namespace ll {

constexpr int64_t AHEAD_BYTES = 2048;  // between a prefetch of values and their use
constexpr int64_t HEADER_BYTES = 64;
struct Header {
    int64_t bits, group, has_offsets, wide_scales, is_bf16, n_out;
    int64_t bytes;  // from this header to the next section's; 0: the last section
};

constexpr int64_t to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

template <int BITS>
struct IntPanels {
    static constexpr bool GATED = false;
    static constexpr int64_t UNIT = 8;                              // number of inputs that are processed at once
    static constexpr int64_t UNIT_BYTES = UNIT * PANEL * BITS / 8;  // their values in a panel

    const char* data;
    Header header;
    int64_t groups;
    int64_t group = header.group, padded_in = groups * group, scale_size = header.wide_scales ? 4 : 2;
    int64_t scales = to_line(groups * PANEL * scale_size), values = scales * (1 + header.has_offsets);
    int64_t value_bytes = padded_in * PANEL * BITS / 8, panel_bytes = values + value_bytes;

    LL_INLINE vf factor(const char* at) const {
        return header.wide_scales ? load((const float*)at) : load((const bf16*)at);
    }
    // Returns the address to prefetch while the values at a given address are used. It is AHEAD_BYTES further on, in
    // the panel that ends at `end`, or else in the panels at `then`.
    static const char* asked(const char* values, const char* end, const char* then) {
        return values + AHEAD_BYTES < end ? values + AHEAD_BYTES : then + (values + AHEAD_BYTES - end);
    }
    // LEVEL is that of __builtin_prefetch. 3: into the L1 cache; 2: into the L2 cache, which can wait for more lines.
    template <int P, int LEVEL>
    LL_INLINE void prefetch(const char* asked) const {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
            for (int64_t line = 0; line < UNIT_BYTES; line += 64)
                __builtin_prefetch(asked + p * panel_bytes + line, 0, LEVEL);
    }
};

}  // namespace ll
