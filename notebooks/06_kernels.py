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
# # 06 Kernels
#
# **Question.** How fast can routed experts be computed, missing ones fetched and coming ones predicted, when nothing but memory and the
# link limits them? An overlap study on slow kernels measures the kernels: a layer that computes for a millisecond hides anything.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml, under which records are kept
corpus = "pilot"  # prompt set whose held-out pairs check the predictor kernel
split = "test"  # its split
measure = True  # measure where a GPU is; records of other machines are shown either way
shapes = ["olmoe", "qwen"]  # sizes of the experts, by name
tokens = [1, 2, 4, 8, 16, 64, 256, 1024]  # tokens of a resident block
top_k = 8  # experts per token
samples = 200  # samples of each variant
programs = [4, 8, 16, 32, 64, 132]  # programs of the zero-copy fetch
guided = ["shared_mlp", "gate_ahead", "residual_gate"]  # predictors whose kernels are checked
checked_prompts = 24  # prompts whose pairs check the predictor kernel's arithmetic, 0 for all
seed = 0  # of weights, routes and order of variants

# %%
import inspect
import os

import torch

on_gpu = measure and torch.cuda.is_available()
if not on_gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels then run on the CPU, slowly

# %%
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import fidelity, overlap, paths, record, report, speed, streams
from dualdeadline.kernels import checks, expert_kernels, predictor_kernels
from dualdeadline.report import kernels as shown

# %%
workspace = paths.Workspace(profile)
sizes = {shape.name: shape for shape in (streams.OLMOE, streams.QWEN)}
report.style()

# %% [markdown]
# **In:** committed records of a machine with a GPU (or the GPU itself); fitted predictors and traces for the check of the predictor kernel.
# **Out:** record rows of resident blocks, fetches and predictors.

# %% [markdown]
# ## Bytes and the ceiling
#
# One token of a block reads K experts once and uses each weight for one multiplication: time is bytes over memory bandwidth. The ceiling is
# a device-to-device copy, bytes read and written.

# %%
block_bytes = {name: top_k * shape.component_bytes["expert"] for name, shape in sizes.items()}
assert block_bytes["olmoe"] == 96 << 20 and block_bytes["qwen"] == 48 << 20
Markdown("; ".join(f"{name}: {size / 2**20:.0f} MiB for {top_k} experts" for name, size in block_bytes.items()) + ".")

# %% [markdown]
# ## The kernel
#
# Gate and up share the input, so one program reads a few rows of both and writes one product. Down reads its rows of all K experts and adds
# them in rank order with explicit fused multiply-adds: whichever expert arrives first, the bits are the same.

# %%
Markdown(f"```python\n{inspect.getsource(expert_kernels.gate_up_kernel.fn)}```")

# %% [markdown]
# **Check.** On awkward sizes (no multiple of a tile), in Triton's interpreter where there is no GPU: fused equals apart, pair by pair
# equals all at once, down then combine equals down with combine, bit by bit; against the reference in float32 within the bound of one
# rounding.

# %%
found = checks.check_experts(H=112, F=48, count=4, tokens=2, top_k=2, device="cuda" if on_gpu else "cpu")
assert found["bitwise"] and found["error"] <= found["bound"]

# %% tags=["nbval-check-output"]
print({"equal bits": found["bitwise"], "within the bound": found["error"] <= found["bound"]})

# %% [markdown]
# **Fetch** names the missing experts on the device and reads pinned host memory directly, so it can live in a CUDA graph. Bytes arrive as
# they are, whatever they mean.

# %%
copied = checks.check_fetch(device="cuda" if on_gpu else "cpu")
assert copied == {"fetched": True, "others kept": True, "ids out of range skipped": True}

# %% tags=["nbval-check-output"]
print(copied)

# %% [markdown]
# ## Measurement
#
# Graphs hold twelve blocks with experts of their own, so neither a launch nor the L2 cache flatters anyone; variants run in random order.

# %%
if on_gpu:
    found = speed.everything([sizes[name] for name in shapes], tokens, top_k, programs, samples, seed)
    overlap.record_parts("06_kernels", model, workspace, found)

# %%
rows = record.read(workspace, "06_kernels", model)
assert len(rows), f"no rows for {model}; needed: this notebook run on a GPU"
assert (rows.kind == "measured").all() and set(rows["config.shape"].dropna()) <= set(sizes)

# %% [markdown]
# ## Resident experts

# %% tags=["figure"]
fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.4))
for ax, name in zip(axes, sizes):
    part = rows[(rows.metric == "resident_ms") & (rows["config.shape"] == name)]
    report.curves(part[part.groupby("variant")["config.tokens"].transform("nunique") > 1], "config.tokens", ax)
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=report.title(part, f"{name}, {top_k} experts each"))
    ax.legend()
report.save(fig, "06_resident", workspace, rows[rows.metric == "resident_ms"]);

# %% tags=["table"]
report.table(shown.one_token(rows), "one_token", "one token, experts resident: ms and GB/s of weights", workspace, digits=4)

# %% [markdown]
# ## Fetch

# %% tags=["figure"]
part = rows[(rows.metric == "fetch_gbps") & (rows.variant == "zero_copy")]
fig, ax = plt.subplots()
report.curves(part.assign(variant=part["config.shape"]), "config.programs", ax)
ax.set(xscale="log", xlabel="programs", ylabel="GB/s", ylim=(0, None), title=report.title(part, "Eight experts by zero-copy fetch"))
ax.legend()
report.save(fig, "06_fetch", workspace, part);

# %% [markdown]
# ## Predictor
#
# A predictor that costs more than it hides is worth nothing. In one launch, many programs share the rows of its weights; whichever ends
# last finishes the step: sums, cut, probabilities, top-k.

# %%
Markdown(f"```python\n{inspect.getsource(predictor_kernels.mlp_kernel.fn)}```")

# %% tags=["table"]
report.table(shown.predictor_costs(rows), "predictor", "one step inside a CUDA graph or launched, ms (median)", workspace, digits=4)

# %% [markdown]
# **Kept sets.** The kernel reads states in bfloat16. Its arithmetic in torch, on pairs of token and layer that no fit has seen. With
# float32 weights only the order of additions differs: where two probabilities tie in all but the last bits, a processor may choose either.

# %%
kept = fidelity.kept_sets(workspace, corpus, split, guided, budgets=(2, 4, 8), prompts=checked_prompts)
exact = kept[kept.weights == "float32"]
assert (exact.worse < 1e-5).all() and (exact.pairs - exact.kept <= 1 + 0.001 * exact.pairs).all()
kept = kept.assign(share=kept.kept / kept.pairs, worse=kept.worse.map("{:.1e}".format))
report.table(kept, "kept", "top-n sets equal to the float32 predictor's", workspace, digits=5)

# %% [markdown]
# ## Reading

# %%
Markdown(shown.answer(rows))

# %% tags=["nbval-check-output"]
print(sorted(rows.metric.unique()))

# %% [markdown]
# ## Limits
#
# One GPU, random weights and uniform routes: with several tokens, real routes share more experts. The ceiling is a copy's; reads alone may
# come a little higher. transformers' eager loop is timed as it runs, launched by the host; in a graph it cannot be captured.
