// Making and multiplying matrices of 12 bits per weight (split.h). A pair of columns is decoded in registers to what the
// plain kernel multiplies, in the same order, so sums are equal in every bit. Needs AVX-512 VBMI.
#include "split.h"

#include <array>
#include <atomic>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "product.h"

namespace tandem {
namespace {

constexpr Index kAhead = 4096;  // bytes, as of plain weights
constexpr int kHighs = 128;      // values of seven bits of exponent
constexpr std::uint8_t kNoCode = 0xff;

using Byte = std::uint8_t;
using Pair = __m512bh[4];

inline __m512i bytes(const void* from) { return _mm512_loadu_si512(from); }

template <bool cold>
[[gnu::always_inline]] inline void decode(const Byte* group, __m512i values, Pair& columns) {
    const __m512i first = bytes(group), second = bytes(group + 64), codes = bytes(group + 128);
    if constexpr (cold)
        for (int line = 0; line < 3; ++line)
            _mm_prefetch(reinterpret_cast<const char*>(group) + kAhead + 64 * line, _MM_HINT_T0);
    const __m512i high = _mm512_permutexvar_epi8(codes, values);  // takes the six lowest bits of each byte
    const __m512i other = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), values);
    columns[0] = (__m512bh)_mm512_unpacklo_epi8(first, high);
    columns[1] = (__m512bh)_mm512_unpackhi_epi8(first, high);
    columns[2] = (__m512bh)_mm512_unpacklo_epi8(second, other);
    columns[3] = (__m512bh)_mm512_unpackhi_epi8(second, other);
}

// Puts in place what is written beside a pair; returns what follows it.
[[gnu::always_inline]] inline const std::uint32_t* mend(Pair& columns, const std::uint32_t* beside) {
    alignas(64) bf16 pair[2 * kColumns];
    for (int v = 0; v < 4; ++v) _mm512_store_si512(pair + v * 2 * kLanes, (__m512i)columns[v]);
    std::uint32_t entry;
    do {
        entry = *beside++;
        pair[entry >> 16 & 127] = bf16(entry);
    } while (!(entry >> 31));
    for (int v = 0; v < 4; ++v) columns[v] = (__m512bh)_mm512_load_si512(pair + v * 2 * kLanes);
    return beside;
}

struct Split {
    const Byte* memory;
    SplitPlaces places;

    Split(const Byte* memory, Index columns, Index inner) : memory(memory), places(columns, inner) {}

    // High bytes of a block's sixteen codes, sign and value, four times over.
    __m512i values_of(Index block) const {
        std::uint64_t plain;
        std::memcpy(&plain, memory + places.values + block * kCodes, sizeof plain);
        constexpr std::uint64_t kSigns = 0x80'80'80'80'80'80'80'80;
        return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)(plain | kSigns), (long long)plain));
    }

    // `take(pair, columns)` for each pair of a block, in order.
    template <bool cold, class Take>
    [[gnu::always_inline]] inline void for_each_pair(Index block, Take take) const {
        const __m512i values = values_of(block);
        const Byte* group = memory + places.groups + block * places.pairs * kGroup;
        const auto* flags = reinterpret_cast<const std::uint64_t*>(memory + places.flags) + block * places.words;
        const auto* beside = reinterpret_cast<const std::uint32_t*>(memory + places.beside) +
                             reinterpret_cast<const std::uint32_t*>(memory + places.first)[block];
        for (Index word = 0; word < places.words; ++word) {
            std::uint64_t flagged = flags[word];
            const Index end = std::min(places.pairs, (word + 1) * 64);
            for (Index pair = word * 64; pair < end;) {
                const Index stop = flagged ? word * 64 + __builtin_ctzll(flagged) : end;
                for (; pair < stop; ++pair, group += kGroup) {
                    Pair columns;
                    decode<cold>(group, values, columns);
                    take(pair, columns);
                }
                if (pair == end) break;
                Pair columns;
                decode<cold>(group, values, columns);
                beside = mend(columns, beside);
                take(pair, columns);
                flagged &= flagged - 1;
                ++pair, group += kGroup;
            }
        }
    }

    // One row of the matrix, plain, to `to` [K].
    void read_row(Index row, bf16* to) const {
        const Index block = row / kColumns;
        take_row(block, row % kColumns, to);
        mend_row(block, row % kColumns, to);
    }

   private:
    // A pair has two bytes of each kind of a row, next to each other, and a line of either to itself: what takes time is
    // to wait for them, so they are asked for early, and decoded when there are enough for a register.
    void take_row(Index block, int lane, bf16* to) const {
        constexpr Index kPairs = kLanes * 2, kEarly = 16;
        const int half = lane / 32, within = 2 * (lane % 32);  // of a half's 64 weights, two neighbours of K are a column's
        const int at = within < 32 ? within / 8 * 16 + within % 8 : (within - 32) / 8 * 16 + 8 + within % 8;
        const Byte* low = memory + places.groups + block * places.pairs * kGroup + 64 * half + at;
        const Byte* code = low - 64 * half + 128;
        const __m512i values = values_of(block);
        alignas(64) std::uint16_t lows[kPairs], codes[kPairs];
        for (Index first = 0; first < places.pairs; first += kPairs) {
            const Index count = std::min(kPairs, places.pairs - first);
            for (Index i = 0; i < count; ++i, low += kGroup, code += kGroup) {
                _mm_prefetch(reinterpret_cast<const char*>(low) + kEarly * kGroup, _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(code) + kEarly * kGroup, _MM_HINT_T0);
                std::memcpy(lows + i, low, 2);
                std::memcpy(codes + i, code, 2);
            }
            const __m512i nibbles = _mm512_srli_epi16(_mm512_load_si512(codes), 4 * half);
            const __m512i high = _mm512_permutexvar_epi8(nibbles, values), plain = _mm512_load_si512(lows);
            // Of 64 weights the first 8 of each 16 bytes, then the others.
            const __m512i sooner = _mm512_unpacklo_epi8(plain, high), later = _mm512_unpackhi_epi8(plain, high);
            const __m512i even = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), odd = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
            bf16* const out = to + 2 * first;
            store_some(out, _mm512_permutex2var_epi64(sooner, even, later), 2 * count);
            store_some(out + kPairs, _mm512_permutex2var_epi64(sooner, odd, later), 2 * count - kPairs);
        }
    }

    static void store_some(bf16* to, __m512i weights, Index count) {
        const __mmask32 mask = count >= 32 ? ~__mmask32(0) : count <= 0 ? 0 : (__mmask32(1) << count) - 1;
        _mm512_mask_storeu_epi16(to, mask, weights);
    }

    void mend_row(Index block, int lane, bf16* to) const {
        const auto* flags = reinterpret_cast<const std::uint64_t*>(memory + places.flags) + block * places.words;
        const auto* beside = reinterpret_cast<const std::uint32_t*>(memory + places.beside) +
                             reinterpret_cast<const std::uint32_t*>(memory + places.first)[block];
        for (Index word = 0; word < places.words; ++word)
            for (std::uint64_t flagged = flags[word]; flagged; flagged &= flagged - 1) {
                const Index pair = word * 64 + __builtin_ctzll(flagged);
                std::uint32_t entry;
                do {
                    entry = *beside++;
                    const int place = entry >> 16 & 127;
                    if (place / 2 == lane) to[2 * pair + place % 2] = bf16(entry);
                } while (!(entry >> 31));
            }
    }
};

template <int R>
[[gnu::always_inline]] inline void add(__m512 (&sums)[R][4], const bf16* rows, Index row_stride, Index pair, const Pair& columns) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        std::int32_t both;
        std::memcpy(&both, rows + r * row_stride + 2 * pair, sizeof both);
        const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], value, columns[v]);
    }
}

[[gnu::always_inline]] inline void keep(bf16* to, const Pair& columns) {
    for (int v = 0; v < 4; ++v) _mm512_storeu_si512(to + v * 2 * kLanes, (__m512i)columns[v]);
}

// Blocks that an item's first rows decoded, for the others.
struct Kept {
    const bf16* blocks;  // one, or two where gate and up are
    Index inner;

    template <int R>
    void multiply(__m512 (&sums)[R][4], const bf16* rows, Index row_stride, Index, bool second) const {
        tandem::multiply<R, 4, 0>(sums, rows, row_stride, blocks + second * kColumns * inner, 2 * kColumns, inner / 2);
    }
};

struct Decoding {
    const Split& split;
    bf16* kept;  // null: nobody needs the block again

    Kept again() const { return {kept, 2 * split.places.pairs}; }

    // Inline, or the sums are kept in memory.
    template <int R>
    [[gnu::always_inline]] inline void multiply(__m512 (&sums)[R][4], const bf16* rows, Index row_stride, Index block,
                                                bool second) const {
        if (!kept) {
            split.for_each_pair<true>(block, [&](Index pair, const Pair& columns) __attribute__((always_inline)) {
                add<R>(sums, rows, row_stride, pair, columns);
            });
            return;
        }
        bf16* to = kept + second * split.places.pairs * 2 * kColumns;
        split.for_each_pair<true>(block, [&](Index pair, const Pair& columns) __attribute__((always_inline)) {
            keep(to + pair * 2 * kColumns, columns);
            add<R>(sums, rows, row_stride, pair, columns);
        });
    }
};

// A line of the cache: a product's loads are not to lie across two.
struct alignas(64) Line {
    static constexpr std::size_t kSize = 32;
    bf16 weights[kSize];
};

struct SplitForm {
    Split split;
    Index num_blocks_kept;

    Decoding begin(bool more) const {
        static thread_local std::vector<Line> kept;
        const std::size_t size = num_blocks_kept * split.places.pairs * 2 * kColumns / Line::kSize;
        if (more && kept.size() < size) kept.resize(size);
        return {split, more ? kept.data()->weights : nullptr};
    }
};

// ---------------------------------------------------------------- making them

struct Halves {  // a pair's bytes, as the groups have them
    __m512i low[2], high[2];
};

inline Halves take_apart(const bf16* pair) {
    const __m512i mask = _mm512_set1_epi16(0xff);
    Halves out;
    for (int half = 0; half < 2; ++half) {
        const __m512i a = bytes(pair + half * 64), b = bytes(pair + half * 64 + 32);
        out.low[half] = _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
        out.high[half] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    }
    return out;
}

// Place within a pair of byte `at` of half `half`.
inline std::uint32_t place_of(int half, int at) {
    const int lane = at / 16, within = at % 16;
    return 64 * half + (within < 8 ? 8 * lane + within : 32 + 8 * lane + within - 8);
}

// Code of each value of the high byte without its sign.
struct Codes {
    __m512i lower, upper;

    explicit Codes(const std::array<Byte, kHighs>& codes) : lower(bytes(codes.data())), upper(bytes(codes.data() + 64)) {}

    // Uses the seven lowest bits of each byte.
    __m512i of(__m512i high) const { return _mm512_permutex2var_epi8(lower, high, upper); }
};

std::array<Byte, kHighs> codes_of(const Byte* values) {
    std::array<Byte, kHighs> codes;
    codes.fill(kNoCode);
    for (int code = 0; code < kCodes; ++code) codes[values[code]] = Byte(code);
    return codes;
}

std::array<Index, kHighs> count_highs(const bf16* packed, const SplitPlaces& places) {
    std::array<std::atomic<Index>, kHighs> all{};
    for_each_item(places.blocks, [&](Index block) {
        std::uint32_t counts[4][kHighs] = {};  // four, or equal neighbours wait for each other
        const bf16* from = packed + block * places.pairs * 2 * kColumns;
        for (Index at = 0; at < places.pairs * 2 * kColumns; at += 4)
            for (int lane = 0; lane < 4; ++lane) ++counts[lane][from[at + lane] >> 8 & 127];
        for (int high = 0; high < kHighs; ++high)
            all[high] += counts[0][high] + counts[1][high] + counts[2][high] + counts[3][high];
    });
    std::array<Index, kHighs> counts;
    std::copy(all.begin(), all.end(), counts.begin());
    return counts;
}

void encode_block(const bf16* from, const SplitPlaces& places, const Codes& codes, Index block, Byte* memory) {
    Byte* group = memory + places.groups + block * places.pairs * kGroup;
    auto* flags = reinterpret_cast<std::uint64_t*>(memory + places.flags) + block * places.words;
    auto* beside = reinterpret_cast<std::uint32_t*>(memory + places.beside) +
                   reinterpret_cast<const std::uint32_t*>(memory + places.first)[block];
    const __m512i none = _mm512_set1_epi8(char(kNoCode)), seven = _mm512_set1_epi8(7), sign = _mm512_set1_epi8(8);
    std::fill(flags, flags + places.words, 0);
    for (Index pair = 0; pair < places.pairs; ++pair, group += kGroup, from += 2 * kColumns) {
        const Halves halves = take_apart(from);
        __m512i nibbles[2];
        bool any = false;
        for (int half = 0; half < 2; ++half) {
            const __m512i code = codes.of(halves.high[half]);
            for (std::uint64_t mask = _mm512_cmpeq_epi8_mask(code, none); mask; mask &= mask - 1, any = true) {
                const std::uint32_t place = place_of(half, __builtin_ctzll(mask));
                *beside++ = place << 16 | from[place];
            }
            const __m512i negative = _mm512_and_si512(_mm512_srli_epi16(halves.high[half], 4), sign);
            nibbles[half] = _mm512_or_si512(_mm512_and_si512(code, seven), negative);
            _mm512_storeu_si512(group + 64 * half, halves.low[half]);
        }
        _mm512_storeu_si512(group + 128, _mm512_or_si512(nibbles[0], _mm512_slli_epi16(nibbles[1], 4)));
        if (any) {
            flags[pair / 64] |= std::uint64_t(1) << pair % 64;
            beside[-1] |= std::uint32_t(1) << 31;
        }
    }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Values of the high byte without its sign in the matrix `packed`, in the layout of linear.cpp: how many there are of each,
// added to `counts` [128].
TANDEM_EXPORT void tandem_split_count(const bf16* packed, Index columns, Index inner, Index* counts) {
    const auto found = count_highs(packed, SplitPlaces(columns, inner));
    for (int high = 0; high < kHighs; ++high) counts[high] += found[high];
}

// The matrix `packed` as 12 bits a weight to `memory`, which has room for it with its `num_beside` weights that have none
// of `values`.
TANDEM_EXPORT void tandem_split_pack(const bf16* packed, Index columns, Index inner, const Byte* values, Index num_beside,
                                     Byte* memory) {
    const SplitPlaces places(columns, inner);
    const SplitHead head{kSplitMagic, 1, std::uint64_t(places.beside + 4 * num_beside), std::uint64_t(num_beside), {}};
    std::memcpy(memory, &head, sizeof head);
    for (Index block = 0; block < places.blocks; ++block)
        std::memcpy(memory + places.values + block * kCodes, values, kCodes);
    const auto table = codes_of(values);
    const Codes codes(table);
    auto* first = reinterpret_cast<std::uint32_t*>(memory + places.first);
    const __m512i none = _mm512_set1_epi8(char(kNoCode));
    const Index elements = places.pairs * 2 * kColumns;
    for_each_item(places.blocks, [&](Index block) {
        Index count = 0;
        for (Index at = 0; at < elements; at += 2 * kColumns) {
            const Halves halves = take_apart(packed + block * elements + at);
            for (const __m512i high : halves.high)
                count += __builtin_popcountll(_mm512_cmpeq_epi8_mask(codes.of(high), none));
        }
        first[block] = std::uint32_t(count);
    });
    std::exclusive_scan(first, first + places.blocks, first, std::uint32_t(0));
    for_each_item(places.blocks,
                  [&](Index block) { encode_block(packed + block * elements, places, codes, block, memory); });
}

// The other way round.
TANDEM_EXPORT void tandem_split_unpack(const Byte* memory, Index columns, Index inner, bf16* packed) {
    const Split split(memory, columns, inner);
    for_each_item(split.places.blocks, [&](Index block) {
        bf16* to = packed + block * inner * kColumns;
        split.for_each_pair<true>(block, [&](Index pair, const Pair& columns) { keep(to + pair * 2 * kColumns, columns); });
    });
}

// Rows `ids` of the matrix, plain, to `out` [count, K].
TANDEM_EXPORT void tandem_split_rows(const Byte* memory, Index columns, Index inner, const std::int64_t* ids, Index count,
                                     bf16* out) {
    const Split split(memory, columns, inner);
    for_each_item(count, [&](Index item) { split.read_row(ids[item], out + item * inner); });
}

// As tandem_linear, of a matrix in this form.
TANDEM_EXPORT void tandem_split_linear(const Byte* weight, Index columns, Index inner, const bf16* x, Index x_stride,
                                       Index rows, const bf16* bias, const bf16* residual, bf16* out) {
    run<Plainly>(Product<bf16>{columns, inner, x, x_stride, bias, residual, out}, rows,
                 SplitForm{{weight, columns, inner}, 1});
}

TANDEM_EXPORT void tandem_split_linear_float32(const Byte* weight, Index columns, Index inner, const bf16* x,
                                               Index x_stride, Index rows, const bf16* bias, float* out) {
    run<Plainly>(Product<float>{columns, inner, x, x_stride, bias, nullptr, out}, rows,
                 SplitForm{{weight, columns, inner}, 1});
}

TANDEM_EXPORT void tandem_split_gate_up_silu(const Byte* weight, Index columns, Index inner, const bf16* x,
                                             Index x_stride, Index rows, const bf16* bias, bf16* out) {
    run<Gated>(Product<bf16>{columns, inner, x, x_stride, bias, nullptr, out}, rows,
               SplitForm{{weight, 2 * columns, inner}, 2});
}
