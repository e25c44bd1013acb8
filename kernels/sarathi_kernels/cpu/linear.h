// Products of a batch with packed weights, all threads together.
#pragma once

#include <cmath>

#include "pool.h"
#include "structures.h"

namespace sarathi {

constexpr int64_t ROWS_OF_BLOCK = 256;  // of a product, whose sums stay in the cache

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Inputs of a product, zero beyond their width; bfloat16 in tiles where that is multiplied, else float32 in rows.
struct Inputs {
    Floats memory;
    int64_t width = 0;  // rounded up: tiles are read whole
    bool is_bf16 = false;

    void reserve(int64_t rows, int64_t wanted, bool as_bf16) {
        wanted = round_up(wanted, KBLOCK);
        const int64_t size = round_up(rows, 2 * LANES) * (wanted + LANES);
        if (width != wanted || is_bf16 != as_bf16 || static_cast<int64_t>(memory.size()) < size) {
            memory.assign(size, 0.0f);
            width = wanted;
            is_bf16 = as_bf16;
        }
    }
    // Not a power of two, as rows that lie so apart share few places in the first cache.
    int64_t stride() const { return width + LANES; }
    float* floats(int64_t row) { return memory.data() + row * stride(); }
    bf16* halves(int64_t row, int64_t column = 0) {
        return reinterpret_cast<bf16*>(memory.data()) + in_tiles(row, column, width);
    }
    void put(int64_t row, int64_t column, Vector x, Mask mask) {
        if (!is_bf16) {
            store(floats(row) + column, x, mask);
        } else if (column % LANES == 0) {
            store(halves(row, column), x, mask);
        } else {  // may go on in the next tile
            bf16 values[LANES];
            store(values, x);
            for (int64_t i = 0; i < count_of(mask); ++i) {
                *halves(row, column + i) = values[i];
            }
        }
    }
};

// Rows `first` to `end` of a product with one panel of the weight: 32 sums each.
inline void multiply_panel(Inputs& inputs, int64_t first, int64_t end, const Linear& linear, int64_t panel, bool is_bf16,
                    float* sums) {
    const int64_t size = is_bf16 ? 2 : 4, k = round_up(linear.in_features, is_bf16 ? KBLOCK : 1);
    const void* weight = static_cast<const char*>(linear.weight) + panel * PANEL * k * size;
    if (inputs.is_bf16) {
        multiply_in_tiles(inputs.halves(first), inputs.width, static_cast<const bf16*>(weight), k, end - first, sums);
    } else if (is_bf16) {
        multiply_rows<false, true>(inputs.floats(first), inputs.stride(), 1, static_cast<const bf16*>(weight), k,
                                   end - first, sums);
    } else {
        multiply_rows<false, true>(inputs.floats(first), inputs.stride(), 1, static_cast<const float*>(weight), k,
                                   end - first, sums);
    }
    for (int64_t half = 0; linear.bias && half < PANEL; half += LANES) {
        const Vector bias = load(linear.bias + panel * PANEL + half);
        for (int64_t row = 0; row < end - first; ++row) {
            float* of_row = sums + row * PANEL + half;
            store(of_row, load(of_row) + bias);
        }
    }
}

// All threads together: `put(row, panel, sums)` is called for every row and panel with its 32 sums. Each panel is read
// once for all rows, unless there are too few of them to keep the threads equally busy.
template <class Put>
void multiply_all(Inputs& inputs, int64_t rows, const Linear& linear, int64_t columns, bool is_bf16, Put&& put) {
    const int64_t panels = (columns + PANEL - 1) / PANEL, wanted = 8 * pool->size;
    const int64_t parts = std::min((wanted + panels - 1) / panels, (rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK);
    pool->share(panels * parts, [&](int64_t task) {
        alignas(64) float sums[ROWS_OF_BLOCK * PANEL];
        const int64_t panel = task / parts, part = task % parts;
        const int64_t step = round_up((rows + parts - 1) / parts, 2 * LANES);
        const int64_t end = std::min(rows, (part + 1) * step);
        for (int64_t first = part * step; first < end; first += ROWS_OF_BLOCK) {
            const int64_t last = std::min(end, first + ROWS_OF_BLOCK);
            multiply_panel(inputs, first, last, linear, panel, is_bf16, sums);
            for (int64_t row = first; row < last; ++row) {
                put(row, panel, sums + (row - first) * PANEL);
            }
        }
    });
}

// Into `out`, [rows, out_features], or added to what is there.
inline void multiply_to(Inputs& inputs, int64_t rows, const Linear& linear, bool is_bf16, float* out, bool adds) {
    const int64_t columns = linear.out_features;
    multiply_all(inputs, rows, linear, columns, is_bf16, [&](int64_t row, int64_t panel, const float* sums) {
        for (int64_t column = panel * PANEL; column < std::min((panel + 1) * PANEL, columns); column += LANES) {
            float* to = out + row * columns + column;
            const Mask mask = lanes(columns - column);
            const Vector sum = load(sums + column - panel * PANEL);
            store(to, adds ? load(to, mask) + sum : sum, mask);
        }
    });
}

inline Vector sigmoid_times(Vector x, Vector z) {  // x / (1 + e^-z)
    return x / (broadcast(1.0f) + exponential(-z));
}

inline Vector activate(Vector x, int32_t activation) {
    if (activation == SILU) {
        return sigmoid_times(x, x);
    }
    if (activation == GELU_TANH) {  // x/2 (1 + tanh u) = x / (1 + e^-2u)
        const Vector cube = x * x * (x * broadcast(0.044715f));
        return sigmoid_times(x, (x + cube) * broadcast(2 * 0.7978845608f));
    }
    alignas(64) float values[LANES];
    store(values, x);
    for (float& value : values) {
        value *= 0.5f * (1.0f + std::erf(value * 0.70710678f));
    }
    return load(values);
}

// A gated panel holds 16 gates and the 16 values that they scale.
inline void expand(Inputs& inputs, int64_t rows, const Linear& up, const Model& model, Inputs& out) {
    const int64_t width = up.out_features, per_panel = model.is_gated ? LANES : PANEL;
    const int64_t columns = (width + per_panel - 1) / per_panel * PANEL;
    multiply_all(inputs, rows, up, columns, model.is_bf16, [&](int64_t row, int64_t panel, const float* sums) {
        for (int64_t column = 0; column < per_panel; column += LANES) {
            Vector x = activate(load(sums + column), model.activation);
            x = model.is_gated ? x * load(sums + LANES) : x;
            out.put(row, panel * per_panel + column, x, lanes(width - panel * per_panel - column));
        }
    });
}

}  // namespace sarathi
