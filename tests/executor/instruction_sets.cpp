// Computes on made-up numbers, and writes the results as float32: what `test_instruction_sets.py` compares between sets.
#include "decoder.cpp"

#include <bit>
#include <cstdio>

namespace {

uint32_t state = 1;

float next() {  // in [-1, 1)
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
}

// Kept to the end, as structures point at them.
const float* numbers(int64_t count, float size) {
    auto* made = new Floats(count);
    std::generate(made->begin(), made->end(), [&] { return size * next(); });
    return made->data();
}

// Panels of random weights, float32 or bfloat16.
Linear random_linear(int64_t in_features, int64_t out_features, bool is_bf16, bool is_gated = false) {
    const int64_t panels = (out_features * (is_gated ? 2 : 1) + PANEL - 1) / PANEL;
    const int64_t count = panels * PANEL * round_up(in_features, is_bf16 ? KBLOCK : 1);
    const float* floats = numbers(count, std::sqrt(3.0f / static_cast<float>(in_features)));
    if (!is_bf16) {
        return {floats, nullptr, in_features, out_features};
    }
    auto* halves = new std::vector<bf16>(count);
    for (int64_t i = 0; i < count; ++i) {
        (*halves)[i] = bf16_bits(std::bit_cast<uint32_t>(floats[i]));
    }
    return {halves->data(), nullptr, in_features, out_features};
}

void write(const float* from, int64_t count) { std::fwrite(from, sizeof(float), count, stdout); }

// Chunk and decode of one tiny model, and the likeliest tokens.
void write_logits(bool is_bf16, int32_t kv_type) {
    constexpr int64_t HIDDEN = 48, HEADS = 4, KV_HEADS = 2, SIZE = 20, FFN = 40, VOCABULARY = 97, TOKENS = 37, BLOCK = 16;
    state = 1;
    const auto norm = [](int64_t size) { return Norm{numbers(size, 1.0f), nullptr, size, 1e-5f, 0}; };
    std::vector<Layer> layers(2);
    for (Layer& layer : layers) {
        layer.attention_norm = norm(HIDDEN);
        layer.ffn_norm = norm(HIDDEN);
        layer.qkv = random_linear(HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE, is_bf16);
        layer.out = random_linear(HEADS * SIZE, HIDDEN, is_bf16);
        layer.up = random_linear(HIDDEN, FFN, is_bf16, true);
        layer.down = random_linear(FFN, HIDDEN, is_bf16);
    }
    const Linear embedding = random_linear(HIDDEN, VOCABULARY, is_bf16);
    Model model{layers.data(), embedding.weight, norm(HIDDEN), random_linear(HIDDEN, VOCABULARY, is_bf16),
                2, VOCABULARY, HIDDEN, HEADS, KV_HEADS, SIZE, SIZE / 2, 0, 0, 0, is_bf16, SILU, 1, 0, 0.25f};
    Decoder* decoder = sarathi_make_decoder(&model);
    constexpr int64_t ENTRIES = 2 * 4 * BLOCK * KV_HEADS * SIZE;
    std::vector<float> keys(ENTRIES), values(ENTRIES), key_scales(ENTRIES), value_scales(ENTRIES);
    std::vector<int64_t> ids(TOKENS), positions(TOKENS), slots(TOKENS);
    for (int64_t i = 0; i < TOKENS; ++i) {
        ids[i] = i * i % VOCABULARY;
        positions[i] = slots[i] = i;
    }
    const float *cosines = numbers(64 * SIZE / 2, 1.0f), *sines = numbers(64 * SIZE / 2, 1.0f);
    const auto step = [&](int64_t first, int64_t count) {
        const int64_t emits = count - 1;
        const Segment segment{0, count, first + count, 0, 4, nullptr};
        std::vector<float> logits(VOCABULARY);
        const Batch batch{&ids[first], &positions[first], &slots[first], &emits, &segment, count, 1, 1, keys.data(),
                          values.data(), key_scales.data(), value_scales.data(), 4, BLOCK, cosines, sines, 64,
                          logits.data(), kv_type};
        if (const Fault fault = sarathi_forward(decoder, &batch)) {
            std::fprintf(stderr, "%s\n", fault);
            std::exit(1);
        }
        int64_t token;
        sarathi_greedy(logits.data(), 1, VOCABULARY, -1, &token);
        logits.push_back(static_cast<float>(token));
        write(logits.data(), VOCABULARY + 1);
    };
    step(0, TOKENS - 1);
    step(TOKENS - 1, 1);
    sarathi_free_decoder(decoder);
}

}  // namespace

int main() {
    sarathi_start(2, 0);
    write_logits(false, FLOAT32);
    write_logits(true, BFLOAT16);
    Vector rows[LANES];
    for (Vector& row : rows) {
        row = exponential(load(numbers(LANES, 90.0f)));
    }
    transpose(rows);
    for (const Vector& row : rows) {
        float values[LANES];
        store(values, row);
        write(values, LANES);
    }
}
