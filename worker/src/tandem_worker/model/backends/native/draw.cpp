// Noise of draws: Philox4x32-10 for 16 counters at a time. host/philox.py says what it is for, and is its oracle.
#include <algorithm>

#include "simd.h"

namespace tandem {
namespace {

constexpr int kRounds = 10;

struct Counters {
    __m512i words[4];
};

// The halves of 16 products of 32 bits by 32 bits.
inline void multiply_whole(__m512i x, std::uint32_t factor, __m512i& high, __m512i& low) {
    const __m512i by = _mm512_set1_epi32(int(factor));
    const __m512i even = _mm512_mul_epu32(x, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), by);
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}

inline Counters draw(std::uint64_t seed, std::uint32_t choice, std::uint32_t position, __m512i quads) {
    Counters c = {{_mm512_set1_epi32(int(position)), _mm512_set1_epi32(int(choice)), quads, _mm512_setzero_si512()}};
    std::uint32_t key[2] = {std::uint32_t(seed), std::uint32_t(seed >> 32)};
    for (int round = 0; round < kRounds; ++round) {
        __m512i high[2], low[2];
        multiply_whole(c.words[0], 0xd2511f53u, high[0], low[0]);
        multiply_whole(c.words[2], 0xcd9e8d57u, high[1], low[1]);
        c.words[0] = _mm512_ternarylogic_epi32(high[1], c.words[1], _mm512_set1_epi32(int(key[0])), 0x96);
        c.words[1] = low[1];
        c.words[2] = _mm512_ternarylogic_epi32(high[0], c.words[3], _mm512_set1_epi32(int(key[1])), 0x96);
        c.words[3] = low[0];
        key[0] += 0x9e3779b9u;
        key[1] += 0xbb67ae85u;
    }
    return c;
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Words of the tokens from 0 to `count` to `out` [count].
TANDEM_EXPORT void tandem_draw_all(std::uint64_t seed, std::uint32_t choice, std::uint32_t position, Index count,
                                   std::uint32_t* out) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    alignas(64) std::uint32_t words[4][kLanes];
    for (Index first = 0; first < count; first += 4 * kLanes) {
        const Counters c = draw(seed, choice, position, _mm512_add_epi32(lanes, _mm512_set1_epi32(int(first / 4))));
        // A 4 x 16 matrix is turned: lanes of 128 bits of the pairs, which then go to their places.
        const __m512i a = _mm512_unpacklo_epi32(c.words[0], c.words[1]), b = _mm512_unpackhi_epi32(c.words[0], c.words[1]);
        const __m512i d = _mm512_unpacklo_epi32(c.words[2], c.words[3]), e = _mm512_unpackhi_epi32(c.words[2], c.words[3]);
        const __m512i parts[4] = {_mm512_unpacklo_epi64(a, d), _mm512_unpackhi_epi64(a, d), _mm512_unpacklo_epi64(b, e),
                                  _mm512_unpackhi_epi64(b, e)};  // part p has quads p, p + 4, p + 8, p + 12
        if (count - first >= 4 * kLanes) {
            for (int p = 0; p < 4; ++p) {
                std::uint32_t* to = out + first + 4 * p;
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_extracti32x4_epi32(parts[p], 0));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_extracti32x4_epi32(parts[p], 1));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32), _mm512_extracti32x4_epi32(parts[p], 2));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 48), _mm512_extracti32x4_epi32(parts[p], 3));
            }
            continue;
        }
        for (int word = 0; word < 4; ++word) _mm512_store_si512(words[word], c.words[word]);
        for (Index token = first; token < count; ++token) out[token] = words[token % 4][(token - first) / 4];
    }
}

// Words of `tokens` [count] to `out` [count].
TANDEM_EXPORT void tandem_draw_some(std::uint64_t seed, std::uint32_t choice, std::uint32_t position,
                                    const std::int64_t* tokens, Index count, std::uint32_t* out) {
    alignas(64) std::uint32_t quads[kLanes] = {}, words[4][kLanes];
    for (Index first = 0; first < count; first += kLanes) {
        const Index here = std::min<Index>(kLanes, count - first);
        for (Index i = 0; i < here; ++i) quads[i] = std::uint32_t(tokens[first + i] >> 2);
        const Counters c = draw(seed, choice, position, _mm512_load_si512(quads));
        for (int word = 0; word < 4; ++word) _mm512_store_si512(words[word], c.words[word]);
        for (Index i = 0; i < here; ++i) out[first + i] = words[tokens[first + i] & 3][i];
    }
}
