"""The embedded model's routing beside what is published of OLMoE's."""

from __future__ import annotations

import json

import pandas as pd

from dualdeadline import manifest, paths, record
from dualdeadline.report.look import label


def against_published(cache_rows: pd.DataFrame, recall_rows: pd.DataFrame) -> pd.DataFrame:
    """Frame with columns `figure`, `embedded`, `OLMoE, published`.

    Args:
        cache_rows: `hit_rate` rows of LRU per layer, one per slot count (column `config.slots`).
        recall_rows: `recall` rows at budget 8, one layer ahead, one per predictor (column `variant`).
    """
    published = json.loads((paths.MANIFESTS / "published_routing.json").read_text())
    ours = cache_rows.set_index(cache_rows["config.slots"].astype(int).astype(str))["median"]
    lines = [(f"LRU hit rate, {slots} slots a layer", ours.get(slots), value)
             for slots, value in published["lru_hit_rate"].items()]
    found = recall_rows.set_index("variant")["median"]
    lines += [(f"recall at 8, {label(name).lower()}", found.get(name), value)
              for name, value in published["recall_at_8"].items()]
    return pd.DataFrame(lines, columns=["figure", "embedded", "OLMoE, published"])


def per_layer(rows: pd.DataFrame, metrics: list[str]) -> pd.DataFrame:
    """Routing rows of the model's evaluation as a frame [L, metrics], by layer."""
    kept = rows[(rows["variant"] == "routing") & rows["metric"].isin(metrics)]
    frame = kept.pivot(index="config.layer", columns="metric", values="median")[metrics]
    return frame.set_axis(frame.index.astype(int).rename("layer"))


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of routed tokens each expert gets, [L, E], experts of a layer sorted by load."""
    kept = rows[rows["metric"] == "mean_expert_share"].sort_values("config.layer")
    return pd.DataFrame([sorted(line, reverse=True) for line in kept["config.shares"]])


def packages() -> pd.DataFrame:
    """The training texts' packages by domain: licences, packages, documents, bytes and tokens kept."""
    rows = pd.DataFrame(manifest.read_jsonl(paths.CORPORA / "pretrain.jsonl")).dropna(subset=["domain"])
    grouped = rows.groupby("domain")
    frame = grouped.agg(packages=("name", "size"), documents=("train_documents", "sum"), bytes=("train_bytes", "sum"),
                        tokens=("train_tokens", "sum"), heldout_bytes=("heldout_bytes", "sum"))
    return frame.assign(licences=grouped["licence"].agg(lambda names: ", ".join(sorted(set(names))))).reset_index()


def training_records(model: str) -> pd.DataFrame:
    """Records of how a shipped model was trained: always the committed ones, whatever the profile."""
    return record.read(paths.Workspace("pilot"), "90_pilot_model", model)


def embedded(models: list[str]) -> pd.DataFrame:
    """The embedded models beside each other: training, held-out text and routing over layers, one column each.

    Args:
        models: keys of `models.yaml` with records of notebook 90.
    """
    columns = {}
    for model in models:
        rows = training_records(model)
        found, layers = rows.set_index(["variant", "metric"])["median"], rows[rows["variant"] == "routing"]
        ahead = layers[layers["metric"].str.startswith("gate_ahead_recall")]["median"]
        by_metric = layers.groupby("metric")["median"]
        mean, total = by_metric.mean(), by_metric.sum()
        columns[model] = {
            "training tokens, millions": found["training", "tokens_seen"] / 1e6,
            "bits per byte, macro": found["macro", "bits_per_byte"], "dead experts": total["dead_experts"],
            "load of a layer's least used expert": by_metric.min()["load_min"],
            "load of a layer's most used expert": by_metric.max()["load_max"],
            "experts the token before had too": mean["previous_token_reuse"],
            "recall at K of the next router, one layer early": ahead.mean(),
            "shared expert's gate": mean.get("shared_gate"),
        }
    return pd.DataFrame(columns).rename_axis("figure")
