// The matrix products that everything is made of: a few rows times 32 columns of a packed matrix.
#pragma once

#include <algorithm>

#include "dots.h"

namespace sarathi {

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define SARATHI_AMX
#endif

constexpr int64_t PANEL = 32;  // columns of a packed matrix that lie together
constexpr int64_t KBLOCK = 32;  // inputs of each row, or column, that one AMX tile holds
constexpr int64_t TILE = LANES * KBLOCK;

// What a product reads next, a few lines at a time: a weight that streams by is waited for otherwise.
struct Ahead {
    const char* next = nullptr;
    int64_t lines = 0;  // at a time
    void fetch() {
        for (int64_t line = 0; line < lines; ++line, next += 64) {
            __builtin_prefetch(next, 0, 2);
        }
    }
};

// How many vectors of columns M rows of a product take at a time, for their sums to be kept in registers.
template <int M>
inline constexpr int WIDTH = M * 2 <= SUMS ? 2 : 1;

// The sums of M rows and WIDTH vectors, which are `load`ed from `out` or zero at first, and stored there.
template <int M, bool Accumulates = false>
struct Sums {
    Vector of[M][WIDTH<M>];
    explicit Sums(const float* out) {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            for (int v = 0; v < WIDTH<M>; ++v) {
                of[m][v] = Accumulates ? load(out + m * PANEL + v * LANES) : broadcast(0.0f);
            }
        }
    }
    void add(int m, float x, const Vector (&weights)[WIDTH<M>]) {
        for (int v = 0; v < WIDTH<M>; ++v) {
            of[m][v] = fma(broadcast(x), weights[v], of[m][v]);
        }
    }
    void store_to(float* out) const {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            for (int v = 0; v < WIDTH<M>; ++v) {
                store(out + m * PANEL + v * LANES, of[m][v]);
            }
        }
    }
};

// out[m][0..32) = sum over k of a[m row_stride + k k_stride] * b[k][0..32), added to what is there if `Accumulates`.
template <int M, bool Accumulates>
inline void multiply(const float* a, int64_t row_stride, int64_t k_stride, const float* b, int64_t k, float* out) {
    for (int64_t column = 0; column < PANEL; column += WIDTH<M> * LANES) {
        Sums<M, Accumulates> sums(out + column);
        const float *inputs = a, *panel = b + column;
        for (int64_t i = 0; i < k; ++i, panel += PANEL, inputs += k_stride) {
            Vector weights[WIDTH<M>];
            for (int v = 0; v < WIDTH<M>; ++v) {
                weights[v] = load(panel + v * LANES);
                __builtin_prefetch(panel + 16 * PANEL + v * LANES);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                sums.add(m, inputs[m * row_stride], weights);
            }
        }
        sums.store_to(out + column);
    }
}

// The same with weights of bfloat16: pairs of inputs lie together, each pair for 16 columns (see `packing.py`).
template <int M, bool Accumulates>
inline void multiply(const float* a, int64_t row_stride, int64_t k_stride, const bf16* b, int64_t k, float* out) {
    for (int64_t column = 0; column < PANEL; column += WIDTH<M> * LANES) {
        Sums<M, Accumulates> sums(out + column);
        const float* inputs = a;
        for (int64_t i = 0; i < k; i += 2, inputs += 2 * k_stride) {
            const bf16* pairs = b + i / KBLOCK * KBLOCK * PANEL + i % KBLOCK * LANES + column * KBLOCK;
            Vector first[WIDTH<M>], second[WIDTH<M>];
            for (int v = 0; v < WIDTH<M>; ++v) {
                const Vector both = load(reinterpret_cast<const float*>(pairs + v * TILE));
                first[v] = first_of_pairs(both);
                second[v] = second_of_pairs(both);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                sums.add(m, inputs[m * row_stride], first);
                sums.add(m, inputs[m * row_stride + k_stride], second);
            }
        }
        sums.store_to(out + column);
    }
}

// Where row `row` lies whose columns from `column` on are wanted, in tiles of 16 rows of 64 bytes, `width` columns in all:
// each tile is in one piece, as AMX reads it fastest.
inline int64_t in_tiles(int64_t row, int64_t column, int64_t width) {
    return (row / LANES * (width / KBLOCK) + column / KBLOCK) * TILE + row % LANES * KBLOCK + column % KBLOCK;
}

#ifdef SARATHI_AMX
constexpr bool HAS_AMX = true;

// All eight tiles hold 16 rows of 64 bytes; a thread that multiplies with them configures them first.
inline void begin_tiles() {
    alignas(64) static constexpr struct {  // in memory: GCC may take what is made here for never read
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config{};
    _tile_loadconfig(&config);
}

inline void end_tiles() { _tile_release(); }

// 16 rows of tiles; or a pair of such, the second of which lies `below` the first.
template <bool IsPair>
inline void multiply_tile_rows(const bf16* a, int64_t below, const bf16* b, int64_t count, float* out, bool accumulates,
                               Ahead& ahead) {
    float* out_below = out + LANES * PANEL;
    if (!accumulates) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, out, PANEL * 4);
        _tile_loadd(1, out + LANES, PANEL * 4);
        if (IsPair) {
            _tile_loadd(2, out_below, PANEL * 4);
            _tile_loadd(3, out_below + LANES, PANEL * 4);
        }
    }
    for (int64_t i = 0; i < count; ++i, a += TILE, b += 2 * TILE) {
        ahead.fetch();
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (IsPair) {
            _tile_loadd(5, a + below, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, PANEL * 4);
    _tile_stored(1, out + LANES, PANEL * 4);
    if (IsPair) {
        _tile_stored(2, out_below, PANEL * 4);
        _tile_stored(3, out_below + LANES, PANEL * 4);
    }
}

// `rows` of `a`, which lie in tiles as `in_tiles` says, times a packed panel; added to `out` if it accumulates.
// Writes 16 rows at a time, whether or not the last mean anything. `streams` says that what follows `b`
// in memory is next.
inline void multiply_tiles(const bf16* a, int64_t width, const bf16* b, int64_t k, int64_t rows, float* out, bool accumulates,
                           bool streams) {
    constexpr int64_t LINES = 2 * LANES;  // of a tile, and of what it is multiplied by
    const int64_t row_of_tiles = width * LANES, count = k / KBLOCK;
    if (rows <= LANES) {  // the time is that of reading the weights
        Ahead ahead{reinterpret_cast<const char*>(b + 16 * TILE), LINES};
        return multiply_tile_rows<false>(a, 0, b, count, out, accumulates, ahead);
    }
    constexpr int64_t STEP = 8;  // so that what is read of `b` stays in the first cache from rows to rows
    for (int64_t first = 0; first < count; first += STEP, b += STEP * 2 * TILE) {
        const int64_t some = std::min(STEP, count - first), pairs = (rows + LANES) / (2 * LANES) * some;
        Ahead ahead{reinterpret_cast<const char*>(b + STEP * 2 * TILE), streams ? (STEP * LINES + pairs - 1) / pairs : 0};
        for (int64_t row = 0; row < rows; row += 2 * LANES) {
            const bf16* from = a + row / LANES * row_of_tiles + first * TILE;
            float* to = out + row * PANEL;
            if (rows - row > LANES) {
                multiply_tile_rows<true>(from, row_of_tiles, b, some, to, accumulates || first > 0, ahead);
            } else {
                multiply_tile_rows<false>(from, 0, b, some, to, accumulates || first > 0, ahead);
            }
        }
    }
}
#else
constexpr bool HAS_AMX = false;
inline void begin_tiles() {}
inline void end_tiles() {}
inline void multiply_tiles(const bf16*, int64_t, const bf16*, int64_t, int64_t, float*, bool, bool) {}
#endif

// Calls a template with the number of rows as its constant, 1 to M.
template <int M, class Call>
inline void with_rows(int64_t rows, Call&& call) {
    if constexpr (M > 1) {
        if (rows < M) {
            return with_rows<M - 1>(rows, call);
        }
    }
    call.template operator()<M>();
}

// `rows` of a product, as many at a time as registers hold, in parts as equal as can be.
// What follows `b` in memory is next if it streams.
template <bool Accumulates, bool Streams = false, class T>
inline void multiply_rows(const float* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t k, int64_t rows,
                          float* out) {
    const int64_t parts = (rows + ROWS - 1) / ROWS, lines = k * PANEL * static_cast<int64_t>(sizeof(T)) / 64;
    Ahead ahead{reinterpret_cast<const char*>(b + k * PANEL), Streams && parts > 1 ? (lines + parts - 1) / parts : 0};
    for (int64_t part = 0, row = 0; part < parts; ++part) {
        ahead.fetch();
        const int64_t end = (part + 1) * rows / parts;
        with_rows<ROWS>(end - row, [&]<int M>() {
            multiply<M, Accumulates>(a + row * row_stride, row_stride, k_stride, b, k, out + row * PANEL);
        });
        row = end;
    }
}

// Up to 16 rows of a tile, which lie as `in_tiles` says, times a packed panel, of two inputs at once.
#ifdef SARATHI_PAIRS
template <int M, bool Accumulates>
inline void multiply_pairs(const bf16* a, const bf16* b, int64_t count, float* out) {
    constexpr int64_t PARTS = PANEL / LANES;
    Vector sums[M][PARTS] = {};
    for (int m = 0; m < M && Accumulates; ++m) {
        std::memcpy(sums[m], out + m * PANEL, sizeof sums[m]);
    }
    for (int64_t i = 0; i < count; ++i, a += TILE, b += 2 * TILE) {
        for (int64_t pair = 0; pair < KBLOCK; pair += 2) {
            Ints of_columns[PARTS];
#pragma GCC unroll 4
            for (int64_t part = 0; part < PARTS; ++part) {
                const bf16* from = b + part * TILE + pair * LANES;
                of_columns[part] = load_ints(from);
                __builtin_prefetch(from + 4 * TILE);
                stay(of_columns[part]);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                int32_t inputs;
                std::memcpy(&inputs, a + m * KBLOCK + pair, sizeof inputs);
#pragma GCC unroll 4
                for (int64_t part = 0; part < PARTS; ++part) {
                    sums[m][part] = dot(sums[m][part], Ints{} + inputs, of_columns[part]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        std::memcpy(out + m * PANEL, sums[m], sizeof sums[m]);
    }
}
#else
template <int M, bool Accumulates>
inline void multiply_pairs(const bf16*, const bf16*, int64_t, float*) {}
#endif

inline bool uses_amx = false;

// The same of any number of rows, by whatever is fastest. What follows `b` in memory is next if it streams.
template <bool Accumulates = false, bool Streams = true>
inline void multiply_in_tiles(const bf16* a, int64_t width, const bf16* b, int64_t k, int64_t rows, float* out) {
    if (uses_amx && rows > 0) {
        return multiply_tiles(a, width, b, k, rows, out, Accumulates, Streams);
    }
    for (int64_t tile = 0; HAS_PAIRS && tile < rows; tile += LANES, a += LANES * width, out += LANES * PANEL) {
        const int64_t some = std::min(LANES, rows - tile), parts = (some + ROWS - 1) / ROWS;
        for (int64_t part = 0, row = 0; part < parts; ++part) {
            const int64_t end = (part + 1) * some / parts;
            with_rows<ROWS>(end - row, [&]<int M>() {
                multiply_pairs<M, Accumulates>(a + row * KBLOCK, b, k / KBLOCK, out + row * PANEL);
            });
            row = end;
        }
    }
}

// Whether the inputs of products are rounded, as it is bfloat16 that is multiplied.
inline bool rounds_inputs(bool is_bf16) { return is_bf16 && (uses_amx || HAS_PAIRS); }

}  // namespace sarathi
