// What Python calls.
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

}  // namespace

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
        for (int64_t i = 0; i < linear->in_features; i += LANES) {
            const __mmask16 mask = lanes(linear->in_features - i);
            inputs.put(row, i, load(from + i, mask), mask);
        }
    }
    run([&](int) { multiply_to(inputs, rows, *linear, is_bf16, out, linear->out_features, false); },
        inputs.is_bf16);
}

// query and out [num_tokens, num_heads, head_size] float32; one layer's keys and values.
void sarathi_attention(const Shape* shape, const Segment* segments, int64_t num_segments, int32_t is_bf16,
                       const void* keys, const void* values, const float* query, float* out) {
    const std::vector<Segment> all(segments, segments + num_segments);
    const std::vector<AttentionTask> tasks = attention_tasks(*shape, all, pool->size);
    int64_t longest = 0;
    for (const Segment& segment : all) {
        longest = std::max(longest, segment.kv_len);
    }
    const int64_t stride = shape->num_heads * shape->head_size;
    run([&](int thread) {
        AttentionScratch& scratch = scratches[thread];
        scratch.reserve(*shape, longest);
        const auto put = [&](int64_t row, int64_t column, __m512 x, __mmask16 mask) {
            store(out + row * stride + column, x, mask);
        };
        pool->share(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
            const Segment& segment = all[tasks[index].segment];
            if (is_bf16) {
                attend(*shape, segment, tasks[index], static_cast<const bf16*>(keys), static_cast<const bf16*>(values),
                       query, stride, scratch, uses_amx, put);
            } else {
                attend(*shape, segment, tasks[index], static_cast<const float*>(keys),
                       static_cast<const float*>(values), query, stride, scratch, false, put);
            }
        });
    }, is_bf16 && uses_amx);
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
