// What one instruction multiplies and adds up for each column: two inputs in bfloat16, which lie together in 4 bytes.
#pragma once

#include "simd.h"

namespace sarathi {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define SARATHI_PAIRS
constexpr bool HAS_PAIRS = true;
typedef int32_t Ints __attribute__((vector_size(64)));

inline Vector dot(Vector sum, Ints inputs, Ints weights) { return _mm512_dpbf16_ps(sum, (__m512bh)inputs, (__m512bh)weights); }

// In its register: GCC may read weights again for every row instead, at half the speed.
inline void stay(Ints& x) { asm("" : "+v"(x)); }

inline Ints load_ints(const void* from) {
    Ints ints;
    std::memcpy(&ints, from, sizeof ints);
    return ints;
}
#else
constexpr bool HAS_PAIRS = false;
#endif

}  // namespace sarathi
