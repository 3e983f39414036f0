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
# # 02 Decode traces
#
# **Question.** What does the router choose, token by token, while the model decodes, and how much of it repeats? Every decode step's
# routes, weights, router logits and states are captured where the experts module receives them, and stored once for all later notebooks.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml
corpora = ["pilot", "replication", "ood"]  # prompt sets, decoded with sampling
greedy = ["pilot"]  # prompt sets decoded greedily as well, into <name>_greedy
prompts = 0  # at most so many prompts per set, shares kept; 0 = all
new_tokens = 96  # decode steps per prompt at most
min_new_tokens = 32  # decode steps per prompt at least
batch_size = 64  # prompts decoded together
temperature = 0.8  # of sampling
top_p = 0.95  # probability mass that sampling keeps
sampling_seed = 0  # seed of sampling
check_tokens = 24  # tokens compared with and without capture
benchmark_steps = 40  # timed decode steps with and without capture
resamples = 2000  # bootstrap resamples
seed = 0  # seed of the bootstrap
resume = True  # False replaces what is stored

# %%
import seaborn as sns
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import corpus, models, paths, record, report, traces
from dualdeadline.traces import summary

workspace = paths.Workspace(profile)
sampling = traces.Sampling(temperature, top_p, sampling_seed)
policies = [(name, name, sampling) for name in corpora] + [(f"{name}_greedy", name, None) for name in greedy]

# %% [markdown]
# **In:** prompts of notebook 01 and the model. **Out:** one trace store per set below `data/`, one file per prompt with its SHA-256 in
# the index; record rows. A run that is stopped goes on where it was; a damaged file is named and only that prompt collected again.

# %%
report.style()
network, tokenizer = models.load(model)
spec = models.describe(network)
texts = {name: corpus.load(name, prompts) for name in {*corpora, *greedy}}

# %% tags=["nbval-check-output"]
print(spec.family, {"L": spec.L, "E": spec.E, "K": spec.K, "H": spec.H, "F": spec.F})
print(sorted(texts))

# %% [markdown]
# ## Capturing changes nothing
#
# Hooks on the experts modules, the routers and the decoder layers keep references to what passes; no route is ever recomputed. The same
# prompts decoded with and without hooks give the same tokens:

# %% tags=["nbval-check-output"]
compared = traces.check_capture(network, tokenizer, texts[corpora[0]][:4], check_tokens, sampling)
assert compared > 0
print("capture changed a token:", False)

# %% [markdown]
# ## Collect
#
# Prompts travel in left-padded batches, sorted by length. The noise behind each sampled token is a hash of seed, prompt, step and token,
# so neither the batch nor a restart can change a text. A text ends before the model's end-of-text token, as it would in use, so
# traces differ in length; the token is barred for the first `min_new_tokens` steps, since a small model likes to end at once on prompts
# it finds odd.

# %%
stores = {
    name: traces.collect(network, tokenizer, texts[source], workspace.traces / name, new_tokens, batch_size, how, resume,
                         min_new_tokens)
    for name, source, how in policies
}

# %%
assert [problem for store in stores.values() for problem in store.verify()] == []
assert all(len(stores[name].prompts) == len(texts[source]) for name, source, _ in policies)

# %% tags=["table"]
report.table(summary.table(stores), "stores", "trace stores", workspace)

# %% tags=["nbval-check-output"]
print(sorted(traces.store.TENSORS), sorted(stores[corpora[0]].routers.__dict__))

# %% [markdown]
# ## What capturing costs
#
# Two copies of one batch advance side by side, one captured; which goes first is drawn anew at every step.

# %%
batch = texts[corpora[0]][:16]
steps = traces.overhead(network, tokenizer, batch, benchmark_steps, seed=seed)
recorder = record.Recorder("02_traces", model, models.revision(model), workspace, {"seed": seed})
overhead = summary.add_overhead(recorder, steps, len(batch))

# %%
light = summary.add_records(recorder, stores, resamples, seed)
recorder.write()
rows = record.read(workspace, "02_traces", model).query("`scope.seed` == @seed")
rows = rows.assign(set=rows["config.corpus"], layer=rows["config.layer"])

# %% [markdown]
# ## One prompt's routes
#
# Rows are experts, columns are tokens; only the K routed experts of a token have a colour, its routing weight. Horizontal streaks are what
# caches live on. Layers number their experts independently: row 5 of one layer has nothing to do with row 5 of another.

# %% tags=["figure"]
trace = light[corpora[0]]
name = summary.longest(trace, trace.source[0])
layers = [0, spec.L // 2, spec.L - 1]
fig, axes = plt.subplots(1, 3, figsize=(7.2, 3.2), sharey=True)
for ax, layer in zip(axes, layers):
    image = ax.imshow(summary.routing(trace, name, layer), aspect="auto", interpolation="nearest", vmin=0, vmax=2 / spec.K)
    ax.set(title=f"layer {layer}", xlabel="decode step", ylabel="expert" if layer == 0 else "")
    ax.grid(False)
fig.colorbar(image, ax=axes, label="routing weight", extend="max")
report.save(fig, "02_routing", workspace, rows[rows.set == corpora[0]]);

# %% [markdown]
# ## Load
#
# Share of a layer's routed slots that each expert takes, as a multiple of an even share. No expert of a usable model is dead.

# %% tags=["figure"]
fig, ax = plt.subplots(figsize=(7.2, 2.8))
load = traces.expert_load(trace) * spec.E
sns.heatmap(load.sort(descending=True).values, ax=ax, cbar_kws={"label": "times even share"}, cmap="cividis", vmin=0,
            xticklabels=8, yticklabels=max(1, spec.L // 8))
loads = rows[(rows.metric == "load") & (rows.set == corpora[0])]
ax.set(xlabel="expert, busiest first in each layer", ylabel="layer", title=report.title(loads, "Expert load"))
report.save(fig, "02_load", workspace, loads);

# %% [markdown]
# ## Neighbouring tokens
#
# Share of a token's experts that the previous token of the same prompt used too. *Unrelated* is what two unrelated tokens share because
# some experts are busier than others; the thin line is K/E, an even load.

# %% tags=["figure"]
reused = rows[rows.metric == "reuse"]
fig, ax = plt.subplots(figsize=(7.2, 3.3))
sns.lineplot(reused, x="layer", y="median", hue="set", style="variant", markers=True, dashes=True, ax=ax)
ax.axhline(spec.K / spec.E, color="black", lw=0.6)
sns.move_legend(ax, "center left", bbox_to_anchor=(1, 0.5), title=None)
ax.set(ylabel="share of experts", ylim=(0, None), title=report.title(reused, "Experts shared with the previous token"))
sns.move_legend(ax, "upper left", bbox_to_anchor=(1, 1))
report.save(fig, "02_reuse", workspace, reused);

# %% [markdown]
# ## Repetition
#
# A small model loops under greedy decoding, and a loop routes alike again and again: that is locality of the text, not of the router.
# Therefore every later notebook uses the sampled traces, and the greedy ones only show how much would change.

# %% tags=["figure"]
repeats = rows[rows.metric == "repeated_4grams_by_source"]
fig, ax = plt.subplots(figsize=(5.6, 2.6))
sns.barplot(repeats, x="median", y="set", hue="variant", ax=ax, width=0.7)
ax.set(xlabel="share of 4-grams that occurred before in the same text", ylabel="",
       title=report.title(repeats, "Repetition by set and source"))
report.save(fig, "02_repetition", workspace, repeats);

# %% tags=["table"]
shown = traces.repetition(trace).sort_values("repeated", ascending=False).head(5)
report.table(shown, "most_repetitive", f"most repetitive prompts of {corpora[0]}", workspace)

# %%
chosen = rows[(rows.set == corpora[0]) & (rows.metric == "reuse")].groupby("variant")["median"].mean()
repeated = rows[rows.metric == "repeated_4grams"].set_index("set")["median"]
loop = "".join(f" (greedy: {repeated[f'{name}_greedy']:.0%})" for name in greedy[:1])
Markdown(f"**Answer.** On average {chosen['neighbour']:.0%} of a token's experts were used by the token before it, where unrelated tokens "
         f"share {chosen['unrelated']:.0%}; {repeated[corpora[0]]:.0%} of the sampled text's 4-grams repeat{loop}. "
         f"Capturing costs {overhead:.1%} of a decode step at batch {len(batch)} (median of {len(steps)} steps).")

# %% [markdown]
# ## Limits
#
# Routes depend on the number format and on the experts kernel in the last bit; both are part of a store's settings, and traces made with
# others are refused, not mixed. Prompt processing is not traced. Reuse between neighbours is a property of this model and these texts.
