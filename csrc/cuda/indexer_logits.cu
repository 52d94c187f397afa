#include <algorithm>
#include <cstddef>

#include "indexer_keys.cuh"

// Logits of an indexer over keys in 4 bits, on Hopper's tensor cores (WGMMA).
//
// A thread block is one warpgroup. It owns a share of all tiles of the batch, a tile being 64 keys of one request, and
// keeps the request's queries in shared memory. Keys go from device memory to the registers of the thread that needs
// them, through a ring in shared memory that no other thread reads, and become fp8 operands there. A thread has a group
// of 32 elements of two keys: the order in which products are summed does not matter, so that elements of keys and of
// queries are permuted alike.

namespace hisparse {

namespace {

constexpr int kLogitsThreads = 128;
constexpr int kStages = 4;  // tiles in the ring
constexpr int kThreadBlocks = 4;  // per multiprocessor
constexpr int kSwizzleBytes = 1024;  // eight rows of 128 bytes, whose 16-byte parts are permuted

struct Ring {
    uint4 elements[kStages][2][kLogitsThreads];
    uint32_t words[kStages][2][kLogitsThreads];
};

template <int kHeads>
struct Shared {
    static constexpr int kQueryBytes = kHeads * kKeyDim;

    Ring ring;
    float weights[kMaxQueryLen][kHeads];
    uint8_t queries[kMaxQueryLen][kQueryBytes];  // as many as a request has

    // Bytes of a thread block's shared memory, with what aligns it.
    static size_t num_bytes(int num_queries) {
        return kSwizzleBytes + offsetof(Shared, queries) + static_cast<size_t>(num_queries) * kQueryBytes;
    }
};
static_assert(offsetof(Shared<32>, queries) % kSwizzleBytes == 0 && offsetof(Shared<64>, queries) % kSwizzleBytes == 0);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kSteps = 4;  // of 32 elements, which one WGMMA instruction multiplies

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void copy_async_16(void* target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

__device__ inline void copy_async_4(void* target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

__device__ inline void end_copies_of_stage() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kOpenGroups>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kOpenGroups) : "memory");
}

// Matrix B of WGMMA: rows of 128 bytes, swizzled. part: of 16 bytes, where the matrix begins.
__device__ inline uint64_t matrix_descriptor(uint32_t part) {
    return uint64_t{kSwizzleBytes >> 4 | 1u << 30} << 32 | (part | 1u << 16);
}

__device__ inline void multiply(
    float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulates
) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulates)
    );
}

__device__ inline void multiply(
    float (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int accumulates
) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulates)
    );
}

// Keep the compiler from moving uses of operands across WGMMA instructions, which run on.
template <int kSize>
__device__ inline void pin(float (&d)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ inline void pin(uint32_t (&keys)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) asm volatile("" : "+r"(keys[i / 4][i % 4])::"memory");
}

// Consecutive tiles of one request.
struct Segment {
    int request;
    int first;  // tile of the request
    int end;
};

// Hands out the segments of a thread block. All warps run it alike.
class Schedule {
public:
    __device__ Schedule(const LogitsBatch& batch) : batch_(batch), request_(0), tile_(0) {
        const int lane = lane_index();
        int64_t total = 0;
        for (int base = 0; base < batch.num_requests; base += kWarpSize) total += num_tiles(base + lane);
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            total += __shfl_xor_sync(kAllLanes, total, distance);
        }
        const int64_t begin = total * blockIdx.x / gridDim.x;
        num_left_ = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x - begin);
        if (num_left_ == 0) return;
        int64_t before = 0;
        for (int base = 0; base < batch.num_requests; base += kWarpSize) {
            const int own = num_tiles(base + lane);
            int sum = own;
#pragma unroll
            for (int distance = 1; distance < kWarpSize; distance *= 2) {
                const int other = __shfl_up_sync(kAllLanes, sum, distance);
                if (lane >= distance) sum += other;
            }
            const uint32_t reaches = __ballot_sync(kAllLanes, before + sum > begin);
            if (reaches != 0) {
                const int found = __ffs(reaches) - 1;
                request_ = base + found;
                tile_ = static_cast<int>(begin - before) - __shfl_sync(kAllLanes, sum - own, found);
                return;
            }
            before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
        }
    }

    __device__ bool next(Segment& segment) {
        if (num_left_ == 0) return false;
        int tiles = num_tiles(request_);
        while (tile_ >= tiles) {
            tiles = num_tiles(++request_);
            tile_ = 0;
        }
        segment = {request_, tile_, min(tiles, tile_ + num_left_)};
        num_left_ -= segment.end - tile_;
        tile_ = segment.end;
        return true;
    }

private:
    __device__ int num_tiles(int request) const {
        if (request >= batch_.num_requests) return 0;
        const int num_keys = __ldg(batch_.seq_lens + request * batch_.seq_len_stride);
        return num_keys > 0 ? (num_keys + kTileKeys - 1) / kTileKeys : 0;
    }

    const LogitsBatch& batch_;
    int request_, tile_, num_left_;
};

// Copies a segment's keys into the ring, each thread its own: those of rows `row` and `row + 8` of a tile, group
// `group`.
class KeyReader {
public:
    __device__ KeyReader(const NarrowKeys& cache, const LogitsBatch& batch, const Segment& segment, Ring& ring)
        : cache_(cache),
          table_(batch.block_table + segment.request * batch.table_stride + segment.first),
          num_tiles_(segment.end - segment.first),
          ring_(ring) {
        const int lane = lane_index(), row = warp_index() * 16 + lane / 4;
        elements_ = cache.blocks + row * kKeyElementBytes + lane % 4 * kVectorBytes;
        words_ = cache.blocks + kTileKeys * kKeyElementBytes + row * sizeof(uint32_t);
        blocks_ = load_blocks(0);
        next_blocks_ = load_blocks(kWarpSize);
    }

    // Begin to copy a tile, counted from the first of the segment. Called for each tile in order; beyond the last one,
    // nothing is copied.
    __device__ void begin(int tile) {
        if (tile < num_tiles_) {
            if (tile > 0 && tile % kWarpSize == 0) {
                blocks_ = next_blocks_;
                next_blocks_ = load_blocks(tile + kWarpSize);
            }
            const int64_t start = __shfl_sync(kAllLanes, blocks_, tile % kWarpSize) * cache_.block_stride;
            const int stage = tile % kStages;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint8_t* const elements = elements_ + start + half * 8 * kKeyElementBytes;
                copy_async_16(&ring_.elements[stage][half][threadIdx.x], elements);
                copy_async_4(&ring_.words[stage][half][threadIdx.x], words_ + start + half * 8 * sizeof(uint32_t));
            }
        }
        end_copies_of_stage();
    }

private:
    __device__ int load_blocks(int tile) const {
        const int index = tile + lane_index();
        return index < num_tiles_ ? __ldg(table_ + index) : 0;
    }

    const NarrowKeys& cache_;
    const int32_t* const table_;
    const int num_tiles_;
    Ring& ring_;
    const uint8_t *elements_, *words_;  // of this thread's first key in block 0
    int blocks_, next_blocks_;  // of 32 tiles, one in each lane
};

// Copy a request's queries and weights to shared memory: word w of a row goes to the place of its element group and step.
template <int kHeads>
__device__ inline void load_queries(const LogitsBatch& batch, int request, Shared<kHeads>& shared) {
    const int num_rows = batch.num_queries * kHeads;
    const auto source = reinterpret_cast<const uint4*>(batch.query + int64_t{request} * num_rows * kKeyDim);
    constexpr int kRowVectors = kKeyDim / kVectorBytes;
    for (int i = threadIdx.x; i < num_rows * kRowVectors; i += kLogitsThreads) {
        const int row = i / kRowVectors, vector = i % kRowVectors, group = vector / 2;
        const uint4 words = __ldg(source + i);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int part = vector % 2 * 4 + j;  // of 16 bytes: step part / 2, elements 4 * (part % 2) and on of eight
            uint8_t* const place = shared.queries[0] + row * kKeyDim + ((part ^ row % 8) << 4) + group * 4;
            *reinterpret_cast<uint32_t*>(place) = word[j];
        }
    }
    for (int i = threadIdx.x; i < num_rows; i += kLogitsThreads) {
        const int64_t row = int64_t{request} * batch.num_queries + i / kHeads;
        shared.weights[0][i] = 0.5f * __ldg(batch.weights + row * batch.weight_stride + i % kHeads);
    }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kHeads>
__global__ void __launch_bounds__(kLogitsThreads, kThreadBlocks) indexer_logits_kernel(
    const __grid_constant__ NarrowKeys cache,
    const __grid_constant__ LogitsBatch batch,
    float* __restrict__ logits,  // [num_requests * num_queries, ...], rows logits_stride elements apart
    const int64_t logits_stride
) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<Shared<kHeads>*>(memory + (-shared_address(memory) & (kSwizzleBytes - 1)));
    const Ring& ring = shared.ring;
    const uint32_t first_matrix = shared_address(shared.queries) >> 4;
    const int lane = lane_index(), row = warp_index() * 16 + lane / 4, group = lane % 4;
    Schedule schedule(batch);
    for (Segment segment; schedule.next(segment);) {
        KeyReader reader(cache, batch, segment, shared.ring);
#pragma unroll
        for (int tile = 0; tile < kStages - 1; ++tile) reader.begin(tile);
        __syncthreads();  // all warps are done with the queries before
        load_queries<kHeads>(batch, segment.request, shared);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor cores read what threads wrote
        __syncthreads();
        const int num_tiles = segment.end - segment.first;
        float* out = logits + int64_t{segment.request} * batch.num_queries * logits_stride + segment.first * kTileKeys
                     + row + 8 * group;
        for (int tile = 0; tile < num_tiles; ++tile, out += kTileKeys) {
            wait_for_copies<kStages - 2>();
            const int stage = tile % kStages;
            uint32_t keys[kSteps][4];
            float scales[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 elements = ring.elements[stage][half][threadIdx.x];
                const uint32_t word = ring.words[stage][half][threadIdx.x];
                const uint32_t steps[kSteps] = {elements.x, elements.y, elements.z, elements.w};
                const GroupValues values(group_exponent(word, group));
                scales[half] = key_scale(word);
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    keys[step][half] = values.first_four(steps[step]);
                    keys[step][half + 2] = values.last_four(steps[step]);
                }
            }
            reader.begin(tile + kStages - 1);
            float* place = out;
            for (int query = 0; query < batch.num_queries; ++query, place += logits_stride) {
                float sums[kHeads / 2];
                const uint32_t matrix = first_matrix + query * (Shared<kHeads>::kQueryBytes >> 4);
                pin(sums);
                pin(keys);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const uint64_t part = matrix_descriptor(matrix + step * 2);
                    multiply(sums, keys[step][0], keys[step][1], keys[step][2], keys[step][3], part, step > 0);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                pin(sums);
                const auto pairs = reinterpret_cast<const float2*>(shared.weights[query]) + group;
                float2 weight[kHeads / 8];
#pragma unroll
                for (int i = 0; i < kHeads / 8; ++i) weight[i] = pairs[i * 4];
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                pin(sums);
                pin(keys);
                float logit[4] = {};
#pragma unroll
                for (int i = 0; i < kHeads / 8; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float product = sums[4 * i + j];
                        // 2 * relu(x), by an addition: the units that compare are busy with keys.
                        logit[j] = fmaf(product + fabsf(product), j % 2 == 0 ? weight[i].x : weight[i].y, logit[j]);
                    }
                }
                float first = (logit[0] + logit[1]) * scales[0], second = (logit[2] + logit[3]) * scales[1];
#pragma unroll
                for (int distance = 1; distance < 4; distance *= 2) {
                    first += __shfl_xor_sync(kAllLanes, first, distance);
                    second += __shfl_xor_sync(kAllLanes, second, distance);
                }
                if (group < 2) *place = group == 0 ? first : second;
            }
        }
        wait_for_copies<0>();
    }
#endif
}

template <int kHeads>
cudaError_t indexer_logits(
    const NarrowKeys& cache, const LogitsBatch& batch, float* logits, int64_t logits_stride, cudaStream_t stream
) {
    const auto kernel = indexer_logits_kernel<kHeads>;
    const size_t num_bytes = Shared<kHeads>::num_bytes(batch.num_queries);
    int device = 0, major = 0, minor = 0, num_multiprocessors = 0, num_resident = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess && (major != 9 || minor != 0))
        return cudaErrorNoKernelImageForDevice;  // it is empty there
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess) {
        error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
            static_cast<int>(Shared<kHeads>::num_bytes(kMaxQueryLen))
        );
    }
    if (error == cudaSuccess) {
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&num_resident, kernel, kLogitsThreads, num_bytes);
    }
    if (error != cudaSuccess) return error;
    const int num_blocks = num_multiprocessors * std::max(num_resident, 1);
    kernel<<<num_blocks, kLogitsThreads, num_bytes, stream>>>(cache, batch, logits, logits_stride);
    return cudaGetLastError();
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_indexer_logits(
    const NarrowKeys& cache, const LogitsBatch& batch, float* logits, int64_t logits_stride, cudaStream_t stream
) {
    if (batch.num_requests == 0) return cudaSuccess;
    const bool fits = batch.num_queries >= 1 && batch.num_queries <= kMaxQueryLen && cache.block_size == kTileKeys;
    if (!fits) return cudaErrorInvalidValue;
    if (batch.num_heads == 64) return indexer_logits<64>(cache, batch, logits, logits_stride, stream);
    if (batch.num_heads == 32) return indexer_logits<32>(cache, batch, logits, logits_stride, stream);
    return cudaErrorInvalidValue;
}
