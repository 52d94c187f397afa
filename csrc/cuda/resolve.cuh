#pragma once

#include "common.cuh"

namespace hisparse {

constexpr int kMaxTopK = 4096;         // selected positions of a request
constexpr int kMaxHotRows = 524288;    // of a request, the reserved one included

}  // namespace hisparse

// Find hits, choose victims and update the residency: `SwapInOps.resolve`.
//
// top_k: [batch, out->top_k], requests top_k_stride elements apart. hot: hot->rows is not read and may be null.
// counts: [num_states, 2]. Returns cudaErrorInvalidValue beyond kMaxTopK selected positions
// or kMaxHotRows hot rows of a request.
extern "C" cudaError_t hisparse_resolve(
    const hisparse::Residency* residency,
    const hisparse::StepTables* tables,
    const int32_t* top_k,
    int64_t top_k_stride,
    const hisparse::HotRows* hot,
    int64_t* counts,
    const hisparse::Resolved* out,
    cudaStream_t stream
);
