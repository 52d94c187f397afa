// Functions that the kernels share: decode metadata, row copies.
#pragma once

#include "arguments.h"

namespace hisparse {

constexpr int kNumThreads = 1024;
constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr uint32_t kAllLanes = 0xffffffff;
constexpr int kLineBytes = 128;   // largest read over the link

// Divides non-negative numbers by a fixed divisor, without a division instruction.
struct Divisor {
    int32_t divisor;
    uint32_t multiplier;  // ceil(2^(31 + shift) / divisor)
    uint32_t shift;

    explicit Divisor(int32_t divisor) : divisor(divisor), shift(0) {
        while (int64_t{1} << shift < divisor) ++shift;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
    }
    __device__ friend int32_t operator/(int32_t number, const Divisor& by) {
        return static_cast<int32_t>(__umulhi(2u * number, by.multiplier) >> by.shift);
    }
    __device__ friend int32_t operator%(int32_t number, const Divisor& by) { return number - number / by * by.divisor; }
};

__device__ inline int warp_index() {
    return threadIdx.x / kWarpSize;
}

__device__ inline int lane_index() {
    return threadIdx.x % kWarpSize;
}

// Return the sequence index of a part of a device block; -1 for padding, and for a request without hot rows.
__device__ inline int32_t find_seq_of(const DecodeMetadata& decode, int32_t part, int32_t seq_len) {
    const bool known = part >= 0 && part < decode.num_device_blocks && seq_len > 0;
    const int32_t seq_index = known ? decode.seq_indices[part] : -1;
    if (seq_index < 0 || seq_index >= decode.num_seqs) return -1;
    return decode.num_hot_rows == nullptr || __ldg(decode.num_hot_rows + seq_index) > 0 ? seq_index : -1;
}

// Return the sequence index of a request of the batch. head_stride: parts from one device block to the next
// (`KVHeads`).
__device__ inline int32_t find_seq(const DecodeMetadata& decode, int batch_index, int32_t head_stride = 1) {
    const int32_t part = decode.first_hot_block_ids[batch_index * decode.first_hot_block_stride] * head_stride;
    return find_seq_of(decode, part, decode.seq_lens[batch_index]);
}

// Return the flat id of row `row` of a paged table; -1 if its block is -1 or lies beyond the table.
//
// table: [num_blocks] on the device. rows_per_block: an integer or a `Divisor`.
template <typename T>
__device__ inline int64_t flat_row_id(
    const int32_t* table, int32_t num_blocks, int32_t row, const T& rows_per_block, int64_t block_stride_rows
) {
    const int32_t index = row / rows_per_block;
    const int32_t block = index < num_blocks ? __ldg(table + index) : -1;
    return block < 0 ? -1 : block * block_stride_rows + row % rows_per_block;
}

// Return whether a sequence's hot blocks are divided equally among layers.
__device__ inline bool has_equal_rows(const DecodeMetadata& decode, int32_t seq_index) {
    return decode.has_equal_rows != nullptr && __ldg(decode.has_equal_rows + seq_index) != 0;
}

// Return the flat id of the hot row in a slot; -1 if the slot has no block. If the block is divided equally, the caller
// adds `equal_offset`. slot: >= 0. rows_per_block: rows of the layer in the sequence's blocks.
template <typename T>
__device__ inline int64_t flat_hot_row_id(
    const DecodeMetadata& decode, const HotRows& hot, const T& rows_per_block, int32_t seq_index, int32_t slot
) {
    const int32_t* table = decode.hot_block_tables + seq_index * decode.hot_block_table_stride;
    const int32_t index = slot / rows_per_block;
    const int32_t block = index < decode.num_hot_blocks ? __ldg(table + index) : -1;
    return block < 0 ? -1 : block * hot.block_stride_rows + slot % rows_per_block * hot.pitch;
}

// Return the flat id of the host row of a position. position: >= 0.
template <typename T>
__device__ inline int64_t flat_host_row_id(
    const DecodeMetadata& decode, const T& block_size, int32_t seq_index, int32_t position
) {
    const int32_t* table = decode.host_block_tables + seq_index * decode.host_block_table_stride;
    return flat_row_id(table, decode.num_host_blocks, position, block_size, decode.block_size);
}

__device__ inline int32_t query_len_of(const DecodeMetadata& decode, int batch_index) {
    return decode.query_lens == nullptr ? 1 : decode.query_lens[batch_index];
}

// The new positions of a request, [first, end), and their slots: position p is in slot p if the sequence fits; if not,
// new positions are in the last slots, which are reserved.
struct NewPositions {
    int32_t first;
    int32_t end;
    bool fits;
    int32_t first_slot;

    __device__ NewPositions(int32_t seq_len, int32_t query_len, int32_t max_query_len, int32_t num_hot_rows)
        : first(seq_len - query_len),
          end(seq_len),
          fits(first + max_query_len <= num_hot_rows),
          first_slot(fits ? first : num_hot_rows - max_query_len) {}
    __device__ NewPositions(const DecodeMetadata& decode, int batch_index, int32_t num_hot_rows)
        : NewPositions(
              decode.seq_lens[batch_index], query_len_of(decode, batch_index), decode.max_query_len, num_hot_rows
          ) {}
    __device__ int32_t slot(int32_t position) const { return first_slot + position - first; }
};

__device__ inline bool in_range(int64_t row, int64_t num_rows) {
    return row >= 0 && row < num_rows;
}

__device__ inline uint4 load_once(const uint4* source) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source));
    return value;
}

// Copy one row with a warp. The side in host memory (`kHostIsSource`: the source) is accessed in whole lines, because a
// line that two instructions share would cross the link twice.
template <bool kHostIsSource>
__device__ inline void copy_row(uint8_t* target, const uint8_t* source, int64_t row_bytes, int lane) {
    constexpr int kUnroll = 4;
    const auto host = reinterpret_cast<uintptr_t>(kHostIsSource ? source : target);
    const int num_vectors = static_cast<int>(row_bytes / kVectorBytes);
    const int skew = static_cast<int>(host % kLineBytes / kVectorBytes);
    const auto from = reinterpret_cast<const uint4*>(source);
    const auto to = reinterpret_cast<uint4*>(target);
    for (int first = lane - skew; first < num_vectors; first += kUnroll * kWarpSize) {
        uint4 values[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int index = first + i * kWarpSize;
            if (index >= 0 && index < num_vectors) values[i] = load_once(from + index);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int index = first + i * kWarpSize;
            if (index >= 0 && index < num_vectors) __stcs(to + index, values[i]);
        }
    }
}

// Programmatic dependent launch: the next kernel may start early, and waits for this kernel's results when it needs
// them.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void wait_for_dependency() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace hisparse
