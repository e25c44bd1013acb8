"""Names of models and cards as people, servers and drivers write them, and the files of conf/ that
stand for them.
"""

from __future__ import annotations

import pytest

from sarathi_lab.config.published_names import (
    begins_with,
    nearest_option,
    option_of,
    positions_of,
    stands_for,
)

MODELS = {
    "deepseek-v3": [
        *("DeepSeek-V3", "DeepSeek-V3-0324", "DeepSeek-V3-bf16", "DeepSeek-V3.1-Terminus"),
        *("DeepSeek-R1", "DeepSeek-R1-0528-FP4-v2", "DeepSeek-V3.1-Base"),
    ],
    "gemma-3-12b": ["gemma-3-12b-it", "gemma-3-12b-it-qat-q4_0-gguf"],
    "gemma-4-26b-a4b": ["gemma-4-26B-A4B-it"],
    "glm-4.5": ["GLM-4.5", "GLM-4.5-FP8"],
    "glm-4.5-air": ["GLM-4.5-Air-FP8", "GLM-4.5-Air-Base"],
    "gpt-oss-20b": ["gpt-oss-20b", "gpt-oss-20b-mxfp4"],
    "kimi-k2": ["Kimi-K2-Instruct", "Kimi-K2-Instruct-0905", "Kimi-K2-Base"],
    "llama2-7b": ["Llama-2-7b-chat-hf", "Llama-2-7B-Chat-AWQ"],
    "llama3-8b": ["Meta-Llama-3-8B-Instruct"],
    "llama3.1-8b": [
        *("Llama-3.1-8B", "Meta-Llama-3.1-8B-Instruct-FP8", "llama3.1:8b-instruct-q4_K_M"),
        *("Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3-1-8b-instruct", "Llama-3.1-8B-sft"),
        "Llama-3.1-8B-Instruct-bnb-4bit",
    ],
    "llama4-maverick": ["Llama-4-Maverick-17B-128E-Instruct-FP8"],
    "llama4-scout": ["Llama-4-Scout-17B-16E-Instruct"],
    "minimax-m2": ["MiniMax-M2"],
    "mistral-7b": ["Mistral-7B-v0.1", "Mistral-7B-Instruct-v0.1"],
    "mistral-small-24b": ["Mistral-Small-24B-Instruct-2501"],
    "mixtral-8x7b": ["Mixtral-8x7B-Instruct-v0.1-GPTQ"],
    "nemotron-3-nano-30b-a3b": ["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"],
    "nemotron-h-56b": ["Nemotron-H-56B-Base-8K"],
    "phi-4-14b": ["phi-4", "phi-4-gguf"],
    "qwen2.5-7b": ["Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen25-7b"],
    "qwen3-235b-a22b": ["Qwen3-235B-A22B-Thinking-2507-FP8"],
    "qwen3-8b": ["Qwen3-8B-base", "Qwen3-8B-GGUF:Q4_K_M", "Qwen3-8B-FP8-dynamic", "qwen3:8b"],
    "qwen3-14b": ["Qwen3-14B-AWQ-4bit-128g", "Qwen3-14B.Q4_K_M.gguf"],
    "qwen3-next-80b-a3b": ["Qwen3-Next-80B-A3B-Instruct"],
    "qwen3.6-27b": ["Qwen3.6-27B", "Qwen3.5-27B"],
    "yi-34b": ["Yi-34B-Chat", "Yi-34B-Chat-4bits"],
    # The lab's own shapes have no published names.
    "13b": ["13b"],
    "tiny": ["tiny"],
    "": [
        *("GLM-4.5V", "GLM-4.5V-FP8", "GLM-4.6", "DeepSeek-V3.2", "DeepSeek-V3.2-Exp"),
        *("DeepSeek-R1-0528-Qwen3-8B", "DeepSeek-R1-Distill-Llama-8B", "deepseek-r1-32b"),
        *("Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2-Instruct-quantized.w4a16", "MiniMax-M2.1"),
        *("gpt-oss-20b-BF16", "gpt-oss-safeguard-20b", "Yi-34B-200K", "Phi-4-mini-instruct"),
        *("Mistral-7B-Instruct-v0.2", "Mistral-7B-v0.3", "Mistral-Small-3.1-24B-Instruct-2503"),
        *("Qwen2-57B-A14B", "Qwen2.5-7B-Instruct-1M", "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B"),
        *(
            "Qwen2.5-Coder-32B-Instruct",
            "Llama-3.1-8B-ours",
            "Llama-3.1-8B-L",
            "Llama-3.1-Nemotron-70B-Instruct",
        ),
        *("TinyLlama-1.1B-Chat-v1.0", "tiny-random-LlamaForCausalLM", "auto-merged", "13b-merged"),
    ],
}
CARDS = {
    "a10": ["NVIDIA A10"],
    "a100": [
        *("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB", "NVIDIA A100", "a100-80g"),
        "NVIDIA A100 80GB Tensor Core GPU",
    ],
    "a40": ["NVIDIA A40"],
    "a6000": ["NVIDIA RTX A6000", "A6000"],
    "b200": ["NVIDIA B200"],
    "b300": ["NVIDIA B300 SXM6 AC"],
    "gb10": ["NVIDIA GB10"],
    "gb200": ["NVIDIA GB200"],
    "h100": ["NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3", "H100-SXM5-80GB", "h100"],
    "h100-pcie": ["NVIDIA H100 PCIe"],
    "h20": ["NVIDIA H20"],
    "h200": ["NVIDIA H200", "NVIDIA H200 141 GB HBM3e"],
    "l4": ["NVIDIA L4", "NVIDIA L4 24GB"],
    "l40s": ["NVIDIA L40S"],
    "mi300x": ["AMD Instinct MI300X", "AMD_Instinct_MI300X_OAM"],
    "rtx-3090": ["NVIDIA GeForce RTX 3090"],
    "rtx-4090": ["NVIDIA GeForce RTX 4090"],
    "rtx-5090": ["NVIDIA GeForce RTX 5090"],
    "rtx-pro-6000": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"],
    "": [
        *("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"),
        *("NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H800", "NVIDIA H20-3e", "NVIDIA GB300"),
        *("NVIDIA A10G", "NVIDIA L40", "NVIDIA A40-48Q", "NVIDIA GH200 480GB", "Tesla T4"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 3090 Ti", "AMD Instinct MI325X"),
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX 6000 Ada Generation",
    ],
}


@pytest.mark.parametrize("option", MODELS)
def test_a_name_of_a_model_is_that_of_its_file_alone(option):
    assert {name: option_of("model", name) for name in MODELS[option]} == dict.fromkeys(
        MODELS[option], option
    )


@pytest.mark.parametrize("option", CARDS)
def test_a_name_of_a_card_is_that_of_its_file_alone(option):
    assert {name: option_of("hardware", name) for name in CARDS[option]} == dict.fromkeys(
        CARDS[option], option
    )


@pytest.mark.parametrize(
    ("group", "name", "option", "differences"),
    [
        ("model", "GLM-4.5V-FP8", "glm-4.5", ["4.5v"]),
        ("model", "Kimi-K2.5", "kimi-k2", ["k2.5"]),
        ("hardware", "NVIDIA A10G", "a10", ["a10g"]),
        ("hardware", "H100 80GB HBM3 MIG 1g.10gb", "h100", ["mig", "1g", "10gb"]),
    ],
)
def test_words_that_make_another_thing_are_named(group, name, option, differences):
    assert nearest_option(group, name) == (option, differences)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("Qwen3-4B-Instruct-2507-FP8", 262144),
        ("Qwen3-4B", None),
        ("Kimi-K2-Instruct-0905", 262144),
        ("Qwen3-30B-A3B-FP8", 40960),
        ("Qwen3-30B-A3B-Thinking-2507", None),
        ("Qwen3-235B-A22B", 40960),
        ("DeepSeek-V3-0324", None),
    ],
)
def test_a_date_in_a_models_name_tells_its_positions(name, positions):
    assert positions_of(name) == positions


def test_an_option_of_one_driver_stands_for_its_card():
    assert stands_for("hardware", "a100_2023", "NVIDIA A100-SXM4-80GB")
    assert not stands_for("hardware", "a100_2023", "NVIDIA A100-SXM4-40GB")


@pytest.mark.parametrize(
    ("name", "first", "is_same"),
    [
        ("NVIDIA_H100_80GB_HBM3", "h100", True),
        ("0.11.2", "0.11", True),
        ("NVIDIA L40", "l4", False),
        ("NVIDIA A100-SXM4-80GB", "a10", False),
        ("GLM-4.5V", "GLM-4.5", False),
        ("Llama-3.1-8B", "llama3-8b", False),
    ],
)
def test_a_name_begins_with_whole_words_of_another(name, first, is_same):
    assert begins_with(name, first) == is_same
