// Weights as checkpoints store them, widened to float32 and rounded to bfloat16.
//
// Formats are those of GGML, described by the `gguf` package's reference in numpy: each value is computed by the same
// operations in the same order, and rounded to nearest even with subnormal results kept, as torch does. So every bit is
// the same as by way of a float32 matrix.
#pragma once

#include "simd.h"

namespace tandem {

using Byte = std::uint8_t;

struct Format {
    Index elements;  // of a block
    Index bytes;     // of a block
    void (*widen)(const Byte* from, Index count, bf16* to);  // whole blocks; for blocks of one element, any number
};

// The format of GGML's type number; null where there is none here.
const Format* find_format(Index type);

}  // namespace tandem
