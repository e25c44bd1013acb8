// A vector of several registers, of which an instruction set's header tells what one does: a pair of halves, which are
// such a `Part` or pairs themselves. A mask is a count.
#pragma once

#include <bit>

namespace sarathi {

constexpr int SUMS = 6;  // vectors of a product's results kept in registers, beside a weight and one input
constexpr int ROWS = 6;  // of a product that are computed together

// x 2^n, for n up to 127; zero where that is below float's range.
inline Part scale(Part x, Part n) {
    const auto exponents = reinterpret_cast<PartBits>(__builtin_convertvector(n, PartInts)) << 23;
    return n < -126.0f ? Part{} : reinterpret_cast<Part>(reinterpret_cast<PartBits>(x) + exponents);
}

template <class H>
struct Pair {
    H low, high;
    static constexpr int64_t HALF = sizeof(H) / sizeof(float);
    friend Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
    friend Pair operator-(Pair a, Pair b) { return {a.low - b.low, a.high - b.high}; }
    friend Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
    friend Pair operator/(Pair a, Pair b) { return {a.low / b.low, a.high / b.high}; }
    friend Pair operator-(Pair a) { return {-a.low, -a.high}; }
    friend Pair fma(Pair a, Pair b, Pair c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
    friend Pair max(Pair a, Pair b) { return {max(a.low, b.low), max(a.high, b.high)}; }
    friend Pair min(Pair a, Pair b) { return {min(a.low, b.low), min(a.high, b.high)}; }
    friend Pair first_of_pairs(Pair x) { return {first_of_pairs(x.low), first_of_pairs(x.high)}; }
    friend Pair second_of_pairs(Pair x) { return {second_of_pairs(x.low), second_of_pairs(x.high)}; }
    friend Pair nearest(Pair x) { return {nearest(x.low), nearest(x.high)}; }
    friend Pair scale(Pair x, Pair n) { return {scale(x.low, n.low), scale(x.high, n.high)}; }
    friend void store(float* to, Pair x) { store(to, x.low), store(to + HALF, x.high); }
    friend float reduce_add(Pair x) { return reduce_add(x.low + x.high); }
    friend bool exceeds(Pair a, Pair b) { return exceeds(a.low, b.low) || exceeds(a.high, b.high); }
};
using Vector = std::conditional_t<sizeof(Part) == 32, Pair<Part>, Pair<Pair<Part>>>;

struct Mask {
    int64_t count;
};
inline Mask lanes(int64_t count) { return {std::clamp<int64_t>(count, 0, LANES)}; }
inline int64_t count_of(Mask mask) { return mask.count; }

// Calls `make(lane)` for the first lane of each part.
template <class V = Vector, class Make>
inline V each_part(Make&& make, int64_t lane = 0) {
    if constexpr (sizeof(V) == sizeof(Part)) {
        return make(lane);
    } else {
        return {each_part<decltype(V::low)>(make, lane), each_part<decltype(V::low)>(make, lane + V::HALF)};
    }
}

inline bf16 converted(float x, bf16) { return bf16_bits(std::bit_cast<uint32_t>(x)); }

template <class T>
inline void store(T* to, Vector x) {
    float values[LANES];
    store(values, x);
    for (int64_t i = 0; i < LANES; ++i) {
        to[i] = converted(values[i], T{});
    }
}

template <class T>
inline void store(T* to, Vector x, Mask mask) {
    if (mask.count == LANES) {
        return store(to, x);
    }
    T values[LANES];
    store(values, x);
    std::copy_n(values, mask.count, to);
}

inline Vector broadcast(float x) {
    return each_part([&](int64_t) { return repeat(x); });
}

template <class T>
inline Vector load(const T* from) {
    return each_part([&](int64_t lane) { return load_part(from + lane); });
}

template <class T>
inline Vector load(const T* from, Mask mask, Vector elsewhere = broadcast(0.0f)) {
    if (mask.count == LANES) {
        return load(from);
    }
    T values[LANES];
    store(values, elsewhere);
    std::copy_n(from, mask.count, values);
    return load(values);
}

// Zero elsewhere.
inline Vector keep(Vector x, Mask mask) {
    float values[LANES];
    store(values, x);
    return load(values, mask);
}

// What is left of x beside a whole number.
inline Vector fraction(Vector x, Vector& whole) {
    x = max(broadcast(-200.0f), x);  // the second if NaN
    whole = nearest(x);
    return x - whole;
}

inline uint32_t nan_lanes(Vector x) { return exceeds(x, x); }  // whether there are any

inline float reduce_max(Vector x) {
    float values[LANES];
    store(values, x);
    return *std::max_element(values, values + LANES);
}

// The sum of each of four vectors, the first `count` of which are stored.
inline void store_sums(float* to, const Vector (&x)[4], int64_t count) {
    for (int64_t i = 0; i < std::min<int64_t>(4, count); ++i) {
        to[i] = reduce_add(x[i]);
    }
}

// Rows become columns.
inline void transpose(Vector (&x)[LANES]) {
    float values[LANES][LANES], row[LANES];
    for (int64_t i = 0; i < LANES; ++i) {
        store(row, x[i]);
        for (int64_t j = 0; j < LANES; ++j) {
            values[j][i] = row[j];
        }
    }
    for (int64_t i = 0; i < LANES; ++i) {
        x[i] = load(values[i]);
    }
}

}  // namespace sarathi
