#include <cuda_runtime.h>

// What an error code of the launchers means, as a static string.
extern "C" const char* hisparse_error_string(cudaError_t error) {
    return cudaGetErrorString(error);
}
