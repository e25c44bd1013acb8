// Causal attention of packed tokens to a paged cache.
#pragma once

#include "attention_tile.h"

namespace sarathi {

constexpr int64_t DECODE_TILE = 16;  // tokens whose keys or values are read at a time

// Few queries, of the heads that share the key heads `first_head` to `end_head`. The entries of these lie side by side in
// the cache, so a few tokens of all are read before the next few: memory is fast only where it is read in a row.
template <int V, class T>
struct FewQueries {
    const Queries& queries;
    int64_t first_head, end_head;
    const int64_t size = queries.shape.head_size, num_lanes = queries.num_lanes();
    const int64_t first_key = queries.first_key(), num_keys = queries.end() - first_key;
    // Of pairs of bfloat16 all first entries come to lie before all second ones: that takes half the time.
    const bool splits = std::is_same_v<T, bf16> && size % KBLOCK == 0;

    Mask mask(int v) const { return lanes(size - v * LANES); }

    Vector convert(const Rows<T, DECODE_TILE>& rows, int64_t token, int64_t head, int v) const {
        if (!splits) {
            return rows.load(token, head * size + v * LANES, mask(v));
        }
        const Vector pairs = load(reinterpret_cast<const float*>(rows.of[token] + head * size + v / 2 * KBLOCK), mask(v));
        return v % 2 ? second_of_pairs(pairs) : first_of_pairs(pairs);
    }

    // From the order of entries to that of a converted row, or back.
    template <bool Back>
    void reorder(float* row) const {
        float copy[V * LANES];
        std::copy_n(row, V * LANES, copy);
        for (int64_t i = 0; splits && i < V * LANES; ++i) {
            const int64_t place = i / KBLOCK * KBLOCK + i % 2 * LANES + i % KBLOCK / 2;
            row[Back ? i : place] = copy[Back ? place : i];
        }
    }

    // Calls `use(tile, lane, rows, count)` for each lane of all heads and some tokens after another; rows are of floats.
    template <class Use>
    void for_rows(const Cache<T>& cache, float* converted, Use&& use) const {
        const int64_t heads = end_head - first_head;
        Rows<T, DECODE_TILE> rows[2];
        rows[0].find(cache, first_key, queries.end(), heads * size);
        for (int64_t tile = 0, now = 0; tile < num_keys; tile += DECODE_TILE, now = 1 - now) {
            rows[1 - now].find(cache, first_key + tile + DECODE_TILE, queries.end(), heads * size);
            for (int64_t head = 0; head < heads; ++head) {
                const float* floats[DECODE_TILE];
                for (int64_t token = 0; token < rows[now].count; ++token) {
                    if constexpr (std::is_same_v<T, float>) {
                        floats[token] = rows[now].of[token] + head * size;
                    } else {
                        floats[token] = converted + token * V * LANES;
                        for (int v = 0; v < V; ++v) {
                            store(converted + (token * V + v) * LANES, convert(rows[now], token, head, v));
                        }
                    }
                }
                for (int64_t lane = 0; lane < num_lanes; ++lane) {
                    rows[1 - now].fetch(heads * num_lanes);
                    use(tile, head * num_lanes + lane, floats, rows[now].count);
                }
            }
        }
    }

    // Scores of one lane, in powers of two.
    void score(const float* query, const float* const* rows, int64_t count, float* scores) const {
        Vector q[V];
        for (int v = 0; v < V; ++v) {
            q[v] = load(query + v * LANES);
        }
        for (int64_t token = 0; token < count; token += 4) {
            Vector products[4];
            for (int64_t i = 0; i < 4; ++i) {
                const float* row = rows[std::min(token + i, count - 1)];
                products[i] = q[0] * load(row, mask(0));
                for (int v = 1; v < V; ++v) {
                    products[i] = fma(q[v], load(row + v * LANES, mask(v)), products[i]);
                }
            }
            store_sums(scores + token, products, count - token);
        }
    }

    void add(const float* weights, const float* const* rows, int64_t count, float* sums) const {
        Vector sum[V];
        for (int v = 0; v < V; ++v) {
            sum[v] = load(sums + v * LANES);
        }
        for (int64_t token = 0; token < count; ++token) {
            const Vector p = broadcast(weights[token]);
            for (int v = 0; v < V; ++v) {
                sum[v] = fma(p, load(rows[token] + v * LANES, mask(v)), sum[v]);
            }
        }
        for (int v = 0; v < V; ++v) {
            store(sums + v * LANES, sum[v]);
        }
    }

    // Scores become weights, zero of the keys that the lane does not see; returns their sum.
    float soften(int64_t lane, float* scores) const {
        const int64_t position = queries.position(lane), first = queries.shape.first_key(position) - first_key;
        const int64_t seen = position + 1 - first_key - first;
        std::fill(scores, scores + first, 0.0f);
        std::fill(scores + first + seen, scores + num_keys, 0.0f);
        scores += first;
        Vector most = broadcast(LOWEST), total = broadcast(0.0f);
        for (int64_t key = 0; key < seen; key += LANES) {
            most = max(load(scores + key, lanes(seen - key), most), most);
        }
        const Vector maximum = broadcast(reduce_max(most));
        for (int64_t key = 0; key < seen; key += LANES) {
            const Mask some = lanes(seen - key);
            const Vector p = power_of_two<6>(load(scores + key, some) - maximum);
            store(scores + key, p, some);
            total = total + keep(p, some);
        }
        return reduce_add(total);
    }

    template <class Put>
    void attend(const Cache<T>& keys, const Cache<T>& values, AttentionScratch& scratch, Put&& put) const {
        constexpr int64_t WIDTH = V * LANES;
        const int64_t all = (end_head - first_head) * num_lanes;
        float *scores = scratch.scores.data(), *sums = scratch.sums.data(), *q = scratch.queries.data();
        for (int64_t lane = 0; lane < all; ++lane) {
            const float* query = queries.find(first_head + lane / num_lanes, lane % num_lanes);
            for (int v = 0; v < V; ++v) {
                const Vector scale = broadcast(queries.shape.scale * LOG2_E);
                store(q + lane * WIDTH + v * LANES, load(query + v * LANES, mask(v)) * scale);
            }
            reorder<false>(q + lane * WIDTH);
        }
        std::fill_n(sums, all * WIDTH, 0.0f);
        for_rows(keys, scratch.keys.data(), [&](int64_t tile, int64_t lane, const float* const* rows, int64_t count) {
            score(q + lane * WIDTH, rows, count, scores + lane * num_keys + tile);
        });
        for (int64_t lane = 0; lane < all; ++lane) {
            scratch.totals[lane] = soften(lane % num_lanes, scores + lane * num_keys);
        }
        for_rows(values, scratch.keys.data(), [&](int64_t tile, int64_t lane, const float* const* rows, int64_t count) {
            add(scores + lane * num_keys + tile, rows, count, sums + lane * WIDTH);
        });
        for (int64_t lane = 0; lane < all; ++lane) {
            const int64_t row = queries.row(lane % num_lanes);
            const int64_t column = queries.column(first_head + lane / num_lanes, lane % num_lanes);
            const Vector inverse = broadcast(1.0f / scratch.totals[lane]);
            reorder<true>(sums + lane * WIDTH);
            for (int v = 0; v < V; ++v) {
                put(row, column + v * LANES, load(sums + lane * WIDTH + v * LANES) * inverse, mask(v));
            }
        }
    }
};

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
        const int64_t num_queries = segments[s].num_queries, step = std::max<int64_t>(1, heads_of_decode / num_queries);
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

// `put(row, column, x, mask)` takes the results; `rounds` says whether what is in bfloat16 may be multiplied as such: by AMX, or in pairs where there is none; a CPU that has it multiplies pairs more slowly than floats.
template <class T, class Put>
void attend(const Shape& shape, const Segment& segment, const AttentionTask& task, const T* keys,
            const T* values, const float* query, int64_t query_stride, AttentionScratch& scratch,
            [[maybe_unused]] bool rounds, Put&& put) {
    const Cache<T> key_cache{keys + task.first_head * shape.head_size, shape, segment};
    const Cache<T> value_cache{values + task.first_head * shape.head_size, shape, segment};
    const Queries queries{shape, segment, task.first, task.count, query, query_stride};
    const auto attend_few = [&]<int V>() {
        FewQueries<V, T>{queries, task.first_head, task.end_head}.attend(key_cache, value_cache, scratch, put);
    };
    if (queries.num_lanes() > std::max(FEW_LANES, shape.group())) {
#ifdef __AVX512BF16__
        if constexpr (std::is_same_v<T, bf16>) {
            if (rounds && (uses_amx || !HAS_AMX) && shape.head_size % KBLOCK == 0) {
                return attend_tile<InTiles>(queries, task.first_head, key_cache, value_cache, scratch, put);
            }
        }
#endif
        attend_tile<InFloats<T>>(queries, task.first_head, key_cache, value_cache, scratch, put);
    } else if (shape.head_size <= 2 * LANES) {
        attend_few.template operator()<2>();
    } else if (shape.head_size <= 4 * LANES) {
        attend_few.template operator()<4>();
    } else if (shape.head_size <= 8 * LANES) {
        attend_few.template operator()<8>();
    } else {
        attend_few.template operator()<16>();  // up to 256
    }
}

}  // namespace sarathi
