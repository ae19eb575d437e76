// Decoder layers of one step in one call: the kernels in the order in which a layer's Python calls them, so the bits are
// those of layers that are called one kernel at a time.
#include <algorithm>

#include "matrix.h"

namespace tandem {

// One layer. `_Layer` of stack.py.
struct Layer {
    const bf16 *input_norm, *mlp_norm;  // [hidden] or null
    const bf16 *q_norm, *k_norm;        // [width] or null
    const float* sinks;                 // [num_heads] or null
    Matrix qkv, out, gate_up, down;
    Index num_heads, num_kv_heads, width, window, chunk;
    float scale, input_eps, mlp_eps, head_eps;
};

// What the layers of a step share. `_SharedStep` of stack.py.
struct SharedStep {
    const bf16 *cos, *sin;             // [rows, width / 2]
    const std::int64_t* slots;         // [rows]
    const std::int32_t* tables;        // [num_sequences, table_width]
    const std::int32_t* query_start;   // [num_sequences + 1]
    const std::int32_t* context_lens;  // [num_sequences]
    bf16 *normed;                      // working memory, [rows, hidden]
    bf16 *wide;                        // [rows, the widest of heads with attended, and of the MLP]
    const Index* taps;                 // [count], where the stream before each layer goes, or -1; null: nowhere
    bf16* features;                    // [rows, feature_stride]
    Index rows, num_sequences, table_width, block_size, feature_stride;
};

namespace {

void place(const Layer& layer, const SharedStep& step, bf16* heads, bf16* kv_layer) {
    tandem_place_heads(heads, step.rows, layer.num_heads, layer.num_kv_heads, layer.width, layer.q_norm, layer.k_norm,
                       layer.head_eps, step.cos, step.sin, step.slots, kv_layer, step.block_size);
}

void attend(const Layer& layer, const SharedStep& step, const bf16* heads, bf16* attended, const bf16* kv_layer) {
    const Attention attention{
        .q = heads,
        .out = attended,
        .layer = kv_layer,
        .tables = step.tables,
        .query_start = step.query_start,
        .context_lens = step.context_lens,
        .sinks = layer.sinks,
        .num_sequences = step.num_sequences,
        .table_width = step.table_width,
        .q_stride = layer.qkv.columns,
        .num_heads = layer.num_heads,
        .num_kv_heads = layer.num_kv_heads,
        .width = layer.width,
        .block_size = step.block_size,
        .window = layer.window,
        .chunk = layer.chunk,
        .scale = layer.scale,
    };
    tandem_attention(&attention);
}

// The stream before a layer is wanted.
void tap(const SharedStep& step, const bf16* hidden, Index width, Index place) {
    for (Index row = 0; row < step.rows; ++row)
        std::copy_n(hidden + row * width, width, step.features + row * step.feature_stride + place * width);
}

// Says that a layer's keys and values are written; whether the step ends there.
using Written = int (*)(Index layer);

// `to` may be `from`. False: the step has ended.
bool run_layer(const Layer& layer, const SharedStep& step, const bf16* from, bf16* to, bf16* kv_layer, Index index,
               Written written) {
    const Index hidden = layer.qkv.inner, rows = step.rows;
    tandem_rms_norm(from, hidden, rows, hidden, layer.input_norm, layer.input_eps, step.normed);
    bf16* heads = step.wide;
    bf16* attended = heads + rows * layer.qkv.columns;
    multiply(layer.qkv, step.normed, rows, nullptr, heads);
    place(layer, step, heads, kv_layer);
    if (written && written(index)) return false;
    attend(layer, step, heads, attended, kv_layer);
    multiply(layer.out, attended, rows, from, to);
    tandem_rms_norm(to, hidden, rows, hidden, layer.mlp_norm, layer.mlp_eps, step.normed);
    multiply_gated(layer.gate_up, step.normed, rows, step.wide);
    multiply(layer.down, step.wide, rows, to, to);
    return true;
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// `count` layers over `step`'s rows: hidden states `from` [rows, hidden] to `to`, each layer's keys and values written to
// its own of `kv_layers` [blocks, 2, num_kv_heads, block_size, width], which `written` is told if it is not null.
TANDEM_EXPORT void tandem_layers(const Layer* layers, Index count, const SharedStep* step, const bf16* from, bf16* to,
                                 bf16* const* kv_layers, Written written) {
    for (Index i = 0; i < count; ++i, from = to) {
        if (step->taps && step->taps[i] >= 0) tap(*step, from, layers[i].qkv.inner, step->taps[i]);
        if (!run_layer(layers[i], *step, from, to, kv_layers[i], i, written)) return;
    }
}
