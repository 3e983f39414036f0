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
# # 05 Replay
#
# **Question.** What does an expert cache keep, what does prefetch add to it, and what does the original study's stall arithmetic say once
# every assumption in it can be changed? Recorded routes are replayed against caches and published copy times; nothing here is timed but
# the replay itself.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml
corpus = "pilot"  # prompt set whose routes and scores are replayed
split = "test"  # split for which notebook 03 wrote scores
prompts = 0  # limit of prompts, 0 for all
seed = 0  # seed of the bootstrap, and of the predictors' fits
resamples = 2000  # bootstrap resamples over prompts
horizons = [1, 2, 3]  # layers between the state read and the layer predicted
slots_shown = [8, 16, 32, 48]  # slots per layer in tables
prefetch_slots = [16, 32, 48]  # slots per layer in front of which experts are prefetched
prefetch_budgets = [4]  # most copies ahead per token and layer
thresholds = [0.0, 0.5]  # least probability that is worth a copy
budgets = [0, 2, 4, 8, 12, 16]  # whole-expert bytes that may be moved ahead, in experts
told_budget = 4  # budget at which the original reports its learned predictor and its caches
stall_slots = [8, 16, 32, 64]  # slots per layer of the LRU cache in front of the stall arithmetic
race_prompts = 12  # prompts in the comparison of speed with a plain loop
scheduler = ""  # dask scheduler, tcp://host:port; empty for worker processes on this machine

# %%
import pandas as pd
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import cache, models, paths, record, replay, report, selection, simulate, sweep
from dualdeadline.cost import TransferModel
from dualdeadline.report import published

workspace = paths.Workspace(profile)
store = str(paths.need(workspace.traces / corpus, "02_traces"))
test = {"corpus": corpus, "split": split}
report.style()

# %% [markdown]
# **In:** decode traces of notebook 02, scores of notebook 03, and the original study's published times
# (`data_manifests/published_olmoe.json`, source inside). **Out:** one record row per hit rate and stall, with intervals over prompts.

# %%
routes, prompt, experts = replay.routes_of(store, split, prompts)
fits = selection.read_index(workspace)
fits = fits[(fits.seed == seed) & (fits.source == "") & fits.horizon.isin(horizons)]
fits = fits[[(workspace.scores / folder / f"{corpus}.safetensors").exists() for folder in fits.folder]].copy()
assert {"random", "popularity", "gate_ahead", "oracle"} <= set(fits.label)
assert routes.max() < experts and (routes[:, :, :1] != routes[:, :, 1:]).all()

# %% tags=["nbval-check-output"]
print(dict(zip("LKE", (*routes.shape[1:], experts))))

# %% [markdown]
# ## The original study's arithmetic, reproduced
#
# For every routed token and layer the original adds up what the link still has to copy once the router has spoken. *Monolithic*
# waits for whole experts. *Staged* waits for gate and up, and for the downs as far as they outlast the gate/up products. A perfect
# predictor with the published mean copy times and windows must give the published rows, whatever the routes.

# %%
told = simulate.published()
transfer = TransferModel.fit(told["transfer"]["size_bytes"], told["transfer"]["mean_ms"])
times, routed = (transfer, told["bytes"], told["expert_gate_up_compute_top8_p50_ms"]), told["top_k"]
windows = simulate.windows(told["layers"], told["predictor_latency_ms"])
shown = {int(budget): row for budget, row in told["published_oracle_stall_ms"].items()}
perfect = simulate.mean_coverage({n: min(n / routed, 1) for n in range(1, 2 * routed + 1)}, routed, range(1, len(windows)))

# %%
ours = simulate.stall(perfect, windows, *times, budgets=list(shown)).set_index("budget")
original = pd.DataFrame(shown).T.add_suffix("_ms").rename_axis("budget")
assert (ours - original).abs().max(axis=None) < 1e-5
assert max(abs(a - b) for a, b in zip(windows, told["prefetch_window_ms_by_target_layer"])) < 1e-9
Markdown(f"Largest difference from the published rows: {(ours - original).abs().max(axis=None):.1e} ms.")

# %% [markdown]
# **One link, charged once.** The downs that staged hides under the gate/up products of layer *l* and the prefetch for layer *l + 1* use
# the same milliseconds. Taking those downs off the window (whole copies, as the original counts, or with the copied part of an unfinished
# copy) gives, for the original's learned predictor, known here by its published mean recall:

# %%
learned = simulate.mean_coverage(told["published_recall"]["learned"], routed, range(1, len(windows)))
once = {"link_once": True}
cases = {"as published": {}, "link once": once, "link once, partial copies": once | {"partial": True}}
rows = {name: simulate.stall(learned, windows, *times, [told_budget], **rule).iloc[0] for name, rule in cases.items()}
once = pd.DataFrame(rows).T.drop(columns="budget")
once["staged - monolithic"] = once.staged_ms - once.monolithic_ms

# %% tags=["table"]
report.table(once, "link_once", f"the original's learned predictor at budget {told_budget}, stall in ms", workspace)

# %% tags=["nbval-check-output"]
assert abs(once.staged_ms.iloc[0] - told["published_stall_budget4_ms"]["learned"]["staged"]) < 0.01
print({name: "staged wins" if gain < 0 else "staged loses" for name, gain in once["staged - monolithic"].items()})

# %% [markdown]
# ## Sweeps
#
# Every policy at every slot count, per layer and as one shared pool, emptied for each prompt or kept; prefetch into those slots; stalls.
# Each point becomes a shard below `data/`, so a stopped run goes on where it was.

# %%
common = {"store": [store], "split": [split], "prompts": [prompts]}
policies = list(cache.POLICIES)
token = sweep.points(**common, policy=policies, order=["token"], scope=["layer", "pool"], start=["cold", "warm"])
rank = sweep.points(**common, policy=policies, order=["rank"], scope=["layer"], start=["cold"])
grids = {replay.curves: token + rank}
grids[replay.layer_curves] = sweep.points(**common, policy=policies, order=["token"])
grids[replay.references] = sweep.points(**common, horizons=[horizons], sizes=[prefetch_slots])

# %%
finalists = {"oracle", "gate_ahead", "shared_mlp", "residual_gate", str(fits.published.iloc[0])}
fits["scores"] = [str(workspace.scores / folder / f"{corpus}.safetensors") for folder in fits.folder]
scored = fits[(fits.horizon == 1) | fits.label.isin(finalists)].rename(columns={"label": "variant"})
scored = scored[["variant", "horizon", "scores"]].to_dict("records")
base, near = {"store": store, "split": split, "prompts": prompts}, [p for p in scored if p["horizon"] == 1]
shape = {"sizes": prefetch_slots, "budgets": prefetch_budgets, "thresholds": thresholds}
grids[replay.prefetches] = [base | point | shape for point in scored]
grids[replay.stalls] = [base | point | {"budgets": budgets, "sizes": stall_slots} for point in near]

# %%
curves, layers, plain, prefetched, stalled = replay.run(grids, workspace, scheduler)
assert curves.hit_rate.between(0, 1).all() and (stalled.ms >= 0).all()

# %%
keys = ["policy", "order", "scope", "start", "slots"]
rates = replay.intervals(curves, "hit_rate", keys, resamples, seed).rename(columns={"policy": "variant"})
rates["scope"] = rates.scope.replace({"pool": "shared"})
own = layers[layers.slots.isin(slots_shown)].rename(columns={"policy": "variant", "hit_rate": "mean"})
own = own[["variant", "order", "layer", "slots", "mean"]].assign(low=None, high=None, n=prompt.max() + 1)
whole = rates[rates.slots >= routes.shape[2]]  # below K slots a token's experts take turns
best, lru = (whole[whole.variant == name].set_index(keys[1:])["mean"] for name in ("belady", "lru"))
assert (best >= lru - 1e-12).all()

# %%
keys = ["variant", "horizon", "slots", "policy", "budget", "threshold", "charged"]
reference = plain.assign(policy=plain.variant.replace({"none": "lru"}), budget=0, threshold=0.0, charged=True)
filled = pd.concat([prefetched, reference])[[*keys, "prompt", "hit_rate", "useful", "wasted"]]
ahead = replay.intervals(filled, "hit_rate", keys, resamples, seed)
copies = {name: replay.intervals(prefetched, name, keys, resamples, seed) for name in ("useful", "wasted")}

# %%
keys = ["variant", "metric", "timings", "slots", "budget"]
stalled = stalled[(stalled.slots == 0) | (stalled.budget == told_budget)]
waits = replay.intervals(stalled, "ms", [*keys, "schedule"], resamples, seed)
gains = replay.gains(stalled[stalled.timings == "p50"], keys, resamples, seed)
gains["metric"] = gains.metric.str.replace("_ms", "_difference_ms")
few = prompt < race_prompts
race = replay.race(routes[few], prompt[few], experts, range(4, experts + 1, 12))
assert (waits.query("variant == 'oracle' and metric == 'stall_ms'")["mean"] >= 0).all()

# %% [markdown]
# ## Records

# %%
recorder = record.Recorder("05_replay", model, models.revision(model), workspace)
replay.add_records(recorder, rates[rates.order == "token"], "share", "hit_rate", **test)
single = rates[(rates.order == "rank") & rates.slots.isin(slots_shown)]
replay.add_records(recorder, single, "share", "hit_rate_rank", **test)
replay.add_records(recorder, own, "share", "layer_hit_rate", **test)
replay.add_records(recorder, ahead, "share", "prefetch_hit_rate", **test)
for name, found in copies.items():
    replay.add_records(recorder, found, "copies", f"prefetch_{name}", **test)
for found in (waits, gains):
    replay.add_records(recorder, found, "ms", horizon=1, **test)
recorder.add("one_pass", "replay_speedup", race["speedup"], "ratio", "measured", prompts=race_prompts, slots=experts)
recorder.write();

# %%
rows = record.read(workspace, "05_replay", model)
hit = rows[rows.metric == "hit_rate"]
filled = rows[(rows.metric == "prefetch_hit_rate") & (rows["config.horizon"] == 1)]
wait = rows[(rows.metric == "stall_ms") & (rows["config.timings"] == "p50")]
gain = {name: rows[rows.metric == f"stall_{name}difference_ms"] for name in ("", "link_once_")}

# %% [markdown]
# ## What a cache keeps
#
# One pass over the accesses gives the hit rate at every slot count. Order: all experts of a token and layer at once, those in use pinned,
# as an engine works. A shared pool of as many slots in total may give a layer more than its share. *Cold* caches are emptied for each
# prompt; *warm* ones are kept, and then the optimum also knows the prompts to come.

# %% tags=["figure"]
panels = [("layer", "cold"), ("layer", "warm"), ("shared", "cold"), ("shared", "warm")]
fig, axes = plt.subplots(2, 2, figsize=(6.8, 5.4), sharex=True, sharey=True)
for ax, (scope, start) in zip(axes.flat, panels):
    part = hit[(hit["config.scope"] == scope) & (hit["config.start"] == start)]
    report.curves(part, "config.slots", ax)
    ax.set(title=report.title(part, f"{scope}, {start}"), xlabel="slots per layer", ylabel="hit rate", ylim=(0, 1))
axes[0, 0].legend(loc="lower right")
report.save(fig, "05_hit_rates", workspace, hit);

# %% tags=["table"]
published.show("caches", workspace, model, corpus)

# %% tags=["figure"]
layer = rows[(rows.metric == "layer_hit_rate") & (rows["config.slots"] == slots_shown[1])]
fig, ax = plt.subplots()
report.curves(layer, "config.layer", ax)
ax.set(title=report.title(layer, f"{slots_shown[1]} slots per layer, cold"), xlabel="layer", ylabel="hit rate")
ax.legend()
report.save(fig, "05_layers", workspace, layer);

# %% tags=["nbval-check-output"]
print(sorted(hit.variant.unique()), sorted(hit["config.scope"].unique()), sorted(hit["config.start"].unique()))
print(hit["config.slots"].min(), hit["config.slots"].max())

# %% [markdown]
# ## What prefetch adds
#
# Predicted experts are copied into slots of their layer's cache before the router speaks, so a wrong guess takes the place of something
# that may be needed: the space for speculation is charged. The optimum beside them prefetches nothing but evicts with full knowledge.

# %% tags=["figure"]
charged = filled[filled["config.charged"].eq(True) & filled["config.budget"].isin([0, prefetch_budgets[0]])]
charged = charged[charged["config.policy"].isin(["lru", "belady"])]
fig, axes = plt.subplots(1, len(thresholds), figsize=(7.6, 3.6), sharey=True)
for ax, least in zip(axes, thresholds):
    part = charged[(charged["config.threshold"] == least) | charged.variant.isin(["none", "belady"])]
    report.curves(part, "config.slots", ax, band=False)
    ax.set(title=report.title(part, f"copies from probability {least}"), xlabel="slots per layer", ylabel="hit rate")
fig.legend(*axes[-1].get_legend_handles_labels(), loc="outside right center")
report.save(fig, "05_prefetch", workspace, charged);

# %% tags=["table"]
part = charged[(charged["config.threshold"] == thresholds[-1]) | charged.variant.isin(["none", "belady"])]
table = part.pivot(index="variant", columns="config.slots", values="median").sort_values(prefetch_slots[0])[::-1]
caption = f"hit rate by slots per layer, at most {prefetch_budgets[0]} copies ahead, from probability {thresholds[-1]}"
report.table(table.rename(index=report.label), "prefetch", caption, workspace)

# %% tags=["table"]
part = filled[(filled["config.policy"] == "predicted") | filled.variant.isin(["none", "belady"])]
table = part.pivot(index="variant", columns="config.slots", values="median").sort_values(prefetch_slots[0])[::-1]
caption = "hit rate by slots per layer when the least predicted expert is evicted; nothing is copied ahead"
report.table(table.rename(index=report.label), "eviction", caption, workspace)

# %% [markdown]
# ## Stall against budget
#
# The original's arithmetic with its published median times and without a cache, predictor time charged. Below, staged minus monolithic:
# as the original counts, and with the link charged once. A gain that the random predictor shows too is no gain of prediction.

# %% tags=["figure"]
fig, axes = plt.subplots(2, 2, figsize=(6.8, 6.2), sharex=True)
for ax, schedule in zip(axes[0], ("monolithic", "staged")):
    report.curves(wait[wait["config.schedule"] == schedule], "config.budget", ax)
    ax.set(title=report.title(wait, schedule), ylabel="stall, ms", ylim=(0, None))
for ax, (name, text) in zip(axes[1], (("", "as published"), ("link_once_", "link charged once"))):
    report.curves(gain[name], "config.budget", ax)
    ax.axhline(0, color="black", lw=0.6)
    ax.set(title=report.title(gain[name], text), xlabel="budget, whole experts", ylabel="staged - monolithic, ms")
axes[0, 1].legend(ncol=2, fontsize=6)
report.save(fig, "05_stall", workspace, pd.concat([wait, *gain.values()]));

# %% tags=["table"]
published.show("replay", workspace, model, corpus)

# %% tags=["table"]
part = rows[rows.metric == "stall_lru_ms"]
table = part.pivot(index=["variant", "config.schedule"], columns="config.slots", values="median")
caption = f"stall in ms per token and layer behind an LRU cache, budget {told_budget}, by slots per layer"
report.table(table, "stall_lru", caption, workspace)

# %% [markdown]
# ## Speed of the replay

# %%
Markdown(f"LRU at {experts} slot counts: {race['one_pass_s']:.3f} s of processor time in one pass, {race['plain_s']:.2f} s "
         f"in a plain OrderedDict loop: **{race['speedup']:.0f} times** as fast, results equal.")

# %%
at = {name: part.set_index(["variant", "config.budget"])["median"] for name, part in gain.items()}
lost = {name: f"{part['gate_ahead', told_budget]:+.3f} ({part['random', told_budget]:+.3f})" for name, part in at.items()}
held = hit[(hit["config.scope"] == "layer") & (hit["config.start"] == "cold")].set_index(["variant", "config.slots"])["median"]
half = experts // 2
best = charged[(charged.variant == "gate_ahead") & (charged["config.threshold"] == thresholds[-1])].set_index("config.slots")
Markdown(f"**Answer.** With {half} slots per layer a prompt-cold LRU cache serves {held['lru', half]:.1%} of the routed experts, the "
         f"optimum {held['belady', half]:.1%}, and LRU filled ahead by gate-ahead {best['median'][half]:.1%}. At budget {told_budget} "
         f"the published arithmetic has staging change the stall by {lost['']} ms with gate-ahead (with random guesses), and by "
         f"{lost['link_once_']} ms once the link is charged once.")

# %% [markdown]
# ## Limits
#
# Replayed is not measured: windows and copy times are the published ones of a real OLMoE on an H200, the routes are this profile's, and
# the baseline is the original's, which computes nothing before the last expert has arrived. Link and compute share no clock here; whole
# schedules are timed in the notebooks that run on a GPU.
