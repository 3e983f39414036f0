"""The embedded models' architectures: name -> module with `config`, `shapes`, `initial` and `Forward`."""

from __future__ import annotations

from dualdeadline.pretrain import model, qwen

# the name is the model's folder in pilot/, and `pilot-NAME` its key in models.yaml
ARCHITECTURES = {"olmoe": model, "qwen": qwen}
TYPES = {"olmoe": "olmoe", "qwen3_5_moe_text": "qwen"}


def name_of(cfg) -> str:
    """Name of a config's architecture.

    Raises:
        ValueError: none of them.
    """
    if cfg.model_type not in TYPES:
        raise ValueError(f"model type is {cfg.model_type!r}; needed: one of {', '.join(TYPES)}")
    return TYPES[cfg.model_type]


def of(cfg):
    """Module of a config's architecture."""
    return ARCHITECTURES[name_of(cfg)]
