// Encodes the TMA descriptors of the forward's operands. Host only; the driver's function is looked up at run time, so
// that the library does not link libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "moe/forward/arguments.h"

namespace moe {

// bf16 rows [rows, columns], contiguous; boxes of box_rows x 64.
std::string encode_rows(CUtensorMap& map, const void* data, std::int64_t rows, std::int64_t columns, int box_rows);

// bf16 weight [experts, halves * rows, columns] as [experts, halves, rows, columns], so that a box never runs from one
// half into the next; boxes of box_rows x 64.
std::string encode_weight(CUtensorMap& map, const WeightView& weight, std::int64_t experts, std::int64_t halves,
                          std::int64_t rows, std::int64_t columns, int box_rows);

}  // namespace moe
