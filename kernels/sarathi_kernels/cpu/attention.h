// Causal attention of packed tokens to a paged cache.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "attention_cache.h"
#include "attention_tile.h"

namespace sarathi {

constexpr int64_t DECODE_TILE = 16;  // tokens whose keys or values are read at a time
constexpr int64_t FEW_QUERIES = 3;   // of a head that take less time one by one than in a panel of 32

// One query of the heads that share the key heads `first_head` to `end_head`. Their entries lie side by side in the
// cache, so a few tokens of all heads are read before the next few: memory is fast only where it is read in a row.
struct DecodeTask {
    const Shape& shape;
    int64_t first_head, end_head, position;
    int64_t first_key() const { return shape.first_key(position); }
    int64_t num_keys() const { return position + 1 - first_key(); }
    int64_t num_heads() const { return (end_head - first_head) * shape.group(); }
};

// Fetches the next tokens' rows, of all heads, a part with each head of these: all at once would be waited for.
template <class T>
struct NextRows {
    const T* const* rows;
    int64_t lines, lines_of_row, step, line = 0;
    NextRows(const T* const* rows, int64_t count, int64_t size, int64_t num_heads)
        : rows(rows), lines_of_row((size * static_cast<int64_t>(sizeof(T)) + 63) / 64) {
        lines = count * lines_of_row;
        step = (lines + num_heads - 1) / num_heads;
    }
    void fetch() {
        for (const int64_t end = std::min(lines, line + step); line < end; ++line) {
            __builtin_prefetch(reinterpret_cast<const char*>(rows[line / lines_of_row]) + line % lines_of_row * 64, 0, 2);
        }
    }
};

// Calls `use(tile, rows, count, next)` for some tokens after another.
template <class T, class Use>
void for_tokens(const DecodeTask& task, const Cache<T>& cache, Use&& use) {
    const T* rows[2][DECODE_TILE];
    const int64_t num_keys = task.num_keys(), size = (task.end_head - task.first_head) * task.shape.head_size;
    const auto find = [&](int64_t tile, const T** to) {
        const int64_t count = std::max<int64_t>(0, std::min(DECODE_TILE, num_keys - tile));
        cache.find(task.first_key() + tile, count, to);
        return NextRows<T>(to, count, size, task.num_heads());
    };
    find(0, rows[0]);
    for (int64_t tile = 0; tile < num_keys; tile += DECODE_TILE) {
        const int64_t now = tile / DECODE_TILE % 2;
        NextRows<T> next = find(tile + DECODE_TILE, rows[1 - now]);
        use(tile, rows[now], std::min(DECODE_TILE, num_keys - tile), next);
    }
}

// Scores of one query head, in powers of two.
template <int V, class T>
void score_tokens(const Vector (&q)[V], const Mask (&mask)[V], const T* const* rows, int64_t offset, int64_t count,
                  float* scores) {
    for (int64_t token = 0; token < count; token += 4) {
        Vector products[4];
        for (int64_t i = 0; i < 4; ++i) {
            const T* row = rows[std::min(token + i, count - 1)] + offset;
            products[i] = q[0] * load(row, mask[0]);
            for (int v = 1; v < V; ++v) {
                products[i] = fma(q[v], load(row + v * LANES, mask[v]), products[i]);
            }
        }
        store_sums(scores + token, products, count - token);
    }
}

// Scores of keys in 8 bits, by the scales of their head: one product a key instead of one an entry.
template <class T>
void scale_scores(const float* const* scales, int64_t kv_head, int64_t count, float* scores) {
    if constexpr (IS_SCALED<T>) {
        for (int64_t token = 0; token < count; ++token) {
            scores[token] *= scales[token][kv_head];
        }
    }
}

// Scores become weights; returns their sum.
inline float soften_row(float* scores, int64_t num_keys) {
    Vector most = broadcast(LOWEST), total = broadcast(0.0f);
    for (int64_t key = 0; key < num_keys; key += LANES) {
        most = max(load(scores + key, lanes(num_keys - key), most), most);
    }
    const Vector maximum = broadcast(reduce_max(most));
    for (int64_t key = 0; key < num_keys; key += LANES) {
        const Mask some = lanes(num_keys - key);
        const Vector p = power_of_two<6>(load(scores + key, some) - maximum);
        store(scores + key, p, some);
        total = total + keep(p, some);
    }
    return reduce_add(total);
}

// In `V` vectors a head.
template <int V, class T, class Put>
void attend_one(const DecodeTask& task, const Cache<T>& keys, const Cache<T>& values, const float* query,
                AttentionScratch& scratch, Put&& put) {
    const int64_t size = task.shape.head_size, group = task.shape.group(), num_keys = task.num_keys();
    float *scores = scratch.scores.data(), *sums = scratch.sums.data();
    Mask mask[V];
    for (int v = 0; v < V; ++v) {
        mask[v] = lanes(size - v * LANES);
    }
    std::fill_n(sums, task.num_heads() * V * LANES, 0.0f);
    for_tokens(task, keys, [&](int64_t tile, const T* const* rows, int64_t count, NextRows<T>& next) {
        const float* scales[DECODE_TILE];
        keys.find_scales(task.first_key() + tile, count, scales);
        for (int64_t head = 0; head < task.num_heads(); ++head) {
            next.fetch();
            Vector q[V];
            for (int v = 0; v < V; ++v) {
                q[v] = load(query + head * size + v * LANES, mask[v]) * broadcast(task.shape.scale * LOG2_E);
            }
            score_tokens<V>(q, mask, rows, head / group * size, count, scores + head * num_keys + tile);
            scale_scores<T>(scales, head / group, count, scores + head * num_keys + tile);
        }
    });
    for (int64_t head = 0; head < task.num_heads(); ++head) {
        scratch.totals[head] = soften_row(scores + head * num_keys, num_keys);
    }
    for_tokens(task, values, [&](int64_t tile, const T* const* rows, int64_t count, NextRows<T>& next) {
        const float* scales[DECODE_TILE];
        values.find_scales(task.first_key() + tile, count, scales);
        for (int64_t head = 0; head < task.num_heads(); ++head) {
            next.fetch();
            Vector sum[V];
            for (int v = 0; v < V; ++v) {
                sum[v] = load(sums + (head * V + v) * LANES);
            }
            for (int64_t token = 0; token < count; ++token) {
                const T* row = rows[token] + head / group * size;
                float weight = scores[head * num_keys + tile + token];
                if constexpr (IS_SCALED<T>) {
                    weight *= scales[token][head / group];
                }
                const Vector p = broadcast(weight);
                for (int v = 0; v < V; ++v) {
                    sum[v] = fma(p, load(row + v * LANES, mask[v]), sum[v]);
                }
            }
            for (int v = 0; v < V; ++v) {
                store(sums + (head * V + v) * LANES, sum[v]);
            }
        }
    });
    for (int64_t head = 0; head < task.num_heads(); ++head) {
        const Vector inverse = broadcast(1.0f / scratch.totals[head]);
        for (int v = 0; v < V; ++v) {
            put(head * size + v * LANES, load(sums + (head * V + v) * LANES) * inverse, mask[v]);
        }
    }
}

// A part of a segment and some key heads: what one thread does at a time.
struct AttentionTask {
    int64_t segment, first_head, end_head, first, count;
};

// Decodes take all heads at once, unless there are fewer of them than threads.
inline std::vector<AttentionTask> attention_tasks(const Shape& shape, const std::vector<Segment>& segments,
                                                  int64_t num_threads) {
    const int64_t num_segments = static_cast<int64_t>(segments.size()), heads = shape.num_kv_heads;
    const int64_t parts_of_decode = std::min(heads, (2 * num_threads + num_segments - 1) / std::max<int64_t>(1, num_segments));
    const int64_t heads_of_decode = (heads + parts_of_decode - 1) / parts_of_decode;
    std::vector<AttentionTask> tasks;
    for (int64_t s = 0; s < num_segments; ++s) {
        const int64_t num_queries = segments[s].num_queries, step = num_queries > 1 ? 1 : heads_of_decode;
        // The last queries see the most keys: they go first, so that no thread is left with them at the end.
        for (int64_t part = (num_queries + MOST_QUERIES - 1) / MOST_QUERIES - 1; part >= 0; --part) {
            const int64_t first = part * MOST_QUERIES;
            for (int64_t head = 0; head < heads; head += step) {
                tasks.push_back({s, head, std::min(heads, head + step), first, std::min(MOST_QUERIES, num_queries - first)});
            }
        }
    }
    return tasks;
}

// `put(row, column, x, mask)` takes the results; `uses_amx` says whether AMX may multiply what is in bfloat16 or 8 bits.
template <class T, class Put>
void attend(const Shape& shape, const Segment& segment, const AttentionTask& task, Stored<const T> keys,
            Stored<const T> values, const float* query, int64_t query_stride, AttentionScratch& scratch,
            [[maybe_unused]] bool uses_amx, Put&& put) {
    const Cache<T> key_cache{keys.from_head(task.first_head, shape), shape, segment};
    const Cache<T> value_cache{values.from_head(task.first_head, shape), shape, segment};
    if (task.count > FEW_QUERIES) {
        const QueryTile tile{task.first_head, task.first, task.count, shape.group()};
#ifdef SARATHI_AMX
        if constexpr (sizeof(T) <= 2) {
            if (uses_amx && shape.head_size % KBLOCK == 0) {
                return attend_tile<InTiles<T>>(shape, segment, tile, key_cache, value_cache, query, query_stride, scratch,
                                               put);
            }
        }
#endif
        return attend_tile<InFloats<T>>(shape, segment, tile, key_cache, value_cache, query, query_stride, scratch, put);
    }
    for (int64_t at = task.first; at < task.first + task.count; ++at) {
        const DecodeTask decode{shape, task.first_head, task.end_head, segment.kv_len - segment.num_queries + at};
        const int64_t row = segment.start + at, first_column = task.first_head * shape.group() * shape.head_size;
        const float* q = query + row * query_stride + first_column;
        const auto put_one = [&](int64_t column, Vector x, Mask mask) { put(row, first_column + column, x, mask); };
        if (shape.head_size <= 2 * LANES) {
            attend_one<2>(decode, key_cache, value_cache, q, scratch, put_one);
        } else if (shape.head_size <= 4 * LANES) {
            attend_one<4>(decode, key_cache, value_cache, q, scratch, put_one);
        } else if (shape.head_size <= 8 * LANES) {
            attend_one<8>(decode, key_cache, value_cache, q, scratch, put_one);
        } else {
            attend_one<16>(decode, key_cache, value_cache, q, scratch, put_one);  // up to 256
        }
    }
}

}  // namespace sarathi
