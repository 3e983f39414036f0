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
# # 10 Tiers below host memory
#
# **Question.** What changes when experts lie on an SSD or in another process: how much of the disk's rate reaches the slots, when does a
# read ahead of the router pay, what does a remote worker cost, and where do a step's milliseconds and joules go? A second study asked the
# same of an engine that streams experts from an SSD; its figures stand beside ours as *published*.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml; its routes drive the experiments, its steps are taken apart
corpus = "pilot"  # prompt set
split = "test"  # split for which notebook 03 wrote scores
measure = ["disk", "cold", "ahead", "late", "exact", "remote", "attribution", "peer"]  # other machines' records are shown too
disk_mib = 192  # of one layout's file; there are three
expert = [1024, 128]  # hidden size and width of an expert in those files; on a GPU's machine OLMoE's are taken
read_kib = [4, 64, 256]  # sizes of single reads, beside a whole record
depths = [1, 4, 8, 16]  # reads in flight
sweep_mib = 8  # read per size and depth
repeats = 8  # of each layout's cold experts
slots = [16, 32, 48]  # slots per layer of the cold decode
cold_tokens = [20, 3]  # that only fill the slots, and that are timed
guesses = [["residual_gate", 0.5], ["next_token", 0.3]]  # label of notebook 03, or across tokens, and least probability
horizons = [1, 2, 3]  # layers ahead
ahead_slots = [16, 32]  # host slots per layer where reads go ahead
pauses_ms = [0.1, 3.0]  # for a layer's other work: of a captured step on a GPU, of this model on two cores
ahead_size = [5, 6, 3]  # layers of the model, tokens of each prompt, those of them that are not timed
late = [48, 20]  # host slots and tokens of one prompt where reads come too late: warm slots, the shortest pause
ahead_prompts = [2, 6]  # of validation, which choose a setting, and of the test that judges it
remote_rows = [1, 8, 32]  # of a request to the worker
remote_samples = 3  # of each size and link
hosted = [16, 5, 3]  # slots per layer, steps that are taken apart, tokens whose logits are compared bit by bit
captured = [32, "residual_gate", 2, 0, 0.7]  # slots and guesses of the steps in graphs that are taken apart
captured_steps = 20  # of each
sizes = {}  # of the captured model, where they are not OLMoE-1B-7B's (fields of its config)
compile = True  # also compile the stock code around the experts
resamples = 2000  # bootstrap resamples
seed = 0  # of weights, places, order and bootstrap

# %%
import torch
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import models, overlap, paths, record, report
from dualdeadline.decode import recorded
from dualdeadline.report import joules
from dualdeadline.report import tiers as shown
from dualdeadline.report import tiers_said as said
from dualdeadline.report import verdicts
from dualdeadline.tiers import ahead, study

# %%
workspace = paths.Workspace(profile)
torch.set_num_threads(1)
gpu = study.device() == "cuda"
layers, tokens, warm = ahead_size
report.style()

# %% [markdown]
# **In:** routes and scores of notebooks 02 and 03, records of 04, 05 and 09. **Out:** record rows; tables show all
# machines.
#
# ## One tier down, replayed
#
# Do our routes behave as the published ones, in hit rates of an LRU cache and in how far ahead they can be told?

# %% tags=["table"]
replayed = shown.replayed(workspace, model, corpus)
report.table(replayed, "replayed", "test split, mean over prompts (replayed)", workspace)

# %%
Markdown(said.replayed_answer(replayed))

# %% [markdown]
# ## Layouts
#
# How should an expert lie on the disk? Direct reads show what the disk gives. Then cold experts, each layout's bits compared first: nine
# tensors one after the other through the page cache, the same in parallel, one record in one read, the same encoded. On a CPU a record is
# read straight into its slot.

# %%
if {"disk", "cold", "ahead", "late"} & set(measure):
    made = study.files(workspace.base / "tiers", expert, disk_mib, seed)
if "disk" in measure:
    overlap.record_parts("10_tiers", model, workspace, study.disk(made, read_kib, depths, sweep_mib, repeats, seed))

# %%
rows = shown.every(workspace, model)
report.table(shown.reads(rows), "reads", "GB/s by reads in flight, random places (measured)", workspace, digits=2)

# %% tags=["table"]
report.table(shown.layouts(rows), "layouts", "per cold expert, medians (measured)", workspace)

# %% tags=["table"]
report.table(shown.installs(rows), "installs", "from host memory to the slot (measured)", workspace)

# %%
Markdown(said.layouts_answer(rows))

# %% tags=["nbval-check-output"]
print(sorted(set(shown.of(rows, "expert_ms").variant)))

# %% [markdown]
# ## Cold decode
#
# Recorded routes ask for experts, LRU slots say which are missing, and those are read. Only that is timed: attention and products are left
# out. The disk's own rate is measured between the tokens, with nothing done to the bytes.

# %%
labels = ["gate_ahead", "random", "residual_gate"]  # as in notebook 09, whose file is enough where there are no traces
if "cold" in measure or gpu:
    drive = recorded.load(workspace, model, corpus, split, labels, 1, 6, seed)
if "cold" in measure:
    overlap.record_parts("10_tiers", model, workspace, study.cold(made, drive, slots, *cold_tokens, seed))
rows = shown.every(workspace, model)

# %% tags=["table"]
report.table(shown.cold(rows), "cold", "mean over tokens (measured)", workspace, digits=2)

# %% tags=["figure"]
fig = shown.draw_cold(rows)
report.save(fig, "10_cold", workspace, shown.of(rows, "cold_tokens_per_s"));

# %%
Markdown(said.cold_answer(rows))

# %% [markdown]
# ## Reads ahead
#
# Can a guess bring an expert from the disk to host memory before its router asks? Only if depth x layer time reaches the time of a read:
# the border below. A setting is chosen on validation prompts and measured on test prompts beside demand. A layer's attention and products
# are a pause of stated length.

# %%
if "ahead" in measure:
    common = dict(horizons=horizons, tokens=tokens, layers=layers, seed=seed)
    chooses = ahead.drive(workspace, corpus, "validation", guesses, prompts=ahead_prompts[0], **common)
    tests = ahead.drive(workspace, corpus, split, guesses, prompts=ahead_prompts[1], **common)
    found = ahead.parts(made, chooses, tests, ahead_slots, pauses_ms, warm, resamples, seed)
    overlap.record_parts("10_tiers", model, workspace, found)

# %%
if "late" in measure:
    warmed = ahead.drive(workspace, corpus, "validation", guesses, horizons, 1, late[1], layers, seed)
    found = ahead.late(made, warmed, late[0], min(pauses_ms), late[1] - tokens, resamples, seed)
    overlap.record_parts("10_tiers", model, workspace, found)
rows = shown.every(workspace, model)

# %% tags=["table"]
chosen = shown.settings(rows, "validation", "validation, warm slots")
report.table(chosen, "choice", "validation prompts, ms per token (measured)", workspace)

# %% tags=["table"]
report.table(shown.settings(rows, "test"), "ahead", "test prompts, ms per token (measured)", workspace)

# %% tags=["figure"]
fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.2))
shown.draw_border(rows, axes)
axes[0].set_title(report.title(shown.of(rows, "tier_ms"), "Enough time?"))
axes[0].legend()
report.save(fig, "10_ahead", workspace, shown.of(rows, "tier_time_ratio", "tier_lead_ms", "tier_read_ms"));

# %%
Markdown(said.sides(rows) + " " + said.prefetch_verdict(rows))

# %% [markdown]
# ## The engine over an SSD
#
# Whole decode steps of the embedded model through `offload(tier="ssd")`, guesses across tokens among them: every logit equals the
# resident run's.

# %%
net, tokenizer = models.load(model, experts="eager")
ids, folder = torch.tensor(tokenizer("def mean(values): return sum(").input_ids, device=net.device), workspace.base / "tiers" / model
if "exact" in measure:
    found = study.exact(net, ids[None], folder, hosted[0], hosted[2], study.fitted(workspace, corpus))
    overlap.record_parts("10_tiers", model, workspace, found)
rows = shown.every(workspace, model)

# %% tags=["table"]
report.table(shown.engine(rows), "engine", "whole steps, tiny experts (measured)", workspace, digits=2)

# %% tags=["nbval-check-output"]
print(sorted(set(shown.of(rows, "engine_ms").variant)))

# %% [markdown]
# ## Remote experts
#
# A worker holds experts of OLMoE's size and answers activations; no weight crosses. What is the link's part, and what the worker's?

# %%
if "remote" in measure:
    overlap.record_parts("10_tiers", model, workspace, study.remote(remote_rows, remote_samples, seed))
rows = shown.every(workspace, model)
print(said.missing_links(rows))

# %% tags=["table"]
report.table(shown.remote(rows), "remote", "ms of a request for eight experts per row (measured)", workspace, digits=2)

# %%
Markdown(said.remote_answer(rows))

# %% [markdown]
# ## Where the milliseconds go
#
# On a CPU by hooks and watched lanes of the embedded model's engine, on a GPU from a trace of captured steps at OLMoE's size. Parts must
# add up to the step, by a clock of its own, within 3 %.

# %%
if "attribution" in measure and gpu:
    found = study.captured(drive, captured, seed, compile, captured_steps, **sizes)
    overlap.record_parts("10_tiers", model, workspace, found)
if "attribution" in measure:
    overlap.record_parts("10_tiers", model, workspace, study.hosted(net, ids, folder, *hosted[:2]))
rows = shown.every(workspace, model)

# %% tags=["table"]
report.table(shown.parts(rows), "parts", "ms of a step (measured)", workspace)

# %% tags=["figure"]
fig, ax = plt.subplots(figsize=(7.2, 3.4))
shown.draw_parts(rows, ax)
fig.legend(loc="outside right upper")
report.save(fig, "10_attribution", workspace, shown.of(rows, "part_ms"));

# %% tags=["nbval-check-output"]
off = (shown.parts(rows)["sum"] - 1).abs()
assert (off <= 0.03).all(), f"parts miss their step by {off.max():.1%}; needed: 3 % at most"
print(len(off) > 0, bool((off <= 0.03).all()))

# %% [markdown]
# The reads' share shows in *demand wait*; guesses for host slots are *prediction*.

# %%
Markdown(said.parts_answer(rows))

# %% [markdown]
# ## Energy
#
# Which counters can be read, and what they say; then joules per token of notebook 09 over the megabytes that crossed for them.

# %% tags=["table"]
report.table(joules.counters(rows), "counters", "joules per token of the steps above (measured)", workspace)

# %% tags=["table"]
steps = record.read(workspace, "09_decode", model)
report.table(joules.per_megabyte(steps), "joules", "idle power included (measured)", workspace)

# %%
Markdown(f"Energy of the chosen way over one deadline without guesses: {joules.ratio(steps)}.")

# %% [markdown]
# ## Another GPU's memory

# %%
if "peer" in measure:
    told = dict(samples=50, resamples=resamples, seed=seed)
    overlap.record_parts("10_tiers", model, workspace, study.peers(workspace, model, drive if gpu else None, slots, **told))
Markdown(said.peers(shown.every(workspace, model)))

# %% [markdown]
# ## Answer

# %% tags=["table"]
report.table(said.targets(rows), "targets", "what was aimed at, and what came out", workspace, digits=2)

# %%
words = verdicts.words(workspace, model)
Markdown(f"{said.answer(rows)} H7 (SSD tier): **{words['H7']}**; H5 (energy): **{words['H5']}**.")

# %% [markdown]
# ## Limits
#
# Files of random experts, a few hundred megabytes, on whatever lies below this machine's file system (a virtual disk may keep them in its
# host's memory: the table says what kept *our* page cache out). Cold decode and reads ahead are the tier's share of a step; where a layer's
# work is a pause, its length is a choice, stated in each row. The worker's link is loopback, a relay or a namespace, not a cable; it
# computes on the same cores as the caller. Energy is the GPU's or package's counter; where there is none nothing is estimated.
