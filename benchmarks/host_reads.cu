// How fast does a GPU read scattered rows of a large host pool, and what limits it: the link, the kind of host memory,
// or the translation of addresses?
//
//     nvcc -O3 -std=c++17 -arch=native -o host_reads benchmarks/host_reads.cu
//     ./host_reads <GiB of the pool> <huge|small|shared|cuda|vmm>
//
// Layer after layer, as in a decode step: each layer has its part of the pool, each request a run of it, and a launch
// reads some random rows of every run. Every step reads other rows, because translations of the same ones could be
// cached. `shared` is the kind of memory of the package's host pool. Prints a JSON object per case.

#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kRowBytes = 656, kVectors = kRowBytes / 16, kLayers = 61, kThreads = 1024, kRepeats = 4;

#define CHECK(call)                                                                     \
    do {                                                                                \
        if (const auto status = (call); status != 0) {                                  \
            std::fprintf(stderr, "line %d: error %d\n", __LINE__, static_cast<int>(status)); \
            std::exit(1);                                                               \
        }                                                                               \
    } while (0)

__device__ uint4 load_once(const uint4* source) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source));
    return value;
}

// One warp per row. Neighbouring rows go to different thread blocks, or with `chunked` to the same.
__global__ void __launch_bounds__(kThreads, 1) gather(
    const uint4* host, const int32_t* rows, uint4* out, int32_t num_rows, bool chunked
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = kThreads / 32;
    const int64_t chunk = (num_rows + gridDim.x - 1) / gridDim.x;
    const int64_t begin = chunked ? blockIdx.x * chunk + warp : static_cast<int64_t>(warp) * gridDim.x + blockIdx.x;
    const int64_t end = chunked ? min(static_cast<int64_t>(num_rows), (blockIdx.x + 1) * chunk) : num_rows;
    for (int64_t i = begin; i < end; i += chunked ? num_warps : num_warps * gridDim.x) {
        const uint4* source = host + static_cast<int64_t>(rows[i]) * kVectors;
        uint4* target = out + i * kVectors;
        const uint4 head = load_once(source + lane);
        if (lane < kVectors - 32) __stcs(target + 32 + lane, load_once(source + 32 + lane));
        __stcs(target + lane, head);
    }
}

// Read a word of every `stride` bytes, so that their addresses are translated.
__global__ void touch(const char* first, size_t num_bytes, size_t stride, int32_t* sink) {
    int32_t sum = 0;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < num_bytes / stride; i += gridDim.x * blockDim.x) {
        int32_t value;
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(first + i * stride));
        sum ^= value;
    }
    if (sum == 12345) *sink = sum;
}

template <typename Function>
Function driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12050, cudaEnableDefault, &result));
    return reinterpret_cast<Function>(found);
}

// Host memory of CUDA's virtual memory management, in physical pages of 2 MiB.
void* allocate_vmm(size_t num_bytes) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    CUmemGenericAllocationHandle handle;
    CHECK(driver_function<decltype(&cuMemCreate)>("cuMemCreate")(&handle, num_bytes, &properties, 0));
    CUdeviceptr address;
    CHECK(driver_function<decltype(&cuMemAddressReserve)>("cuMemAddressReserve")(&address, num_bytes, 0, 0, 0));
    CHECK(driver_function<decltype(&cuMemMap)>("cuMemMap")(address, num_bytes, 0, handle, 0));
    CUmemAccessDesc access[2]{};
    access[0] = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    access[1] = {{CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CHECK(driver_function<decltype(&cuMemSetAccess)>("cuMemSetAccess")(address, num_bytes, access, 2));
    return reinterpret_cast<void*>(address);
}

char* allocate(size_t num_bytes, const std::string& kind) {
    void* memory = nullptr;
    if (kind == "vmm") return static_cast<char*>(allocate_vmm(num_bytes));
    if (kind == "cuda") {
        CHECK(cudaHostAlloc(&memory, num_bytes, 0));
        return static_cast<char*>(memory);
    }
    const bool is_shared = kind == "shared";
    const int sharing = is_shared ? MAP_SHARED : MAP_PRIVATE;
    memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
    CHECK(memory == MAP_FAILED);
    if (!is_shared) CHECK(madvise(memory, num_bytes, kind == "huge" ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));
    CHECK(cudaHostRegister(memory, num_bytes, 0));
    return static_cast<char*>(memory);
}

struct Case {
    int64_t num_requests, num_tokens, num_missed;
    std::string order;     // of a launch's rows: "any", "by request" or "sorted", by request and address
    size_t touch_stride;   // bytes; 0: nothing is touched before
    int num_blocks;
    bool chunked;
};

// Microseconds of a launch, the best of some steps.
double measure(const Case& c, const char* pool, int64_t rows_per_layer) {
    static std::mt19937_64 source(1);
    const int64_t num_rows = c.num_requests * c.num_missed;
    const int64_t run = std::min(rows_per_layer / c.num_requests, c.num_tokens);
    const int64_t num_launches = kRepeats * kLayers;
    std::vector<int32_t> rows(num_launches * num_rows);
    for (int64_t launch = 0; launch < num_launches; ++launch) {
        const int64_t layer = launch % kLayers;
        int32_t* own = rows.data() + launch * num_rows;
        for (int64_t i = 0; i < num_rows; ++i) {
            own[i] = static_cast<int32_t>(layer * rows_per_layer + i / c.num_missed * run + source() % run);
        }
        if (c.order == "any") std::shuffle(own, own + num_rows, source);
        if (c.order == "sorted") std::sort(own, own + num_rows);
    }
    int32_t *device_rows, *sink;
    uint4* out;
    CHECK(cudaMalloc(&device_rows, rows.size() * sizeof(int32_t)));
    CHECK(cudaMalloc(&sink, sizeof(int32_t)));
    CHECK(cudaMalloc(&out, num_rows * kRowBytes));
    CHECK(cudaMemcpy(device_rows, rows.data(), rows.size() * sizeof(int32_t), cudaMemcpyDefault));
    std::vector<cudaEvent_t> events(2 * kLayers);
    for (auto& event : events) CHECK(cudaEventCreate(&event));
    double best = 1e9;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        for (int64_t layer = 0; layer < kLayers; ++layer) {
            const char* part = pool + layer * rows_per_layer * kRowBytes;
            if (c.touch_stride) touch<<<32, 256>>>(part, c.num_requests * run * kRowBytes, c.touch_stride, sink);
            CHECK(cudaEventRecord(events[2 * layer]));
            const auto host = reinterpret_cast<const uint4*>(pool);
            const int32_t* own = device_rows + (repeat * kLayers + layer) * num_rows;
            gather<<<c.num_blocks, kThreads>>>(host, own, out, num_rows, c.chunked);
            CHECK(cudaEventRecord(events[2 * layer + 1]));
        }
        CHECK(cudaDeviceSynchronize());
        double sum = 0;
        for (int64_t layer = 0; layer < kLayers; ++layer) {
            float ms;
            CHECK(cudaEventElapsedTime(&ms, events[2 * layer], events[2 * layer + 1]));
            sum += ms * 1000 / kLayers;
        }
        if (repeat > 0) best = std::min(best, sum);
    }
    for (auto& event : events) CHECK(cudaEventDestroy(event));
    for (void* memory : {static_cast<void*>(device_rows), static_cast<void*>(sink), static_cast<void*>(out)}) {
        CHECK(cudaFree(memory));
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s <GiB of the pool> <huge|small|shared|cuda|vmm>\n", argv[0]);
        return 2;
    }
    const size_t num_bytes = std::strtoull(argv[1], nullptr, 10) << 30;
    const std::string kind = argv[2];
    const std::array<std::string, 5> kinds = {"huge", "small", "shared", "cuda", "vmm"};
    if (num_bytes == 0 || std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) {
        const char* const expected = "at least 1 GiB of huge, small, shared, cuda or vmm";
        std::fprintf(stderr, "got %s GiB of %s, expected %s\n", argv[1], argv[2], expected);
        return 2;
    }
    CHECK(cudaFree(nullptr));
    const char* pool = allocate(num_bytes, kind);
    const int64_t rows_per_layer = num_bytes / kRowBytes / kLayers;
    std::vector<Case> cases;
    for (const auto& [requests, tokens, missed] : {std::array<int64_t, 3>{56, 32768, 230}, {28, 65536, 240}}) {
        for (const char* order : {"any", "by request", "sorted"}) {
            cases.push_back({requests, tokens, missed, order, 0, 64, false});
        }
        for (const size_t stride : {2 << 20, 65536, 4096}) {
            cases.push_back({requests, tokens, missed, "by request", stride, 64, false});
        }
        for (const char* order : {"by request", "sorted"}) {
            for (const int num_blocks : {16, 32, 132, 264}) {
                cases.push_back({requests, tokens, missed, order, 0, num_blocks, false});
            }
            for (const int num_blocks : {32, 64, 132}) {
                cases.push_back({requests, tokens, missed, order, 0, num_blocks, true});
            }
        }
    }
    for (const Case& c : cases) {
        const double us = measure(c, pool, rows_per_layer);
        const double gb_per_s = c.num_requests * c.num_missed * kRowBytes / us / 1000;
        std::printf(
            "{\"memory\": \"%s\", \"requests\": %ld, \"context\": %ld, \"missed\": %ld, \"order\": \"%s\", "
            "\"touch_stride\": %zu, \"thread_blocks\": %d, \"chunked\": %s, \"us\": %.1f, \"gb_per_s\": %.1f}\n",
            kind.c_str(), c.num_requests, c.num_tokens, c.num_missed, c.order.c_str(), c.touch_stride, c.num_blocks,
            c.chunked ? "true" : "false", us, gb_per_s
        );
    }
}
