// The instructions for AMX tiles that attention_amx.cpp uses, in C++, so that every CPU with AVX-512 can test it. The
// products sum even and odd elements separately, as the hardware does.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tiles {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } shapes;
    char data[8][16][64];
};
inline thread_local Tiles tiles;

inline void configure(const void* shapes) {
    std::memcpy(&tiles.shapes, shapes, sizeof tiles.shapes);
    std::memset(tiles.data, 0, sizeof tiles.data);
}

inline void clear(int tile) { std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }

inline void load(int tile, const void* from, int64_t stride) {
    clear(tile);
    for (int row = 0; row < tiles.shapes.rows[tile]; ++row)
        std::memcpy(tiles.data[tile][row], static_cast<const char*>(from) + row * stride, tiles.shapes.bytes_per_row[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
    for (int row = 0; row < tiles.shapes.rows[tile]; ++row)
        std::memcpy(static_cast<char*>(to) + row * stride, tiles.data[tile][row], tiles.shapes.bytes_per_row[tile]);
}

inline float element(int tile, int row, int index) {
    uint16_t half;
    std::memcpy(&half, tiles.data[tile][row] + 2 * index, sizeof half);
    const uint32_t word = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

inline void multiply(int sum, int a, int b) {
    const auto& shapes = tiles.shapes;
    for (int row = 0; row < shapes.rows[sum]; ++row)
        for (int column = 0; column < shapes.bytes_per_row[sum] / 4; ++column) {
            float even = 0, odd = 0, total;
            for (int pair = 0; pair < shapes.bytes_per_row[a] / 4; ++pair) {
                even = __builtin_fmaf(element(a, row, 2 * pair), element(b, pair, 2 * column), even);
                odd = __builtin_fmaf(element(a, row, 2 * pair + 1), element(b, pair, 2 * column + 1), odd);
            }
            char* at = tiles.data[sum][row] + 4 * column;
            std::memcpy(&total, at, sizeof total);
            total += even + odd;
            std::memcpy(at, &total, sizeof total);
        }
}

}  // namespace emulated

#define _tile_loadconfig(shapes) emulated::configure(shapes)
#define _tile_zero(tile) emulated::clear(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sum, a, b) emulated::multiply(sum, a, b)
#define _tile_release() ((void)0)
