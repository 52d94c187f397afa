#include "arguments.h"

namespace hisparse {
namespace {

cudaError_t advise(void* memory, size_t num_bytes, cudaMemoryAdvise advice, bool of_host, int device) {
#if CUDART_VERSION >= 13000
    cudaMemLocation location{};
    location.type = of_host ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
    location.id = device;
#else
    const int location = of_host ? cudaCpuDeviceId : device;
#endif
    return cudaMemAdvise(memory, num_bytes, advice, location);
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// NOTE: after an error, `cudaGetLastError` would return it again at the next launch of any kernel.
cudaError_t hisparse::allocate_managed(size_t num_bytes, int device, void** memory) {
    int is_concurrent = 0;
    cudaError_t error = cudaDeviceGetAttribute(&is_concurrent, cudaDevAttrConcurrentManagedAccess, device);
    if (error == cudaSuccess && !is_concurrent) error = cudaErrorNotSupported;
    if (error == cudaSuccess) error = cudaMallocManaged(memory, num_bytes);
    if (error == cudaSuccess) {
        error = advise(*memory, num_bytes, cudaMemAdviseSetPreferredLocation, true, 0);
        if (error != cudaSuccess) cudaFree(*memory);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

cudaError_t hisparse::map_managed(void* memory, size_t num_bytes, int device) {
    const cudaError_t error = advise(memory, num_bytes, cudaMemAdviseSetAccessedBy, false, device);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

cudaError_t hisparse::free_managed(void* memory) {
    const cudaError_t error = cudaFree(memory);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}
