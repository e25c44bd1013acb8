// A vector of several registers, of which an instruction set's header tells what one does: a pair of halves, which are
// such a `Part` or pairs themselves. A mask is a count.
#pragma once

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
    friend Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
    friend Pair operator-(Pair a, Pair b) { return {a.low - b.low, a.high - b.high}; }
    friend Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
    friend Pair operator/(Pair a, Pair b) { return {a.low / b.low, a.high / b.high}; }
    friend Pair operator-(Pair a) { return {-a.low, -a.high}; }
    friend Pair fma(Pair a, Pair b, Pair c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
    friend Pair max(Pair a, Pair b) { return {max(a.low, b.low), max(a.high, b.high)}; }
    friend Pair min(Pair a, Pair b) { return {min(a.low, b.low), min(a.high, b.high)}; }
    friend Pair nearest(Pair x) { return {nearest(x.low), nearest(x.high)}; }
    friend Pair scale(Pair x, Pair n) { return {scale(x.low, n.low), scale(x.high, n.high)}; }
    friend float reduce_add(Pair x) { return reduce_add(x.low + x.high); }
    friend float reduce_max(Pair x) { return reduce_max(max(x.low, x.high)); }
    friend bool exceeds(Pair a, Pair b) { return exceeds(a.low, b.low) | exceeds(a.high, b.high); }
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
        using H = decltype(V::low);
        return {each_part<H>(make, lane), each_part<H>(make, lane + static_cast<int64_t>(sizeof(H) / sizeof(float)))};
    }
}

// And `use(part, lane)`.
template <class V, class Use>
inline void for_parts(V x, Use&& use, int64_t lane = 0) {
    if constexpr (sizeof(V) == sizeof(Part)) {
        use(x, lane);
    } else {
        for_parts(x.low, use, lane);
        for_parts(x.high, use, lane + static_cast<int64_t>(sizeof(x.low) / sizeof(float)));
    }
}

inline Vector broadcast(float x) {
    return each_part([&](int64_t) { return repeat(x); });
}

template <class T>
inline Vector load(const T* from) {
    return each_part([&](int64_t lane) { return load_part(from + lane); });
}

template <class T>
inline Vector load(const T* from, Mask mask) {
    if (mask.count == LANES) {
        return load(from);
    }
    T values[LANES] = {};
    std::copy_n(from, mask.count, values);
    return load(values);
}

inline Vector load(const float* from, Mask mask, Vector elsewhere) {
    float values[LANES];
    for_parts(elsewhere, [&](Part x, int64_t lane) { store_part(values + lane, x); });
    std::copy_n(from, mask.count, values);
    return load(values);
}

template <class T>
inline void store(T* to, Vector x) {
    for_parts(x, [&](Part part, int64_t lane) { store_part(to + lane, part); });
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

// Zero elsewhere.
inline Vector keep(Vector x, Mask mask) {
    float values[LANES];
    store(values, x);
    return mask.count == LANES ? x : load(values, mask);
}

// Pairs of bfloat16: the first of each, and the second.
inline void load_pairs(const bf16* from, Vector& first, Vector& second) {
    const auto both = [&](int64_t lane) {
        PartBits bits;
        std::memcpy(&bits, from + 2 * lane, sizeof bits);
        return bits;
    };
    first = each_part([&](int64_t lane) { return reinterpret_cast<Part>(both(lane) << 16); });
    second = each_part([&](int64_t lane) { return reinterpret_cast<Part>(both(lane) & 0xFFFF0000); });
}

// What is left of x beside a whole number.
inline Vector fraction(Vector x, Vector& whole) {
    x = max(broadcast(-200.0f), x);  // the second if NaN
    whole = nearest(x);
    return x - whole;
}

inline uint32_t nan_lanes(Vector x) { return exceeds(x, x); }  // whether there are any

template <class H>
inline Part folded(H x) {
    if constexpr (sizeof(H) == sizeof(Part)) {
        return x;
    } else {
        return folded(x.low + x.high);
    }
}

// The sum of each of four vectors, the first `count` of which are stored.
inline void store_sums(float* to, const Vector (&x)[4], int64_t count) {
    float sums[4];
    add_each(folded(x[0]), folded(x[1]), folded(x[2]), folded(x[3]), count >= 4 ? to : sums);
    if (count < 4) {
        std::copy_n(sums, count, to);
    }
}

// Rows become columns.
template <class H>
inline void transpose(Pair<H> (&x)[sizeof(Pair<H>) / sizeof(float)]) {
    constexpr int64_t n = sizeof(H) / sizeof(float);
    H a[n], b[n], c[n], d[n];
    for (int64_t i = 0; i < n; ++i) {
        a[i] = x[i].low, b[i] = x[i].high, c[i] = x[n + i].low, d[i] = x[n + i].high;
    }
    transpose(a), transpose(b), transpose(c), transpose(d);
    for (int64_t i = 0; i < n; ++i) {
        x[i] = {a[i], c[i]}, x[n + i] = {b[i], d[i]};
    }
}

}  // namespace sarathi
