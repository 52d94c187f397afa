// Indexer keys in 4 bits; vllm_hisparse/ops/indexer_keys.py describes the format.
#pragma once

#include "common.cuh"

namespace hisparse {

constexpr int kKeyDim = 128;
constexpr int kGroups = 4;  // of 32 elements, each with an exponent
constexpr int kKeyElementBytes = kKeyDim / 2;
constexpr int kWideScaleBytes = 4;
constexpr int kTileKeys = 64;  // of a block
constexpr int kMinGroupExponent = -5;
constexpr int kMaxGroupExponent = 6;
constexpr int kMinKeyExponent = -100;
constexpr int kMaxKeyExponent = 100;

// The fp8 elements (e4m3) that the eight magnitudes of a group stand for.
struct GroupValues {
    uint32_t low;  // of 0, 0.5, 1, 1.5
    uint32_t high;  // of 2, 3, 4, 6

    // exponent: of the group, above kMinGroupExponent.
    __device__ explicit GroupValues(uint32_t exponent)
        : low(0x14100800u + exponent * 0x08080800u), high(0x24201c18u + exponent * 0x08080808u) {}
    // Decode a word of eight elements. NOTE: __byte_perm would mask its selector once more.
    __device__ void decode(uint32_t word, uint32_t& first_four, uint32_t& last_four) const {
        const uint32_t codes = word & 0x77777777u;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(first_four) : "r"(low), "r"(high), "r"(codes));
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(last_four) : "r"(low), "r"(high), "r"(codes >> 16));
        first_four |= word & 0x80808080u;
        last_four |= word << 4 & 0x80808080u;
    }
};

__device__ inline uint32_t group_exponent(uint32_t word, int group) {
    return word >> (4 * group) & 15u;
}

__device__ inline float key_scale(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
}

}  // namespace hisparse
