"""The model card of a trained embedded model, from its configuration and from what its call measured."""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path

from dualdeadline.pretrain import architectures

TEXT = """---
license: apache-2.0
library_name: transformers
tags: [moe, {tag}]
---
# DualDeadline pilot MoE, {title}

{what}, trained from scratch for the DualDeadline study, so that the study runs on real, trained routes without
downloading anything.

- **Made for:** studying expert routing, prediction and caching. **Not for:** answering questions; it is far too small.
- **Architecture:** {architecture}
- **Size:** {parameters:.1f} M parameters, of which {routed:.1f} M in routed experts ({expert_kib:g} KiB each in
  bfloat16); tied embeddings; context {context:,}; {megabytes:.1f} MB of bfloat16 safetensors, final: the records name
  this file's hash.
- **Data:** the pilot models' common text: documentation of Python, PostgreSQL, Rust, Erlang and Node.js, Jane Austen's
  novels, two public-domain Bibles, permissively licensed Python source, and generated word problems with worked
  answers. Every package with version, SHA-256 and licence is listed in `data_manifests/corpora/pretrain.jsonl`, the
  cleaning in `pretrain.yaml` beside it. HumanEval text, the study's prompt templates and the packages behind its *ood*
  prompts were kept out.
- **Tokenizer:** byte-level BPE, {vocabulary:,} entries, digits one by one; `<|endoftext|>` (0) ends and begins a text,
  `<|pad|>` (1) fills from the left.
- **Training:** {device}, bfloat16 products over float32 weights, {optimizer}, windows of {length:,} tokens,
  balance loss {balance:g} per layer, z-loss {z:g}; {tokens:,.0f} M tokens in {seconds:,.0f} s.
- **Held-out text:** {macro:.3f} bits per byte, macro average over {domains} domains of natural text.
- **Routing, natural held-out text:** {dead} dead experts; load of the least and of the most used expert of a layer
  {least:.2f} and {most:.2f} (1 is even); {reuse:.3f} of a token's experts served the token before; the next layer's
  router, applied one layer early, finds {ahead:.3f} of them.{shared}
- **Limits:** English only; repeats itself under greedy decoding; word problems of unknown templates are answered with
  unrelated text.

Progress, losses and figures by domain and by layer: `notebooks/90_pilot_model.ipynb`, from
`data_manifests/records/90_pilot_model.csv`.
"""


def _architecture(cfg) -> str:
    plain = f"{cfg.num_hidden_layers} layers, hidden size {cfg.hidden_size}, {cfg.num_experts} experts of width "
    if architectures.name_of(cfg) == "olmoe":
        return plain + f"{cfg.intermediate_size}, {cfg.num_experts_per_tok} routed per token."
    full = sum(kind == "full_attention" for kind in cfg.layer_types)
    return (
        plain + f"{cfg.moe_intermediate_size}, {cfg.num_experts_per_tok} routed per token (weights renormalised), "
        f"one gated shared expert of width {cfg.shared_expert_intermediate_size}; {len(cfg.layer_types) - full} layers "
        f"of gated delta net ({cfg.linear_num_key_heads} key and {cfg.linear_num_value_heads} value heads of "
        f"{cfg.linear_value_head_dim}) and {full} of full attention ({cfg.num_attention_heads} heads of "
        f"{cfg.head_dim}, {cfg.num_key_value_heads} of keys). No vision tower, no multi-token prediction."
    )


def _wrapped(body: str, width: int = 118) -> str:
    """Paragraphs and points of a text whose filled-in lines have any length, broken again at `width`."""
    lines = []
    for part in re.split(r"\n(?=\n|- )", body.strip()):
        lines += [""] * (not part or part.startswith("\n"))
        inside = "  " if part.startswith("- ") else ""
        words = " ".join(part.split())
        lines += textwrap.wrap(words, width, subsequent_indent=inside, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _sizes(cfg) -> dict:
    """What the card says of a model's size."""
    sizes = {name: math.prod(shape) for name, shape in architectures.of(cfg).shapes(cfg).items()}
    routed = sum(value for name, value in sizes.items() if ".experts." in name)
    total, experts = sum(sizes.values()), cfg.num_hidden_layers * cfg.num_experts
    return {
        "parameters": total / 1e6,
        "megabytes": 2 * total / 1e6,
        "routed": routed / 1e6,
        "expert_kib": 2 * routed / experts / 1024,
        "context": cfg.max_position_embeddings,
        "vocabulary": cfg.vocab_size,
    }


def _measured(rows: list[dict], top_k: int) -> dict:
    """What the card says of held-out text and routing; rows of `evaluate.measure`."""
    macro = next(row for row in rows if row["variant"] == "macro")

    def layers(metric: str) -> list[float]:
        return [row["median"] for row in rows if row["variant"] == "routing" and row["metric"] == metric]

    reuse, ahead = layers("previous_token_reuse"), layers(f"gate_ahead_recall_at_{top_k}")
    shared = layers("shared_gate")
    return {
        "macro": macro["median"],
        "domains": macro["n"],
        "dead": int(sum(layers("dead_experts"))),
        "least": min(layers("load_min")),
        "most": max(layers("load_max")),
        "reuse": sum(reuse) / len(reuse),
        "ahead": sum(ahead) / len(ahead),
        "shared": f" The shared expert's gate is {sum(shared) / len(shared):.2f} on average." if shared else "",
    }


def text(cfg, metrics: dict, rows: list[dict]) -> str:
    """The card.

    Args:
        cfg: config of the checkpoint. metrics: of `train.train`. rows: of `evaluate.measure`.
    """
    args, last = metrics["args"], metrics["last"]
    optimizer = "Muon for the matrices and AdamW for the rest" if args["optimizer"] == "muon" else "AdamW"
    made = TEXT.format(
        tag=cfg.model_type,
        what=f"A `{cfg.architectures[0]}` at a small size",
        architecture=_architecture(cfg),
        title={"olmoe": "OLMoE form", "qwen": "Qwen3.5 form"}[architectures.name_of(cfg)],
        device=metrics["device"],
        optimizer=optimizer,
        length=args["length"],
        balance=args["balance"],
        z=args["z"],
        tokens=last["tokens"] / 1e6,
        seconds=last["seconds"],
        **_sizes(cfg),
        **_measured(rows, cfg.num_experts_per_tok),
    )
    head, start, body = made.partition("# ")
    return head + _wrapped(start + body)


def write(folder: Path, metrics: dict, rows: list[dict]) -> None:
    """Write README.md beside an exported checkpoint."""
    from transformers import AutoConfig

    from dualdeadline import manifest

    manifest.write_text(Path(folder) / "README.md", text(AutoConfig.from_pretrained(folder), metrics, rows))
