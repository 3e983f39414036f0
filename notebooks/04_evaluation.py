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
# # 04 Evaluation
#
# **Question.** How well do the predictors foresee routes on prompts that nothing was chosen on, and does ours beat both the next router's
# own opinion and the original study's predictor where it counts: on what the cache misses?

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml
corpora = ["pilot", "replication", "ood"]  # the first is measured on its test split, the others whole
budgets = [2, 4, 8, 12, 16]  # experts that may be prefetched, per layer and token
miss_budgets = [4, 8]  # the same, where a cache is there already
slots = [8, 16, 24, 32, 40, 48]  # experts cached per layer, for the first corpus
shown_budget = 8  # budget of single figures and of the layer-wise table
seed = 0  # of the bootstrap
resamples = 2000  # bootstrap resamples of prompts
workers = 2  # predictors measured side by side, one CPU thread each

# %%
import pandas as pd
import seaborn as sns
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import evaluation, manifest, models, paths, record, report, selection
from dualdeadline.report import verdicts
from dualdeadline.traces import TraceStore

workspace = paths.Workspace(profile)
policies, h2 = (manifest.read_yaml("protocol.yaml")[key] for key in ("policies", "hypotheses"))
ours, rivals, h2_slots = policies["ours"], policies["baselines"], h2["H2"]["test"]["config"]["slots"]
report.style()

# %% [markdown]
# **In:** traces of notebook 02, predictors fitted and chosen by notebook 03. **Out:** record rows with intervals over prompts, figures.

# %%
fits = selection.read_index(workspace)
stores = {name: TraceStore(workspace.traces / name) for name in corpora}
splits = {name: "test" if place == 0 else "all" for place, name in enumerate(corpora)}
main, everywhere = selection.to_measure(fits), selection.to_measure(fits, [ours, *rivals, "popularity", "oracle"])
assert {ours, *rivals} <= set(main.label)

# %% tags=["nbval-check-output"]
test, train = stores[corpora[0]].split("test"), stores[corpora[0]].index.query("split == 'train'")
assert not set(test.prompt_ids) & set(train.id)
print(sorted(set(main.label) & set(policies["predictors"])))
print(corpora, budgets)

# %% [markdown]
# ## Measure
#
# Recall is the share of the K routed experts among the `budget` best scores. A prefetcher beside a cache needs another figure: of the
# routed experts that a prompt-cold per-layer LRU cache does *not* hold, the share among the predictor's best *absent* experts. Ties
# count by chance, so a predictor that says nothing scores as random. Each prompt is one figure, intervals resample prompts, and a
# predictor fitted with several seeds is their mean. Every target layer counts; layers below the horizon cannot be predicted from
# an earlier layer, so with horizon *h* the first *h* layers are left to the cache.

# %%
full = evaluation.Settings(budgets, miss_budgets, slots, details=True)
brief = evaluation.Settings(budgets, miss_budgets, h2_slots)
values = [evaluation.measure_all(main, test, corpora[0], splits[corpora[0]], full, workspace.scores, workers)]
for name in corpora[1:]:
    trace = stores[name].split(splits[name])
    values.append(evaluation.measure_all(everywhere, trace, name, splits[name], brief, workspace.scores, workers))
values = pd.concat(values, ignore_index=True)

# %%
crossed = evaluation.measure_across(fits, {name: stores[name].split(splits[name]) for name in corpora[::2]}, splits,
                                    shown_budget, workspace.scores)

# %%
means = evaluation.intervals(values, resamples, seed)
compared = values.query("metric == 'recall' and budget == @shown_budget or metric == 'miss_recall'")
gaps = evaluation.differences(compared, ours, rivals, resamples, seed)
leak = evaluation.differences(compared[compared.metric == "recall"], "shuffled", ["popularity"], resamples, seed)
crossed_means = evaluation.intervals(crossed, resamples, seed)
assert len(leak) and (leak.low <= 0.01).all()

# %% [markdown]
# The assertion is the control against leaks: fitted on shuffled labels, the learned predictor falls to popularity or below.
#
# ## Records

# %%
recorder = record.Recorder("04_evaluation", model, models.revision(model), workspace)
for part in (means, gaps, crossed_means):
    evaluation.add_records(recorder, part)
bins = evaluation.calibration(main[(main.horizon == 1) & (main.seed == main.seed.min())], test, workspace.scores)
for label, error in bins.groupby("label").calibration_error.first().items():
    recorder.add(label, "calibration_error", error, "share", "replayed", n=len(test.prompt_ids), corpus=corpora[0],
                 split=splits[corpora[0]], horizon=1)
recorder.write()
first = {"corpus": corpora[0], "split": splits[corpora[0]]}

# %% [markdown]
# ## Recall by budget

# %% tags=["figure"]
rows = report.rows_of(workspace, "04_evaluation", "recall", model, horizon=1, **first)
fig, ax = plt.subplots(figsize=(6.4, 3.6))
report.curves(rows, "config.budget", ax)
ax.set(xlabel="experts prefetched", ylabel="recall", xticks=budgets, title=report.title(rows, "Recall one layer ahead, test"))
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
report.save(fig, "04_recall", workspace, rows);

# %% tags=["figure"]
rows = report.rows_of(workspace, "04_evaluation", "recall", model, budget=shown_budget, **first)
rows = rows[rows.variant != "oracle"]
fig, ax = plt.subplots(figsize=(6.4, 3.3))
report.curves(rows, "config.horizon", ax)
ax.set(xlabel="horizon (layers ahead; 0: same layer, before attention)", ylabel=f"recall at {shown_budget}",
       xticks=[0, 1, 2, 3], title=report.title(rows, "Recall by horizon, test"))
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
report.save(fig, "04_horizons", workspace, rows);

# %% [markdown]
# Recall weighted by routing mass, and the useful share of the bytes moved, show what raw recall hides: the experts that carry most of
# the output are easier to foresee, and each further guess is worth less than the one before.

# %% tags=["table"]
mass = means.query("horizon == 1 and corpus == @corpora[0] and metric in ('recall', 'mass_recall', 'precision')")
report.table(mass.pivot(index="variant", columns=["metric", "budget"], values="mean").sort_values(("recall", shown_budget)),
             "mass", "recall, recall by routing mass, useful bytes per byte; one layer ahead, test", workspace)

# %% [markdown]
# ## What the cache misses

# %% tags=["figure"]
rows = report.rows_of(workspace, "04_evaluation", "miss_recall", model, horizon=1, budget=4, **first)
rows = rows[rows.variant.isin([ours, *rivals, "transition", "previous_token", "popularity", "random", *selection.ADDED])]
fig, ax = plt.subplots(figsize=(6.4, 3.3))
report.curves(rows, "config.slots", ax)
ax.set(xlabel="cache slots per layer", ylabel="recall of misses, 4 guesses", xticks=slots,
       title=report.title(rows, "Recall on what LRU misses, one layer ahead, test"))
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
report.save(fig, "04_misses", workspace, rows);

# %% tags=["table"]
bytes_ = means.query("metric == 'miss_precision' and horizon == 1 and budget == 4 and corpus == @corpora[0]")
report.table(bytes_.pivot(index="variant", columns="slots", values="mean").sort_values(slots[-1]), "miss_precision",
             "useful bytes per byte prefetched beside the cache, 4 guesses, by slots; the rest is wasted", workspace)

# %% [markdown]
# ## By layer

# %% tags=["figure"]
rows = report.rows_of(workspace, "04_evaluation", "layer_recall", model, horizon=1, **first)
rows = rows[rows.variant.isin([ours, *rivals, "transition", "popularity", *selection.ADDED])]
fig, ax = plt.subplots(figsize=(6.4, 3.3))
report.curves(rows, "config.layer", ax)
ax.set(xlabel="target layer (layer 0 has no layer before it)", ylabel="recall at K",
       title=report.title(rows, "Recall by target layer, one layer ahead, test"))
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
report.save(fig, "04_layers", workspace, rows);

# %% [markdown]
# ## Probabilities
#
# Scheduling multiplies them with costs, so they have to mean what they say.

# %% tags=["figure"]
shown = bins[bins.label.isin([ours, *rivals, "popularity", *selection.ADDED]) & (bins["count"] >= 200)]
rows = report.rows_of(workspace, "04_evaluation", "calibration_error", model, horizon=1, **first)
fig, ax = plt.subplots(figsize=(4, 3.6))
sns.lineplot(shown, x="probability", y="routed", hue="label", palette=report.palette(shown.label.unique()), marker=".", ax=ax)
ax.axline((0, 0), slope=1, color="grey", lw=0.8, zorder=0)
ax.legend(ax.lines[:-1], shown.label.drop_duplicates().map(report.label))
ax.set(xlabel="predicted probability", ylabel="share routed", title=report.title(rows, "Reliability, one layer ahead, test"))
report.save(fig, "04_reliability", workspace, rows);

# %% [markdown]
# ## Other domains
#
# Fitted on one kind of prompt, tested on the other and on prose that no training text or predictor has seen.

# %% tags=["table"]
table = crossed_means.pivot(index="variant", columns=["corpus", "split"], values="mean")
report.table(table, "domains", f"recall at {shown_budget}, one layer ahead, by kind of prompt", workspace)

# %% tags=["table"]
rest = means.query("metric == 'recall' and budget == @shown_budget")
report.table(rest.pivot(index=["corpus", "variant"], columns="horizon", values="mean"), "corpora",
             f"recall at {shown_budget} by prompt set and horizon", workspace)

# %% [markdown]
# ## Verdict on H2

# %%
lines, _ = verdicts.comparisons(workspace, "H2", model)
word = verdicts.verdict_of(lines)
Markdown(f"**Claim.** {h2['H2']['claim']}\n\n**Support.** {h2['H2']['support']}")

# %% tags=["table"]
report.table(lines.assign(config=lines.config.astype(str)), "h2", "paired differences, 95 % intervals over prompts", workspace)

# %% tags=["nbval-check-output"]
assert word in ("supported", "not supported")
print(lines.shape, sorted(lines.variant.unique()))

# %%
at = means.query("metric == 'miss_recall' and horizon == 1 and budget == 4 and slots == @h2_slots[0] and corpus == @corpora[0]")
said = ", ".join(f"{report.label(row.variant)} {report.value(row.mean, row.low, row.high)}" for row in at.itertuples()
                 if row.variant in (ours, *rivals))
Markdown(f"**Answer.** H2 is **{word}** ({verdicts.count_supported(lines)} comparisons). Of what an LRU cache of {h2_slots[0]} "
         f"slots misses, 4 guesses one layer ahead find, on test: {said} (recall, 95 % interval over prompts).")

# %% [markdown]
# ## Limits
#
# Replayed, not timed: recall says nothing about whether a copy would have arrived. Intervals cover prompts only, not other checkpoints;
# the embedded model stands in for its routing shape and is not OLMoE. Decoding is seeded sampling in English.
