// How fast does a GPU read scattered rows of a large host pool, and what limits it: the link, the kind of host memory,
// or the translation of addresses?
//
//     nvcc -O3 -std=c++17 -arch=native -o host_reads benchmarks/host_reads.cu
//     ./host_reads <GiB of the pool> <managed|shared|small|huge|cuda|vmm>
//
// Layer after layer, as in a decode step: each layer has its part of the pool, each request a run of it, and a launch
// reads some random rows of every run. Every step reads other rows, because translations of the same ones could be
// cached, and device memory is read before or beside it, because page tables could be cached, too. `managed` and
// `shared` are the kinds of memory of the package's host pool. Prints a JSON object per case.

#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kRowBytes = 656, kVectors = kRowBytes / 16, kThreads = 1024, kRepeats = 3, kMaxLayers = 61;
constexpr size_t kLayerBytes = size_t{1200} << 20, kDeviceBytes = size_t{600} << 20;

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

// One warp copies one row, as in the package: neighbouring rows go to different thread blocks, and host memory is read
// in whole lines of 128 bytes.
__global__ void __launch_bounds__(kThreads, 2) gather(
    const char* host, const int64_t* offsets, uint4* out, int num_rows
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = kThreads / 32;
    for (int64_t i = warp * gridDim.x + blockIdx.x; i < num_rows; i += num_warps * gridDim.x) {
        const auto source = reinterpret_cast<const uint4*>(host + offsets[i]);
        const int first = lane - static_cast<int>(reinterpret_cast<uintptr_t>(source) % 128 / 16), second = first + 32;
        uint4 values[2];
        if (first >= 0) values[0] = load_once(source + first);
        if (second < kVectors) values[1] = load_once(source + second);
        if (first >= 0) __stcs(out + i * kVectors + first, values[0]);
        if (second < kVectors) __stcs(out + i * kVectors + second, values[1]);
    }
}

// Read device memory, as matrix products and experts do.
__global__ void read_device(const uint4* first, size_t num_vectors, int times, uint4* sink) {
    uint4 sum{};
    for (int time = 0; time < times; ++time) {
        const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
        for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < num_vectors; i += step) {
            const uint4 value = __ldg(first + i);
            sum.x ^= value.x ^ value.y ^ value.z ^ value.w;
        }
    }
    if (sum.x == 12345) *sink = sum;
}

__global__ void wait_cycles(int64_t cycles) {
    for (const int64_t start = clock64(); clock64() - start < cycles;) {}
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

cudaMemLocation location(cudaMemLocationType type) {
    cudaMemLocation found{};
    found.type = type;
    return found;
}

char* allocate(size_t num_bytes, const std::string& kind) {
    void* memory = nullptr;
    if (kind == "vmm") return static_cast<char*>(allocate_vmm(num_bytes));
    if (kind == "cuda") {
        CHECK(cudaHostAlloc(&memory, num_bytes, 0));
        return static_cast<char*>(memory);
    }
    if (kind == "managed") {
        CHECK(cudaMallocManaged(&memory, num_bytes));
        CHECK(cudaMemAdvise(memory, num_bytes, cudaMemAdviseSetPreferredLocation, location(cudaMemLocationTypeHost)));
        std::memset(memory, 0, num_bytes);
        CHECK(cudaMemAdvise(memory, num_bytes, cudaMemAdviseSetAccessedBy, location(cudaMemLocationTypeDevice)));
        return static_cast<char*>(memory);
    }
    const int sharing = kind == "shared" ? MAP_SHARED : MAP_PRIVATE;
    memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
    CHECK(memory == MAP_FAILED);
    if (kind != "shared") CHECK(madvise(memory, num_bytes, kind == "huge" ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));
    CHECK(cudaHostRegister(memory, num_bytes, 0));
    return static_cast<char*>(memory);
}

struct Case {
    int num_requests, num_missed;
    std::string order;     // of a launch's rows: "any" or "by request"
    int num_blocks;        // thread blocks of the launch
    int read_mib;          // device memory that is read before the launch
    int blocks_beside;     // thread blocks that read device memory beside the launch
    size_t touch_stride;   // bytes; the whole layer is touched before the launch; 0: nothing is
};

struct Times {
    double us = 1e9, touch_us = 1e9;  // of a launch
};

// The best of some steps.
Times measure(const Case& c, const char* pool, size_t num_bytes) {
    static std::mt19937_64 source(1);
    const int num_rows = c.num_requests * c.num_missed;
    const int num_layers = static_cast<int>(std::min<size_t>(num_bytes / kLayerBytes, kMaxLayers));
    const size_t run = kLayerBytes / c.num_requests / kRowBytes;  // rows
    std::vector<int64_t> offsets(static_cast<size_t>(kRepeats) * num_layers * num_rows);
    for (int launch = 0; launch < kRepeats * num_layers; ++launch) {
        int64_t* own = offsets.data() + static_cast<size_t>(launch) * num_rows;
        for (int i = 0; i < num_rows; ++i) {
            own[i] = launch % num_layers * kLayerBytes + (i / c.num_missed * run + source() % run) * kRowBytes;
        }
        if (c.order == "any") std::shuffle(own, own + num_rows, source);
    }
    int64_t* device_offsets;
    int32_t* sink;
    uint4 *out, *device;
    cudaStream_t beside;
    cudaEvent_t fork, join;
    CHECK(cudaMalloc(&device_offsets, offsets.size() * sizeof(int64_t)));
    CHECK(cudaMalloc(&sink, sizeof(uint4)));
    CHECK(cudaMalloc(&out, static_cast<size_t>(num_rows) * kRowBytes));
    CHECK(cudaMalloc(&device, kDeviceBytes));
    CHECK(cudaMemset(device, 1, kDeviceBytes));
    CHECK(cudaMemcpy(device_offsets, offsets.data(), offsets.size() * sizeof(int64_t), cudaMemcpyDefault));
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&fork));
    CHECK(cudaEventCreate(&join));
    std::vector<cudaEvent_t> events(4 * num_layers);
    for (auto& event : events) CHECK(cudaEventCreate(&event));
    const auto device_sink = reinterpret_cast<uint4*>(sink);
    Times best;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        for (int layer = 0; layer < num_layers; ++layer) {
            const size_t read = static_cast<size_t>(c.read_mib) << 20;
            if (read) read_device<<<264, 512>>>(device, read / sizeof(uint4), 1, device_sink);
            CHECK(cudaEventRecord(events[4 * layer]));
            if (c.touch_stride) touch<<<132, 256>>>(pool + layer * kLayerBytes, kLayerBytes, c.touch_stride, sink);
            CHECK(cudaEventRecord(events[4 * layer + 1]));
            if (c.blocks_beside) {
                CHECK(cudaEventRecord(fork));
                CHECK(cudaStreamWaitEvent(beside, fork));
                read_device<<<c.blocks_beside, 512, 0, beside>>>(device, kDeviceBytes / sizeof(uint4), 3, device_sink);
                CHECK(cudaEventRecord(join, beside));
                wait_cycles<<<1, 1>>>(10'000);  // until the other kernel runs
            }
            CHECK(cudaEventRecord(events[4 * layer + 2]));
            const int64_t* own = device_offsets + (static_cast<size_t>(repeat) * num_layers + layer) * num_rows;
            gather<<<c.num_blocks, kThreads>>>(pool, own, out, num_rows);
            CHECK(cudaEventRecord(events[4 * layer + 3]));
            if (c.blocks_beside) CHECK(cudaStreamWaitEvent(nullptr, join));
        }
        CHECK(cudaDeviceSynchronize());
        Times sum{0, 0};
        for (int layer = 0; layer < num_layers; ++layer) {
            float ms;
            CHECK(cudaEventElapsedTime(&ms, events[4 * layer + 2], events[4 * layer + 3]));
            sum.us += ms * 1000 / num_layers;
            CHECK(cudaEventElapsedTime(&ms, events[4 * layer], events[4 * layer + 1]));
            sum.touch_us += ms * 1000 / num_layers;
        }
        if (repeat > 0) best = {std::min(best.us, sum.us), std::min(best.touch_us, sum.touch_us)};
    }
    for (auto& event : events) CHECK(cudaEventDestroy(event));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaStreamDestroy(beside));
    for (void* memory : {static_cast<void*>(device_offsets), static_cast<void*>(sink), static_cast<void*>(out),
                         static_cast<void*>(device)}) {
        CHECK(cudaFree(memory));
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s <GiB of the pool> <managed|shared|small|huge|cuda|vmm>\n", argv[0]);
        return 2;
    }
    const size_t num_bytes = std::strtoull(argv[1], nullptr, 10) << 30;
    const std::string kind = argv[2];
    const std::array<std::string, 6> kinds = {"managed", "shared", "small", "huge", "cuda", "vmm"};
    if (num_bytes < size_t{2} << 30 || std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) {
        const char* const expected = "at least 2 GiB of managed, shared, small, huge, cuda or vmm";
        std::fprintf(stderr, "got %s GiB of %s, expected %s\n", argv[1], argv[2], expected);
        return 2;
    }
    CHECK(cudaFree(nullptr));
    const char* pool = allocate(num_bytes, kind);
    std::vector<Case> cases;
    for (const int read_mib : {0, 300}) {
        for (const char* order : {"any", "by request"}) cases.push_back({56, 230, order, 16, read_mib, 0, 0});
        for (const int num_blocks : {8, 16, 64}) cases.push_back({14, 230, "by request", num_blocks, read_mib, 0, 0});
        for (const int num_blocks : {8, 16}) cases.push_back({28, 240, "by request", num_blocks, read_mib, 0, 0});
    }
    for (const size_t stride : {2 << 20, 65536}) cases.push_back({56, 230, "by request", 16, 300, 0, stride});
    for (const int num_requests : {14, 28, 56}) {
        for (const int num_blocks : {8, 16}) {
            for (const int blocks_beside : {40, 116, 232}) {
                cases.push_back({num_requests, 230, "by request", num_blocks, 0, blocks_beside, 0});
            }
        }
    }
    for (const Case& c : cases) {
        const Times times = measure(c, pool, num_bytes);
        const double gb_per_s = c.num_requests * c.num_missed * double{kRowBytes} / times.us / 1000;
        std::printf(
            "{\"memory\": \"%s\", \"pool_gib\": %zu, \"requests\": %d, \"missed\": %d, \"order\": \"%s\", "
            "\"thread_blocks\": %d, \"device_mib_before\": %d, \"thread_blocks_beside\": %d, \"touch_stride\": %zu, "
            "\"touch_us\": %.1f, \"us\": %.1f, \"gb_per_s\": %.1f}\n",
            kind.c_str(), num_bytes >> 30, c.num_requests, c.num_missed, c.order.c_str(), c.num_blocks, c.read_mib,
            c.blocks_beside, c.touch_stride, times.touch_us, times.us, gb_per_s
        );
    }
}
