// What attention is asked for. `_Attention` of library.py.
#pragma once

#include "simd.h"

namespace tandem {

// One step over B sequences, T new tokens in all. `context_lens` count the new tokens too.
struct Attention {
    const bf16* q;  // [T, num_heads, width], tokens `q_stride` elements apart
    bf16* out;      // [T, num_heads * width]
    const bf16* layer;  // [blocks, 2, num_kv_heads, block_size, width]
    const std::int32_t* tables;  // [B, table_width]
    const std::int32_t* query_start;  // [B + 1]
    const std::int32_t* context_lens;  // [B]
    const float* sinks;  // [num_heads] or null
    Index num_sequences, table_width, q_stride, num_heads, num_kv_heads, width, block_size;
    Index window;  // keys a query sees, its own included; 0 for all
    Index chunk;   // a query sees keys of its own run of so many positions; 0 for all
    float scale;
};

}  // namespace tandem
