// What Python calls. What it hands over is checked there or here: what is within reads and writes wherever it is told.
#include "checks.h"
#include "decoder.h"

#if defined(__linux__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
static bool enable_amx() { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }
#else
static bool enable_amx() { return false; }
#endif

using namespace sarathi;

namespace {

void run(const std::function<void(int)>& work) {
    pool->run([&](int thread) {
        if (uses_amx) {
            begin_tiles();
        }
        work(thread);
        if (uses_amx) {
            end_tiles();
        }
    });
}

// Null, or why a check within `call` failed: C has no exceptions.
template <class Call>
Fault fault_in(Call&& call) {
    try {
        call();
    } catch (Fault fault) {
        return fault;
    }
    return nullptr;
}

// Calls a template with the type of a cache's entries, on all threads.
template <class Call>
void run_with_type(int32_t kv_type, Call&& call) {
    run([&](int thread) {
        switch (kv_type) {
            case BFLOAT16: return call.template operator()<bf16>(thread);
            default: return call.template operator()<float>(thread);
        }
    });
}

// The inputs of a product, x [rows, width].
void put_all(const float* x, int64_t rows, int64_t width, bool is_bf16, Inputs& inputs) {
    inputs.reserve(rows, width, rounds_inputs(is_bf16));
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < width; i += LANES) {
            const Mask mask = lanes(width - i);
            inputs.put(row, i, load(x + row * width + i, mask), mask);
        }
    }
}

}  // namespace

#pragma GCC visibility push(default)  // the rest is private to each library, where a process has several
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

// Each thread copies its share, whole pages: they come to lie on its node, where nothing was before.
void sarathi_copy(char* to, const char* from, int64_t num_bytes) {
    const auto begin = [&](int i) { return i < pool->size ? num_bytes * i / pool->size & -PAGE : num_bytes; };
    pool->run([&](int thread) { std::copy(from + begin(thread), from + begin(thread + 1), to + begin(thread)); });
}

Decoder* sarathi_make_decoder(const Model* model) { return new Decoder{*model}; }

void sarathi_free_decoder(Decoder* decoder) { delete decoder; }

// One iteration: writes keys and values, and the logits of the emitting rows.
Fault sarathi_forward(Decoder* decoder, const Batch* batch) {
    return fault_in([&] {
        check(*batch, decoder->model);
        decoder->prepare(*batch);
        run_with_type(batch->kv_type, [&]<class T>(int thread) { decoder->forward<T>(thread); });
    });
}

// x [rows, in_features] float32 times a packed weight, to out [rows, out_features].
void sarathi_linear(const Linear* linear, int32_t is_bf16, const float* x, int64_t rows, float* out) {
    Inputs inputs;
    put_all(x, rows, linear->in_features, is_bf16, inputs);
    run([&](int) { multiply_to(inputs, rows, *linear, is_bf16, out, false); });
}

// query and out [num_tokens, num_heads, head_size] float32, to one layer's keys and values. Of the model only its heads
// are read, and `is_bf16`: whether what is not float32 may be rounded to it; of the batch only the segments and the cache.
Fault sarathi_attention(const Model* model, const Batch* batch, const float* query, float* out) {
    return fault_in([&] {
        check_segments(*batch);
        Decoder decoder{*model};
        decoder.prepare_attention(*batch);
        const int64_t width = model->num_heads * model->head_size;
        const auto put = [&](int64_t row, int64_t i, Vector x, Mask mask) { store(out + row * width + i, x, mask); };
        run_with_type(batch->kv_type, [&]<class T>(int thread) {
            decoder.attend_all<T>(query, width, 0, thread, put);
        });
    });
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
            out[row] = nan ? nan_token : std::find(of_row, of_row + width, reduce_max(most)) - of_row;
        });
    });
}

}  // extern "C"
#pragma GCC visibility pop
