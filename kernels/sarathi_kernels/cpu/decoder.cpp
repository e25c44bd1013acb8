// A decoder's whole iteration in one call: norms, products, rotary embedding, paged attention, logits. Everything but
// the packed weights and the cache is float32; with bfloat16 weights the inputs of products are rounded to it where
// AMX multiplies them, as they would be between torch's operations.
#include <memory>

#include "attention.h"
#include "pool.h"
#include "simd.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace sarathi;

// -- what Python fills in, field by field: see `library.py` ---------------------------------------------------------

struct Linear {
    const void* weight;  // packed
    const float* bias;   // as wide as the packed weight, or null
    int64_t in_features, out_features;  // of a gated product, what is left of each pair
};

struct Norm {
    const float *weight, *bias;  // weight null: no norm
    float epsilon;
    int32_t is_layer;
};

struct Layer {
    Norm attention_norm, ffn_norm, query_norm, key_norm;
    Linear qkv, out, up, down;
};

struct Model {
    const Layer* layers;
    const void* embedding;  // [vocab_size, hidden_size]
    const float *cosines, *sines;  // [positions, rotary_half]
    Norm final_norm;
    Linear head;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_size, rotary_half, window;
    int32_t is_bf16, activation, is_gated;
    float scale;
};

struct Batch {
    const int64_t *token_ids, *positions, *slots, *emit_rows;
    const Segment* segments;
    int64_t num_tokens, num_segments, num_emits;
    void *keys, *values;  // [layers, blocks, block_size, kv_heads, head_size]
    int64_t num_blocks, block_size;
    float* logits;  // [num_emits, vocab_size]
};

namespace {

enum Activation { SILU, GELU, GELU_TANH };
constexpr int64_t ROWS_OF_TASK = 96;  // of a product: 8 times ROWS, 3 times a pair of tiles

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

bool enable_amx() {
#if defined(__linux__) && defined(__AMX_BF16__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

bool uses_amx = false;
std::unique_ptr<Pool> pool;
std::vector<AttentionScratch> scratches;  // of each thread

// Inputs of a product, zero beyond `width`: AMX reads whole tiles. Bfloat16 if it does, else float32.
struct Inputs {
    std::vector<float> memory;
    int64_t stride = 0;
    bool is_bf16 = false;

    void reserve(int64_t rows, int64_t width, bool as_bf16) {
        const int64_t wanted = round_up(width, KBLOCK);
        const int64_t size = round_up(rows, 2 * LANES) * wanted;
        if (stride != wanted || is_bf16 != as_bf16 || static_cast<int64_t>(memory.size()) < size) {
            memory.assign(size, 0.0f);
            stride = wanted;
            is_bf16 = as_bf16;
        }
    }
    float* floats(int64_t row) { return memory.data() + row * stride; }
    bf16* halves(int64_t row) { return reinterpret_cast<bf16*>(memory.data()) + row * stride; }
    void put(int64_t row, int64_t column, __m512 x, __mmask16 mask) {
        is_bf16 ? store(halves(row) + column, x, mask) : store(floats(row) + column, x, mask);
    }
};

// All threads together: `put(row, panel, sums)` is called for every row and panel with its 32 sums.
template <class Put>
void multiply_all(Inputs& inputs, int64_t num_rows, const Linear& linear, int64_t columns, bool is_bf16, Put&& put) {
    const int64_t panels = (columns + PANEL - 1) / PANEL, k = round_up(linear.in_features, is_bf16 ? KBLOCK : 1);
    const int64_t parts = (num_rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
    pool->share(panels * parts, [&](int64_t task) {
        alignas(64) float sums[ROWS_OF_TASK * PANEL];
        const int64_t panel = task % panels, part = task / panels;
        const int64_t step = round_up((num_rows + parts - 1) / parts, 2 * LANES);
        const int64_t first = std::min(num_rows, part * step), end = std::min(num_rows, first + step);
        const void* weight = static_cast<const char*>(linear.weight) + panel * PANEL * k * (is_bf16 ? 2 : 4);
        if (inputs.is_bf16) {
            for (int64_t row = first; row < end; row += 2 * LANES) {
                multiply_tiles(inputs.halves(row), inputs.stride, static_cast<const bf16*>(weight), k, end - row,
                               sums + (row - first) * PANEL);
            }
        } else if (is_bf16) {
            multiply_rows_bf16(inputs.floats(first), inputs.stride, static_cast<const bf16*>(weight), k, end - first,
                               sums);
        } else {
            multiply_rows<false>(inputs.floats(first), inputs.stride, 1, static_cast<const float*>(weight), k,
                                 end - first, sums);
        }
        for (int64_t row = first; row < end; ++row) {
            float* of_row = sums + (row - first) * PANEL;
            if (linear.bias) {
                for (int64_t half = 0; half < PANEL; half += LANES) {
                    store(of_row + half, _mm512_add_ps(load(of_row + half), load(linear.bias + panel * PANEL + half)));
                }
            }
            put(row, panel, of_row);
        }
    });
}

// Into `out`, [rows, stride], or added to what is there.
void multiply_to(Inputs& inputs, int64_t rows, const Linear& linear, bool is_bf16, float* out, int64_t stride, bool adds) {
    const int64_t columns = linear.out_features;
    multiply_all(inputs, rows, linear, columns, is_bf16, [&](int64_t row, int64_t panel, const float* sums) {
        for (int64_t column = panel * PANEL; column < std::min((panel + 1) * PANEL, columns); column += LANES) {
            float* to = out + row * stride + column;
            const __mmask16 mask = lanes(columns - column);
            const __m512 sum = load(sums + column - panel * PANEL);
            store(to, adds ? _mm512_add_ps(load(to, mask), sum) : sum, mask);
        }
    });
}

__m512 sigmoid_times(__m512 x, __m512 z) {  // x / (1 + e^-z)
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), z))));
}

__m512 activate(__m512 x, int32_t activation) {
    if (activation == SILU) {
        return sigmoid_times(x, x);
    }
    if (activation == GELU_TANH) {  // x/2 (1 + tanh u) = x / (1 + e^-2u)
        const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
        return sigmoid_times(x, _mm512_mul_ps(_mm512_add_ps(x, cube), _mm512_set1_ps(2 * 0.7978845608f)));
    }
    alignas(64) float values[LANES];
    store(values, x);
    for (float& value : values) {
        value *= 0.5f * (1.0f + std::erf(value * 0.70710678f));
    }
    return load(values);
}

// A gated panel holds 16 gates and the 16 values that they scale.
void expand(Inputs& inputs, int64_t rows, const Linear& up, const Model& model, Inputs& out) {
    const int64_t width = up.out_features, per_panel = model.is_gated ? LANES : PANEL;
    const int64_t columns = (width + per_panel - 1) / per_panel * PANEL;
    multiply_all(inputs, rows, up, columns, model.is_bf16, [&](int64_t row, int64_t panel, const float* sums) {
        for (int64_t column = 0; column < per_panel; column += LANES) {
            __m512 x = activate(load(sums + column), model.activation);
            x = model.is_gated ? _mm512_mul_ps(x, load(sums + LANES)) : x;
            out.put(row, panel * per_panel + column, x, lanes(width - panel * per_panel - column));
        }
    });
}

// Calls `put(column, normed, mask)` for 16 columns after another; every part of the row is read before it is put.
template <class Put>
void norm_row(const float* x, int64_t size, const Norm& norm, Put&& put) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    float mean = 0.0f;
    if (norm.is_layer) {
        for (int64_t i = 0; i < size; i += LANES) {
            sum = _mm512_add_ps(sum, load(x + i, lanes(size - i)));
        }
        mean = _mm512_reduce_add_ps(sum) / static_cast<float>(size);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        const __m512 centred = _mm512_maskz_sub_ps(mask, load(x + i, mask), _mm512_set1_ps(mean));
        squares = _mm512_fmadd_ps(centred, centred, squares);
    }
    const float scale = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + norm.epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        const __m512 centred = _mm512_sub_ps(load(x + i, mask), _mm512_set1_ps(mean));
        __m512 y = _mm512_mul_ps(_mm512_mul_ps(centred, _mm512_set1_ps(scale)), load(norm.weight + i, mask));
        y = norm.bias ? _mm512_add_ps(y, load(norm.bias + i, mask)) : y;
        put(i, y, mask);
    }
}

void norm_rows(const float* hidden, int64_t rows, int64_t size, const Norm& norm, Inputs& out) {
    pool->share((rows + 7) / 8, [&](int64_t task) {
        for (int64_t row = task * 8; row < std::min(rows, task * 8 + 8); ++row) {
            norm_row(hidden + row * size, size, norm,
                     [&](int64_t i, __m512 y, __mmask16 mask) { out.put(row, i, y, mask); });
        }
    });
}

void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const __mmask16 mask = lanes(half - i);
        const __m512 x = load(head + i, mask), y = load(head + half + i, mask);
        const __m512 c = load(cosines + i, mask), s = load(sines + i, mask);
        store(head + i, _mm512_fnmadd_ps(y, s, _mm512_mul_ps(x, c)), mask);
        store(head + half + i, _mm512_fmadd_ps(x, s, _mm512_mul_ps(y, c)), mask);
    }
}

template <class T>
void copy_row(const float* from, int64_t size, T* to) {
    for (int64_t i = 0; i < size; i += LANES) {
        store(to + i, load(from + i, lanes(size - i)), lanes(size - i));
    }
}

// Buffers and shapes of one model; the threads run `forward` side by side, each for its share of every phase.
struct Decoder {
    Model model;
    Shape shape{};
    std::vector<float> hidden, heads;
    Inputs normed, attended, expanded;
    std::vector<Segment> segments;
    std::vector<AttentionTask> tasks;

    explicit Decoder(const Model& made) : model(made) {}

    int64_t heads_width() const { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size; }

    void prepare(const Batch& batch) {
        shape = {model.num_heads, model.num_kv_heads, model.head_size, batch.block_size, model.window, model.scale};
        const bool as_bf16 = model.is_bf16 && uses_amx;
        const Layer& layer = model.layers[0];
        AttentionScratch::grow(hidden, batch.num_tokens * model.hidden_size);
        AttentionScratch::grow(heads, batch.num_tokens * heads_width());
        normed.reserve(batch.num_tokens, model.hidden_size, as_bf16);
        attended.reserve(batch.num_tokens, layer.out.in_features, as_bf16);
        expanded.reserve(batch.num_tokens, layer.down.in_features, as_bf16);
        segments.assign(batch.segments, batch.segments + batch.num_segments);
        tasks = attention_tasks(shape, segments);
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
        tasks = attention_tasks(shape, segments);
    }

    template <class T>
    void forward(const Batch& batch, int thread) {
        embed<T>(batch);
        int64_t rows = batch.num_tokens;
        for (int64_t number = 0; number < model.num_layers; ++number) {
            const Layer& layer = model.layers[number];
            norm_rows(hidden.data(), rows, model.hidden_size, layer.attention_norm, normed);
            multiply_to(normed, rows, layer.qkv, model.is_bf16, heads.data(), heads_width(), false);
            rotate_and_store<T>(layer, batch, number);
            if (number == model.num_layers - 1) {
                rows = batch.num_emits;
                pool->share(1, [&](int64_t) { gather(batch); });
            }
            attend_all<T>(batch, number, thread);
            multiply_to(attended, rows, layer.out, model.is_bf16, hidden.data(), model.hidden_size, true);
            norm_rows(hidden.data(), rows, model.hidden_size, layer.ffn_norm, normed);
            expand(normed, rows, layer.up, model, expanded);
            multiply_to(expanded, rows, layer.down, model.is_bf16, hidden.data(), model.hidden_size, true);
        }
        norm_rows(hidden.data(), rows, model.hidden_size, model.final_norm, normed);
        multiply_to(normed, rows, model.head, model.is_bf16, batch.logits, model.head.out_features, false);
    }

    template <class T>
    void embed(const Batch& batch) {
        pool->share((batch.num_tokens + 7) / 8, [&](int64_t task) {
            for (int64_t row = task * 8; row < std::min(batch.num_tokens, task * 8 + 8); ++row) {
                const T* from = static_cast<const T*>(model.embedding) + batch.token_ids[row] * model.hidden_size;
                for (int64_t i = 0; i < model.hidden_size; i += LANES) {
                    const __mmask16 mask = lanes(model.hidden_size - i);
                    store(hidden.data() + row * model.hidden_size + i, load(from + i, mask), mask);
                }
            }
        });
    }

    template <class T>
    T* of_layer(void* cache, const Batch& batch, int64_t layer) const {
        return static_cast<T*>(cache) +
               layer * batch.num_blocks * batch.block_size * shape.num_kv_heads * shape.head_size;
    }

    template <class T>
    void rotate_and_store(const Layer& layer, const Batch& batch, int64_t number) {
        const int64_t size = shape.head_size, rotated = shape.num_heads + shape.num_kv_heads;
        T* keys = of_layer<T>(batch.keys, batch, number);
        T* values = of_layer<T>(batch.values, batch, number);
        pool->share((batch.num_tokens + 3) / 4, [&](int64_t task) {
            for (int64_t row = task * 4; row < std::min(batch.num_tokens, task * 4 + 4); ++row) {
                float* head = heads.data() + row * heads_width();
                const int64_t place = batch.slots[row] * shape.num_kv_heads * size;
                const int64_t angle = batch.positions[row] * model.rotary_half;
                for (int64_t i = 0; i < rotated; ++i) {
                    const Norm& norm = i < shape.num_heads ? layer.query_norm : layer.key_norm;
                    if (norm.weight) {
                        norm_row(head + i * size, size, norm, [&](int64_t column, __m512 y, __mmask16 mask) {
                            store(head + i * size + column, y, mask);
                        });
                    }
                    rotate(head + i * size, model.cosines + angle, model.sines + angle, model.rotary_half);
                }
                copy_row(head + shape.num_heads * size, shape.num_kv_heads * size, keys + place);
                copy_row(head + rotated * size, shape.num_kv_heads * size, values + place);
            }
        });
    }

    // Emitting rows come first, in their order; they may be asked for in any, and more than once.
    void gather(const Batch& batch) {
        keep_emitting(batch);
        gather_rows(batch, hidden, model.hidden_size);
        gather_rows(batch, heads, heads_width());
        const bool as_bf16 = normed.is_bf16;
        normed.reserve(batch.num_emits, model.hidden_size, as_bf16);
        attended.reserve(batch.num_emits, attended.stride, as_bf16);
        expanded.reserve(batch.num_emits, expanded.stride, as_bf16);
    }

    static void gather_rows(const Batch& batch, std::vector<float>& rows, int64_t width) {
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
        const T* keys = of_layer<T>(batch.keys, batch, number);
        const T* values = of_layer<T>(batch.values, batch, number);
        pool->share(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
            const AttentionTask& task = tasks[index];
            const Segment& segment = segments[task.segment];
            if (attended.is_bf16) {
                attend(shape, segment, task, keys, values, heads.data(), heads_width(), attended.halves(0),
                       attended.stride, scratches[thread]);
            } else {
                attend(shape, segment, task, keys, values, heads.data(), heads_width(), attended.floats(0),
                       attended.stride, scratches[thread]);
            }
        });
    }
};

void run(const std::function<void(int)>& work, bool with_tiles) {
    pool->run([&](int thread) {
        if (with_tiles) {
            begin_tiles();
        }
        work(thread);
        if (with_tiles) {
            end_tiles();
        }
    });
}

}  // namespace

// -- what Python calls ----------------------------------------------------------------------------------------------

extern "C" {

// Starts the threads, before anything else. Returns whether products of bfloat16 use AMX, which `allows_amx` may forbid.
int32_t sarathi_start(int32_t num_threads, int32_t allows_amx) {
    uses_amx = HAS_AMX && allows_amx && enable_amx();
    if (!pool || pool->size != num_threads) {
        pool = std::make_unique<Pool>(num_threads);
        scratches.resize(num_threads);
    }
    return uses_amx;
}

void* sarathi_make_decoder(const Model* model) { return new Decoder(*model); }

void sarathi_free_decoder(void* decoder) { delete static_cast<Decoder*>(decoder); }

// One iteration: writes keys and values, and the logits of the emitting rows.
void sarathi_forward(void* made, const Batch* batch, const float* cosines, const float* sines) {
    Decoder& decoder = *static_cast<Decoder*>(made);
    decoder.model.cosines = cosines;
    decoder.model.sines = sines;
    decoder.prepare(*batch);
    const bool is_bf16 = decoder.model.is_bf16;
    run([&](int thread) { is_bf16 ? decoder.forward<bf16>(*batch, thread) : decoder.forward<float>(*batch, thread); },
        is_bf16 && uses_amx);
}

// x [rows, in_features] float32 times a packed weight, to out [rows, out_features].
void sarathi_linear(const Linear* linear, int32_t is_bf16, const float* x, int64_t rows, float* out) {
    Inputs inputs;
    inputs.reserve(rows, linear->in_features, is_bf16 && uses_amx);
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + row * linear->in_features;
        inputs.is_bf16 ? copy_row(from, linear->in_features, inputs.halves(row))
                       : copy_row(from, linear->in_features, inputs.floats(row));
    }
    run([&](int) { multiply_to(inputs, rows, *linear, is_bf16, out, linear->out_features, false); },
        inputs.is_bf16);
}

// query and out [num_tokens, num_heads, head_size] float32; one layer's keys and values.
void sarathi_attention(const Shape* shape, const Segment* segments, int64_t num_segments, int32_t is_bf16,
                       const void* keys, const void* values, const float* query, float* out) {
    const std::vector<Segment> all(segments, segments + num_segments);
    const std::vector<AttentionTask> tasks = attention_tasks(*shape, all);
    int64_t longest = 0;
    for (const Segment& segment : all) {
        longest = std::max(longest, segment.kv_len);
    }
    const int64_t stride = shape->num_heads * shape->head_size;
    run([&](int thread) {
        AttentionScratch& scratch = scratches[thread];
        scratch.reserve(*shape, longest);
        pool->share(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
            const Segment& segment = all[tasks[index].segment];
            if (is_bf16) {
                attend(*shape, segment, tasks[index], static_cast<const bf16*>(keys), static_cast<const bf16*>(values),
                       query, stride, out, stride, scratch);
            } else {
                attend(*shape, segment, tasks[index], static_cast<const float*>(keys),
                       static_cast<const float*>(values), query, stride, out, stride, scratch);
            }
        });
    }, false);
}

// The likeliest token of each row of logits; `nan_token` where one is not a number.
void sarathi_greedy(const float* logits, int64_t rows, int64_t width, int64_t nan_token, int64_t* out) {
    run([&](int) {
        pool->share(rows, [&](int64_t row) {
            const float* of_row = logits + row * width;
            __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
            __mmask16 nan = 0;
            for (int64_t i = 0; i < width; i += LANES) {
                const __m512 x = _mm512_mask_loadu_ps(most, lanes(width - i), of_row + i);
                nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
                most = _mm512_max_ps(x, most);
            }
            const float maximum = _mm512_reduce_max_ps(most);
            out[row] = nan ? nan_token : std::find(of_row, of_row + width, maximum) - of_row;
        });
    }, false);
}

}  // extern "C"
