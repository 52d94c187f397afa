#include <cstddef>

#include "indexer_keys.cuh"

// Logits of an indexer over keys in 4 bits, on Hopper's tensor cores (WGMMA).
//
// A thread block owns a share of all tiles of the batch, a tile being 64 keys of one request. Its warpgroups take
// tiles in turn and share the request's queries, which are in shared memory. Each warp copies its quarter of a tile
// from device memory to a ring in shared memory, and its threads turn keys into fp8 operands in registers. A thread
// has a group of 32 elements of two keys: the order in which products are summed does not matter, so that elements of
// keys and of queries are permuted alike.

namespace hisparse {

namespace {

constexpr int kWarpgroups = 4;  // of a thread block, of which a multiprocessor runs one
constexpr int kLogitsThreads = kWarpgroups * 128;
constexpr int kStages = 4;  // tiles in a ring
constexpr int kSwizzleBytes = 1024;  // eight rows of 128 bytes, whose 16-byte parts are permuted

// Keys of a tile that one warp has.
struct Quarter {
    uint4 elements[2][kWarpSize];
    uint32_t words[kTileKeys / 4];
};

using Ring = Quarter[kStages];

template <int kHeads>
struct Shared {
    static constexpr int kQueryBytes = kHeads * kKeyDim;

    Ring rings[kLogitsThreads / kWarpSize];
    float weights[kMaxQueryLen][kHeads];
    alignas(kSwizzleBytes) uint8_t queries[kMaxQueryLen][kQueryBytes];  // as many as a request has

    // Bytes of a thread block's shared memory.
    static size_t num_bytes(int num_queries) {
        return offsetof(Shared, queries) + static_cast<size_t>(num_queries) * kQueryBytes;
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kSteps = 4;  // of 32 elements, which one WGMMA instruction multiplies

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void copy_async_16(void* target, const uint8_t* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

__device__ inline void copy_async_4(void* target, const uint8_t* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

__device__ inline void end_group_of_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kOpenGroups>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kOpenGroups) : "memory");
}

// Low word of the descriptor of a matrix B of WGMMA. address: in shared memory.
__device__ inline uint32_t matrix_at(uint32_t address) {
    return address >> 4 | 1u << 16;
}

// Matrix B: rows of 128 bytes, swizzled. part: `matrix_at`, and as many 16-byte parts beyond.
__device__ inline uint64_t matrix_descriptor(uint32_t part) {
    return uint64_t{kSwizzleBytes >> 4 | 1u << 30} << 32 | part;
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

// Begin to multiply keys with the heads of a query. matrix: of the query, the same in all lanes.
template <int kSize>
__device__ inline void begin_products(float (&products)[kSize], uint32_t (&keys)[kSteps][4], uint32_t matrix) {
    pin(products);
    pin(keys);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint64_t part = matrix_descriptor(matrix + step * 2);
        multiply(products, keys[step][0], keys[step][1], keys[step][2], keys[step][3], part, step > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    pin(products);
}

template <int kSize>
__device__ inline void wait_for_products(float (&products)[kSize], uint32_t (&keys)[kSteps][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(products);
    pin(keys);
}

template <int kSize>
__device__ inline void load_weights(float2 (&weights)[kSize], const float* source, int group) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) weights[i] = reinterpret_cast<const float2*>(source)[i * 4 + group];
}

// Return the sum over heads of weight * 2 * relu(product), times the scale of the key: of the thread's first key in
// even lanes, of its second in odd ones.
template <int kSize>
__device__ inline float sum_heads(
    const float (&products)[kSize], const float2 (&weights)[kSize / 4], const float (&scales)[2]
) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
        // 2 * relu(x), by an addition: the units that compare are busy with keys.
        const float relu = products[i] + fabsf(products[i]);
        sums[i % 4] = fmaf(relu, i % 2 == 0 ? weights[i / 4].x : weights[i / 4].y, sums[i % 4]);
    }
    const float first = (sums[0] + sums[1]) * scales[0], second = (sums[2] + sums[3]) * scales[1];
    const bool is_odd = lane_index() % 2 == 1;
    const float sum = (is_odd ? second : first) + __shfl_xor_sync(kAllLanes, is_odd ? first : second, 1);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2);
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
        int total = 0;
        for (int base = 0; base < batch.num_requests; base += kWarpSize) total += num_tiles(base + lane);
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            total += __shfl_xor_sync(kAllLanes, total, distance);
        }
        const int block = blockIdx.x, num_blocks = gridDim.x, share = total / num_blocks, rest = total % num_blocks;
        const int begin = share * block + min(block, rest);
        num_left_ = share + (block < rest ? 1 : 0);
        if (num_left_ == 0) return;
        int before = 0;
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
                tile_ = begin - before - __shfl_sync(kAllLanes, sum - own, found);
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

// A warpgroup's tiles of a segment, in order. Each warp copies and decodes its own keys.
class KeyStream {
public:
    __device__ KeyStream(
        const NarrowKeys& cache, const LogitsBatch& batch, const Segment& segment, int first, Ring& ring
    )
        : ring_(ring),
          stride_(static_cast<uint32_t>(cache.block_stride)),
          table_(batch.block_table + segment.request * batch.table_stride + first),
          num_tiles_((segment.end - first + kWarpgroups - 1) / kWarpgroups) {
        const int quarter = warp_index() % 4, lane = lane_index();
        elements_ = cache.blocks + quarter * sizeof(Quarter::elements) + lane * kVectorBytes;
        words_ = cache.blocks + kTileKeys * kKeyElementBytes + quarter * sizeof(Quarter::words) + lane * kVectorBytes;
        blocks_ = load_blocks(0);
        next_blocks_ = load_blocks(kWarpSize);
    }

    __device__ void start() {
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) begin_copy(i);
    }

    // Decode keys of the next tile; anything beyond the last one.
    __device__ void next(uint32_t (&keys)[kSteps][4], float (&scales)[2]) {
        wait_for_copies<kStages - 2>();
        __syncwarp();
        const int lane = lane_index(), group = lane % kGroups;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 elements = ring_[stage_].elements[half][lane];
            const uint32_t word = ring_[stage_].words[half * 8 + lane / kGroups];
            const uint32_t steps[kSteps] = {elements.x, elements.y, elements.z, elements.w};
            const GroupValues values(group_exponent(word, group));
            scales[half] = key_scale(word);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                values.decode(steps[step], keys[step][half], keys[step][half + 2]);
            }
        }
        begin_copy(stage_ == 0 ? kStages - 1 : stage_ - 1);
        stage_ = stage_ == kStages - 1 ? 0 : stage_ + 1;
    }

    __device__ void end() {
        wait_for_copies<0>();
        __syncwarp();
    }

private:
    __device__ void begin_copy(int stage) {
        if (num_begun_ < num_tiles_) {
            if (num_begun_ > 0 && num_begun_ % kWarpSize == 0) {
                blocks_ = next_blocks_;
                next_blocks_ = load_blocks(num_begun_ + kWarpSize);
            }
            const uint64_t start = uint64_t{__shfl_sync(kAllLanes, blocks_, num_begun_ % kWarpSize)} * stride_;
            copy_async_16(&ring_[stage].elements[0][lane_index()], elements_ + start);
            copy_async_16(&ring_[stage].elements[1][lane_index()], elements_ + start + sizeof(Quarter::elements[0]));
            if (lane_index() < 4) copy_async_16(&ring_[stage].words[lane_index() * 4], words_ + start);
            ++num_begun_;
        }
        end_group_of_copies();
    }

    __device__ uint32_t load_blocks(uint32_t first) const {
        const uint32_t index = first + lane_index();
        return index < num_tiles_ ? __ldg(table_ + index * kWarpgroups) : 0;
    }

    Ring& ring_;
    const uint32_t stride_;
    const int32_t* const table_;
    const uint32_t num_tiles_;
    uint32_t num_begun_ = 0;
    int stage_ = 0;
    const uint8_t *elements_, *words_;  // of this lane in block 0
    uint32_t blocks_, next_blocks_;  // of 32 tiles, one in each lane
};

// Begin to copy a request's queries to shared memory, and copy its weights: word w of a row goes to the place of its
// element group and step.
template <int kHeads>
__device__ inline void begin_queries(const LogitsBatch& batch, int request, Shared<kHeads>& shared) {
    constexpr int kRowWords = kKeyDim / sizeof(uint32_t);
    const int num_rows = batch.num_queries * kHeads;
    const uint8_t* const source = batch.query + int64_t{request} * num_rows * kKeyDim;
    for (int i = threadIdx.x; i < num_rows * kRowWords; i += kLogitsThreads) {
        const int row = i / kRowWords, word = i % kRowWords, group = word / 8;
        const int part = word % 8;  // of 16 bytes: step part / 2, elements 4 * (part % 2) and on of eight
        uint8_t* const place = shared.queries[0] + row * kKeyDim + ((part ^ row % 8) << 4) + group * 4;
        copy_async_4(place, source + i * sizeof(uint32_t));
    }
    end_group_of_copies();
    for (int i = threadIdx.x; i < num_rows; i += kLogitsThreads) {
        const int64_t row = int64_t{request} * batch.num_queries + i / kHeads;
        shared.weights[0][i] = 0.5f * __ldg(batch.weights + row * batch.weight_stride + i % kHeads);
    }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kHeads, int kQueries>
__global__ void __launch_bounds__(kLogitsThreads, 1) indexer_logits_kernel(
    const __grid_constant__ NarrowKeys cache,
    const __grid_constant__ LogitsBatch batch,
    float* __restrict__ logits,  // [num_requests * num_queries, ...], rows logits_stride elements apart
    const int64_t logits_stride
) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(kSwizzleBytes) uint8_t memory[];
    auto& shared = *reinterpret_cast<Shared<kHeads>*>(memory);
    const uint32_t first_matrix = matrix_at(shared_address(shared.queries));
    constexpr int kMatrixParts = Shared<kHeads>::kQueryBytes / kVectorBytes;
    constexpr int kHeldQueries = kQueries > 0 ? kQueries : 1;  // whose weights are in registers
    const int num_queries = kQueries > 0 ? kQueries : batch.num_queries;
    const int warpgroup = __shfl_sync(kAllLanes, warp_index() / 4, 0);
    const int lane = lane_index(), group = lane % kGroups, row = warp_index() % 4 * 16 + lane / kGroups + group % 2 * 8;
    wait_for_dependency();
    Schedule schedule(batch);
    for (Segment segment; schedule.next(segment);) {
        int tile = segment.first + warpgroup;
        KeyStream stream(cache, batch, segment, tile, shared.rings[warp_index()]);
        __syncthreads();  // all warps are done with the queries before
        begin_queries<kHeads>(batch, segment.request, shared);
        stream.start();
        wait_for_copies<kStages - 1>();  // of queries
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor cores read what threads wrote
        __syncthreads();
        float2 weights[kHeldQueries][kHeads / 8];
#pragma unroll
        for (int i = 0; i < kQueries; ++i) load_weights(weights[i], shared.weights[i], group);
        float* of_tile = logits + int64_t{segment.request} * num_queries * logits_stride + tile * kTileKeys + row;
        for (; tile < segment.end; tile += kWarpgroups, of_tile += kWarpgroups * kTileKeys) {
            uint32_t keys[kSteps][4];
            float scales[2], products[kHeads / 2];
            stream.next(keys, scales);
            float* place = of_tile;
#pragma unroll kHeldQueries
            for (int query = 0; query < num_queries; ++query, place += logits_stride) {
                begin_products(products, keys, first_matrix + query * kMatrixParts);
                auto& query_weights = weights[query % kHeldQueries];
                if constexpr (kQueries == 0) load_weights(query_weights, shared.weights[query], group);
                wait_for_products(products, keys);
                const float logit = sum_heads(products, query_weights, scales);
                if (group < 2) *place = logit;
            }
        }
        stream.end();
    }
#endif
}

template <int kHeads, int kQueries>
cudaError_t indexer_logits(
    const NarrowKeys& cache, const LogitsBatch& batch, float* logits, int64_t logits_stride, cudaStream_t stream
) {
    const auto kernel = indexer_logits_kernel<kHeads, kQueries>;
    int device = 0, major = 0, minor = 0, num_multiprocessors = 0;
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
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = num_multiprocessors;
    config.blockDim = kLogitsThreads;
    config.dynamicSmemBytes = Shared<kHeads>::num_bytes(batch.num_queries);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, cache, batch, logits, logits_stride);
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_indexer_logits(
    const NarrowKeys& cache, const LogitsBatch& batch, float* logits, int64_t logits_stride, cudaStream_t stream
) {
    if (batch.num_requests == 0) return cudaSuccess;
    const bool fits = batch.num_queries >= 1 && batch.num_queries <= kMaxQueryLen && cache.block_size == kTileKeys
                      && cache.block_stride <= UINT32_MAX;
    if (!fits) return cudaErrorInvalidValue;
    const auto launch = batch.num_heads == 32    ? indexer_logits<32, 0>
                        : batch.num_heads != 64  ? nullptr
                        : batch.num_queries == 1 ? indexer_logits<64, 1>
                        : batch.num_queries == 2 ? indexer_logits<64, 2>
                                                 : indexer_logits<64, 0>;
    return launch == nullptr ? cudaErrorInvalidValue : launch(cache, batch, logits, logits_stride, stream);
}
