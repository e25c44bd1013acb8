// Causal attention of packed tokens to a paged cache. Scores are kept transposed, a row per key and a lane per query:
// then the keys and values of the cache are read as they lie, and maxima and sums need no exchange between lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace sarathi {

constexpr int64_t KEY_TILE = 96;
constexpr int64_t MOST_QUERIES = 64;  // of one head that share a pass over the keys
constexpr int64_t AHEAD = 12;         // keys to prefetch
constexpr float LOWEST = -1e30f;      // below every score, yet finite: differences with it are numbers

// The newest tokens of one sequence, rows `start` on, and where its `kv_len` keys lie: in neighbouring blocks from
// `first_block` on, or in those that `blocks` lists.
struct Segment {
    int64_t start, num_queries, kv_len, first_block;
    const int64_t* blocks;
};

struct Shape {
    int64_t num_heads, num_kv_heads, head_size, block_size, window;  // window 0: all are seen
    float scale;
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Keys or values of one layer and head.
template <class T>
struct Cache {
    const T* data;
    const Shape& shape;
    const Segment& segment;

    // Where the keys or values of `count` tokens from `first` on lie.
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

// What one thread needs of its own.
struct AttentionScratch {
    std::vector<float> keys, values, scores, queries, sums, maxima, totals;

    void reserve(const Shape& shape, int64_t longest) {
        const int64_t panels = shape.group() * MOST_QUERIES / PANEL, padded = (shape.head_size + 15) / 16 * 16;
        grow(keys, KEY_TILE * shape.head_size);
        grow(values, KEY_TILE * shape.head_size);
        grow(scores, std::max(KEY_TILE * PANEL, shape.group() * longest));
        grow(queries, panels * padded * PANEL);
        grow(sums, panels * padded * PANEL);
        grow(maxima, panels * PANEL);
        grow(totals, panels * PANEL);
    }

    static void grow(std::vector<float>& buffer, int64_t size) {
        if (static_cast<int64_t>(buffer.size()) < size) {
            buffer.resize(size);
        }
    }
};

template <class T>
void copy_rows(const Cache<T>& from, int64_t first, int64_t count, float* to) {
    const int64_t size = from.shape.head_size;
    const T* rows[KEY_TILE];
    from.find(first, count, rows);
    for (int64_t token = 0; token < count; ++token, to += size) {
        const T* row = rows[token];
        for (int64_t i = 0; i < size; i += LANES) {
            store(to + i, load(row + i, lanes(size - i)), lanes(size - i));
        }
    }
}

// Softmax of scores [keys][32 queries] over all keys so far: exponentials replace the scores, and `sums`
// [head_size][32], gathered with older maxima, are scaled to the new. Query q is at `position + q`.
inline void soften(const Shape& shape, float* scores, int64_t first_key, int64_t num_keys, int64_t position,
                   int64_t last_position, float* maxima, float* totals, float* sums) {
    const __m512 scale = _mm512_set1_ps(shape.scale), hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const bool sees_all = first_key + num_keys - 1 <= position &&
                          (shape.window == 0 || first_key > last_position - shape.window);
    for (int64_t half = 0; half < PANEL; half += LANES) {
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(position + half)), step);
        const __m512i from = _mm512_sub_epi32(at, _mm512_set1_epi32(static_cast<int>(shape.window)));
        const __m512 before = load(maxima + half);
        __m512 most = before;
        for (int64_t key = 0; key < num_keys; ++key) {
            __m512 score = _mm512_mul_ps(load(scores + key * PANEL + half), scale);
            if (!sees_all) {
                const __m512i where = _mm512_set1_epi32(static_cast<int>(first_key + key));
                __mmask16 seen = _mm512_cmple_epi32_mask(where, at);
                seen &= shape.window ? _mm512_cmpgt_epi32_mask(where, from) : 0xFFFF;
                score = _mm512_mask_mov_ps(hidden, seen, score);
            }
            store(scores + key * PANEL + half, score);
            most = _mm512_max_ps(score, most);
        }
        __m512 total = _mm512_setzero_ps();
        for (int64_t key = 0; key < num_keys; ++key) {
            const __m512 p = exponential(_mm512_sub_ps(load(scores + key * PANEL + half), most));
            store(scores + key * PANEL + half, p);
            total = _mm512_add_ps(total, p);
        }
        const __m512 kept = exponential(_mm512_sub_ps(before, most));
        store(maxima + half, most);
        store(totals + half, _mm512_fmadd_ps(load(totals + half), kept, total));
        if (_mm512_cmp_ps_mask(before, most, _CMP_NEQ_UQ)) {
            for (int64_t i = 0; i < shape.head_size; ++i) {
                store(sums + i * PANEL + half, _mm512_mul_ps(load(sums + i * PANEL + half), kept));
            }
        }
    }
}

// Up to MOST_QUERIES queries of the heads that share key head `kv_head`, from query `first` of the segment on.
template <class T, class Out>
void attend_tile(const Shape& shape, const Segment& segment, const Cache<T>& keys, const Cache<T>& values,
                 int64_t kv_head, int64_t first, int64_t count, const float* query, int64_t query_stride, Out* out,
                 int64_t out_stride, AttentionScratch& scratch) {
    const int64_t size = shape.head_size, group = shape.group(), parts = (count + PANEL - 1) / PANEL;
    const int64_t panels = group * parts, position = segment.kv_len - segment.num_queries + first;
    std::fill_n(scratch.sums.data(), panels * size * PANEL, 0.0f);
    std::fill_n(scratch.totals.data(), panels * PANEL, 0.0f);
    std::fill_n(scratch.maxima.data(), panels * PANEL, LOWEST);
    for (int64_t panel = 0; panel < panels; ++panel) {
        float* transposed = scratch.queries.data() + panel * size * PANEL;
        const int64_t head = kv_head * group + panel / parts;
        for (int64_t lane = 0; lane < PANEL; ++lane) {
            // Lanes beyond the last query repeat it: their results are numbers that nobody reads.
            const int64_t row = segment.start + first + std::min(panel % parts * PANEL + lane, count - 1);
            for (int64_t i = 0; i < size; ++i) {
                transposed[i * PANEL + lane] = query[row * query_stride + head * size + i];
            }
        }
    }
    const int64_t end = position + count;
    for (int64_t key = shape.first_key(position); key < end; key += KEY_TILE) {
        const int64_t num_keys = std::min(KEY_TILE, end - key);
        copy_rows(keys, key, num_keys, scratch.keys.data());
        copy_rows(values, key, num_keys, scratch.values.data());
        for (int64_t panel = 0; panel < panels; ++panel) {
            const int64_t at = position + panel % parts * PANEL;
            if (key > at + PANEL - 1) {
                continue;  // all later than these queries
            }
            float* sums = scratch.sums.data() + panel * size * PANEL;
            const float* transposed = scratch.queries.data() + panel * size * PANEL;
            multiply_rows<false>(scratch.keys.data(), size, 1, transposed, size, num_keys, scratch.scores.data());
            soften(shape, scratch.scores.data(), key, num_keys, at, at + PANEL - 1,
                   scratch.maxima.data() + panel * PANEL, scratch.totals.data() + panel * PANEL, sums);
            multiply_rows<true>(scratch.values.data(), 1, size, scratch.scores.data(), num_keys, size, sums);
        }
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t head = kv_head * group + panel / parts;
        for (int64_t lane = 0; lane < PANEL && panel % parts * PANEL + lane < count; ++lane) {
            const int64_t row = segment.start + first + panel % parts * PANEL + lane;
            const float* sums = scratch.sums.data() + panel * size * PANEL + lane;
            const __m512 total = _mm512_set1_ps(1.0f / scratch.totals[panel * PANEL + lane]);
            const __m512i column = _mm512_mullo_epi32(
                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(PANEL));
            for (int64_t i = 0; i < size; i += LANES) {
                const __m512 sum = _mm512_mask_i32gather_ps(total, lanes(size - i), column, sums + i * PANEL, 4);
                store(out + row * out_stride + head * size + i, _mm512_mul_ps(sum, total), lanes(size - i));
            }
        }
    }
}

// The sum of each of four vectors.
inline __m128 sums_of(const __m512 (&x)[4]) {
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(second);
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// Rows of one head lie apart, and a CPU foresees only what lies together.
template <int V, class T>
inline void prefetch_row(const T* row) {
    for (int64_t line = 0; line < V * LANES * static_cast<int64_t>(sizeof(T)); line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(row) + line, _MM_HINT_T0);
    }
}

// One query of the heads that share a key head, in `V` vectors a head; query i sees the keys up to `position`.
template <int V, class T, class Out>
void attend_one(const Shape& shape, const Cache<T>& keys, const Cache<T>& values, int64_t position, const float* query,
                Out* out, AttentionScratch& scratch) {
    const int64_t size = shape.head_size, group = shape.group(), first = shape.first_key(position);
    const int64_t num_keys = position + 1 - first;
    const T* rows[KEY_TILE];
    __mmask16 mask[V];
    for (int v = 0; v < V; ++v) {
        mask[v] = lanes(size - v * LANES);
    }
    float* scores = scratch.scores.data();
    float* sums = scratch.sums.data();
    std::fill_n(sums, group * V * LANES, 0.0f);
    for (int64_t tile = 0; tile < num_keys; tile += KEY_TILE) {
        const int64_t end = std::min(num_keys, tile + KEY_TILE);
        keys.find(first + tile, end - tile, rows);
        for (int64_t head = 0; head < group; ++head) {
            __m512 q[V];
            for (int v = 0; v < V; ++v) {
                q[v] = _mm512_mul_ps(load(query + head * size + v * LANES, mask[v]), _mm512_set1_ps(shape.scale));
            }
            float* to = scores + head * num_keys;
            for (int64_t key = tile; key < end; key += 4) {
                __m512 products[4];
                for (int64_t i = 0; i < 4; ++i) {
                    const int64_t at = std::min(key + i, end - 1) - tile;
                    prefetch_row<V>(rows[std::min(at + AHEAD, end - 1 - tile)]);
                    products[i] = _mm512_mul_ps(q[0], load(rows[at], mask[0]));
                    for (int v = 1; v < V; ++v) {
                        products[i] = _mm512_fmadd_ps(q[v], load(rows[at] + v * LANES, mask[v]), products[i]);
                    }
                }
                _mm_mask_storeu_ps(to + key, static_cast<__mmask8>(lanes(end - key)), sums_of(products));
            }
        }
    }
    for (int64_t head = 0; head < group; ++head) {
        float* row = scores + head * num_keys;
        __m512 most = _mm512_set1_ps(LOWEST);
        for (int64_t key = 0; key < num_keys; key += LANES) {
            most = _mm512_mask_max_ps(most, lanes(num_keys - key), load(row + key, lanes(num_keys - key)), most);
        }
        const __m512 maximum = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        __m512 total = _mm512_setzero_ps();
        for (int64_t key = 0; key < num_keys; key += LANES) {
            const __mmask16 some = lanes(num_keys - key);
            const __m512 p = exponential(_mm512_sub_ps(load(row + key, some), maximum));
            store(row + key, p, some);
            total = _mm512_mask_add_ps(total, some, total, p);
        }
        scratch.totals[head] = _mm512_reduce_add_ps(total);
    }
    for (int64_t tile = 0; tile < num_keys; tile += KEY_TILE) {
        const int64_t end = std::min(num_keys, tile + KEY_TILE);
        values.find(first + tile, end - tile, rows);
        for (int64_t head = 0; head < group; ++head) {
            __m512 sum[V];
            for (int v = 0; v < V; ++v) {
                sum[v] = load(sums + (head * V + v) * LANES);
            }
            for (int64_t key = tile; key < end; ++key) {
                const T* row = rows[key - tile];
                prefetch_row<V>(rows[std::min(key + AHEAD, end - 1) - tile]);
                const __m512 p = _mm512_set1_ps(scores[head * num_keys + key]);
                for (int v = 0; v < V; ++v) {
                    sum[v] = _mm512_fmadd_ps(p, load(row + v * LANES, mask[v]), sum[v]);
                }
            }
            for (int v = 0; v < V; ++v) {
                store(sums + (head * V + v) * LANES, sum[v]);
            }
        }
    }
    for (int64_t head = 0; head < group; ++head) {
        const __m512 total = _mm512_set1_ps(1.0f / scratch.totals[head]);
        for (int v = 0; v < V; ++v) {
            store(out + head * size + v * LANES, _mm512_mul_ps(load(sums + (head * V + v) * LANES), total), mask[v]);
        }
    }
}

// A part of a segment and the heads of one key head: what one thread does at a time.
struct AttentionTask {
    int64_t segment, kv_head, first, count;
};

inline std::vector<AttentionTask> attention_tasks(const Shape& shape, const std::vector<Segment>& segments) {
    std::vector<AttentionTask> tasks;
    for (int64_t s = 0; s < static_cast<int64_t>(segments.size()); ++s) {
        // The last queries see the most keys: they go first, so that no thread is left with them at the end.
        const int64_t parts = (segments[s].num_queries + MOST_QUERIES - 1) / MOST_QUERIES;
        for (int64_t part = parts - 1; part >= 0; --part) {
            const int64_t first = part * MOST_QUERIES;
            for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
                tasks.push_back({s, head, first, std::min(MOST_QUERIES, segments[s].num_queries - first)});
            }
        }
    }
    return tasks;
}

template <class T, class Out>
void attend(const Shape& shape, const Segment& segment, const AttentionTask& task, const T* keys, const T* values,
            const float* query, int64_t query_stride, Out* out, int64_t out_stride, AttentionScratch& scratch) {
    const Cache<T> key_cache{keys + task.kv_head * shape.head_size, shape, segment};
    const Cache<T> value_cache{values + task.kv_head * shape.head_size, shape, segment};
    if (segment.num_queries > 1) {
        return attend_tile(shape, segment, key_cache, value_cache, task.kv_head, task.first, task.count, query,
                           query_stride, out, out_stride, scratch);
    }
    const int64_t column = task.kv_head * shape.group() * shape.head_size;
    const float* q = query + segment.start * query_stride + column;
    Out* to = out + segment.start * out_stride + column;
    const int64_t position = segment.kv_len - 1;
    if (shape.head_size <= 2 * LANES) {
        attend_one<2>(shape, key_cache, value_cache, position, q, to, scratch);
    } else if (shape.head_size <= 4 * LANES) {
        attend_one<4>(shape, key_cache, value_cache, position, q, to, scratch);
    } else if (shape.head_size <= 8 * LANES) {
        attend_one<8>(shape, key_cache, value_cache, position, q, to, scratch);
    } else {
        attend_one<16>(shape, key_cache, value_cache, position, q, to, scratch);  // up to 256
    }
}

}  // namespace sarathi
