// What the kernels share: bfloat16 in AVX-512 registers, and the one product they are all made of.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))

namespace tandem {

using bf16 = std::uint16_t;
using Index = std::ptrdiff_t;

constexpr Index kLanes = 16;    // float32 elements of a register
constexpr Index kColumns = 64;  // output columns of a packed block: four registers

inline __mmask16 first_lanes(Index count) {
    return count >= kLanes ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

inline __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 load(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

inline __m512 load(const bf16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }

// Rounds to nearest even; subnormal results become zero.
inline void store(bf16* to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

inline void store(bf16* to, __m512 values, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

inline void store(float* to, __m512 values, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, values); }

// 2^x. The remainder is within [-1/2, 1/2], where a Taylor polynomial of degree 6 is exact to 2e-7; minus infinity
// gives 0, what is not a number stays so.
inline __m512 exp2(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_maskz_sub_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-200.0f), _CMP_GT_OQ), x, whole);
    __m512 sum = _mm512_set1_ps(1.5403530e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3333558e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, _mm512_max_ps(_mm512_set1_ps(-200.0f), whole));
}

constexpr float kLog2E = 1.44269504f;

// x * sigmoid(x)
inline __m512 silu(__m512 x) {
    const __m512 decay = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), decay));
}

// sums[r][v] += rows[r] * block, for a block of `pairs` x [16 V columns] x 2: two neighbours of the inner dimension
// stand together, as the instruction that multiplies bfloat16 wants them. Distances are in elements. `ahead` bytes of
// the block are asked for early; 0 where it is in the cache.
template <int R, int V, Index ahead = 0>
inline void multiply(__m512 (&sums)[R][V], const bf16* rows, Index row_stride, const bf16* block, Index pair_stride,
                     Index pairs) {
    for (Index pair = 0; pair < pairs; ++pair) {
        const bf16* line = block + pair * pair_stride;
        __m512bh columns[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            columns[v] = (__m512bh)_mm512_loadu_si512(line + v * 2 * kLanes);
            if constexpr (ahead > 0)
                _mm_prefetch(reinterpret_cast<const char*>(line + v * 2 * kLanes) + ahead, _MM_HINT_T0);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            std::int32_t both;
            std::memcpy(&both, rows + r * row_stride + 2 * pair, sizeof both);
            const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], value, columns[v]);
        }
    }
}

}  // namespace tandem
