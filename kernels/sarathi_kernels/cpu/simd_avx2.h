// Eight floats in a register of AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace sarathi {

typedef float Part __attribute__((vector_size(32)));
typedef uint32_t PartBits __attribute__((vector_size(32)));
typedef int32_t PartInts __attribute__((vector_size(32)));

inline Part repeat(float x) { return _mm256_set1_ps(x); }
inline Part fma(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
inline Part max(Part a, Part b) { return _mm256_max_ps(a, b); }  // the second if one is NaN
inline Part min(Part a, Part b) { return _mm256_min_ps(a, b); }
inline Part nearest(Part x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline bool exceeds(Part a, Part b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)); }  // anywhere

inline float reduce_add(Part x) {
    const __m128 fours = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    const __m128 twos = fours + _mm_movehl_ps(fours, fours);
    return twos[0] + twos[1];
}

inline Part load_part(const float* from) { return _mm256_loadu_ps(from); }

inline Part load_part(const bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline void store(float* to, Part x) { _mm256_storeu_ps(to, x); }

}  // namespace sarathi
