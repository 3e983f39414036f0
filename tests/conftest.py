"""Shared fixtures: a tiny tokenizer and tiny random checkpoints of every MoE family, in the real format."""

from __future__ import annotations

import os
import subprocess
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402


def interpreted_python(*arguments: str, **more) -> subprocess.CompletedProcess:
    """Run Python with Triton's interpreter, which has to be chosen before Triton is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | more.pop("env", {})
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, **more)


def passes_interpreted(file: str, *options: str) -> str:
    """Run a test file in a pytest process of its own, in Triton's interpreter; what it printed, once all passed."""
    done = interpreted_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *options, file)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: benchmarks; leave them out with -m 'not slow'")


SMALL = {
    "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
NARROW = {"moe_intermediate_size": 16, "intermediate_size": 48}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
    "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}
# family -> (config class, what differs from SMALL)
FAMILIES = {
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "intermediate_size": 16, "num_key_value_heads": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", NARROW | {"num_experts": 8, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", NARROW | {"num_experts": 8, "head_dim": 8, "norm_topk_prob": True,
                                              "mlp_only_layers": [0]}),
    "qwen3_next": ("Qwen3NextConfig", NARROW | HYBRID | {"num_experts": 8, "norm_topk_prob": True}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", NARROW | HYBRID | {"num_experts": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "intermediate_size": 16}),
    "deepseek_v2": ("DeepseekV2Config", NARROW | LATENT | {"n_routed_experts": 8, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", NARROW | LATENT | {"n_routed_experts": 8}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8, "intermediate_size": 16, "head_dim": 8, "sliding_window": 16,
                                 "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 8, "intermediate_size": 16}),
}


def tiny_config(family: str, **changes):
    """Config of a tiny model of a family; Qwen3.5's is nested below `text_config` like the published one."""
    import transformers

    name, own = FAMILIES[family]
    values = SMALL | own | changes
    if family == "qwen3_5_moe":
        return transformers.Qwen3_5MoeConfig(text_config=values, tie_word_embeddings=False)
    return getattr(transformers, name)(**values)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Byte-level BPE of at most 384 entries, trained on the spot; id 0 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["a few words about numbers and lists, how many apples are left?"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory, tiny_tokenizer):
    """`tiny_checkpoint(family, **config changes)` -> folder of a random checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    made = {}

    def make(family: str, **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
            with torch.no_grad():  # the usual small initial values would give nearly even routing and dull text
                for value in model.parameters():
                    if value.dim() > 1:
                        value.normal_(std=0.3)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            tiny_tokenizer.save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint):
    """`tiny_model(family)` -> (model, tokenizer) of a tiny checkpoint, loaded by `models.load` in float32."""
    from dualdeadline import models

    loaded = {}

    def load(family: str = "olmoe"):
        if family not in loaded:
            loaded[family] = models.load(str(tiny_checkpoint(family)), device="cpu")
        return loaded[family]

    return load


@pytest.fixture(scope="session")
def tiny_prompts():
    """Nine prompts of two sources and unequal lengths: 5 train, 2 validation, 2 test."""
    from dualdeadline.corpus import Prompt

    texts = ["how many apples", "a list of words and numbers, a few left", "numbers", "are apples words?",
             "a few", "left, left, left and left again, how many?", "lists about lists", "many words", "apples"]
    splits = ["train"] * 5 + ["validation"] * 2 + ["test"] * 2
    return [Prompt(f"p{i}", ("words", "code")[i % 2], split, f"g{i}", text)
            for i, (split, text) in enumerate(zip(splits, texts, strict=True))]


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory, tiny_model, tiny_prompts):
    """Traces of a tiny OLMoE, sampled, 12 new tokens."""
    from dualdeadline import traces

    model, tokenizer = tiny_model("olmoe")
    out = tmp_path_factory.mktemp("traces") / "tiny"
    return traces.collect(model, tokenizer, tiny_prompts, out, new_tokens=12, batch_size=4, sampling=traces.Sampling())
