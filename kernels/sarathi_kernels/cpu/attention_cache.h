// Where the keys and values of a paged cache lie, and what a thread needs to attend to them.
#pragma once

#include <algorithm>
#include <vector>

#include "products.h"

namespace sarathi {

constexpr int64_t KEY_TILE = 96;
constexpr int64_t MOST_QUERIES = 128;  // of one head that share a pass over the keys
constexpr int64_t FEW_LANES = 16;      // that take less time with each key alone than in a panel
constexpr float LOG2_E = 1.44269504f;
constexpr float LOWEST = -1e30f;      // below every score, yet finite: differences with it are numbers

// The newest tokens of one sequence, rows `start` on, and where its `kv_len` keys lie: in neighbouring blocks from
// `first_block` on, or in those that `blocks` lists: `num_blocks` of them.
struct Segment {
    int64_t start, num_queries, kv_len, first_block, num_blocks;
    const int64_t* blocks;
};

struct Shape {
    int64_t num_heads, num_kv_heads, head_size, block_size, window;  // window 0: all are seen
    float scale;
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Keys or values of one layer as one segment sees them, or what is left of them from some head on.
template <class T>
struct Cache {
    const T* data;
    const Shape& shape;
    const Segment& segment;

    // Where `count` rows lie, of tokens `first` on.
    void find(int64_t first, int64_t count, const T** rows) const {
        const int64_t width = shape.num_kv_heads * shape.head_size;
        for (int64_t token = first; token < first + count;) {
            const int64_t block = token / shape.block_size, end = std::min(first + count, (block + 1) * shape.block_size);
            const int64_t id = segment.blocks ? segment.blocks[block] : segment.first_block + block;
            const T* row = data + (id * shape.block_size + token % shape.block_size) * width;
            for (; token < end; ++token, row += width) {
                *rows++ = row;
            }
        }
    }
};

// Where the keys or values of up to N tokens lie, which are fetched while those before them are computed with.
template <class T, int64_t N>
struct Rows {
    const T* of[N];
    int64_t count = 0, line = 0, lines_of_row = 0;

    // Of tokens `first` on, but not from `end` on; `size` entries of each.
    void find(const Cache<T>& cache, int64_t first, int64_t end, int64_t size) {
        count = std::clamp<int64_t>(end - first, 0, N);
        line = 0;
        lines_of_row = (size * static_cast<int64_t>(sizeof(T)) + 63) / 64;
        cache.find(first, count, of);
    }

    // One of so many parts: all at once would be waited for.
    void fetch(int64_t parts) {
        const int64_t lines = count * lines_of_row;
        for (const int64_t end = std::min(lines, line + (lines + parts - 1) / parts); line < end; ++line) {
            __builtin_prefetch(reinterpret_cast<const char*>(of[line / lines_of_row]) + line % lines_of_row * 64, 0, 2);
        }
    }

    // Sixteen entries of a token, `i` on.
    Vector load(int64_t token, int64_t i, Mask mask = lanes(LANES)) const { return sarathi::load(of[token] + i, mask); }
};

// Some queries of one segment, `first` on. Those of all heads that share a key head are its lanes, a query's side by side.
struct Queries {
    const Shape& shape;
    const Segment& segment;
    int64_t first, count;
    const float* data;
    int64_t stride;
    int64_t num_lanes() const { return count * shape.group(); }
    int64_t row(int64_t lane) const { return segment.start + first + lane / shape.group(); }
    int64_t column(int64_t kv_head, int64_t lane) const {
        return (kv_head * shape.group() + lane % shape.group()) * shape.head_size;
    }
    const float* find(int64_t kv_head, int64_t lane) const { return data + row(lane) * stride + column(kv_head, lane); }
    int64_t position(int64_t lane) const { return segment.kv_len - segment.num_queries - segment.start + row(lane); }
    int64_t first_key() const { return shape.first_key(position(0)); }
    int64_t end() const { return position(0) + count; }  // of the keys
};

// What each thread needs separately.
struct AttentionScratch {
    Floats keys, values, scores, weights, queries, sums, maxima, totals;

    void reserve(const Shape& shape, int64_t longest) {
        const int64_t panels = shape.group() * MOST_QUERIES / PANEL, padded = (shape.head_size + 15) / 16 * 16;
        grow(keys, KEY_TILE * padded);
        grow(values, KEY_TILE * shape.head_size);
        const int64_t singles = std::max(FEW_LANES, shape.num_heads);
        grow(scores, std::max(KEY_TILE * PANEL, singles * longest));
        grow(weights, KEY_TILE * PANEL / 2);
        grow(queries, std::max(panels * PANEL, 2 * singles) * padded);
        grow(sums, std::max(panels * PANEL, 2 * singles) * padded);
        grow(maxima, panels * PANEL);
        grow(totals, std::max(panels * PANEL, singles));
    }

    static void grow(Floats& buffer, int64_t size) {
        if (static_cast<int64_t>(buffer.size()) < size) {
            buffer.resize(size);
        }
    }
};

}  // namespace sarathi
