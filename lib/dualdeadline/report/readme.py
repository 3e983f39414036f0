"""Fill the generated blocks of README.md from records: `<!-- begin:NAME -->` to `<!-- end:NAME -->`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pandas as pd

from dualdeadline import families, manifest, paths
from dualdeadline.report import latex, numbers, prediction, published, runtime, short
from dualdeadline.report.tables import Subject, Table

README = paths.ROOT / "README.md"
BLOCK = re.compile(r"<!-- begin:(?P<name>[a-z_]+) -->\n.*?<!-- end:(?P=name) -->", re.DOTALL)

ANSWER = """\
**In short** (one H200, OLMoE's sizes, batch 1). Where a decode step is one CUDA graph, three things shorten it:
fewer bytes (a lossless wire format) most, a second deadline and guesses one layer ahead by some per cent; there the
step without a second deadline fetches all of a layer's bytes before its first product. Where the host launches every
operation and whole experts are pipelined, a second deadline does not (H1: **{verdict_h1}**), and guesses lengthened the
step in {prefetch_slower} of {prefetch_cases} cases. Every logit equals that of the resident run with the same
kernels ({engine_equal_steps} steps compared). On the same model, transformers' own modes reach {engine_stock}
tokens/s, {engine_stock_graph} in a compiled graph, all resident, and accelerate's offload {engine_accelerate}.
Everything but the GPU's records is made again on {run_machine} in {run_minutes} minutes.
"""

RESULTS = """\
**Prediction.** One layer ahead and with room for {recall_budget} experts, the next layer's own router applied
early finds {recall_gate_ahead} of the routed experts, the original study's learned predictor
{recall_shared_mlp}, and that router with a learned low-rank correction {recall_residual_gate}
({recall_conditions}). That the correction beats both on what a cache of {cache_slots} of {model_e} experts
misses (H2): **{verdict_h2}**, {comparisons_h2} comparisons. LRU with {cache_slots} slots per layer hits
{hit_lru}, the optimum {hit_belady} ({hit_conditions}).

**On an H200**, eight missing experts of OLMoE's size take {block_demand_serial} ms copied and then computed
(the original's baseline), {block_demand_pipelined} ms pipelined expert by expert, {block_staged_pipelined} ms
with two deadlines per expert, and {block_component_priority} ms with two deadlines for the last expert only;
the copies alone need {block_floor} ms (measured, one token, fused kernels in a CUDA graph). Sample by sample,
two deadlines for every expert change the pipelined block by {staged_gain_ms} ms, for the last one only by
{priority_gain_ms} ms (median, 20 to 80 %; positive is slower). That whole decode steps gain (H1):
**{verdict_h1}**; two deadlines change a host-launched step by {deadline_steps} ms (measured, 95 % interval over
prompts). A prefetch lengthened the step in {prefetch_slower} of {prefetch_cases} measured cases and shortened
it in {prefetch_faster}, as the cost model says (H3).

**Fewer bytes** gain more: a lossless wire format puts a bfloat16 weight on the link in {wire_bits} bits (the
exponents' entropy allows {wire_entropy}) and one gate/up record is decoded at {wire_decode_gbps} GB/s. The
pipelined block then takes {wire_coded_ms} ms instead of {wire_raw_ms} in the same run, with equal bits; two
deadlines for the last expert change it by {wire_split_gain_ms} ms more. By the line through measured copies,
gate and up of one expert cross in {wire_copy_coded_ms} ms instead of {wire_copy_raw_ms}, within the
{wire_window_ms} ms that a captured layer of the stock code, not compiled, needs up to its router. Decode steps, encoded
over raw, measured with every operation launched by the host: {wire_step_ratios}; simulated as one CUDA graph of such
layers (12 other prompts): {wire_step_simulated}; the engine's graph is measured below.

**The engine** runs stock transformers code of OLMoE's sizes (random weights, the embedded model's routes) with
every logit equal to its resident run ({engine_equal_steps} steps compared); its tokens/s, and what deadlines, wire
format and guesses change, stand in the tables on top. Hit rates with the slots of those tables, fewest first:
{engine_hits} where slots start empty at each prompt, {engine_warm_hits} where they stay warm. Without guesses a step
takes {engine_floor_raw} (raw) and {engine_floor_coded} (encoded) times the resident step plus its bytes at the rate of
copies.{engine_reads} Simulated steps are off by {engine_off} % (median). Within a memory limit a GPU reserved
{engine_vram} (measured).

**At Qwen3.6's sizes.** {engine_large}

**Below host memory**, with one contiguous record per expert on a cold SSD a plain loop of the same reads takes
{tier_record_loop} of a step's time, a disk that never waits for a router {tier_record_share}; nine scattered tensors
read one by one take {tier_record_times} times as long, by as many threads {tier_record_parallel}; the install of a
record takes {tier_install} times one copy. That reads ahead of the router shorten such a step (H7, tested with half of
the experts in host memory; a layer's other work is a pause of stated length): **{verdict_h7}**; their time over
demand's: {tier_ahead}. A worker on the same
machine answers over loopback in {tier_remote} rows of eight experts, {tier_remote_compute} of it products.
{tier_peer}
Joules per token, two deadlines and guesses against fetching on demand (H5): **{verdict_h5}**.

**A second architecture**, targets fixed before its results: on the {confirm_model}, four guesses one layer ahead
find {confirm_recall_residual_gate} of the routed experts (of eight, so at most half) by our predictor,
{confirm_recall_shared_mlp} by the original study's, {confirm_recall_gate_ahead} by gate-ahead and
{confirm_recall_popularity} by popularity ({confirm_conditions}). Targets: recall **{confirm_verdict_c1}**, H2
repeated **{confirm_verdict_c2}** ({confirm_misses} comparisons), stall **{confirm_verdict_c3}**, predictor kernel
**{confirm_verdict_c4}**, blocks **{confirm_verdict_c5}**, decode at Qwen3.6's sizes **{confirm_verdict_c6}**;
deviations from the protocol: {confirm_deviations}. {confirm_decode} Two deadlines change the published accounting's
stall by {confirm_stall} ms, without any guess by {confirm_stall_without} ms; what no prefetch shows too is not credited
to prediction. Against whole experts with the same bytes ahead, two deadlines for the last expert change blocks of
Qwen3.6's size by {confirm_split} (first, middle, last layer; positive is slower; {confirm_kind}), pipelining whole ones
by {confirm_whole}.

**Time.** Traces, predictors, replays, simulations, figures and tables run again on {run_machine} in
{run_minutes} minutes; what a GPU measured, training included, is read from committed records.
"""


def _pipes(frame: pd.DataFrame) -> str:
    return frame.to_markdown(index=False, disable_numparse=True)  # cells are finished text: 2.0 stays 2.0


def markdown(made: Table) -> str:
    """A table with its caption and source."""
    return f"{_pipes(made.frame)}\n\n{made.caption} Made by {latex.made_by(made.rows)}.\n"


def _prose(template: str, said: dict[str, str]) -> str:
    parts = template.format(**said).strip().split("\n\n")
    return "\n\n".join(textwrap.fill(part, 130) for part in parts) + "\n"


def answer(about: Subject, said: dict[str, str]) -> str:
    """The result on one screen; numbers and verdict words come from records."""
    return f"{_prose(ANSWER, said)}\n{markdown(short.changes(about))}\n{markdown(short.speeds(about))}"


def verdicts(about: Subject) -> str:
    """Hypothesis, comparisons and verdict."""
    made = published.hypotheses(about)
    return _pipes(made.frame.drop(columns="counts as support")) + f"\n\n{made.caption}\n"


def costs(about: Subject) -> str:
    """Minutes per stage of the last whole run."""
    return markdown(runtime.minutes(about.workspace))


# what a block is made from: the subject, and the numbers that prose quotes
BLOCKS = {
    "answer": answer,
    "results": lambda about, said: _prose(RESULTS, said),
    "headline": lambda about, said: markdown(prediction.headline(about)),
    "verdicts": lambda about, said: verdicts(about),
    "costs": lambda about, said: costs(about),
    "families": lambda about, said: families.table(),
}


def filled(text: str, about: Subject) -> str:
    """`text` with every block made anew.

    Raises:
        ValueError: a block has no maker, or a maker has no block.
    """
    found = [match["name"] for match in BLOCK.finditer(text)]
    if sorted(found) != sorted(BLOCKS):
        raise ValueError(f"README has blocks {sorted(found)}; needed, once each: {sorted(BLOCKS)}")

    said = numbers.by_name(about)

    def block(match: re.Match) -> str:
        name = match["name"]
        return f"<!-- begin:{name} -->\n{BLOCKS[name](about, said)}<!-- end:{name} -->"

    return BLOCK.sub(block, text)


def fill(about: Subject, path: Path = README) -> bool:
    """Rewrite the blocks of `path`; whether anything changed."""
    old = path.read_text(encoding="utf-8")
    new = filled(old, about)
    if new != old:
        manifest.write_text(path, new)
    return new != old
