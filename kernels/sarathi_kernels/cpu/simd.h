// Sixteen floats at a time: loads, conversions, exponentials, transposes. Each instruction set has a header with what one
// of its registers does, a `Part`; one of AVX512 is all of a `Vector`, of the others it takes several (`simd_pair.h`).
// A `Mask` is the first few lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

namespace sarathi {

using bf16 = uint16_t;
constexpr int64_t LANES = 16;

// Buffers begin at a cache line: a tile whose rows lie across two takes twice as long to read.
template <class T>
struct AtCacheLine {
    using value_type = T;
    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* from, std::size_t) { ::operator delete(from, std::align_val_t(64)); }
    bool operator==(const AtCacheLine&) const { return true; }
};
using Floats = std::vector<float, AtCacheLine<float>>;

// To bfloat16, of vectors `W` of the floats' bits. To the nearest, ties to even; a NaN must not be rounded up to
// infinity's neighbour, zero.
template <class W>
inline W bf16_bits(W raw) {
    return (raw & 0x7FFFFFFF) > 0x7F800000 ? W{} + 0x7FC0 : (raw + ((raw >> 16 & 1) + 0x7FFF)) >> 16;
}

}  // namespace sarathi

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "neither AVX512 nor AVX2 with FMA and F16C nor NEON"
#endif

namespace sarathi {

// Pairs of bfloat16, read as floats: the first of each, and the second.
inline Part first_of_pairs(Part both) { return reinterpret_cast<Part>(reinterpret_cast<PartBits>(both) << 16); }
inline Part second_of_pairs(Part both) { return reinterpret_cast<Part>(reinterpret_cast<PartBits>(both) & 0xFFFF0000); }

}  // namespace sarathi

#ifndef __AVX512F__
#include "simd_pair.h"
#endif

namespace sarathi {

// 2^x, x up to 127, by a polynomial of so high a degree: 6 is about float's precision, 4 more than bfloat16's. NaN stays
// NaN, and what is below float's range, -infinity too, gives 0.
template <int Degree>
inline Vector power_of_two(Vector x) {
    Vector whole;
    const Vector r = fraction(x, whole);
    constexpr float COEFFICIENTS[] = {1.0f,           0.693147181f,   0.240226507f,  0.0555041087f,
                                      0.00961812911f, 0.00133335581f, 0.000154035304f};  // (ln 2)^i / i!
    Vector p = broadcast(COEFFICIENTS[Degree]);
#pragma GCC unroll 8
    for (int i = Degree - 1; i >= 0; --i) {
        p = fma(p, r, broadcast(COEFFICIENTS[i]));
    }
    return scale(p, whole);
}

// e^x to about one unit in the last place; NaN stays NaN, what is below float's range gives 0, and above e^88 that.
inline Vector exponential(Vector x) {
    x = min(broadcast(88.0f), max(broadcast(-200.0f), x));  // the second if NaN
    const Vector n = nearest(x * broadcast(1.44269504f));
    Vector r = fma(n, broadcast(-0.693359375f), x);  // ln 2 in two parts
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vector p = broadcast(1.0f / 5040);  // Taylor's series on |r| < 0.35
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = fma(p, r, broadcast(c));
    }
    return scale(p, n);
}

}  // namespace sarathi
