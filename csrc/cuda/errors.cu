#include <cstdint>
#include <cuda_runtime.h>

constexpr int kInterfaceVersion = 2;  // of launchers, structs and constants; raised by whoever changes one of them

// Compared when the library is loaded: an old build beside newer Python code would read wrong addresses.
extern "C" int32_t hisparse_interface_version() {
    return kInterfaceVersion;
}

// What an error code of the launchers means, as a static string.
extern "C" const char* hisparse_error_string(cudaError_t error) {
    return cudaGetErrorString(error);
}
