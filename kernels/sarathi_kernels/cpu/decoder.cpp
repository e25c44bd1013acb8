// What Python calls. What is handed over is checked here: what is within reads and writes wherever it is told to.
#include "checks.h"
#include "decoder.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace sarathi;

namespace {

bool enable_amx() {
#if defined(__linux__) && defined(__AMX_BF16__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

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

template <class T>
void forward(Decoder& decoder, const Batch& batch, int thread) {
    switch (batch.kv_type) {
        case INT8: return decoder.forward<T, int8_t>(batch, thread);
        case FP8: return decoder.forward<T, fp8>(batch, thread);
        default: return decoder.forward<T, T>(batch, thread);
    }
}

// The inputs of a product, x [rows, width].
void put_all(const float* x, int64_t rows, int64_t width, bool as_bf16, Inputs& inputs) {
    inputs.reserve(rows, width, as_bf16);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < width; i += LANES) {
            const Mask mask = lanes(width - i);
            inputs.put(row, i, load(x + row * width + i, mask), mask);
        }
    }
}

// One layer's keys or values, as Python hands them over.
struct Layered {
    const void* data;
    float* scales;
    template <class T>
    Stored<const T> as() const {
        return {static_cast<const T*>(data), scales};
    }
};

template <class T>
void attend_all(const Shape& shape, const std::vector<Segment>& segments, const Layered& keys, const Layered& values,
                const float* query, float* out, bool rounds) {
    const std::vector<AttentionTask> tasks = attention_tasks(shape, segments, pool->size);
    int64_t longest = 0;
    for (const Segment& segment : segments) {
        longest = std::max(longest, segment.kv_len);
    }
    const int64_t stride = shape.num_heads * shape.head_size;
    run([&](int thread) {
        AttentionScratch& scratch = scratches[thread];
        scratch.reserve(shape, longest);
        const auto put = [&](int64_t row, int64_t column, Vector x, Mask mask) {
            store(out + row * stride + column, x, mask);
        };
        pool->share(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
            attend<T>(shape, segments[tasks[index].segment], tasks[index], keys.as<T>(), values.as<T>(), query, stride,
                      scratch, rounds, put);
        });
    }, rounds && uses_amx);
}

}  // namespace

extern "C" {

// Starts the threads, before anything else. Returns whether products of bfloat16 use AMX, which `allows_amx` may forbid.
int32_t sarathi_start(int32_t num_threads, int32_t allows_amx) {
    uses_amx = HAS_AMX && allows_amx && enable_amx();
    if (!pool || pool->size != num_threads) {
        pool = std::make_unique<Pool>(std::vector<int32_t>(num_threads, -1), std::vector<int32_t>(num_threads));
        scratches.resize(num_threads);
    }
    return uses_amx;
}

// As many threads as before, from now on on these cores, each near this node of memory (see `Pool`).
void sarathi_place(const int32_t* cores, const int32_t* nodes) {
    const int num_threads = pool->size;
    pool.reset();  // whose threads end first
    pool = std::make_unique<Pool>(std::vector(cores, cores + num_threads), std::vector(nodes, nodes + num_threads));
}

void sarathi_copy(char* to, const char* from, int64_t num_bytes) { pool->copy(to, from, num_bytes); }

Fault sarathi_make_decoder(const Model* model, void** made) {
    const Fault fault = fault_of(*model);
    *made = fault ? nullptr : new Decoder(*model);
    return fault;
}

void sarathi_free_decoder(void* decoder) { delete static_cast<Decoder*>(decoder); }

// One iteration: writes keys and values, and the logits of the emitting rows.
Fault sarathi_forward(void* made, const Batch* batch) {
    Decoder& decoder = *static_cast<Decoder*>(made);
    if (const Fault fault = fault_of(*batch, decoder.model)) {
        return fault;
    }
    decoder.prepare(*batch);
    const bool is_bf16 = decoder.model.is_bf16;
    run([&](int thread) { is_bf16 ? forward<bf16>(decoder, *batch, thread) : forward<float>(decoder, *batch, thread); },
        is_bf16 && uses_amx);
    return nullptr;
}

// x [rows, in_features] float32 times a packed weight, to out [rows, out_features].
void sarathi_linear(const Linear* linear, int32_t is_bf16, const float* x, int64_t rows, float* out) {
    const Group all[]{{0, rows, 0}};
    Inputs inputs;
    put_all(x, rows, linear->in_features, rounds_inputs(is_bf16), inputs);
    run([&](int) { multiply_to(inputs, all, *linear, is_bf16, out, linear->out_features, false); },
        is_bf16 && uses_amx);
}

// x and out [rows, hidden_size] float32; the experts of a layer by `logits` [rows, num_experts]. Of the model and the
// layer nothing else is read.
void sarathi_experts(const Model* model, const Layer* layer, const float* x, const float* logits, int64_t rows,
                     float* out) {
    Inputs inputs;
    put_all(x, rows, model->hidden_size, rounds_inputs(model->is_bf16), inputs);
    Mixture mixture;
    mixture.reserve(rows, *layer, *model, inputs.is_bf16);
    std::copy_n(logits, rows * model->num_experts, mixture.logits.begin());
    std::fill_n(out, rows * model->hidden_size, 0.0f);
    run([&](int) { mixture.add_to(out, inputs, rows, *layer, *model); }, model->is_bf16 && uses_amx);
}

// query and out [num_tokens, num_heads, head_size] float32; one layer's keys and values in `num_blocks` blocks, whose type
// `is_bf16` tells if it is OWN; otherwise it says whether AMX may multiply them.
Fault sarathi_attention(const Shape* shape, const Segment* segments, int64_t num_segments, int64_t num_tokens,
                        int64_t num_blocks, int32_t is_bf16, int32_t kv_type, const void* keys, const void* values,
                        float* key_scales, float* value_scales, const float* query, float* out) {
    if (const Fault fault = fault_of(*shape)) {
        return fault;
    }
    if (const Fault fault = fault_of(segments, num_segments, num_tokens, shape->block_size, num_blocks)) {
        return fault;
    }
    const std::vector<Segment> all(segments, segments + num_segments);
    const Layered of_keys{keys, key_scales}, of_values{values, value_scales};
    const bool rounds = rounds_inputs(is_bf16);
    if (kv_type == INT8) {
        attend_all<int8_t>(*shape, all, of_keys, of_values, query, out, rounds);
    } else if (kv_type == FP8) {
        attend_all<fp8>(*shape, all, of_keys, of_values, query, out, rounds);
    } else if (is_bf16) {
        attend_all<bf16>(*shape, all, of_keys, of_values, query, out, rounds);
    } else {
        attend_all<float>(*shape, all, of_keys, of_values, query, out, false);
    }
    return nullptr;
}

// The likeliest token of each row of logits; `nan_token` where one is not a number.
void sarathi_greedy(const float* logits, int64_t rows, int64_t width, int64_t nan_token, int64_t* out) {
    run([&](int) {
        pool->share(rows, [&](int64_t row) {
            const float* of_row = logits + row * width;
            Vector most = broadcast(-std::numeric_limits<float>::infinity());
            uint32_t nan = 0;
            for (int64_t i = 0; i < width; i += LANES) {
                const Vector x = load(of_row + i, lanes(width - i), most);
                nan |= nan_lanes(x);
                most = max(x, most);
            }
            const float maximum = reduce_max(most);
            out[row] = nan ? nan_token : std::find(of_row, of_row + width, maximum) - of_row;
        });
    }, false);
}

}  // extern "C"
