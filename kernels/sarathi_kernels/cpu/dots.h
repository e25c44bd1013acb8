// What one instruction multiplies and adds up for each column: inputs that lie together in 4 bytes, four in int8 or two in
// bfloat16.
#pragma once

#include "simd.h"

namespace sarathi {

// `dot` adds to each column's sum the products of four inputs and four weights. Where it takes unsigned inputs these are
// 128 too large, and the sums begin as much too small.
#if defined(__AVX512VNNI__)
typedef int32_t Ints __attribute__((vector_size(64)));
constexpr bool IS_UNSIGNED = true;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(inputs),
                                                      reinterpret_cast<__m512i>(weights)));
}
#elif defined(__AVX2__)
typedef int32_t Ints __attribute__((vector_size(32)));
#ifdef __AVXVNNI__
constexpr bool IS_UNSIGNED = true;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(inputs), reinterpret_cast<__m256i>(weights)));
}
#else
constexpr bool IS_UNSIGNED = false;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {  // |x| times w with x's sign: two of them fit into 16 bits
    const __m256i x = reinterpret_cast<__m256i>(inputs), w = reinterpret_cast<__m256i>(weights);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
    return sum + reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
#else
using Ints = int32x4_t;
constexpr bool IS_UNSIGNED = false;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {
    const int8x16_t x = vreinterpretq_s8_s32(inputs), w = vreinterpretq_s8_s32(weights);
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, w, x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(w)), high = vmull_high_s8(x, w);
    return sum + vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}
#endif

// In its register: GCC may read weights again for every row instead, at half the speed.
inline void stay([[maybe_unused]] Ints& x) {
#ifdef __AVX2__
    asm("" : "+v"(x));
#endif
}

inline Ints load_ints(const void* from) {
    Ints ints;
    std::memcpy(&ints, from, sizeof ints);
    return ints;
}

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr bool HAS_PAIRS = true;
inline Vector dot(Vector sum, Ints inputs, Ints weights) { return _mm512_dpbf16_ps(sum, (__m512bh)inputs, (__m512bh)weights); }
#else
constexpr bool HAS_PAIRS = false;
#endif

// What sums of inputs of type T are kept in.
template <class T>
struct Dots {
    using Sum = Ints;
};
template <>
struct Dots<bf16> {
    using Sum = Vector;
};

}  // namespace sarathi
