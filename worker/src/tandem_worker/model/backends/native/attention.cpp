// Causal attention over paged blocks for any mix of prefills and decodes (online softmax, arXiv:2205.14135).
//
// The query heads that share a KV head, of several neighbouring queries, are the rows of a tile. 128 keys at a time are
// packed as the product wants them, which costs little beside what the rows do with them.
//
// A row's bits follow from its query and the keys that it sees, never from the tile or the step that it came in: keys
// are summed in segments between fixed positions, each from nothing, and folded into the row's result in their order.
// So it does not matter whether one thread takes all segments of a tile or several take one each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr Index kKeys = 128;        // keys attended together
constexpr Index kTileRows = 192;     // rows of a tile, unless one query has more heads
constexpr Index kSegment = 512;      // keys that are summed together, a multiple of kKeys: changing it changes bits
constexpr Index kSplitRows = 64;     // tiles of so few rows leave segments to several threads
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Part of the work: a tile of queries of one sequence and KV head over the keys from `first` to `last`.
struct Item {
    Index sequence, kv_head;
    Index query, num_queries;  // among the T tokens
    Index position;            // of the first query
    Index first, last;
    Index partial;  // place of the segment's sums; -1: all segments of the tile are here
};

// A tile whose segments were summed apart.
struct Merge {
    Item tile;
    Index partial, count;
};

Index first_visible(const Attention& a, Index position) {
    Index first = 0;
    if (a.window) first = std::max(first, position + 1 - a.window);
    if (a.chunk) first = std::max(first, position / a.chunk * a.chunk);
    return first;
}

Index down(Index position) { return position / kKeys * kKeys; }

Index segment_end(Index position) { return position / kSegment * kSegment + kSegment; }

struct Plan {
    std::vector<Item> items;
    std::vector<Merge> merges;
    Index partials = 0;  // rows of sums that segments leave

    void build(const Attention& a) {
        items.clear();
        merges.clear();
        partials = 0;
        const Index group = a.num_heads / a.num_kv_heads, per_tile = std::max<Index>(1, kTileRows / group);
        for (Index b = 0; b < a.num_sequences; ++b) {
            const Index start = a.query_start[b], queries = a.query_start[b + 1] - start;
            const Index before = a.context_lens[b] - queries;
            // The last queries see the most keys: they come first, so that no thread is left with a long one.
            for (Index done = queries; done > 0;) {
                const Index count = std::min(per_tile, done);
                done -= count;
                const Index position = before + done, first = down(first_visible(a, position));
                for (Index h = 0; h < a.num_kv_heads; ++h)
                    add({b, h, start + done, count, position, first, position + count, -1}, count * group);
            }
        }
    }

    void add(const Item& tile, Index rows) {
        if (rows > kSplitRows || segment_end(tile.first) >= tile.last) {
            items.push_back(tile);
            return;
        }
        Merge merge{tile, partials, 0};
        for (Index key = tile.first; key < tile.last; key = segment_end(key), partials += rows, ++merge.count) {
            Item item = tile;
            item.first = key;
            item.last = std::min(tile.last, segment_end(key));
            item.partial = partials;
            items.push_back(item);
        }
        merges.push_back(merge);
    }
};

// Of one row and the keys that it has seen: the greatest score, the sum of shares, and that of values by shares.
struct Sums {
    float* greatest;
    float* weight;
    float* values;  // [width]
};

// Those of the rows of a tile.
struct RowSums {
    float *greatest, *weight, *values;  // [rows], [rows], [rows, width]

    static Index size(Index rows, Index width) { return rows * (width + 2); }
    static RowSums at(float* memory, Index rows) { return {memory, memory + rows, memory + 2 * rows}; }
    Sums row(Index r, Index width) const { return {greatest + r, weight + r, values + r * width}; }

    void clear(Index rows, Index width) const {
        std::fill_n(greatest, rows, kHidden);
        std::fill_n(weight, rows, 0.0f);
        std::fill_n(values, rows * width, 0.0f);
    }
};

// One thread's working memory.
struct Scratch {
    std::vector<float> floats;
    std::vector<bf16> halves;
    float *scores, *shrink;
    RowSums segment, result;
    bf16 *queries, *shares, *keys, *values;

    void reserve(Index rows, Index width) {
        const Index numbers = rows * (kKeys + 1) + 2 * RowSums::size(rows, width);
        const Index elements = rows * (width + kKeys) + 2 * kKeys * width + kLanes;
        if (Index(floats.size()) < numbers) floats.resize(numbers);
        if (Index(halves.size()) < elements) halves.resize(elements);
        scores = floats.data();
        shrink = scores + rows * kKeys;
        segment = RowSums::at(shrink + rows, rows);
        result = RowSums::at(shrink + rows + RowSums::size(rows, width), rows);
        queries = halves.data();
        shares = queries + rows * width;
        keys = shares + rows * kKeys;
        values = keys + kKeys * width;
    }
};

Scratch& scratch() {
    static thread_local Scratch mine;
    return mine;
}

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

float power(float x) { return _mm512_cvtss_f32(exp2(_mm512_set1_ps(x))); }

// Takes one row's scores of `count` further keys, a multiple of 16, into its softmax: their shares as bfloat16, and the
// factor by which what was summed before shrinks.
void take_in(const float* scores, Index count, float scale, Index visible_from, Index visible_to, Sums& sums,
             float& shrink, bf16* shares) {
    __m512 s[kKeys / kLanes];
    __m512 top = _mm512_set1_ps(kHidden);
    const Index vectors = count / kLanes;
    for (Index v = 0; v < vectors; ++v) {
        const __mmask16 mask = first_lanes(visible_to - v * kLanes) & ~first_lanes(visible_from - v * kLanes);
        s[v] = _mm512_mask_mul_ps(_mm512_set1_ps(kHidden), mask, _mm512_loadu_ps(scores + v * kLanes),
                                  _mm512_set1_ps(scale));
        top = _mm512_max_ps(top, s[v]);
    }
    const float now = std::max(*sums.greatest, _mm512_reduce_max_ps(top));
    if (now == kHidden) {  // nothing is visible yet
        shrink = 1.0f;
        std::memset(shares, 0, count * sizeof(bf16));
        return;
    }
    __m512 sum = _mm512_setzero_ps();  // hidden keys add zeros to it, however many there are
    for (Index v = 0; v < vectors; ++v) {
        const __m512 share = exp2(_mm512_sub_ps(s[v], _mm512_set1_ps(now)));
        sum = _mm512_add_ps(sum, share);
        store(shares + v * kLanes, share);
    }
    shrink = power(*sums.greatest - now);
    *sums.weight = std::fma(*sums.weight, shrink, _mm512_reduce_add_ps(sum));
    *sums.greatest = now;
}

// Takes a segment into what came before it. One that the row sees nothing of changes no bit.
__attribute__((noinline)) void fold(const Sums& segment, Sums result, Index width) {
    if (*segment.greatest == kHidden) return;
    const float now = std::max(*result.greatest, *segment.greatest);
    const float before = power(*result.greatest - now), added = power(*segment.greatest - now);
    *result.weight = std::fma(*result.weight, before, *segment.weight * added);
    *result.greatest = now;
    const __m512 old = _mm512_set1_ps(before), factor = _mm512_set1_ps(added);
    for (Index i = 0; i < width; i += kLanes) {
        const __m512 part = _mm512_mul_ps(_mm512_loadu_ps(segment.values + i), factor);
        _mm512_storeu_ps(result.values + i, _mm512_fmadd_ps(_mm512_loadu_ps(result.values + i), old, part));
    }
}

Index head_of(const Attention& a, const Item& tile, Index row) {
    const Index group = a.num_heads / a.num_kv_heads;
    return tile.kv_head * group + row % group;
}

// A row's result before its first segment: its sink, if it has one.
void begin(const Attention& a, const Item& tile, Index rows, const RowSums& result) {
    result.clear(rows, a.width);
    if (!a.sinks) return;
    for (Index r = 0; r < rows; ++r) {
        result.greatest[r] = a.sinks[head_of(a, tile, r)] * kLog2E;
        result.weight[r] = 1.0f;
    }
}

__attribute__((noinline)) void finish(const Attention& a, const Item& tile, Index rows, const RowSums& result) {
    const Index group = a.num_heads / a.num_kv_heads;
    for (Index r = 0; r < rows; ++r) {
        bf16* to = a.out + ((tile.query + r / group) * a.num_heads + head_of(a, tile, r)) * a.width;
        const __m512 factor = _mm512_set1_ps(1.0f / result.weight[r]);
        for (Index i = 0; i < a.width; i += kLanes)
            store(to + i, _mm512_mul_ps(_mm512_loadu_ps(result.values + r * a.width + i), factor));
    }
}

// Sums of the keys from `first` to `last`, of one segment.
void sum_keys(const Attention& a, const Item& item, Index first, Index last, Scratch& mine, const RowSums& sums) {
    const Index group = a.num_heads / a.num_kv_heads, rows = item.num_queries * group, width = a.width;
    const std::int32_t* table = a.tables + item.sequence * a.table_width;
    const Index plane = a.block_size * width, block = 2 * a.num_kv_heads * plane;
    sums.clear(rows, width);
    for (Index key = first; key < last; key += kKeys) {
        const Index count = std::min(kKeys, last - key);
        const bf16 *key_rows[kKeys] = {}, *value_rows[kKeys] = {};
        Index number = key / a.block_size, within = key % a.block_size;
        for (Index i = 0; i < count; ++i, ++within) {
            if (within == a.block_size) ++number, within = 0;
            key_rows[i] = a.layer + table[number] * block + item.kv_head * plane + within * width;
            value_rows[i] = key_rows[i] + a.num_kv_heads * plane;
        }
        const Index padded = (count + kLanes - 1) / kLanes * kLanes;
        pack_keys(key_rows, padded, width, mine.keys);
        pack_values(value_rows, padded, width, mine.values);
        product_of(rows, padded, mine.queries, width, mine.keys, 2 * kKeys, width / 2, nullptr, mine.scores, kKeys);
        for (Index r = 0; r < rows; ++r) {
            const Index position = item.position + r / group;
            Sums row = sums.row(r, width);
            take_in(mine.scores + r * kKeys, padded, a.scale * kLog2E, first_visible(a, position) - key,
                    std::min(count, position + 1 - key), row, mine.shrink[r], mine.shares + r * kKeys);
        }
        product_of(rows, width, mine.shares, kKeys, mine.values, 2 * width, padded / 2, mine.shrink, sums.values, width);
    }
}

void attend(const Attention& a, const Item& item, Scratch& mine, float* partials) {
    const Index group = a.num_heads / a.num_kv_heads, rows = item.num_queries * group, width = a.width;
    mine.reserve(rows, width);
    for (Index r = 0; r < rows; ++r)
        std::memcpy(mine.queries + r * width,
                    a.q + (item.query + r / group) * a.q_stride + head_of(a, item, r) * width, width * sizeof(bf16));
    if (item.partial >= 0) {
        sum_keys(a, item, item.first, item.last, mine,
                 RowSums::at(partials + RowSums::size(item.partial, width), rows));
        return;
    }
    begin(a, item, rows, mine.result);
    for (Index key = item.first; key < item.last; key = segment_end(key)) {
        sum_keys(a, item, key, std::min(item.last, segment_end(key)), mine, mine.segment);
        for (Index r = 0; r < rows; ++r) fold(mine.segment.row(r, width), mine.result.row(r, width), width);
    }
    finish(a, item, rows, mine.result);
}

void merge(const Attention& a, const Merge& m, Scratch& mine, float* partials) {
    const Index rows = m.tile.num_queries * (a.num_heads / a.num_kv_heads), width = a.width;
    mine.reserve(rows, width);
    begin(a, m.tile, rows, mine.result);
    for (Index s = 0; s < m.count; ++s) {
        const RowSums segment = RowSums::at(partials + RowSums::size(m.partial + s * rows, width), rows);
        for (Index r = 0; r < rows; ++r) fold(segment.row(r, width), mine.result.row(r, width), width);
    }
    finish(a, m.tile, rows, mine.result);
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
    const Index needed = RowSums::size(plan.partials, a.width);
    if (Index(partial_results.size()) < needed) partial_results.resize(needed);
    float* partials = partial_results.data();
    const std::vector<Item>& items = plan.items;
    const std::vector<Merge>& merges = plan.merges;
    for_each_item(Index(items.size()), [&](Index i) { attend(a, items[i], scratch(), partials); });
    for_each_item(Index(merges.size()), [&](Index i) { merge(a, merges[i], scratch(), partials); });
}
