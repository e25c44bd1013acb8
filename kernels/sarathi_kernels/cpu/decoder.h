// A decoder's whole iteration: norms, products, rotary embedding, paged attention, logits. Everything but the packed
// weights and the cache is float32; with bfloat16 weights what a CPU multiplies as such is rounded, as it would be between
// torch's operations.
#pragma once

#include "attention.h"
#include "mixture.h"
#include "rows.h"

namespace sarathi {

inline std::vector<AttentionScratch> scratches;  // of each thread

// Buffers and shapes of one model; the threads run `forward` side by side, each for its share of every phase.
struct Decoder {
    Model model;
    Shape shape{};
    Floats hidden, heads, gates;
    Inputs normed, attended, expanded;
    Mixture mixture;
    std::vector<Segment> segments;
    std::vector<AttentionTask> tasks;
    int64_t marked = 0;  // when an operation ended last
    std::atomic<int64_t> decoding{0};  // nanoseconds that threads spent on attention of decodes since

    explicit Decoder(const Model& made) : model(made) {}

    int64_t heads_width() const { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size; }

    void prepare(const Batch& batch) {
        pool->is_watched = batch.seconds;
        pool->take_waited();
        marked = Pool::now();
        shape = {model.num_heads, model.num_kv_heads, model.head_size, batch.block_size, model.window, model.scale};
        const bool as_bf16 = rounds_inputs(model.is_bf16) && !model.head.scales;
        const Layer& layer = model.layers[0];
        AttentionScratch::grow(hidden, batch.num_tokens * model.hidden_size);
        AttentionScratch::grow(heads, batch.num_tokens * heads_width());
        AttentionScratch::grow(gates, std::max(batch.num_tokens, batch.num_emits));
        normed.reserve(batch.num_tokens, model.hidden_size, as_bf16);
        attended.reserve(batch.num_tokens, layer.out.in_features, as_bf16);
        expanded.reserve(batch.num_tokens, layer.down.in_features, as_bf16);
        mixture.reserve(batch.num_tokens, layer, model, as_bf16);
        segments.assign(batch.segments, batch.segments + batch.num_segments);
        tasks = attention_tasks(shape, segments, pool->size);
        int64_t longest = 0;
        for (const Segment& segment : segments) {
            longest = std::max(longest, segment.kv_len);
        }
        for (auto& scratch : scratches) {
            scratch.reserve(shape, longest);
        }
    }

    // Of the last layer nothing but the emitting rows is read: each becomes a segment of one query.
    void keep_emitting(const Batch& batch) {
        std::vector<Segment> kept;
        for (int64_t emit = 0; emit < batch.num_emits; ++emit) {
            const int64_t row = batch.emit_rows[emit];
            const auto next = std::upper_bound(segments.begin(), segments.end(), row,
                                               [](int64_t r, const Segment& segment) { return r < segment.start; });
            Segment segment = *(next - 1);
            segment.kv_len -= segment.start + segment.num_queries - 1 - row;
            segment.start = emit;
            segment.num_queries = 1;
            kept.push_back(segment);
        }
        segments = std::move(kept);
        tasks = attention_tasks(shape, segments, pool->size);
    }

    // Whoever watches gets the seconds since the last mark, less those that threads waited.
    void mark(const Batch& batch, int thread, Operation operation) {
        if (!batch.seconds || thread) {
            return;
        }
        const int64_t before = std::exchange(marked, pool->released);
        const double waited = pool->take_waited();
        const double decodes = static_cast<double>(decoding.exchange(0)) * 1e-9 / pool->size;
        batch.seconds[WAITING] += waited;
        batch.seconds[ATTENTION_DECODE] += decodes;
        batch.seconds[operation] += static_cast<double>(marked - before) * 1e-9 - waited - decodes;
    }

    // Of weights in T, and a cache in C.
    template <class T, class C>
    void forward(const Batch& batch, int thread) {
        embed<T>(batch);
        mark(batch, thread, EMBEDDING);
        Group rows[]{{0, batch.num_tokens, 0}};
        for (int64_t number = 0; number < model.num_layers; ++number) {
            const Layer& layer = model.layers[number];
            norm_rows(hidden.data(), rows[0].rows, model.hidden_size, layer.attention_norm, normed);
            mark(batch, thread, ELEMENTWISE);
            multiply_to(normed, rows, layer.qkv, model.is_bf16, heads.data(), heads_width(), false);
            mark(batch, thread, QKV_PROJ);
            rotate_and_store<C>(layer, batch, number);
            if (number == model.num_layers - 1) {
                rows[0].rows = batch.num_emits;
                pool->share(1, [&](int64_t) { gather(batch); });
            }
            mark(batch, thread, ROTARY);
            attend_all<C>(batch, number, thread);
            mark(batch, thread, ATTENTION_PREFILL);
            multiply_to(attended, rows, layer.out, model.is_bf16, hidden.data(), model.hidden_size, true);
            mark(batch, thread, OUT_PROJ);
            norm_rows(hidden.data(), rows[0].rows, model.hidden_size, layer.ffn_norm, normed);
            mark(batch, thread, ELEMENTWISE);
            if (layer.router.weight) {
                multiply_to(normed, rows, layer.router, model.is_bf16, mixture.logits.data(), model.num_experts, false);
                mixture.add_to(hidden.data(), normed, rows[0].rows, layer, model);
                mark(batch, thread, EXPERTS);
            }
            if (layer.shared_gate.weight) {
                multiply_to(normed, rows, layer.shared_gate, model.is_bf16, gates.data(), 1, false);
            }
            if (layer.up.weight) {
                expand(normed, rows, layer.up, model, expanded, layer.shared_gate.weight ? gates.data() : nullptr);
                mark(batch, thread, FFN_UP);
                multiply_to(expanded, rows, layer.down, model.is_bf16, hidden.data(), model.hidden_size, true);
                mark(batch, thread, FFN_DOWN);
            }
        }
        norm_rows(hidden.data(), rows[0].rows, model.hidden_size, model.final_norm, normed);
        mark(batch, thread, ELEMENTWISE);
        multiply_to(normed, rows, model.head, model.is_bf16, batch.logits, model.head.out_features, false);
        mark(batch, thread, LM_HEAD);
    }

    template <class T>
    void embed(const Batch& batch) {
        pool->share((batch.num_tokens + 7) / 8, [&](int64_t task) {
            for (int64_t row = task * 8; row < std::min(batch.num_tokens, task * 8 + 8); ++row) {
                const T* from = static_cast<const T*>(model.embedding) + batch.token_ids[row] * model.hidden_size;
                for (int64_t i = 0; i < model.hidden_size; i += LANES) {
                    const Mask mask = lanes(model.hidden_size - i);
                    store(hidden.data() + row * model.hidden_size + i, load(from + i, mask), mask);
                }
            }
        });
    }

    template <class T>
    Stored<T> of_layer(void* cache, float* scales, const Batch& batch, int64_t layer) const {
        const int64_t heads = layer * batch.num_blocks * batch.block_size * shape.num_kv_heads;
        return {static_cast<T*>(cache) + heads * shape.head_size, IS_SCALED<T> ? scales + heads : nullptr};
    }

    template <class T>
    void rotate_and_store(const Layer& layer, const Batch& batch, int64_t number) {
        const int64_t size = shape.head_size, rotated = shape.num_heads + shape.num_kv_heads;
        const Stored<T> keys = of_layer<T>(batch.keys, batch.key_scales, batch, number);
        const Stored<T> values = of_layer<T>(batch.values, batch.value_scales, batch, number);
        pool->share((batch.num_tokens + 3) / 4, [&](int64_t task) {
            for (int64_t row = task * 4; row < std::min(batch.num_tokens, task * 4 + 4); ++row) {
                float* head = heads.data() + row * heads_width();
                const int64_t angle = batch.positions[row] * model.rotary_half;
                for (int64_t i = 0; i < rotated; ++i) {
                    const Norm& norm = i < shape.num_heads ? layer.query_norm : layer.key_norm;
                    if (norm.weight) {
                        norm_row(head + i * size, size, norm, [&](int64_t column, Vector y, Mask mask) {
                            store(head + i * size + column, y, mask);
                        });
                    }
                    rotate(head + i * size, batch.cosines + angle, batch.sines + angle, model.rotary_half);
                }
                put_heads(head + shape.num_heads * size, batch.slots[row], keys);
                put_heads(head + rotated * size, batch.slots[row], values);
            }
        });
    }

    // The keys or values of one token, at its slot.
    template <class T>
    void put_heads(const float* heads, int64_t slot, const Stored<T>& cache) const {
        const int64_t width = shape.num_kv_heads * shape.head_size;
        if constexpr (IS_SCALED<T>) {
            for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
                const int64_t column = head * shape.head_size;
                cache.scales[slot * shape.num_kv_heads + head] =
                    quantize_row(heads + column, shape.head_size, cache.data + slot * width + column);
            }
        } else {
            copy_row(heads, width, cache.data + slot * width);
        }
    }

    // Emitting rows come first, in their order; they may be asked for in any, and more than once.
    void gather(const Batch& batch) {
        keep_emitting(batch);
        gather_rows(batch, hidden, model.hidden_size);
        gather_rows(batch, heads, heads_width());
        const bool as_bf16 = normed.is_bf16;
        normed.reserve(batch.num_emits, model.hidden_size, as_bf16);
        attended.reserve(batch.num_emits, attended.width, as_bf16);
        expanded.reserve(batch.num_emits, expanded.width, as_bf16);
        mixture.reserve(batch.num_emits, model.layers[0], model, as_bf16);
    }

    static void gather_rows(const Batch& batch, Floats& rows, int64_t width) {
        std::vector<float> taken;
        for (int64_t emit = 0; emit < batch.num_emits; ++emit) {
            const float* row = rows.data() + batch.emit_rows[emit] * width;
            taken.insert(taken.end(), row, row + width);
        }
        AttentionScratch::grow(rows, batch.num_emits * width);
        std::copy(taken.begin(), taken.end(), rows.begin());
    }

    template <class T>
    void attend_all(const Batch& batch, int64_t number, int thread) {
        const Stored<T> keys = of_layer<T>(batch.keys, batch.key_scales, batch, number);
        const Stored<T> values = of_layer<T>(batch.values, batch.value_scales, batch, number);
        pool->share(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
            const AttentionTask& task = tasks[index];
            const Segment& segment = segments[task.segment];
            const int64_t begun = batch.seconds && segment.num_queries == 1 ? Pool::now() : 0;
            attend<T>(shape, segment, task, {keys.data, keys.scales}, {values.data, values.scales}, heads.data(),
                      heads_width(), scratches[thread], rounds_inputs(model.is_bf16),
                   [&](int64_t row, int64_t column, Vector x, Mask mask) { attended.put(row, column, x, mask); });
            decoding += begun ? Pool::now() - begun : 0;
        });
    }
};

}  // namespace sarathi
