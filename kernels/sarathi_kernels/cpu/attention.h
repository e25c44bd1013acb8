// Causal attention of packed tokens to a paged cache.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "attention_cache.h"
#include "attention_tile.h"

namespace sarathi {

constexpr int64_t AHEAD = 12;  // keys to prefetch

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
template <int V, class T, class Put>
void attend_one(const Shape& shape, const Cache<T>& keys, const Cache<T>& values, int64_t position, const float* query,
                AttentionScratch& scratch, Put&& put) {
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
                q[v] = _mm512_mul_ps(load(query + head * size + v * LANES, mask[v]), _mm512_set1_ps(shape.scale * LOG2_E));
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
            const __m512 p = power_of_two<6>(_mm512_sub_ps(load(row + key, some), maximum));
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
            put(head * size + v * LANES, _mm512_mul_ps(load(sums + (head * V + v) * LANES), total), mask[v]);
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

// `put(row, column, x, mask)` takes the results; `uses_amx` says whether AMX may multiply bfloat16.
template <class T, class Put>
void attend(const Shape& shape, const Segment& segment, const AttentionTask& task, const T* keys, const T* values,
            const float* query, int64_t query_stride, AttentionScratch& scratch, bool uses_amx, Put&& put) {
    const Cache<T> key_cache{keys + task.kv_head * shape.head_size, shape, segment};
    const Cache<T> value_cache{values + task.kv_head * shape.head_size, shape, segment};
    if (segment.num_queries > 1) {
        const QueryTile tile{task.kv_head, task.first, task.count, shape.group()};
        if constexpr (sizeof(T) == 2) {
            if (uses_amx && shape.head_size % KBLOCK == 0) {
                return attend_tile<InTiles>(shape, segment, tile, key_cache, value_cache, query, query_stride, scratch, put);
            }
        }
        return attend_tile<InFloats<T>>(shape, segment, tile, key_cache, value_cache, query, query_stride, scratch, put);
    }
    const int64_t first_column = task.kv_head * shape.group() * shape.head_size, position = segment.kv_len - 1;
    const float* q = query + segment.start * query_stride + first_column;
    const auto put_one = [&](int64_t column, __m512 x, __mmask16 mask) {
        put(segment.start, first_column + column, x, mask);
    };
    if (shape.head_size <= 2 * LANES) {
        attend_one<2>(shape, key_cache, value_cache, position, q, scratch, put_one);
    } else if (shape.head_size <= 4 * LANES) {
        attend_one<4>(shape, key_cache, value_cache, position, q, scratch, put_one);
    } else if (shape.head_size <= 8 * LANES) {
        attend_one<8>(shape, key_cache, value_cache, position, q, scratch, put_one);
    } else {
        attend_one<16>(shape, key_cache, value_cache, position, q, scratch, put_one);  // up to 256
    }
}

}  // namespace sarathi
