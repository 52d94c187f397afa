// Shared memory of the kernel of `resolve` for a request that does not fit.
#pragma once

#include "common.cuh"

namespace hisparse {

constexpr int kNumAges = kMaxAge + 2;  // the last one is for empty slots
constexpr int kSlotsPerLoad = 8;       // ages in one vector
static_assert(kNumAges == kNumThreads, "one age per thread");

// Sizes of `Scratch` for a number of columns.
struct ScratchSize {
    static constexpr int kBucketsPerColumn = 4;  // at least, if there is room

    int num_columns;

    // Return the bits of the largest table that fits into `max_bytes` with everything but the ages; 0 if none fits.
    int bucket_bits(size_t max_bytes) const {
        int bits = 0, least = 0;
        while (1 << least < kMaxColumns) ++least;  // so that an entry has room for a column
        while (1 << bits < kBucketsPerColumn * num_columns) ++bits;
        while (bits > least && num_bytes(bits) > max_bytes) --bits;
        return bits < least || num_bytes(bits) > max_bytes ? 0 : bits;
    }
    // Return the bytes of everything but the ages.
    size_t num_bytes(int bucket_bits) const {
        return sizeof(int32_t) * (kNumAges + 3 * static_cast<size_t>(num_columns) + (size_t{1} << bucket_bits));
    }
};

// Shared memory of one thread block: a chained hash table of the wanted columns; hits and ages of its slots; victims.
//
// The low bits of an entry are a column, the other bits are those of its position; the bucket implies the position's
// low bits. If an entry and a position differ only in the low bits, the column wants the position.
template <int kColumnRounds>
struct Scratch {
    static constexpr int kNumColumns = kColumnRounds * kNumThreads;  // largest number of columns
    static constexpr int kColumnMask = kMaxColumns - 1;
    static constexpr int32_t kEnd = -1;          // end of a chain; a negative column means no column
    static constexpr int32_t kNone = INT32_MAX;  // no slot
    static_assert((kMaxColumns & kColumnMask) == 0);

    int32_t* num_aged;  // [kNumAges] number of slots of each age that are not hits
    int32_t* chosen;    // [columns] slot of a hit; otherwise kNone, and later ~n for the n-th miss
    int32_t* links;     // [columns] next entry of the chain, or kEnd
    int32_t* victims;   // [columns] slot that the n-th miss takes; -1 if it belongs to another thread block
    int32_t* heads;     // [2^bucket_bits] first entry of each bucket, or kEnd
    uint16_t* ages;  // [num_kept] age plus one of each slot, 0 for a hit; ages of later slots are computed again
    int bucket_bits;
    int32_t num_kept;  // multiple of kSlotsPerLoad

    __device__ Scratch(int32_t* memory, int bucket_bits, int32_t num_kept)
        : num_aged(memory),
          chosen(num_aged + kNumAges),
          links(chosen + kNumColumns),
          victims(links + kNumColumns),
          heads(victims + kNumColumns),
          ages(reinterpret_cast<uint16_t*>(heads + (1 << bucket_bits))),
          bucket_bits(bucket_bits),
          num_kept(num_kept) {}

    // Clear everything but the ages.
    __device__ void clear() const {
        const auto vectors = reinterpret_cast<int4*>(heads);
        for (int i = threadIdx.x; i < 1 << bucket_bits >> 2; i += kNumThreads) vectors[i] = {kEnd, kEnd, kEnd, kEnd};
        num_aged[threadIdx.x] = 0;
    }
    __device__ void clear_ages(int32_t num_slots) const {
        const auto vectors = reinterpret_cast<int4*>(ages);
        const int32_t num_vectors = (min(num_slots, num_kept) + kSlotsPerLoad - 1) / kSlotsPerLoad;
        for (int32_t i = threadIdx.x; i < num_vectors; i += kNumThreads) vectors[i] = {0, 0, 0, 0};
    }
    __device__ int32_t* head(int32_t position) const { return heads + (position & ((1 << bucket_bits) - 1)); }
    __device__ void insert(int32_t position, int column) const {
        links[column] = atomicExch(head(position), (position & ~kColumnMask) | column);
    }
    // Compare an entry with a position. Returns the column if it wants the position, a negative number at the end of
    // the chain, and a number beyond the columns if the search goes on.
    __device__ static int32_t compare(int32_t entry, int32_t position) { return entry ^ (position & ~kColumnMask); }
    __device__ int32_t compare_next(int32_t difference, int32_t position) const {
        return compare(links[difference & kColumnMask], position);
    }
    // Return the first column in the chain that wants a position, or a negative number. position: >= 0.
    __device__ int32_t find(int32_t position) const {
        int32_t difference = compare(*head(position), position);
        while (difference >= kMaxColumns) difference = compare_next(difference, position);
        return difference;
    }
    // Return the lowest column that wants the same position as `found`.
    __device__ int32_t find_lowest(int32_t position, int32_t found) const {
        int32_t lowest = found;
        for (int32_t next = compare_next(found, position); next >= 0; next = compare_next(next, position)) {
            if (next < lowest) lowest = next;
        }
        return lowest;
    }
    // Record the age of a slot that is not a hit. slot: counted from the first slot of the block.
    __device__ void note_age(int32_t slot, int32_t age) const {
        atomicAdd(num_aged + age, 1);
        if (slot < num_kept) ages[slot] = static_cast<uint16_t>(age + 1);
    }
};

}  // namespace hisparse
