// A decoder's whole iteration: norms, products, rotary embedding, paged attention, logits. Everything but the packed
// weights and the cache is float32; with bfloat16 weights what a CPU multiplies as such is rounded, as it would be between
// torch's operations.
#pragma once

#include "attention.h"
#include "rows.h"

namespace sarathi {

inline std::vector<AttentionScratch> scratches;  // of each thread

// Buffers and shapes of one model; the threads run `forward` side by side, each for its share of every phase.
struct Decoder {
    const Model model;
    Batch batch{};  // of this iteration
    Shape shape{};
    Floats hidden{}, heads{};
    Inputs normed{}, attended{}, expanded{};
    std::vector<Segment> segments{};
    std::vector<AttentionTask> tasks{};
    int64_t marked = 0;  // when an operation ended last
    std::atomic<int64_t> decoding{0};  // nanoseconds that threads spent on attention of decodes since

    int64_t heads_width() const { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size; }

    void prepare(const Batch& next) {
        prepare_attention(next);
        pool->is_watched = batch.nanoseconds;
        pool->take_waited();
        marked = Pool::now();
        const int64_t rows = std::max(batch.num_tokens, batch.num_emits);
        const bool as_bf16 = rounds_inputs(model.is_bf16);
        AttentionScratch::grow(hidden, rows * model.hidden_size);
        AttentionScratch::grow(heads, rows * heads_width());
        normed.reserve(rows, model.hidden_size, as_bf16);
        attended.reserve(rows, model.layers[0].out.in_features, as_bf16);
        expanded.reserve(rows, model.layers[0].down.in_features, as_bf16);
    }

    // All that `attend_all` needs.
    void prepare_attention(const Batch& next) {
        batch = next;
        shape = {model.num_heads, model.num_kv_heads, model.head_size, batch.block_size, model.window, model.scale};
        take({batch.segments, batch.segments + batch.num_segments});
        int64_t longest = 0;
        for (const Segment& segment : segments) {
            longest = std::max(longest, segment.kv_len);
        }
        for (auto& scratch : scratches) {
            scratch.reserve(shape, longest);
        }
    }

    void take(std::vector<Segment> next) {
        segments = std::move(next);
        tasks = attention_tasks(shape, segments, pool->size);
    }

    // Whoever watches gets the time since the last mark, less that which threads waited.
    void mark(int thread, Operation operation) {
        if (!batch.nanoseconds || thread) {
            return;
        }
        const int64_t before = std::exchange(marked, pool->released), waited = pool->take_waited();
        const int64_t decodes = decoding.exchange(0) / pool->size;
        batch.nanoseconds[WAITING] += waited;
        batch.nanoseconds[ATTENTION_DECODE] += decodes;
        batch.nanoseconds[operation] += marked - before - waited - decodes;
    }

    // Of a cache in T.
    template <class T>
    void forward(int thread) {
        model.is_bf16 ? embed<bf16>() : embed<float>();
        mark(thread, EMBEDDING);
        int64_t num_rows = batch.num_tokens;
        for (int64_t number = 0; number < model.num_layers; ++number) {
            const Layer& layer = model.layers[number];
            norm_rows(hidden.data(), num_rows, model.hidden_size, layer.attention_norm, normed);
            mark(thread, ELEMENTWISE);
            multiply_to(normed, num_rows, layer.qkv, model.is_bf16, heads.data(), false);
            mark(thread, QKV_PROJ);
            rotate_and_store<T>(layer, number);
            if (number == model.num_layers - 1) {
                num_rows = batch.num_emits;
                pool->share(1, [&](int64_t) { keep_emitting(); });
            }
            mark(thread, ROTARY);
            attend_all<T>(heads.data(), heads_width(), number, thread,
                          [&](int64_t row, int64_t i, Vector x, Mask mask) { attended.put(row, i, x, mask); });
            mark(thread, ATTENTION_PREFILL);
            multiply_to(attended, num_rows, layer.out, model.is_bf16, hidden.data(), true);
            mark(thread, OUT_PROJ);
            norm_rows(hidden.data(), num_rows, model.hidden_size, layer.ffn_norm, normed);
            mark(thread, ELEMENTWISE);
            expand(normed, num_rows, layer.up, model, expanded);
            mark(thread, FFN_UP);
            multiply_to(expanded, num_rows, layer.down, model.is_bf16, hidden.data(), true);
            mark(thread, FFN_DOWN);
        }
        norm_rows(hidden.data(), num_rows, model.hidden_size, model.final_norm, normed);
        mark(thread, ELEMENTWISE);
        multiply_to(normed, num_rows, model.head, model.is_bf16, batch.logits, false);
        mark(thread, LM_HEAD);
    }

    template <class T>
    void embed() {
        pool->share_rows(batch.num_tokens, [&](int64_t row) {
            const T* from = static_cast<const T*>(model.embedding) + batch.token_ids[row] * model.hidden_size;
            copy_row(from, model.hidden_size, hidden.data() + row * model.hidden_size);
        });
    }

    template <class T>
    T* of_layer(void* cache, int64_t layer) const {
        const int64_t size = batch.num_blocks * batch.block_size * shape.num_kv_heads * shape.head_size;
        return static_cast<T*>(cache) + layer * size;
    }

    template <class T>
    void rotate_and_store(const Layer& layer, int64_t number) {
        T* keys = of_layer<T>(batch.keys, number);
        T* values = of_layer<T>(batch.values, number);
        pool->share_rows(batch.num_tokens, [&](int64_t row) {
            const int64_t size = shape.head_size, angle = batch.positions[row] * model.rotary_half;
            float* head = heads.data() + row * heads_width();
            for (int64_t i = 0; i < shape.num_heads + shape.num_kv_heads; ++i, head += size) {
                const Norm& norm = i < shape.num_heads ? layer.query_norm : layer.key_norm;
                if (norm.weight) {
                    norm_row(head, size, norm, [&](int64_t at, Vector y, Mask mask) { store(head + at, y, mask); });
                }
                rotate(head, batch.cosines + angle, batch.sines + angle, model.rotary_half);
            }
            put_heads(head - shape.num_kv_heads * size, batch.slots[row], keys);
            put_heads(head, batch.slots[row], values);
        });
    }

    // The keys or values of one token, at its slot.
    template <class T>
    void put_heads(const float* from, int64_t slot, T* cache) const {
        const int64_t size = shape.num_kv_heads * shape.head_size;
        copy_row(from, size, cache + slot * size);
    }

    // Of the last layer nothing but the emitting rows is read: they come first, each a segment of one query. They may be
    // asked for in any order, and more than once.
    void keep_emitting() {
        std::vector<Segment> kept;
        for (int64_t emit = 0; emit < batch.num_emits; ++emit) {
            const int64_t row = batch.emit_rows[emit];
            Segment segment = *(std::ranges::upper_bound(segments, row, {}, &Segment::start) - 1);
            segment.kv_len -= segment.start + segment.num_queries - 1 - row;
            segment.start = emit;
            segment.num_queries = 1;
            kept.push_back(segment);
        }
        take(std::move(kept));
        gather_rows(hidden, model.hidden_size);
        gather_rows(heads, heads_width());
    }

    void gather_rows(Floats& rows, int64_t width) const {
        std::vector<float> taken;
        for (int64_t emit = 0; emit < batch.num_emits; ++emit) {
            const float* row = rows.data() + batch.emit_rows[emit] * width;
            taken.insert(taken.end(), row, row + width);
        }
        std::copy(taken.begin(), taken.end(), rows.begin());
    }

    // All threads together: queries of `stride` from one to the next, and `put` as `attend` has it.
    template <class T, class Put>
    void attend_all(const float* queries, int64_t stride, int64_t number, int thread, Put&& put) {
        T* keys = of_layer<T>(batch.keys, number);
        T* values = of_layer<T>(batch.values, number);
        pool->share(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
            const AttentionTask& task = tasks[index];
            const Segment& segment = segments[task.segment];
            const int64_t begun = batch.nanoseconds && segment.num_queries == 1 ? Pool::now() : 0;
            attend<T>(shape, segment, task, keys, values, queries, stride,
                      scratches[thread], rounds_inputs(model.is_bf16), put);
            decoding += begun ? Pool::now() - begun : 0;
        });
    }
};

}  // namespace sarathi
