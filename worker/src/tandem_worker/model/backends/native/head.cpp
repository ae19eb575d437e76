// One decoder layer that reads the norm of a token's embedding beside the norm of a state, as EAGLE-3 heads do, over many
// chains of guesses in one call.
#include <algorithm>

#include "matrix.h"

namespace tandem {

// A head. `_Head` of head.py.
struct Head {
    const bf16 *input_norm, *state_norm, *mlp_norm, *norm;  // [hidden]
    Matrix queries, keys_values, out, gate_up, down, output;
    Index hidden, num_heads, num_kv_heads, width, block_size;
    Index adds_normed, gives_normed;  // what the layer adds to, and what is given as the next state: the norm of it
    float eps, scale;
};

// Tokens and the states before them. `_Entered` of head.py.
struct Entered {
    const bf16* embedded;           // [rows, hidden]
    const bf16* states;             // [rows, hidden]
    const std::int64_t* positions;  // [rows], of the states
    const bf16 *cos, *sin;          // [positions, width / 2]
    bf16* working;
    Index rows;
};

// Chains of guesses. `_Chains` of head.py.
struct Chains {
    bf16* const* contexts;      // [rows], each [blocks, 2, num_kv_heads, block_size, width]; the first slot has no entry
    const std::int64_t* slots;  // [rows], the first that is free in each
    const std::int32_t* table;  // 0, 1, 2 and so on, as far as any has blocks
    bf16* made;                 // [rows, hidden]
    float* logits;              // [rows, columns of the output]
};

namespace {

// Places in the working memory, in the order in which they are taken.
struct Memory {
    bf16* next;
    bf16* take(Index elements) {
        bf16* taken = next;
        next += elements;
        return taken;
    }
};

// [rows, 2 hidden]
bf16* enter(const Head& head, const Entered& in, Memory& memory) {
    const Index hidden = head.hidden;
    bf16* entries = memory.take(in.rows * 2 * hidden);
    for (Index row = 0; row < in.rows; ++row) {
        bf16* entry = entries + row * 2 * hidden;
        tandem_rms_norm(in.embedded + row * hidden, hidden, 1, hidden, head.input_norm, head.eps, entry);
        tandem_rms_norm(in.states + row * hidden, hidden, 1, hidden, head.state_norm, head.eps, entry + hidden);
    }
    return entries;
}

// Cosines or sines of the rows' positions, [rows, width / 2].
bf16* gather(const Head& head, const Entered& in, const bf16* table, Memory& memory) {
    const Index half = head.width / 2;
    bf16* rows = memory.take(in.rows * half);
    for (Index row = 0; row < in.rows; ++row) std::copy_n(table + in.positions[row] * half, half, rows + row * half);
    return rows;
}

void attend(const Head& head, const bf16* queries, const bf16* context, const std::int32_t* table, Index slot,
            bf16* attended) {
    const std::int32_t query_start[2] = {0, 1}, context_len = static_cast<std::int32_t>(slot + 1);
    const Attention attention{
        .q = queries,
        .out = attended,
        .layer = context,
        .tables = table,
        .query_start = query_start,
        .context_lens = &context_len,
        .sinks = nullptr,
        .num_sequences = 1,
        .table_width = slot / head.block_size + 1,
        .q_stride = head.num_heads * head.width,
        .num_heads = head.num_heads,
        .num_kv_heads = head.num_kv_heads,
        .width = head.width,
        .block_size = head.block_size,
        .window = slot,  // all but the first slot
        .chunk = 0,
        .scale = head.scale,
    };
    tandem_attention(&attention);
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Keys and values of entries to their `slots` [rows] of `layer` [blocks, 2, num_kv_heads, block_size, width].
TANDEM_EXPORT void tandem_head_write(const Head* head, const Entered* in, const std::int64_t* slots, bf16* layer) {
    Memory memory{in->working};
    const bf16* entries = enter(*head, *in, memory);
    const bf16 *cos = gather(*head, *in, in->cos, memory), *sin = gather(*head, *in, in->sin, memory);
    bf16* made = memory.take(in->rows * head->keys_values.columns);
    multiply(head->keys_values, entries, in->rows, nullptr, made);
    tandem_place_heads(made, in->rows, 0, head->num_kv_heads, head->width, nullptr, nullptr, 0.0f, cos, sin, slots, layer,
                       head->block_size);
}

// One more entry of each chain, and what follows it: logits, and the state of the next entry.
TANDEM_EXPORT void tandem_head_advance(const Head* head, const Entered* in, const Chains* chains) {
    const Index rows = in->rows, hidden = head->hidden, wide = head->num_heads * head->width;
    const Index made_width = head->keys_values.columns, half = head->width / 2;
    Memory memory{in->working};
    const bf16* entries = enter(*head, *in, memory);
    const bf16 *cos = gather(*head, *in, in->cos, memory), *sin = gather(*head, *in, in->sin, memory);
    bf16* queries = memory.take(rows * wide);
    bf16* made = memory.take(rows * made_width);
    bf16* attended = memory.take(rows * wide);
    multiply(head->queries, entries, rows, nullptr, queries);
    multiply(head->keys_values, entries, rows, nullptr, made);
    tandem_place_heads(queries, rows, head->num_heads, 0, head->width, nullptr, nullptr, 0.0f, cos, sin, chains->slots,
                       nullptr, head->block_size);
    for (Index row = 0; row < rows; ++row) {
        bf16* context = chains->contexts[row];
        tandem_place_heads(made + row * made_width, 1, 0, head->num_kv_heads, head->width, nullptr, nullptr, 0.0f,
                           cos + row * half, sin + row * half, chains->slots + row, context, head->block_size);
        attend(*head, queries + row * wide, context, chains->table, chains->slots[row], attended + row * wide);
    }
    bf16* residual = memory.take(rows * hidden);
    for (Index row = 0; row < rows; ++row)
        std::copy_n(head->adds_normed ? entries + row * 2 * hidden + hidden : in->states + row * hidden, hidden,
                    residual + row * hidden);
    bf16* stream = memory.take(rows * hidden);
    bf16* normed = memory.take(rows * hidden);
    bf16* gated = memory.take(rows * head->down.inner);
    multiply(head->out, attended, rows, residual, stream);
    tandem_rms_norm(stream, hidden, rows, hidden, head->mlp_norm, head->eps, normed);
    multiply_gated(head->gate_up, normed, rows, gated);
    multiply(head->down, gated, rows, stream, stream);
    tandem_rms_norm(stream, hidden, rows, hidden, head->norm, head->eps, normed);
    multiply(head->output, normed, rows, chains->logits);
    std::copy_n(head->gives_normed ? normed : stream, rows * hidden, chains->made);
}
