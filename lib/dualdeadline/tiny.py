"""Tiny random models of every MoE family that is supported, with a tokenizer: what tests and `families` run on."""

from __future__ import annotations

SMALL = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
NARROW = {"moe_intermediate_size": 16, "intermediate_size": 48}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
IMAGE, VIDEO, VISION_START, VISION_END = 380, 381, 382, 383  # token ids of the tiny multimodal model
# family -> (config class, what differs from SMALL)
TINY = {
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "intermediate_size": 16, "num_key_value_heads": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", NARROW | {"num_experts": 8, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        NARROW | {"num_experts": 8, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_next": ("Qwen3NextConfig", NARROW | HYBRID | {"num_experts": 8, "norm_topk_prob": True}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", NARROW | HYBRID | {"num_experts": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "intermediate_size": 16}),
    "deepseek_v2": ("DeepseekV2Config", NARROW | LATENT | {"n_routed_experts": 8, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", NARROW | LATENT | {"n_routed_experts": 8}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 8,
            "intermediate_size": 16,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 8, "intermediate_size": 16}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 8, "intermediate_size": 16, "shared_intermediate_size": 16},
    ),
}
TEXT, MULTIMODAL = "AutoModelForCausalLM", "AutoModelForImageTextToText"


def config(family: str, **changes):
    """Config of a tiny model of a family of `TINY`; Qwen3.5's is nested below `text_config` like the published one."""
    import transformers

    name, own = TINY[family]
    values = SMALL | own | changes
    if family == "qwen3_5_moe":
        return transformers.Qwen3_5MoeConfig(
            text_config=values,
            vision_config=VISION,
            tie_word_embeddings=False,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
        )
    return getattr(transformers, name)(**values)


def tokenizer():
    """Byte-level BPE of at most 384 entries, trained on the spot; id 0 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer, end = Tokenizer(models.BPE()), "<|endoftext|>"
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=[end], show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["a few words about numbers and lists, how many apples are left?"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def model(family: str, kind: str = TEXT, **changes):
    """A random model in eval mode, with weights large enough that routing and text are lively."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config(family, **changes))
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(std=0.3)
    return model.eval()
