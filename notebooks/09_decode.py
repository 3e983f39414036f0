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
# # 09 Decode
#
# **Question.** What does a whole decode step cost when most experts live in host memory, inside stock transformers, with every output bit
# equal to the resident run? One call, `offload(model, slots=32)`, moves the experts out; everything else is the user's own code.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml; its tokens are compared, its routes drive the model of real size
corpus = "pilot"  # prompt set
split = "test"  # split for which notebook 03 wrote scores
measure = ["steps", "map", "energy", "control", "baselines", "vram", "qwen"]  # what to measure where a GPU is; others' records are shown
certified = 2  # prompts whose tokens and logits are compared bit by bit
prompt_tokens = 32  # of each, its last ones
new_tokens = 8  # generated for that comparison
certified_slots = [8, 64]  # slots per layer in that comparison
prompts = 6  # prompts whose decode steps drive the measured model
slots = [16, 32, 48]  # slots per layer of the measured model
guesses = [["residual_gate", 2, 0, 0.7], ["residual_gate", 1, 0, 0.7], ["gate_ahead", 2, 0, 0.7], ["random", 2, 0, 0.0],  # scores (recorded
    ["shuffled", 2, 0, 0.7], ["oracle", 2, 0, 0.7], ["oracle", 4, 4, 0.7]]  # or controls), gate/up and down ahead a layer, least chance
warm_guesses = [["residual_gate", 2, 0, 0.7], ["residual_gate", 1, 0, 0.7], ["oracle", 2, 0, 0.7]]  # where slots stay warm
map_of = {"slots": [32], "lanes": [2, 4], "prompts": 2}  # the map of links and layers; fewer programs of a fetch emulate slower links
map_guesses = [["residual_gate", 2, 0, 0.7]]  # as guesses
chosen = [32, "residual_gate", 2, 0, 0.7]  # slots and guesses whose energy is compared
energy_seconds = 60  # of each of the two compared
control_guesses = [["random", 2, 0, 0.0], ["shuffled", 2, 0, 0.7], ["gate_ahead", 2, 0, 0.7]]  # under the live control
break_evens = [0.8]  # precision that the control asks for
horizon = 1  # layers ahead
sizes = {"shape": "olmoe"}  # of the measured model: olmoe or qwen, layers whose experts are alike (alike), fields of its config
qwen = {"routes": "pilot-qwen", "labels": ["residual_gate", "gate_ahead"], "prompts": 3, "slots": [64, 128, 192],  # at its sizes
    "guesses": [["residual_gate", 2, 0, 0.7], ["gate_ahead", 2, 0, 0.7], ["shuffled", 2, 0, 0.7], ["oracle", 2, 0, 0.7]], "plain": [128],
    "warm": [128], "warm_guesses": [["residual_gate", 2, 0, 0.7]], "alike": 8, "steps": 96, "hits": [0.66, 0.86, 0.96]}  # of drawn routes
vram = {"limits": ["6GiB", "10GiB"], "context": 512, "new_tokens": 64}  # memory limits, tokens they must do for and that are generated
baseline_steps = 24  # decode steps of each baseline
compile = True  # also compile the stock code around the experts
resamples = 2000  # bootstrap resamples
seed = 0  # of weights, order of variants and bootstrap

# %%
import torch
from IPython.display import Markdown
from matplotlib import pyplot as plt

import dualdeadline
from dualdeadline import models, overlap, paths, record, report, streams
from dualdeadline.decode import baselines, cases, certificate, memory, recorded, routes, simulated, stopped, study
from dualdeadline.report import decode as shown
from dualdeadline.report import decode_large, decode_beside

# %%
workspace = paths.Workspace(profile)
parts = measure if torch.cuda.is_available() else []
report.style()

# %% [markdown]
# **In:** the model; routes and scores of notebooks 02 and 03; on a machine without a GPU the committed records of the GPU. **Out:** the
# certificate of this machine, and record rows of decode steps.

# %%
labels = sorted({name for name, *_ in guesses + warm_guesses + map_guesses} - {"oracle", "shuffled"})
drive = study.with_controls(recorded.load(workspace, model, corpus, split, labels, horizon, prompts, seed), seed)
kept_warm = slots if drive.E <= 64 else slots[1:2]  # each such variant has slots of its own, for which memory must do
variants = cases.all_cases(slots, drive.E, guesses, warm_guesses, kept_warm)
wide = cases.map_cases(map_of["slots"], drive.E, map_of["lanes"], map_guesses)
picked = cases.guess(cases.Case(chosen[0]), *chosen[1:])
ids = [list(row)[-prompt_tokens:] for row in drive.ids[:certified]]

# %% [markdown]
# ## One call
#
# The experts interface of transformers dispatches by name, so the model's code stays as it is. Routed experts go to host memory, slots in
# the device's memory serve them, and `remove()` puts everything back.

# %%
torch.set_num_threads(1)  # the model is small; more threads wait for each other
net, tokenizer = models.load(model, experts="eager")
backend = "cpu" if net.device.type == "cpu" else "streams"
dualdeadline.offload(net, slots=32, kernels="torch", backend=backend)
print(tokenizer.decode(certificate.generated(net, ids[:1], new_tokens, 1)[0][0]))
stats = net.dualdeadline.stats()
net.dualdeadline.remove()

# %%
{name: stats[name] for name in ("path", "hits", "misses", "bytes_demand", "bytes_useful", "bytes_wasted", "prefetch_on")}

# %% [markdown]
# ## The certificate
#
# Same prompts, batch one and left-padded batches, every logit of every generated token, against the resident run of the same kernels: few
# slots and all of them, three schedules, with guesses. Every schedule, one slot, wrong guesses and other families are left to the tests.

# %%
names = ["demand_serial", "staged_pipelined", "component_priority"]
settings = [dict(slots=count, schedule=name, kernels="torch", backend=backend)
            for count, name in zip(certified_slots + certified_slots[:1], names)]
found = certificate.certify(net, ids, settings, new_tokens, batches=(1, len(ids)))
assert (found.logits_differ == 0).all() and (found.tokens_differ == 0).all()

# %% tags=["table"]
report.table(found.set_index(["slots", "schedule", "batch"])[["logits", "logits_differ", "tokens", "tokens_differ", "hit_rate"]],
             "certificate", "against the resident run (this machine)", workspace)

# %% tags=["nbval-check-output"]
print(int(found.logits_differ.sum()), int(found.tokens_differ.sum()), sorted(set(found.schedule)))

# %% [markdown]
# ## Measuring on a GPU
#
# A stock model of OLMoE's sizes with random weights; hooks on its routers replace the chosen experts by the embedded model's recorded
# ones, so that locality is real and the sizes are real, though not of one model. Guesses are the recorded predictor's; a predictor kernel
# of OLMoE's width runs in every layer and is charged, its output thrown away. Before anything is timed, every variant's logits must equal
# the resident variant's in every bit.

# %%
if "steps" in parts:
    wide = wide if "map" in parts else []
    group = study.build(drive, variants + wide, seed, compile, **sizes)
    seconds = energy_seconds if "energy" in parts else 0
    found = study.measured(group, drive, resamples, seed, wide, map_of["prompts"], picked, seconds)
    overlap.record_parts("09_decode", model, workspace, found)
    del group

# %%
if "control" in parts:
    group = study.build(drive, cases.control_cases(slots, drive.E, control_guesses, break_evens), seed, compile, **sizes)
    overlap.record_parts("09_decode", model, workspace, study.apart(group, drive, resamples, seed, "control", "break_even"))
    del group

# %%
if "baselines" in parts:
    overlap.record_parts("09_decode", model, workspace, baselines.stock(baseline_steps, seed, **sizes))
    overlap.record_parts("09_decode", model, workspace, baselines.accelerate(2, seed, **sizes))

# %%
if "vram" in parts:
    overlap.record_parts("09_decode", model, workspace, memory.rows(**vram, seed=seed, **sizes))

# %%
rows = record.read(workspace, "09_decode", model)
assert len(shown.steps(rows)), f"no measured decode steps for {model}; needed: this notebook run on a GPU"

# %% tags=["nbval-check-output"]
print(sorted(set(shown.steps(rows).slots)), sorted(set(rows.variant[rows.metric == "baseline_step_ms"])))

# %% [markdown]
# ## Speed by slots

# %% tags=["figure"]
speed, change = shown.plain(rows), shown.steps(rows, "prefetch_time_ratio")
change = change[change["config.budget"] == "2-0"]
fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.4))
report.curves(speed, "config.slots", axes[0])
axes[0].axhline(1e3 / shown.resident_ms(rows), color="black", lw=0.8, label="everything resident")
axes[0].set(xlabel="slots per layer (of 64)", ylabel="tokens/s", ylim=(0, None), title=report.title(speed, "No prefetch"))
report.curves(change.assign(variant=change.variant.str.removesuffix("-no prefetch")), "config.slots", axes[1])
axes[1].set(xlabel="slots per layer (of 64)", ylabel="step, with over without guesses", title=report.title(change, "Guesses"))
axes[0].legend()
axes[1].legend(loc="center", bbox_to_anchor=(0.5, 0.69), ncol=2, fontsize=7)  # between what gains and what does not
report.save(fig, "09_speed", workspace, shown.steps(rows, "tokens_per_s"));

# %% tags=["table"]
report.table(shown.speeds(rows), "speeds", "tokens/s by slots per layer", workspace, digits=0)

# %% tags=["table"]
report.table(shown.speeds(rows, warm=True), "speeds_warm", "the same with slots that stay warm between prompts", workspace, digits=0)

# %% [markdown]
# ## How far from the floor
#
# Without prediction a step takes about the resident step plus the time its bytes take on the link (plain copies, measured in the same
# run), since little but a layer's gate and up runs beside a crossing; with perfect guesses it is not shorter than the longer of both.
# Which experts are fetched is known on the device alone, and a copy inside a graph has fixed addresses: so a kernel fetches, whose reads of
# host memory do not reach a copy's rate. *At a fetch's rate* counts the same bytes at what single fetches of the run reach; what is left
# above one is look-ups, launches and decoding that nothing hides.

# %% tags=["table"]
report.table(shown.floors(rows), "floors", "steps without prefetch, and with perfect guesses", workspace, digits=3)

# %% [markdown]
# ## Simulated beside measured
#
# From single look-ups, fetches, decodes and kernels and the resident step, nothing of it fitted to whole steps.

# %%
experts = {one.name: one for one in (streams.OLMOE, streams.QWEN)}
shape = experts[sizes["shape"]]
if set(sizes) <= {"shape", "alike"}:  # costs are recorded for the shapes' own sizes
    costs = simulated.cost(workspace, model, shown.resident_ms(rows), drive.routes.shape[1], shape)
    guessed = simulated.rows(drive, variants, costs, shown.stored(rows, "coded"), resamples, seed, shape)
    overlap.record_parts("09_decode", model, workspace, [("simulated", guessed)])
    rows = record.read(workspace, "09_decode", model)

# %% tags=["table"]
report.table(shown.errors(rows), "simulated", "mean step, ms", workspace, digits=2)

# %% [markdown]
# ## The map
#
# Where two deadlines, encoding and guesses pay: the same steps over slower links (fewer programs fetch, as a link of an older generation
# would) and with the stock code around the experts captured as it is, not compiled, so that a layer takes longer. What a guess can hide
# one layer ahead is bounded by a layer's time: *in windows* says how many such times a gate/up takes to cross. The more it takes, the
# smaller the part that a guess hides, while a wrong one costs all of its time.

# %% tags=["table"]
report.table(shown.spread(rows, drive.routes.shape[1]), "map", "shares of a step, negative is faster", workspace, digits=3)

# %% [markdown]
# ## Energy

# %% tags=["table"]
report.table(shown.energy(rows), "energy", "idle power included", workspace, digits=3)

# %% [markdown]
# ## What guesses change
#
# Against the same variant without them, prompt by prompt. `random` and `shuffled` show what wrong guesses may cost, `oracle` what right
# ones can give one layer ahead.

# %% tags=["table"]
report.table(shown.prefetches(rows), "prefetch", "ms per step, negative is faster", workspace, digits=3)

# %% [markdown]
# Wrong guesses are stopped by a live control: it lets guesses pass while the share of those that the very next look-up of their layer asks
# for is above a break-even. What becomes of them later does not count: many a random guess is used long after the token it was fetched for,
# and a wrong one is evicted later still. Stopped, it tries again after pauses that double. The engine asks for 0.8. Replayed over the
# same routes by the rules that the kernels follow (0: never stopped), and measured in a run of its own.

# %%
found = stopped.rows(drive, slots[-1:], control_guesses, [0.0, *break_evens], 2, resamples, seed)
overlap.record_parts("09_decode", model, workspace, [("stopped", found)] if found else [])
rows = record.read(workspace, "09_decode", model)

# %% tags=["table"]
report.table(decode_beside.stopped(rows), "stopped", "guesses under the live control, replayed", workspace, digits=3)

# %% tags=["table"]
lines = shown.control(rows)
said = Markdown("Not measured with the present break-even yet.")
report.table(lines, "control", "step with guesses over the step without", workspace, digits=3) if len(lines) else said

# %% [markdown]
# ## A limit on memory
#
# `offload(model, vram="6GiB")` takes as many slots as the limit leaves, at the context it is told. Reserved is what torch's allocator took
# from the device at most, from `offload()` through `generate()`; tokens are those of the model with all experts in slots.

# %% tags=["table"]
lines = decode_beside.memory(rows)
held = lines[lines["limit, GiB"] > 0] if len(lines) else lines
assert not len(held) or (held["reserved, GiB"] <= held["limit, GiB"]).all()
report.table(lines, "vram", "memory under a limit", workspace, digits=2) if len(lines) else Markdown("Not measured yet.")

# %% [markdown]
# ## At Qwen3.6's sizes
#
# The same engine around transformers' `Qwen3_5MoeForCausalLM` with the text sizes of Qwen3.6-35B-A3B: 40 layers, three with linear
# attention to one with full, 256 experts of width 512, eight routed and one shared, random weights. So that host memory holds them raw and
# encoded, layer i has the experts of layer i modulo 8; slots are each layer's own. Routes are either a small model's recorded ones, tiled
# (the next eight layers take the steps of the same prompt some steps later, so that transitions inside eight layers are recorded ones and
# nothing is guessed between), or synthetic: drawn so that an LRU cache hits as often as the parameters say, where notebook 11 has not
# traced that model yet. Then `random`, `shuffled` and `oracle` are the only guesses there are. The recorded rows say which: *routes*. Of
# the parameter `qwen`: *warm* slots are also kept from prompt to prompt, *plain* ones also measured with the stock code not compiled.

# %%
if "qwen" in parts:
    told = dict(profile=profile, model=qwen["routes"], corpus=corpus, split=split, labels=qwen["labels"], horizon=horizon)
    told = told | {"prompts": qwen["prompts"]} if routes.traced(profile, qwen["routes"]) else None
    drawn = dict(hits=dict(zip(qwen["slots"], qwen["hits"])), prompts=qwen["prompts"], steps=qwen["steps"])
    large = routes.driving(told, drawn, seed, L=40, E=256, K=8)
    known, known_warm = ([one for one in qwen[name] if one[0] in large.scores] for name in ("guesses", "warm_guesses"))
    own, wide = cases.all_cases(qwen["slots"], 256, known, [], []), cases.plain_cases(qwen["plain"], 256)
    shaped, driven_by = {"shape": "qwen", "alike": qwen["alike"]}, {"routes": qwen["routes"] if told else "synthetic"}
    group = study.build(large, own + wide, seed, compile, **shaped)
    found = study.named(study.measured(group, large, resamples, seed, wide, qwen["prompts"]), **driven_by)
    overlap.record_parts("09_decode", decode_large.MODEL, workspace, found)
    del group

# %%
if "qwen" in parts and qwen["warm"]:
    memory.free()  # warm variants have slots of their own: no room beside the cold
    group = study.build(large, cases.warm_cases(qwen["warm"], 256, known_warm), seed, compile, **shaped)
    found = study.named(study.apart(group, large, resamples, seed, "warm", "warm"), **driven_by)
    overlap.record_parts("09_decode", decode_large.MODEL, workspace, found)
    del group

# %%
large_rows = record.read(workspace, "09_decode", decode_large.MODEL)
if "qwen" in parts:
    costs = simulated.cost(workspace, decode_large.MODEL, shown.resident_ms(large_rows), 40, experts["qwen"], model)
    guessed = simulated.rows(large, own, costs, shown.stored(large_rows, "coded"), resamples, seed, experts["qwen"])
    found = study.named([("simulated", guessed)], **driven_by)
    overlap.record_parts("09_decode", decode_large.MODEL, workspace, found)
    large_rows = record.read(workspace, "09_decode", decode_large.MODEL)

# %%
Markdown(decode_large.answer(large_rows))

# %% tags=["table"]
missing = Markdown("Not measured yet.")
report.table(shown.floors(large_rows), "floors_large", "steps at Qwen3.6's sizes", workspace, digits=3) if len(large_rows) else missing

# %% tags=["table"]
report.table(shown.speeds(large_rows), "speeds_large", "tokens/s by slots of 256", workspace, digits=0) if len(large_rows) else missing

# %% tags=["table"]
kept = shown.speeds(large_rows, warm=True) if len(large_rows) else large_rows
report.table(kept, "speeds_large_warm", "the same with slots that stay warm", workspace, digits=0) if len(kept) else missing

# %% [markdown]
# ## What could be installed instead

# %% tags=["table"]
report.table(decode_beside.baselines(rows), "baselines", "the same model, one token per step", workspace, digits=2)

# %%
Markdown(shown.answer(rows))

# %% [markdown]
# ## Limits
#
# Random weights under another model's routes (at Qwen3.6's sizes possibly no model's): speed, not text. Slots start empty at each prompt,
# as in the replays; a server that keeps them between prompts hits more (the warm rows). One H200 and its link. Steps are timed without
# sampling and stopping criteria, which `generate()` adds.
