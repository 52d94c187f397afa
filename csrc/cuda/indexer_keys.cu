#include <cuda_bf16.h>

#include "indexer_keys.cuh"

namespace hisparse {

namespace {

constexpr int kKeysPerBlock = 8;  // a warp each
constexpr int kKeyThreads = kKeysPerBlock * kWarpSize;
constexpr int kLaneElements = kKeyDim / kWarpSize;
constexpr int kGroupLanes = kWarpSize / kGroups;

// Where a key of a cache in 4 bits lies.
struct NarrowKey {
    uint32_t* elements;
    uint32_t* word;

    __device__ NarrowKey(uint8_t* block, int block_size, int offset)
        : elements(reinterpret_cast<uint32_t*>(block + offset * kKeyElementBytes)),
          word(reinterpret_cast<uint32_t*>(block + block_size * kKeyElementBytes) + offset) {}
};

// The least e with largest <= 6 * 2^e. largest: >= 0.
__device__ inline int least_exponent(float largest) {
    const uint32_t bits = __float_as_uint(largest);
    return static_cast<int>(bits >> 23) - 127 - ((bits & 0x7fffffu) <= 0x400000u ? 2 : 1);
}

// Quantise a key with a warp and write it. values: elements 4 * lane to 4 * lane + 3.
__device__ inline void write_key(const float (&values)[kLaneElements], const NarrowKey& key, int lane) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) largest = fmaxf(largest, fabsf(values[i]));
#pragma unroll
    for (int distance = kGroupLanes / 2; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    const int exponent = least_exponent(largest);
    int key_exponent = exponent;
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= kGroupLanes; distance /= 2) {
        key_exponent = max(key_exponent, __shfl_xor_sync(kAllLanes, key_exponent, distance));
    }
    key_exponent = min(max(key_exponent, kMinKeyExponent), kMaxKeyExponent);
    const int above = max(min(exponent - key_exponent, 0) + kMaxGroupExponent - kMinGroupExponent, 0);
    const int scale = key_exponent + above + kMinGroupExponent - kMaxGroupExponent;
    const float inverse = __uint_as_float(static_cast<uint32_t>(127 - scale) << 23);
    uint32_t bits = 0;
    const int first = lane % 2 * kLaneElements;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
        const float x = fabsf(values[i]) * inverse;
        const uint32_t code =
            (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.0f);
        bits |= code << (4 * (first + i));
        bits |= (__float_as_uint(values[i]) >> 31) << (first == 0 ? 8 * i + 7 : 8 * i + 3);
    }
    bits |= __shfl_xor_sync(kAllLanes, bits, 1);
    if (lane % 2 == 0) key.elements[lane / 2] = bits;
    uint32_t word = static_cast<uint32_t>(above) << (4 * (lane / kGroupLanes));
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= kGroupLanes; distance /= 2) {
        word |= __shfl_xor_sync(kAllLanes, word, distance);
    }
    if (lane == 0) *key.word = word | static_cast<uint32_t>(key_exponent - kMaxGroupExponent + 127) << 23;
}

// Read a key in 4 bits with a warp. Returns fp8 elements 4 * lane to 4 * lane + 3.
__device__ inline uint32_t read_key(const NarrowKey& key, int lane, float& scale) {
    const uint32_t word = *key.word, elements = key.elements[lane / 2];
    scale = key_scale(word);
    const GroupValues values(group_exponent(word, lane / kGroupLanes));
    uint32_t first_four, last_four;
    values.decode(elements, first_four, last_four);
    return lane % 2 == 0 ? first_four : last_four;
}

// fp8 (e4m3) to float; NaN becomes 0.
__device__ inline float from_fp8(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15u, mantissa = byte & 7u;
    if (exponent == 15 && mantissa == 7) return 0;
    const float magnitude =
        exponent == 0 ? mantissa * 0x1p-9f : __uint_as_float((exponent + 120) << 23 | mantissa << 20);
    return byte & 0x80u ? -magnitude : magnitude;
}

// A key per warp.
__device__ inline int64_t key_index() {
    return static_cast<int64_t>(blockIdx.x) * kKeysPerBlock + warp_index();
}

__global__ void __launch_bounds__(kKeyThreads) insert_keys_kernel(
    const NarrowKeys cache,
    const __nv_bfloat16* __restrict__ keys,  // [num_keys, kKeyDim], key_stride elements apart
    const int64_t key_stride,
    const int64_t* __restrict__ slots,  // [num_keys]
    const int64_t num_keys
) {
    const int64_t index = key_index(), slot = index < num_keys ? slots[index] : -1;
    if (slot < 0) return;
    const int lane = lane_index();
    const auto pairs = reinterpret_cast<const __nv_bfloat162*>(keys + index * key_stride) + lane * 2;
    const float2 low = __bfloat1622float2(pairs[0]), high = __bfloat1622float2(pairs[1]);
    uint8_t* block = cache.blocks + slot / cache.block_size * cache.block_stride;
    const NarrowKey key(block, cache.block_size, static_cast<int>(slot % cache.block_size));
    write_key({low.x, low.y, high.x, high.y}, key, lane);
}

__global__ void __launch_bounds__(kKeyThreads) gather_keys_kernel(
    const NarrowKeys cache,
    const int32_t* __restrict__ block_table,  // [num_requests, ...], requests table_stride entries apart
    const int64_t table_stride,
    const int32_t* __restrict__ starts,  // [num_requests + 1]
    const int32_t num_requests,
    uint32_t* __restrict__ values,  // [max_keys, kKeyDim] bytes
    float* __restrict__ scales,  // [max_keys]
    const int64_t max_keys
) {
    const int64_t index = key_index();
    if (index >= min(max_keys, static_cast<int64_t>(starts[num_requests]))) return;
    int request = 0, behind = num_requests;  // the last request that begins at or before the key
    while (behind - request > 1) {
        const int middle = (request + behind) / 2;
        if (starts[middle] <= index) {
            request = middle;
        } else {
            behind = middle;
        }
    }
    const int position = static_cast<int>(index) - starts[request], lane = lane_index();
    const int64_t block = block_table[request * table_stride + position / cache.block_size];
    float scale;
    const NarrowKey key(cache.blocks + block * cache.block_stride, cache.block_size, position % cache.block_size);
    values[index * kWarpSize + lane] = read_key(key, lane, scale);
    if (lane == 0) scales[index] = scale;
}

// Blocks of kTileKeys keys in 8 bits, and as many in 4 bits.
struct BlockPair {
    uint8_t* wide;
    uint8_t* narrow;

    __device__ BlockPair(uint8_t* wide_blocks, uint8_t* narrow_blocks, int64_t block)
        : wide(wide_blocks + block * kTileKeys * (kKeyDim + kWideScaleBytes)),
          narrow(narrow_blocks + block * kTileKeys * (kKeyElementBytes + sizeof(uint32_t))) {}
    __device__ uint32_t* elements(int offset) const { return reinterpret_cast<uint32_t*>(wide + offset * kKeyDim); }
    __device__ float* scale(int offset) const { return reinterpret_cast<float*>(wide + kTileKeys * kKeyDim) + offset; }
    __device__ NarrowKey key(int offset) const { return {narrow, kTileKeys, offset}; }
};

template <bool kToNarrow>
__global__ void __launch_bounds__(kKeyThreads) convert_blocks_kernel(
    uint8_t* wide, uint8_t* narrow, const int64_t num_blocks
) {
    const int64_t index = key_index();
    if (index >= num_blocks * kTileKeys) return;
    const BlockPair blocks(wide, narrow, index / kTileKeys);
    const int offset = static_cast<int>(index % kTileKeys), lane = lane_index();
    if constexpr (kToNarrow) {
        const uint32_t bytes = blocks.elements(offset)[lane];
        const float scale = *blocks.scale(offset);
        float values[kLaneElements];
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) {
            values[i] = from_fp8(bytes >> (8 * i) & 0xffu) * scale;
            if (isnan(values[i])) values[i] = 0;
        }
        write_key(values, blocks.key(offset), lane);
    } else {
        float scale;
        blocks.elements(offset)[lane] = read_key(blocks.key(offset), lane, scale);
        if (lane == 0) *blocks.scale(offset) = scale;
    }
}

unsigned int num_thread_blocks(int64_t num_keys) {
    return static_cast<unsigned int>((num_keys + kKeysPerBlock - 1) / kKeysPerBlock);
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_insert_indexer_keys(
    const NarrowKeys& cache,
    const void* keys,
    int64_t key_stride,
    const int64_t* slots,
    int64_t num_keys,
    cudaStream_t stream
) {
    if (num_keys == 0) return cudaSuccess;
    insert_keys_kernel<<<num_thread_blocks(num_keys), kKeyThreads, 0, stream>>>(
        cache, static_cast<const __nv_bfloat16*>(keys), key_stride, slots, num_keys
    );
    return cudaGetLastError();
}

cudaError_t hisparse::launch_gather_indexer_keys(
    const NarrowKeys& cache,
    const int32_t* block_table,
    int64_t table_stride,
    const int32_t* starts,
    int32_t num_requests,
    uint8_t* values,
    uint8_t* scales,
    int64_t max_keys,
    cudaStream_t stream
) {
    if (num_requests == 0 || max_keys == 0) return cudaSuccess;
    gather_keys_kernel<<<num_thread_blocks(max_keys), kKeyThreads, 0, stream>>>(
        cache, block_table, table_stride, starts, num_requests, reinterpret_cast<uint32_t*>(values),
        reinterpret_cast<float*>(scales), max_keys
    );
    return cudaGetLastError();
}

cudaError_t hisparse::launch_convert_indexer_keys(
    uint8_t* wide, uint8_t* narrow, int64_t num_blocks, bool to_narrow, cudaStream_t stream
) {
    if (num_blocks == 0) return cudaSuccess;
    const auto kernel = to_narrow ? convert_blocks_kernel<true> : convert_blocks_kernel<false>;
    kernel<<<num_thread_blocks(num_blocks * kTileKeys), kKeyThreads, 0, stream>>>(wide, narrow, num_blocks);
    return cudaGetLastError();
}
