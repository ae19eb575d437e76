// Causal attention over paged blocks for any mix of prefills and decodes (online softmax, arXiv:2205.14135).
//
// The query heads that share a KV head, of several neighbouring queries, are the rows of a tile. 128 keys at a time are
// packed as the product wants them, which costs little beside what the rows do with them.
#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"

namespace tandem {
namespace {

constexpr Index kKeys = 128;        // keys attended together
constexpr Index kTileRows = 192;     // rows of a tile, unless one query has more heads
constexpr Index kSplitKeys = 1024;   // a lone query's keys are split from so many on: it has no other parallelism
constexpr float kHidden = -std::numeric_limits<float>::infinity();

}  // namespace

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

namespace {

// Part of the work: a tile of queries of one sequence and KV head over the keys from `first` to `last`.
struct Item {
    Index sequence, kv_head;
    Index query, num_queries;  // among the T tokens
    Index position;            // of the first query
    Index first, last;
    Index partial;  // place of its partial result; -1: the result is whole
    bool sinks;
};

// Partial results of one query and KV head, to be merged.
struct Merge {
    Index query, kv_head;
    Index partial, count;
};

Index first_visible(const Attention& a, Index position) {
    Index first = 0;
    if (a.window) first = std::max(first, position + 1 - a.window);
    if (a.chunk) first = std::max(first, position / a.chunk * a.chunk);
    return first;
}

Index down(Index position) { return position / kKeys * kKeys; }

struct Plan {
    std::vector<Item> items;
    std::vector<Merge> merges;
    Index partials = 0;

    void build(const Attention& a) {
        items.clear();
        merges.clear();
        partials = 0;
        const Index per_tile = std::max<Index>(1, kTileRows / (a.num_heads / a.num_kv_heads));
        for (Index b = 0; b < a.num_sequences; ++b) {
            const Index start = a.query_start[b], queries = a.query_start[b + 1] - start;
            const Index before = a.context_lens[b] - queries;
            // The last queries see the most keys: they come first, so that no thread is left with a long one.
            for (Index done = queries; done > 0;) {
                const Index count = std::min(per_tile, done);
                done -= count;
                const Index position = before + done, first = down(first_visible(a, position));
                for (Index h = 0; h < a.num_kv_heads; ++h)
                    add({b, h, start + done, count, position, first, position + count, -1, true}, queries == 1);
            }
        }
    }

    void add(const Item& whole, bool may_split) {
        const Index splits = may_split ? (whole.last - whole.first + kSplitKeys - 1) / kSplitKeys : 1;
        if (splits <= 1) {
            items.push_back(whole);
            return;
        }
        merges.push_back({whole.query, whole.kv_head, partials, splits});
        for (Index s = 0; s < splits; ++s) {
            Item item = whole;
            item.first = whole.first + s * kSplitKeys;
            item.last = std::min(whole.last, item.first + kSplitKeys);
            item.partial = partials++;
            item.sinks = s == 0;
            items.push_back(item);
        }
    }
};

// One thread's working memory.
struct Scratch {
    std::vector<float> floats;
    std::vector<bf16> halves;
    float *scores, *sums, *greatest, *weight, *shrink;
    bf16 *queries, *shares, *keys, *values;

    void reserve(Index rows, Index width) {
        const Index numbers = rows * (kKeys + width + 3);
        const Index elements = rows * (width + kKeys) + 2 * kKeys * width + kLanes;
        if (Index(floats.size()) < numbers) floats.resize(numbers);
        if (Index(halves.size()) < elements) halves.resize(elements);
        scores = floats.data();
        sums = scores + rows * kKeys;
        greatest = sums + rows * width;
        weight = greatest + rows;
        shrink = weight + rows;
        queries = halves.data();
        shares = queries + rows * width;
        keys = shares + rows * kKeys;
        values = keys + kKeys * width;
    }
};

// 16 x 16 numbers of 32 bits: rows become columns.
void transpose(__m512i (&m)[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            m[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            m[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j) {
            t[8 * i + j] = _mm512_shuffle_i32x4(m[8 * i + j], m[8 * i + 4 + j], 0x88);
            t[8 * i + 4 + j] = _mm512_shuffle_i32x4(m[8 * i + j], m[8 * i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; ++j) {
        m[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        m[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    }
}

// [count keys, width] to [width / 2][kKeys][2]; absent rows become zeros. `count` is a multiple of 16 in both.
void pack_keys(const bf16* const* rows, Index count, Index width, bf16* to) {
    for (Index key = 0; key < count; key += kLanes)
        for (Index column = 0; column < width; column += 2 * kLanes) {
            const Index pairs = std::min(kLanes, (width - column) / 2);
            __m512i m[16];
            for (int i = 0; i < 16; ++i)
                m[i] = rows[key + i] ? _mm512_maskz_loadu_epi32(first_lanes(pairs), rows[key + i] + column)
                                     : _mm512_setzero_si512();
            transpose(m);
            for (Index i = 0; i < pairs; ++i) _mm512_storeu_si512(to + ((column / 2 + i) * kKeys + key) * 2, m[i]);
        }
}

// [count keys, width] to [count / 2][width][2].
void pack_values(const bf16* const* rows, Index count, Index width, bf16* to) {
    for (Index pair = 0; pair < count / 2; ++pair)
        for (Index column = 0; column < width; column += kLanes) {
            __m512i both = _mm512_setzero_si512();
            if (const bf16* row = rows[2 * pair])
                both = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + column)));
            if (const bf16* row = rows[2 * pair + 1])
                both = _mm512_or_si512(
                    both, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
                                                reinterpret_cast<const __m256i*>(row + column))),
                                            16));
            _mm512_storeu_si512(to + (pair * width + column) * 2, both);
        }
}

// out [R, 16 V] = shrink * out + rows block; without `shrink` out = rows block.
template <int R, int V>
void product(const bf16* rows, Index row_stride, const bf16* block, Index pair_stride, Index pairs, const float* shrink,
             float* out, Index out_stride) {
    __m512 sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            const float* before = out + r * out_stride + v * kLanes;
            sums[r][v] = shrink ? _mm512_mul_ps(_mm512_set1_ps(shrink[r]), _mm512_loadu_ps(before)) : _mm512_setzero_ps();
        }
    multiply<R, V>(sums, rows, row_stride, block, pair_stride, pairs);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) _mm512_storeu_ps(out + r * out_stride + v * kLanes, sums[r][v]);
}

template <int V>
void product_of_rows(Index count, const bf16* rows, Index row_stride, const bf16* block, Index pair_stride, Index pairs,
                     const float* shrink, float* out, Index out_stride) {
    Index row = 0;
    const auto part = [&](auto step, Index size) {
        for (; row + size <= count; row += size)
            step(rows + row * row_stride, row_stride, block, pair_stride, pairs, shrink ? shrink + row : nullptr,
                 out + row * out_stride, out_stride);
    };
    part(product<6, V>, 6);
    part(product<3, V>, 3);
    part(product<1, V>, 1);
}

// out [count, columns] of any width that is a multiple of 16.
void product_of(Index count, Index columns, const bf16* rows, Index row_stride, const bf16* block, Index pair_stride,
                Index pairs, const float* shrink, float* out, Index out_stride) {
    for (Index column = 0; column < columns; column += kColumns) {
        const auto part = [&](auto step) {
            step(count, rows, row_stride, block + 2 * column, pair_stride, pairs, shrink, out + column, out_stride);
        };
        switch (std::min<Index>(4, (columns - column) / kLanes)) {
            case 4: part(product_of_rows<4>); break;
            case 3: part(product_of_rows<3>); break;
            case 2: part(product_of_rows<2>); break;
            default: part(product_of_rows<1>);
        }
    }
}

// Takes one row's scores of `count` further keys, a multiple of 16, into its softmax: their shares as bfloat16, and the
// factor by which what was summed before shrinks.
void take_in(const float* scores, Index count, float scale, Index visible_from, Index visible_to, float& greatest,
             float& weight, float& shrink, bf16* shares) {
    __m512 s[kKeys / kLanes];
    __m512 top = _mm512_set1_ps(kHidden);
    const Index vectors = count / kLanes;
    for (Index v = 0; v < vectors; ++v) {
        const __mmask16 mask = first_lanes(visible_to - v * kLanes) & ~first_lanes(visible_from - v * kLanes);
        s[v] = _mm512_mask_mul_ps(_mm512_set1_ps(kHidden), mask, _mm512_loadu_ps(scores + v * kLanes),
                                  _mm512_set1_ps(scale));
        top = _mm512_max_ps(top, s[v]);
    }
    const float now = std::max(greatest, _mm512_reduce_max_ps(top));
    if (now == kHidden) {  // nothing is visible yet
        shrink = 1.0f;
        std::memset(shares, 0, count * sizeof(bf16));
        return;
    }
    __m512 sum = _mm512_setzero_ps();
    for (Index v = 0; v < vectors; ++v) {
        const __m512 share = exp2(_mm512_sub_ps(s[v], _mm512_set1_ps(now)));
        sum = _mm512_add_ps(sum, share);
        store(shares + v * kLanes, share);
    }
    shrink = _mm512_cvtss_f32(exp2(_mm512_set1_ps(greatest - now)));
    weight = weight * shrink + _mm512_reduce_add_ps(sum);
    greatest = now;
}

void attend(const Attention& a, const Item& item, Scratch& mine, float* partials) {
    const Index group = a.num_heads / a.num_kv_heads, rows = item.num_queries * group, width = a.width;
    mine.reserve(rows, width);
    for (Index r = 0; r < rows; ++r) {
        const Index head = item.kv_head * group + r % group;
        std::memcpy(mine.queries + r * width, a.q + (item.query + r / group) * a.q_stride + head * width,
                    width * sizeof(bf16));
        const bool sink = a.sinks && item.sinks;
        mine.greatest[r] = sink ? a.sinks[head] * kLog2E : kHidden;
        mine.weight[r] = sink ? 1.0f : 0.0f;
    }
    std::memset(mine.sums, 0, rows * width * sizeof(float));
    const std::int32_t* table = a.tables + item.sequence * a.table_width;
    const Index plane = a.block_size * width, block = 2 * a.num_kv_heads * plane;
    for (Index key = item.first; key < item.last; key += kKeys) {
        const Index count = std::min(kKeys, item.last - key);
        const bf16 *key_rows[kKeys] = {}, *value_rows[kKeys] = {};
        for (Index i = 0; i < count; ++i) {
            const Index at = key + i;
            key_rows[i] = a.layer + table[at / a.block_size] * block + item.kv_head * plane + at % a.block_size * width;
            value_rows[i] = key_rows[i] + a.num_kv_heads * plane;
        }
        const Index padded = (count + kLanes - 1) / kLanes * kLanes;
        pack_keys(key_rows, padded, width, mine.keys);
        pack_values(value_rows, padded, width, mine.values);
        product_of(rows, padded, mine.queries, width, mine.keys, 2 * kKeys, width / 2, nullptr, mine.scores, kKeys);
        for (Index r = 0; r < rows; ++r) {
            const Index position = item.position + r / group;
            take_in(mine.scores + r * kKeys, padded, a.scale * kLog2E, first_visible(a, position) - key,
                    std::min(count, position + 1 - key), mine.greatest[r], mine.weight[r], mine.shrink[r],
                    mine.shares + r * kKeys);
        }
        product_of(rows, width, mine.shares, kKeys, mine.values, 2 * width, padded / 2, mine.shrink, mine.sums, width);
    }
    for (Index r = 0; r < rows; ++r) {
        const float* sums = mine.sums + r * width;
        if (item.partial >= 0) {
            float* to = partials + (item.partial * group + r) * (width + 2);
            to[0] = mine.greatest[r];
            to[1] = mine.weight[r];
            std::memcpy(to + 2, sums, width * sizeof(float));
            continue;
        }
        bf16* to = a.out + ((item.query + r / group) * a.num_heads + item.kv_head * group + r % group) * width;
        const __m512 factor = _mm512_set1_ps(1.0f / mine.weight[r]);
        for (Index i = 0; i < width; i += kLanes) store(to + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), factor));
    }
}

void merge(const Attention& a, const Merge& m, const float* partials) {
    const Index group = a.num_heads / a.num_kv_heads, length = a.width + 2;
    for (Index r = 0; r < group; ++r) {
        const auto part = [&](Index s) { return partials + ((m.partial + s) * group + r) * length; };
        float greatest = kHidden, weight = 0;
        for (Index s = 0; s < m.count; ++s) greatest = std::max(greatest, part(s)[0]);
        const auto factor = [&](Index s) { return _mm512_cvtss_f32(exp2(_mm512_set1_ps(part(s)[0] - greatest))); };
        for (Index s = 0; s < m.count; ++s) weight += part(s)[1] * factor(s);
        bf16* to = a.out + (m.query * a.num_heads + m.kv_head * group + r) * a.width;
        for (Index i = 0; i < a.width; i += kLanes) {
            __m512 sum = _mm512_setzero_ps();
            for (Index s = 0; s < m.count; ++s)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(factor(s)), _mm512_loadu_ps(part(s) + 2 + i), sum);
            store(to + i, _mm512_div_ps(sum, _mm512_set1_ps(weight)));
        }
    }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// `width` must be a multiple of 16. Rows of `out` without a query are left alone.
TANDEM_EXPORT void tandem_attention(const Attention* attention) {
    const Attention& a = *attention;
    static thread_local Plan plan;
    static thread_local std::vector<float> partial_results;
    plan.build(a);
    const Index group = a.num_heads / a.num_kv_heads, needed = plan.partials * group * (a.width + 2);
    if (Index(partial_results.size()) < needed) partial_results.resize(needed);
    float* partials = partial_results.data();
    const std::vector<Item>& items = plan.items;
    const std::vector<Merge>& merges = plan.merges;
    for_each_item(Index(items.size()), [&](Index i) {
        static thread_local Scratch mine;
        attend(a, items[i], mine, partials);
    });
    for_each_item(Index(merges.size()), [&](Index i) { merge(a, merges[i], partials); });
}
