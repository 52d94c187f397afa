#pragma once

#include "common.cuh"

namespace hisparse {

constexpr int kMaxTopK = 4096;       // positions of a selection
constexpr int kMaxQueryLen = 8;      // selections of a request
constexpr int kMaxColumns = 8192;    // of several selections
constexpr int kMaxHotRows = 524288;  // of a request, the reserved ones included

// As `hisparse_resolve`. beside_others: as in `hisparse_gather`.
cudaError_t launch_resolve(
    const Residency& residency,
    const StepTables& tables,
    const int32_t* top_k,
    int64_t top_k_stride,
    const HotRows& hot,
    int64_t* counts,
    const Resolved& out,
    bool beside_others,
    cudaStream_t stream
);

}  // namespace hisparse

// Find hits, choose victims and update the residency: `SwapInOps.resolve`.
//
// top_k: [batch, out->num_columns], requests top_k_stride elements apart. hot: hot->rows is not read and may be null.
// counts: [num_states, 2]. Returns cudaErrorInvalidValue beyond these numbers.
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
