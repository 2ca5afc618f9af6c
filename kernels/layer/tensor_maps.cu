// See tensor_maps.h.
#include "layer/tensor_maps.h"

#include <cuda_runtime.h>

namespace moe {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

template <int kRank>
std::string encode(CUtensorMap& map, const void* data, const cuuint64_t (&dims)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], int box_rows) {
  static const Encode function = find_encode();
  if (function == nullptr) return "driver: expected cuTensorMapEncodeTiled (CUDA 12 or later), got none";
  cuuint32_t box[kRank];
  cuuint32_t steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    box[i] = i == 0 ? 64 : i == 1 ? static_cast<cuuint32_t>(box_rows) : 1;
    steps[i] = 1;
  }
  const CUresult result = function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), dims,
                                   strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return "";
  return "tensor map: expected to encode [" + std::to_string(dims[1]) + ", " + std::to_string(dims[0]) +
         "], got driver error " + std::to_string(static_cast<int>(result));
}

}  // namespace

std::string encode_rows(CUtensorMap& map, const void* data, std::int64_t rows, std::int64_t columns, int box_rows) {
  const auto width = static_cast<cuuint64_t>(columns);
  return encode<2>(map, data, {width, static_cast<cuuint64_t>(rows)}, {width * 2}, box_rows);
}

std::string encode_weight(CUtensorMap& map, const WeightView& weight, std::int64_t experts, std::int64_t halves,
                          std::int64_t rows, std::int64_t columns, int box_rows) {
  const auto row_bytes = static_cast<cuuint64_t>(weight.row_stride) * 2;
  const auto dim = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  return encode<4>(map, weight.data, {dim(columns), dim(rows), dim(halves), dim(experts)},
                   {row_bytes, row_bytes * dim(rows), static_cast<cuuint64_t>(weight.expert_stride) * 2}, box_rows);
}

}  // namespace moe
