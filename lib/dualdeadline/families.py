"""Every supported MoE family on a tiny random model: traces, predictors, offload and exactness, as one table.

`python -m dualdeadline.families` runs the four checks under the transformers that is imported and puts the rows into
`data_manifests/families.csv`, beside those of other transformers versions. README shows that file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import pandas as pd

from dualdeadline import manifest, paths, tiny
from dualdeadline.tiny import MULTIMODAL, TEXT

FILE = "families.csv"
CHECKS = ("traces", "predictors", "offload", "exact")
FIELDS = ("name", "model", "family", *CHECKS, "transformers", "torch", "machine", "time")
FAILED = "failed: "
# row -> (family of tiny.TINY, transformers' class for it)
ROWS = {
    "OLMoE": ("olmoe", TEXT),
    "Qwen2-MoE": ("qwen2_moe", TEXT),
    "Qwen3-MoE": ("qwen3_moe", TEXT),
    "Qwen3-Next": ("qwen3_next", TEXT),
    "Qwen3.5-MoE, text": ("qwen3_5_moe", TEXT),
    "Qwen3.5-MoE, multimodal": ("qwen3_5_moe", MULTIMODAL),
    "Mixtral": ("mixtral", TEXT),
    "DeepSeek-V2": ("deepseek_v2", TEXT),
    "DeepSeek-V3": ("deepseek_v3", TEXT),
    "GPT-OSS": ("gpt_oss", TEXT),
    "GraniteMoE": ("granitemoe", TEXT),
    "GraniteMoE, shared expert": ("granitemoeshared", TEXT),
}
WORDS = ("how many apples", "a list of words and numbers", "numbers", "are apples words?", "a few", "left and left")


def check(name: str, folder: Path) -> dict[str, str]:
    """One family through the four checks.

    Args:
        name: a key of `ROWS`. folder: an empty one, for the traces.

    Returns:
        A row of `FIELDS`; a check holds what it counted, or `failed: ` and why.

    Raises:
        ValueError: no such family.
    """
    if name not in ROWS:
        raise ValueError(f"family is {name!r}; needed: one of {', '.join(ROWS)}")
    import torch

    from dualdeadline import machine, models

    row = dict.fromkeys(FIELDS, "") | {"name": name, "machine": machine.machine_id()}
    row |= {key: metadata.version(key) for key in ("transformers", "torch")}
    row["time"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small lose on several
    try:
        model = tiny.model(*ROWS[name])
        row |= {"model": type(model).__name__, "family": models.describe(model).family}
        found: dict = {}
        for key, made in zip(CHECKS, (_traces, _predictors, _offload, _exact), strict=True):
            row[key] = _outcome(made, model, Path(folder), found)
    finally:
        torch.set_num_threads(threads)
    return row


def _outcome(made: Callable, model, folder: Path, found: dict) -> str:
    try:
        return made(model, folder, found)
    except Exception as error:  # a table of what works has to say what does not
        return f"{FAILED}{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _need(true: bool, what: str) -> None:
    if not true:
        raise AssertionError(what)


def _traces(model, folder: Path, found: dict) -> str:
    """Batched equals one by one, capture changes no token, and weights follow from logits by the family's rule."""
    import torch

    from dualdeadline import traces
    from dualdeadline.corpus import Prompt

    splits = ["train"] * 4 + ["test"] * 2
    prompts = [Prompt(f"p{i}", "words", splits[i], f"g{i}", text) for i, text in enumerate(WORDS)]
    tokenizer, sampling = tiny.tokenizer(), traces.Sampling(seed=7)
    model.set_experts_implementation("grouped_mm")
    stores = [
        traces.collect(model, tokenizer, prompts, folder / str(size), 6, size, sampling, min_new_tokens=5)
        for size in (1, 6)
    ]
    one, six = (store.split() for store in stores)
    _need(torch.equal(one.tokens, six.tokens) and torch.equal(one.routes, six.routes), "a batch changed routes")
    traces.check_capture(model, tokenizer, prompts[:2], 4, sampling)
    routers = six.routers
    for layer in range(six.routes.shape[1]):
        logits = six.router_logits[:, layer]
        torch.testing.assert_close(routers.logits(layer, six.router_input[:, layer]), logits, atol=1e-4, rtol=1e-4)
        weights = routers.probabilities(logits).gather(1, six.routes[:, layer])
        weights = weights / weights.sum(1, keepdim=True) if routers.norm_topk_prob else weights
        torch.testing.assert_close(weights * routers.scaling, six.weights[:, layer], atol=1e-5, rtol=1e-4)
    found["store"] = stores[1]
    return f"{len(six)} steps"


def _predictors(model, folder: Path, found: dict) -> str:
    """Gate-ahead and ResidualGate fit; stepped beside the decode loop they say what they score."""
    import torch

    from dualdeadline import metrics, predictors

    train, test = (found["store"].split(name) for name in ("train", "test"))
    first = test.select([0])
    said = []
    for name in ("gate_ahead", "residual_gate"):
        guide = predictors.build(name).fit(train)
        scores, layers, step = guide.score(test), guide.L - 1, guide.online()
        _need(scores.shape == (len(test), layers, guide.E), f"{name} scores {tuple(scores.shape)}")
        _need(bool(((scores >= 0) & (scores <= 1)).all()), f"{name} gives no probabilities")
        for row in range(len(first)):
            for layer in range(guide.L):
                guess = step(layer, first.router_input[row : row + 1, layer], first.routes[row : row + 1, layer])
                if layer < layers:
                    torch.testing.assert_close(guess[0], scores[row, layer], atol=1e-4, rtol=1e-3)
        found[name] = guide
        said.append(f"{float(metrics.recall(scores, test.routes[:, 1:], 2 * guide.K).mean()):.2f}")
    return " and ".join(said)


def _inputs(model) -> dict:
    """Two left-padded rows of text; of the multimodal model, one row with an image of four tokens."""
    import torch

    draw = torch.Generator().manual_seed(1)
    if not hasattr(model.config, "vision_config") or not hasattr(model.config, "text_config"):
        ids, mask = torch.randint(1, 380, (2, 9), generator=draw), torch.ones(2, 9, dtype=torch.long)
        mask[0, :3] = 0
        return {"input_ids": ids, "attention_mask": mask}
    ids = torch.tensor([[5, 6, tiny.VISION_START, *[tiny.IMAGE] * 4, tiny.VISION_END, 9, 10]])
    pixels = torch.randn(16, 3 * 2 * tiny.VISION["patch_size"] ** 2, generator=draw)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels.to(model.dtype),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == tiny.IMAGE).int(),
    }


def _run(model):
    """Logits [N,T,V] of the prompt and the tokens [N,T+5] that greedy decoding makes."""
    import torch

    inputs = _inputs(model)
    with torch.no_grad():
        return model(**inputs).logits, model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)


def _same(first, second) -> bool:
    import torch

    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _offload(model, folder: Path, found: dict) -> str:
    """No expert tensor stays in the model, its outputs follow the store, and `remove` puts everything back."""
    import torch

    from dualdeadline import engine, models

    model.set_experts_implementation("eager")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine.offload(model, slots=3, backend="cpu", predictor=found["residual_gate"])
    experts = [layer.experts for layer in models.describe(model).layers]
    _need(all(one.gate_up_proj.is_meta and one.down_proj.is_meta for one in experts), "experts stay in the model")
    wanted, counts, handle = _run(model), model.dualdeadline.stats(), model.dualdeadline
    _need(counts["misses"] > 0 and counts["bytes_demand"] > 0, "nothing crossed the link")
    handle.tables.clear()
    sources = handle.store.sources["down"]
    for scale in (2.0, 0.5):
        for source in sources:
            source.mul_(scale)
        handle.tables.clear()
        _need(_same(_run(model), wanted) == (scale < 1), "the store's experts are not what is computed with")
    handle.remove()
    after = model.state_dict()
    _need(list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before), "not put back")
    return f"{counts['misses']} of {counts['hits'] + counts['misses']} missed"


def _exact(model, folder: Path, found: dict) -> str:
    """Prompt logits and greedy tokens bitwise those of transformers' eager experts, from 1 slot to all."""
    from dualdeadline import engine

    compared = 0
    for half in (False, True):
        model = model.bfloat16() if half else model
        model.set_experts_implementation("eager")
        wanted = _run(model)
        for slots in (3, 8) if half else (1, 3):
            options = {"wire": "coded"} if half else {"predictor": found["gate_ahead"]}
            engine.offload(model, slots=slots, backend="cpu", **options)
            got = _run(model)
            model.dualdeadline.remove()
            _need(_same(got, wanted), f"{slots} slots in {model.dtype} changed a bit")
            compared += wanted[0].numel()
    return f"{compared:,} logits"


def read() -> pd.DataFrame:
    """Committed rows, all of them text; empty if there are none.

    Raises:
        ValueError: a file with other columns.
    """
    path = paths.MANIFESTS / FILE
    if not path.exists():
        return pd.DataFrame(columns=list(FIELDS))
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    if tuple(rows.columns) != FIELDS:
        raise ValueError(f"{path} has columns {list(rows.columns)}; needed: {list(FIELDS)}")
    return rows


def write(rows: Iterable[dict]) -> pd.DataFrame:
    """Put rows into the file, each in the place of its family's under the same transformers version; all rows."""
    new = pd.DataFrame(list(rows), columns=list(FIELDS))
    every = pd.concat([read(), new]).drop_duplicates(["name", "transformers"], keep="last")
    order = {name: place for place, name in enumerate(ROWS)}
    every = every.assign(place=every["name"].map(order)).sort_values(["place", "transformers"])
    every = every.drop(columns="place").reset_index(drop=True)
    with manifest.atomic(paths.MANIFESTS / FILE) as temporary:
        every.to_csv(temporary, index=False, lineterminator="\n")
    return every


def table() -> str:
    """The committed rows as README shows them: one line per family, the outcome under each transformers version."""
    rows = read()
    if rows.empty:
        return "No results yet: python -m dualdeadline.families.\n"
    versions = sorted(rows["transformers"].unique(), key=lambda text: [int(part) for part in text.split(".")[:2]])
    lines = []
    for (name, family), part in rows.groupby(["name", "family"], sort=False):
        line = {"family": name, "`model_type`": f"`{family}`"}
        for version in versions:
            own = part[part["transformers"] == version]
            line[f"transformers {version}"] = _verdict(own.iloc[0]) if len(own) else "not run"
        newest = part.iloc[-1]
        lines.append(line | {key: newest[key] for key in CHECKS})
    made = pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)
    return f"{made}\n\n{CAPTION}\n"


CAPTION = (
    "Tiny random models (2 or 3 MoE layers, 8 experts, top-2) on a CPU. traces: decode steps captured; the same "
    "batched as one by one, weights follow from logits. predictors: both fit and step as they score; recall with 4 of "
    "8 experts (of random weights, so no measure of quality), gate-ahead and ResidualGate. offload: expert uses missed "
    "with 3 slots. exact: prompt logits compared, all bitwise those of transformers' eager experts, as are the greedy "
    "tokens, in float32 with 1 and 3 slots and in encoded bfloat16 with 3 and 8. Numbers are those of the newest "
    "version. Made by `python -m dualdeadline.families`, data_manifests/families.csv."
)


def _verdict(row: pd.Series) -> str:
    broken = [key for key in CHECKS if row[key].startswith(FAILED) or not row[key]]
    return f"fails: {', '.join(broken)}" if broken else "all four pass"


def main(arguments: list[str] | None = None) -> int:
    """Check the families asked for and write their rows; exit status 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m dualdeadline.families", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"rows to run, default all: {', '.join(ROWS)}")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    given = parser.parse_args(arguments)
    rows = []
    for name in given.names or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(check(name, Path(folder)))
        print(", ".join(f"{key}: {rows[-1][key]}" for key in ("name", *CHECKS)), flush=True)
    if not given.dry:
        write(rows)
    return int(any(row[key].startswith(FAILED) for row in rows for key in CHECKS))


if __name__ == "__main__":
    raise SystemExit(main())
