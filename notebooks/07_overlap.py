# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: jupytext,kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 Overlap
#
# **Question.** Once every copy is pipelined, what is left to gain from giving an expert's components two deadlines? Five schedules of one
# MoE block are executed beside the floor of their own copies, simulated from single copies and kernels, and put into whole decode steps.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml; the model whose recorded routes drive the decode steps
corpus = "pilot"  # prompt set of those routes
split = "test"  # split for which notebook 03 wrote scores
measure = ["blocks", "steps"]  # what to measure where a GPU is; records of other machines are shown either way
shapes = ["olmoe", "qwen"]  # sizes of the experts, by name
layers = 4  # layers with weights of their own, taken in turn
tokens = [1, 8, 64, 1024]  # tokens of a block
top_ks = [1, 2, 4, 8]  # experts per token
samples = 200  # samples of each variant
setting_s = 20.0  # seconds for the variants of one setting at most
many_s = 5.0  # the same for settings of several tokens, whose copies take long: fewer samples
prompts = 12  # prompts whose decode steps are run
steps_per_prompt = 1  # decode steps of each
step_shape = ["olmoe", 0]  # sizes of the steps' experts, by name, and the first layers that steps have (0: all)
repeats = 2  # runs of each step and case
slots = [16, 32, 48]  # cache slots per layer
guided = ["random", "gate_ahead", "residual_gate"]  # predictors that guide a prefetch
horizons = [1, 2]  # layers ahead
budgets = [2, 4]  # whole-expert bytes copied ahead, in experts
thresholds = [0.0]  # least probability of a guess
resamples = 2000  # bootstrap resamples
seed = 0  # of routes, weights, order of variants and bootstrap

# %%
import pandas as pd
import torch
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import models, overlap, paths, record, report, schedule, steps, streams
from dualdeadline.report import lanes
from dualdeadline.report import overlap as shown
from dualdeadline.streams import probes, windows

# %%
workspace = paths.Workspace(profile)
parts = measure if torch.cuda.is_available() else []
report.style()

# %% [markdown]
# **In:** routes of notebook 02 and scores of notebook 03 for the decode steps; on a machine without a GPU the committed records, whose rows
# name the machine they were measured on. **Out:** record rows of copies, windows, blocks, floors, steps, and of their simulation.

# %% [markdown]
# ## A schedule is data
#
# `demand_serial` copies all missing experts and then computes: the original study's *monolithic*. `demand_pipelined` computes each
# expert as soon as it is there: the fair baseline. `staged_barrier` is the original's *staged*; `staged_pipelined` drops its barrier;
# `component_priority` may order copies by what waits behind them, and guesses by their probability.

# %%
sizes = {shape.name: shape for shape in (streams.OLMOE, streams.QWEN)}
plan, expert = overlap.settings(tokens, top_ks), sizes["olmoe"].component_bytes
base = overlap.Setting()
for name in schedule.NAMES:
    block = schedule.block(name, schedule.Layer(tuple(range(8))), expert)
    assert block.bytes == 8 * expert["expert"]
    line = overlap.ideal(block, expert)
    assert line.ms >= max(line.busy_ms("link"), line.busy_ms("compute")) and line.bytes == block.bytes

# %% tags=["nbval-check-output"]
print(list(schedule.NAMES))
print(pd.Series([type(op).__name__ for op in block.ops]).value_counts().to_dict())

# %% [markdown]
# ## Measuring
#
# On a GPU: first every schedule of a setting must give the resident output bit by bit, over slots full of NaN; then all schedules, the
# floors (the same copies back to back) and the resident block are timed in random order, 20 to 80 % of the samples shown. Fused kernels
# run inside one CUDA graph; eager ones are launched by the host. Layers take turns, so that no weight is warm in a cache.

# %%
recorder = record.Recorder("07_overlap", model, models.revision(model), workspace, {"part": "blocks"})
transfers = {graphs: probes.copies(graphs=graphs) for graphs in (True, False)} if parts else {}
if "blocks" in parts:
    installs = probes.installs(expert["expert"])
    overlap.add(recorder, overlap.copy_rows(transfers) + overlap.install_rows(installs))
    used = [sizes[name] for name in shapes]
    overlap.add(recorder, overlap.run_shapes(used, plan, layers, samples, setting_s, many_s, transfers[True], seed))
    recorder.write();

# %%
rows = record.read(workspace, "07_overlap", model)
recorder = record.Recorder("07_overlap", model, models.revision(model), workspace, {"part": "simulated blocks"})
overlap.add(recorder, overlap.resimulate(rows, [sizes[name] for name in shapes], plan, layers, seed))
overlap.add(recorder, overlap.span_rows(overlap.simulated_timelines(rows, sizes["olmoe"], base)))
recorder.write()
rows = record.read(workspace, "07_overlap", model)
blocks = rows[rows.metric.isin(["block_ms", "floor_ms"]) & (rows.kind == "measured")]
assert len(blocks), f"no measured blocks for {model}; needed: this notebook run on a GPU"
assert rows.kind.isin(["measured", "simulated"]).all()

# %% [markdown]
# ## The link
#
# Every figure below rests on these copies: pinned host memory to the GPU, alone and behind one another. Installing an expert as three or
# nine writes instead of one costs link time too.

# %% tags=["figure"]
copies = rows[rows.metric == "copy_gbps"]
fig, ax = plt.subplots()
report.curves(copies[copies["config.submission"] == "graph"], "config.size_mib", ax)
ax.set(xscale="log", xlabel="size of a copy, MiB", ylabel="GB/s", title=report.title(copies, "Pinned host memory to GPU"))
ax.legend()
report.save(fig, "07_copies", workspace, copies);

# %% tags=["table"]
report.table(shown.installs(rows), "installs", "installing one expert, ms (median)", workspace)

# %% [markdown]
# ## One block, five schedules
#
# The same eight missing experts at OLMoE's size. The link never pauses in any of them: what differs is only the work that is left when it
# falls silent.

# %% tags=["figure"]
drawn = shown.span_rows(rows)
spans = shown.spans(drawn)
fig, axes = plt.subplots(len(schedule.NAMES), 1, figsize=(6.8, 5.6), sharex=True)
for ax, name in zip(axes, schedule.NAMES):
    lanes.draw(spans[name], ax)
    ax.set_title(report.label(name), fontsize=8)
axes[-1].set_xlabel(f"ms from the start ({drawn.kind.iloc[0]})")
lanes.legend(fig)
report.save(fig, "07_timelines", workspace, drawn);

# %% tags=["figure"]
part = overlap.of_setting(blocks, "olmoe", base)
fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.4))
report.curves(part[(part.metric == "block_ms") & part.variant.isin(schedule.NAMES)], "config.ready", axes[0], band=False)
report.curves(shown.over_floor(part), "config.ready", axes[1], band=False)
for ax, what in zip(axes, ("block, ms", "ms above whole experts copied back to back")):
    ax.set(xlabel="gate/up of so many of 8 experts present", ylabel=what, ylim=(0, None), title=report.title(part, "One token, OLMoE"))
axes[0].legend()
report.save(fig, "07_ready", workspace, part);

# %% tags=["table"]
table = shown.against(rows, base, shapes)
report.table(table, "blocks", "block in ms, the floor of its copies, and what lies between", workspace, digits=4)

# %% [markdown]
# **Other settings.** With more tokens every expert is needed, and even at a thousand tokens the copies outlast the arithmetic many times
# over. Below: each schedule with fused kernels in a graph against `demand_pipelined`, same samples. Eager kernels are another matter:
# there the block waits for Python's launches, and schedules with fewer, larger launches win (rows with kernels `torch`).

# %% tags=["figure"]
gaps = shown.gaps(rows)
fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.2))
for ax, (x, part) in zip(axes, shown.cuts(gaps, base).items()):
    report.curves(part, f"config.{x}", ax)
    ax.axhline(0, color="black", lw=0.6)
    ax.set(xlabel=x.replace("_", " "), ylabel="ms against demand pipelined", title=report.title(part, "OLMoE, nothing ready"))
axes[1].set_xscale("log")
axes[0].legend()
report.save(fig, "07_gaps", workspace, gaps);

# %% [markdown]
# ## Simulated against measured
#
# The cost model comes from trains of copies, single kernels and launches; none of the blocks below was used for it.

# %% tags=["figure"]
errors = shown.errors(rows)
fig, ax = plt.subplots(figsize=(4.4, 4.0))
for (kernels, way), part in errors.groupby(["config.kernels", "config.submission"]):
    ax.loglog(part.measured, part.simulated, ".", label=f"{kernels}, {way}")
ax.plot([0.1, 30], [0.1, 30], color="black", lw=0.6)
ax.set(xlabel="measured, ms", ylabel="simulated, ms", title=report.title(blocks, "Every configuration"))
ax.legend()
report.save(fig, "07_validation", workspace, rows[rows.metric == "block_ms"]);

# %% tags=["table"]
summary = shown.error_summary(errors)
report.table(summary, "validation", "relative error of the simulator, in percent", workspace, digits=2)

# %% [markdown]
# ## Windows
#
# How long a layer computes decides what a prefetch can hide. Layers of transformers' own OLMoE with random weights, cut at the router.

# %%
recorder = record.Recorder("07_overlap", model, models.revision(model), workspace, {"part": "steps"})
steps_at, step_layers = sizes[step_shape[0]], step_shape[1]
recorded = overlap.steps_of(workspace, corpus, split, guided, horizons, prompts, steps_per_prompt, seed, steps_at.component_bytes,
                            step_layers)
plain = [steps.Case(name, size) for size in slots for name in schedule.NAMES]
ahead = steps.prefetch_cases(slots, guided, horizons, budgets, thresholds)
cases = plain + ahead

# %%
if "steps" in parts:
    stock = windows.StockLayers(num_hidden_layers=recorded.routes.shape[1], num_experts=steps_at.E, intermediate_size=steps_at.F)
    found = windows.windows(stock)
    overlap.add(recorder, overlap.window_rows(found))
    work = streams.Work(steps_at, len(stock.layers), device="cuda", seed=seed, before=stock.graphs(), rewind=stock.rewind)
    cost = overlap.step_cost(work, transfers[True], found)
    measured = recorded.measure(work, cases, repeats, seed)
    overlap.add(recorder, overlap.step_rows(measured, cases, "measured", resamples, seed) + overlap.step_cost_rows(cost))
    recorder.write();

# %%
rows = record.read(workspace, "07_overlap", model)
guessed = recorded.simulate(cases, overlap.recorded_step_cost(rows, steps_at))
recorder = record.Recorder("07_overlap", model, models.revision(model), workspace, {"part": "simulated steps"})
overlap.add(recorder, overlap.step_rows(guessed, cases, "simulated", resamples, seed))
if ((rows.metric == "prefetch_difference_ms") & (rows.kind == "measured")).any():
    overlap.add(recorder, overlap.agreement_rows(rows, recorder.rows, resamples, seed))
recorder.write()
rows = record.read(workspace, "07_overlap", model)

# %% tags=["table"]
report.table(shown.windows(rows), "windows", "a stock OLMoE layer, one token, ms (measured)", workspace)

# %% [markdown]
# ## Decode steps
#
# Recorded routes of held-out prompts drive sixteen layers: attention and router of the stock layers, experts from a cache per layer that
# is emptied for each prompt, misses by schedule, each router's verdict awaited by the host. A measured step's output equals the resident
# run's; the differences below say whether they are measured or simulated.

# %% tags=["table"]
few = int(rows[(rows.metric == "step_ms") & (rows.kind == "measured")].n.min())
caption = f"decode step, ms (n = {few} measured), and how far the simulated mean is from it, percent"
report.table(shown.step_errors(rows), "step_errors", caption, workspace)

# %% tags=["table"]
caption = "decode step less that of demand pipelined, ms (mean over prompts, 95 % interval)"
report.table(shown.steps(rows), "steps", caption, workspace)

# %% tags=["figure"]
gains = shown.prefetch(rows, budgets[0], threshold=thresholds[0])
fig, axes = plt.subplots(1, gains.kind.nunique(), figsize=(3.6 * gains.kind.nunique(), 3.4), sharey=True, squeeze=False)
for ax, (kind, part) in zip(axes.flat, gains.groupby("kind")):
    report.curves(part, "config.slots", ax)
    ax.axhline(0, color="black", lw=0.6)
    ax.set(xlabel="slots per layer", ylabel="ms against no prefetch", title=report.title(part, f"Prefetch, budget {budgets[0]}"))
axes[0, 0].legend()
report.save(fig, "07_prefetch", workspace, gains);

# %% tags=["nbval-check-output"]
print(sorted(set(rows.kind)), sorted(set(blocks["config.shape"])))
print(rows[rows.metric == "block_ms"].variant.isin([*schedule.NAMES, "resident"]).all())

# %%
Markdown(shown.answer(rows, base))

# %% [markdown]
# ## Limits
#
# Simulated steps differ from the few measured ones by as much as the table above says, so smaller differences are not resolved; their
# intervals cover prompts only.
# One GPU and one link. Routes of the blocks are uniform draws, those of the steps are the embedded model's at OLMoE's expert sizes; weights
# are random, which changes no time. Host-launched steps pay Python's launches, which a captured decode step would not. Presence in the
# steps is that of an LRU cache; guesses do not stay in it.
