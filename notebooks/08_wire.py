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
# # 08 Wire
#
# **Question.** With one token per step bytes decide. How few bytes can an expert be on the link and still arrive bit by bit, what does the
# decode cost on the GPU, and what does that change for a one-layer deadline?

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml; its own weights are encoded, its routes drive the decode steps
corpus = "pilot"  # prompt set of those routes
split = "test"  # split for which notebook 03 wrote scores
measure = ["decode", "blocks", "steps"]  # what to measure where a GPU is; records of other machines are shown either way
shapes = ["olmoe", "qwen"]  # sizes of the experts of the blocks, by name
bits = 3  # width of the first code in blocks and steps
layers = 4  # layers with weights of their own, taken in turn
ready = [0, 2, 4, 6, 8]  # gate/ups of 8 that are present
programs = [1, 2, 4, 8, 16]  # programs per record of a decode from host memory
samples = 200  # samples of each variant
setting_s = 15.0  # seconds for the variants of one shape at most
prompts = 12  # prompts whose decode steps are run
steps_per_prompt = 1  # decode steps of each
step_shape = ["olmoe", 0]  # sizes of the steps' experts, by name, and the first layers that steps have (0: all)
repeats = 3  # runs of each step and case
slots = [16, 32, 48]  # cache slots per layer
guided = ["random", "gate_ahead", "residual_gate"]  # predictors in the file of decode steps (no prefetch here)
horizons = [1, 2]  # layers ahead, of the same file
resamples = 2000  # bootstrap resamples
seed = 0  # of weights, routes, order of variants and bootstrap

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels then run on the CPU, slowly

# %%
import pandas as pd
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import overlap, paths, record, report, streams, wire
from dualdeadline.kernels import checks
from dualdeadline.report import overlap as shown_overlap
from dualdeadline.report import wire as shown
from dualdeadline.streams import probes, windows
from dualdeadline.wire import gpu, space, speed

# %%
workspace = paths.Workspace(profile)
parts = measure if torch.cuda.is_available() else []
sizes = {shape.name: shape for shape in (streams.OLMOE, streams.QWEN)}
report.style()

# %% [markdown]
# **In:** the model's weights; routes of notebook 02; on a machine without a GPU the committed records of the GPU. **Out:** record rows of
# bits per weight, of encode and decode speed, of blocks and steps with raw and with encoded experts.

# %% [markdown]
# ## Where the bits are
#
# A bfloat16 weight spends 8 of 16 bits on its exponent, and exponents of trained weights are nearly all a few neighbours. Sign and mantissa
# look random and stay as they are.

# %%
weights = {"normal": speed.normal(1 << 21, seed), "student-t(5)": speed.student(1 << 21, seed), model: speed.weights_of(model)}
share = pd.DataFrame({name: space.exponents(tensor) / tensor.numel() for name, tensor in weights.items()})
common = share[share.max(axis=1) > 1e-4]
assert len(common) < 40 and (share.sum().round(6) == 1).all()

# %% tags=["figure"]
rows_space = speed.design_rows(weights)
fig, ax = plt.subplots(figsize=(5.6, 2.8))
common.plot(ax=ax, marker=".")
ax.set(xlabel="exponent (8 bits)", ylabel="share of weights", title="Exponents of bfloat16 weights (measured)")
ax.legend();

# %% [markdown]
# ## Designs
#
# Planes of one width let every thread of a GPU find its own bits; the codes of escapes need a count of those before them. Entropy and
# Huffman bound what a code of single exponents can do, `zstd` and `lz4` show what a general compressor makes of the same bytes.

# %% tags=["table"]
overlap.record_parts("08_wire", model, workspace, [("designs", rows_space)])
report.table(shown.designs(record.read(workspace, "08_wire", model)), "designs", "bits per weight", workspace, digits=2)

# %% [markdown]
# ## Any bits come back
#
# NaN payloads, infinities, subnormals, zeros, constants, odd shapes: what does not get smaller travels raw behind the same header. A wrong
# bit is refused by name.

# %%
found = speed.check_codec(seed)
assert found["equal"] == found["tensors"] and found["raw"] >= 1 and found["refused"] == found["damaged"]

# %% tags=["nbval-check-output"]
print({name: count for name, count in found.items() if name != "raw"})

# %% [markdown]
# The GPU kernel takes eight weights at a time: a byte of each bit plane becomes eight codes by one multiplication per half, a scan counts
# the escapes before each eight, and sign, mantissa and exponent are put together in packed words. Here on a small bank, in Triton's
# interpreter where there is no GPU:

# %%
decoded = checks.check_wire(device="cuda" if torch.cuda.is_available() else "cpu")
assert all(decoded.values())

# %% tags=["nbval-check-output"]
print(decoded)

# %% [markdown]
# ## Speed on this CPU
#
# A whole model is encoded once and kept; decoding on the CPU serves machines without a GPU.

# %%
found = speed.cpu_rows(sizes["olmoe"], bits, repeats=3, seed=seed)
overlap.record_parts("08_wire", model, workspace, [("cpu", found)])
pd.DataFrame(found)[["variant", "metric", "median", "unit"]]

# %% [markdown]
# ## Measuring on a GPU
#
# Decode from device staging and straight from pinned host memory; then blocks whose copies are raw and encoded, all interleaved, after
# every schedule gave the resident bits over slots full of NaN; then decode steps with the same routes, slots and schedule.

# %%
if "decode" in parts:
    found = gpu.everything(sizes["olmoe"], wire.BITS, programs, samples // 4, seed)
    overlap.record_parts("08_wire", model, workspace, found)

# %%
transfers = probes.copies() if parts else None
if "blocks" in parts:
    used = [sizes[name] for name in shapes]
    found = overlap.wired.run_shapes(used, layers, ready, bits, samples, setting_s, transfers, seed)
    overlap.record_parts("08_wire", model, workspace, found)

# %%
chosen = overlap.wired.cases(slots, ["demand_pipelined", "component_priority"])
steps_at, step_layers = sizes[step_shape[0]], step_shape[1]
recorded = overlap.steps_of(workspace, corpus, split, guided, horizons, prompts, steps_per_prompt, seed, steps_at.component_bytes,
                            step_layers)

# %%
if "steps" in parts:
    stock = windows.StockLayers(num_hidden_layers=recorded.routes.shape[1], num_experts=steps_at.E, intermediate_size=steps_at.F)
    work = streams.Work(steps_at, len(stock.layers), device="cuda", seed=seed, before=stock.graphs(), rewind=stock.rewind)
    overlap.wired.pack_for(recorded, work, chosen, bits)
    measured = recorded.measure(work, chosen, repeats, seed)
    found = overlap.wired.step_rows(measured, chosen, "measured", resamples, seed)
    overlap.record_parts("08_wire", model, workspace, [("steps", found)])

# %%
rows = record.read(workspace, "08_wire", model)
assert (rows.metric == "block_ms").any(), f"no measured blocks for {model}; needed: this notebook run on a GPU"
link = record.read(workspace, "07_overlap", model)
guessed = overlap.wired.simulate_steps(recorded, chosen, rows, link, steps_at)
found = overlap.wired.resimulate(rows, [sizes[name] for name in shapes], ready, layers, seed)
found += overlap.wired.step_rows(guessed, chosen, "simulated", resamples, seed)
overlap.record_parts("08_wire", model, workspace, [("simulated", found)])
rows = record.read(workspace, "08_wire", model)
blocks = rows[rows.metric.isin(["block_ms", "floor_ms"]) & (rows.kind == "measured")]

# %% tags=["table"]
report.table(shown.decode_rates(rows), "decode", "decode on the GPU, GB/s of output (best launch)", workspace, digits=0)

# %% [markdown]
# ## Blocks
#
# The decode of one expert is over long before the next has arrived, so a pipelined block ends with the last piece: its copy, its decode,
# its product.

# %% tags=["figure"]
fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.4))
for ax, name in zip(axes, shapes):
    part = shown.lines(rows, ["demand_pipelined", "component_priority"], name)
    report.curves(part, "config.ready", ax, band=False)
    ax.set(xlabel="gate/up of so many of 8 experts present", ylabel="block, ms", ylim=(0, None), title=report.title(part, name))
axes[0].legend()
report.save(fig, "08_blocks", workspace, blocks);

# %% tags=["table"]
table = shown.against_floor(rows, shapes[0])
report.table(table, "wire_blocks", f"{shapes[0]}: block in ms, the floor of its copies, and what lies between", workspace, digits=4)

# %% tags=["table"]
table = shown.against_floor(rows, shapes[1])
report.table(table, "wire_blocks_2", f"{shapes[1]}: the same", workspace, digits=4)

# %% tags=["table"]
summary = shown_overlap.error_summary(shown.errors(rows), ["wire"])
report.table(summary, "wire_validation", "relative error of the simulator, percent", workspace, digits=2)

# %% [markdown]
# ## Decode steps
#
# Encoded over raw: same schedule, slots and routes. Rows marked measured, where a GPU run has made some, are launched by the host, every
# output bit equal to the resident run's; simulated ones are steps as one CUDA graph would run them, at the measured times of copies,
# decodes, kernels and captured attention.

# %% tags=["table"]
report.table(shown.steps(rows), "wire_steps", "decode step (mean over prompts, 95 % interval)", workspace)

# %% [markdown]
# ## The one-layer deadline
#
# Does a piece cross the link while one layer of the captured stock model computes, from its attention to its router? Copies and windows are
# those of notebook 07; `copy_ms` is their line at the size of the piece, `share` how much of it one window hides.

# %% tags=["table"]
fits = shown.fits(workspace, model)
report.table(fits, "fits", "copy of a piece against one layer's time, ms", workspace)

# %% tags=["nbval-check-output"]
print(sorted(set(rows.kind)), sorted(set(blocks["config.wire"])), sorted(set(blocks["config.shape"])))

# %%
Markdown(shown.answer(rows, fits))

# %% [markdown]
# ## Limits
#
# Measured steps are launched by the host, which has one more operation to launch for each encoded expert: the fewer bytes an expert has,
# the more of a step is the host's. Simulated steps have no host.
# Blocks and steps use normal weights, which compress as trained ones do (the table of designs). Encoding needs a pass over the checkpoint
# and staging memory for what is in flight. One GPU and one link: on a faster link the decode's share grows.
