// What stands between the products: norm, activation, and the way of queries, keys and values to their places.
#include <algorithm>

#include "kernels.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr Index kItemElements = 1 << 14;  // fewer are not worth a second thread

// y = x / sqrt(mean(x^2) + eps) * weight; a null weight scales by 1. x and y may be the same.
void normalize(const bf16* x, const bf16* weight, float eps, Index width, bf16* y) {
    __m512 squares = _mm512_setzero_ps();
    for (Index i = 0; i < width; i += kLanes) {
        const __m512 part = load(x + i, first_lanes(width - i));
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / float(width) + eps));
    for (Index i = 0; i < width; i += kLanes) {
        const __mmask16 mask = first_lanes(width - i);
        __m512 part = _mm512_mul_ps(load(x + i, mask), scale);
        if (weight) part = _mm512_mul_ps(part, load(weight + i, mask));
        store(y + i, part, mask);
    }
}

// Calls `function(row)` for rows of `width` elements.
template <class Function>
void for_each_row(Index rows, Index width, Function function) {
    for_each_run(rows, std::max<Index>(1, kItemElements / width), [&](Index first, Index last) {
        for (Index row = first; row < last; ++row) function(row);
    });
}

// Element i turns with element i + width / 2.
void rotate_half(bf16* head, const bf16* cos, const bf16* sin, Index width) {
    const Index half = width / 2;
    for (Index i = 0; i < half; i += kLanes) {
        const __mmask16 mask = first_lanes(half - i);
        const __m512 c = load(cos + i, mask), s = load(sin + i, mask);
        const __m512 first = load(head + i, mask), second = load(head + half + i, mask);
        store(head + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)), mask);
        store(head + half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)), mask);
    }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// y [rows, width], contiguous, from x with rows `x_stride` apart
TANDEM_EXPORT void tandem_rms_norm(const bf16* x, Index x_stride, Index rows, Index width, const bf16* weight,
                                   float eps, bf16* y) {
    for_each_row(rows, width, [&](Index row) { normalize(x + row * x_stride, weight, eps, width, y + row * width); });
}

// y [rows, width] = silu(gate) * up from [rows, 2 width], gate first
TANDEM_EXPORT void tandem_silu_mul(const bf16* gate_up, Index rows, Index width, bf16* y) {
    for_each_row(rows, 2 * width, [&](Index row) {
        const bf16* gate = gate_up + row * 2 * width;
        for (Index i = 0; i < width; i += kLanes) {
            const __mmask16 mask = first_lanes(width - i);
            store(y + row * width + i, _mm512_mul_ps(silu(load(gate + i, mask)), load(gate + width + i, mask)), mask);
        }
    });
}

// Of `heads` [rows, num_heads + 2 num_kv_heads, width]: norms of query and key heads where weights are given, their
// rotation in place, and keys and values written to `slots` [rows] of a layer [blocks, 2, num_kv_heads, block_size,
// width]. `cos` and `sin` are [rows, width / 2].
TANDEM_EXPORT void tandem_place_heads(bf16* heads, Index rows, Index num_heads, Index num_kv_heads, Index width,
                                   const bf16* q_norm, const bf16* k_norm, float eps, const bf16* cos, const bf16* sin,
                                   const std::int64_t* slots, bf16* layer, Index block_size) {
    const Index total = num_heads + 2 * num_kv_heads;
    for_each_row(rows, total * width, [&](Index row) {
        bf16* head = heads + row * total * width;
        for (Index h = 0; h < num_heads + num_kv_heads; ++h) {
            const bf16* norm = h < num_heads ? q_norm : k_norm;
            if (norm) normalize(head + h * width, norm, eps, width, head + h * width);
            rotate_half(head + h * width, cos + row * width / 2, sin + row * width / 2, width);
        }
        const Index block = slots[row] / block_size, offset = slots[row] % block_size;
        for (Index h = 0; h < 2 * num_kv_heads; ++h)
            std::memcpy(layer + ((block * 2 * num_kv_heads + h) * block_size + offset) * width,
                        head + (num_heads + h) * width, width * sizeof(bf16));
    });
}
