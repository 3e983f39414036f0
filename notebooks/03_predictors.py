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
# # 03 Predictors
#
# **Question.** Which experts will a later layer route to, judged from what is known at this layer? Every predictor of the study is
# fitted on the train prompts, compared on validation, and kept; test and replication are not looked at here.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml
corpus = "pilot"  # prompt set whose train and validation splits are used
horizons = [0, 1, 2, 3]  # layers between the state read and the layer predicted
seed = 0  # seed of the ablations, and the first of the finalists' seeds
seeds = 3  # seeds per finalist
budgets = [2, 4, 8, 12, 16]  # experts that may be prefetched
choose_budget = 8  # budget whose validation recall chooses
epochs = 8  # passes over the train tokens
workers = 2  # fits side by side, one CPU thread each

# %%
import pandas as pd
import seaborn as sns
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import models, paths, predictors, record, report, selection
from dualdeadline.traces import TraceStore

workspace = paths.Workspace(profile)
column = f"recall@{choose_budget}"
finalist_seeds = list(range(seed, seed + seeds))
report.style()

# %% [markdown]
# **In:** decode traces of notebook 02. **Out:** fitted predictors and, for the replay, their scores on the test split, in `data/`;
# one record row per fit and figure.

# %%
store = TraceStore(workspace.traces / corpus)
train, validation = store.split("train"), store.split("validation")
assert not set(train.prompt_ids) & set(validation.prompt_ids)
sources = sorted(set(train.source))

# %% tags=["nbval-check-output"]
print(sorted(predictors.REGISTRY))
print(dict(zip("LEK", (*train.router_logits.shape[1:], train.routes.shape[2]))), sources)

# %% [markdown]
# ## What competes
#
# A predictor reads the router input of layer *l* and scores the experts of layer *l + horizon*; at horizon 0 it reads the state at the
# start of the same layer, before attention (a control: that state is known too late to prefetch much). Ids of one layer say nothing
# about another (*previous layer*, the original study's baseline), so the field is set by *gate-ahead*: the target layer's own router,
# its norm factor exchanged, applied to this layer's state without any training.
#
# Ours starts from gate-ahead and learns what that cannot see, by least squares with a shared low rank: the layers between, which read
# much the same context as one token ago, and the experts that gate-ahead has lately been wrong about. It draws nothing, so it has no
# seed:

# %%
Markdown(f"```python\n{selection.source_of('residual_gate')}\n```")

# %% [markdown]
# Every score is turned into a probability by two numbers per layer, fitted on train prompts that the predictor itself was not fitted
# on. The *shuffled* control learns from the routes of other tokens; whatever it finds beyond popularity would be a leak.
#
# ## Ablations: one layer ahead, one seed

# %%
ablations = selection.jobs(selection.BASELINES + selection.ABLATIONS, [1], [seed])
fits = selection.fit_all(ablations, train, validation, workspace.scores, budgets, workers, epochs=epochs)
assert fits[column].between(0, 1).all()

# %% tags=["table"]
shown = fits.sort_values(column, ascending=False)[["label", "kind", "parameters", *[f"recall@{b}" for b in budgets],
                                                   "calibration_error", "fit_s"]]
report.table(shown, "ablations", "recall on validation, one layer ahead", workspace)

# %%
by_label = fits.set_index("label")
assert by_label.loc["shuffled", column] <= by_label.loc["popularity", column] + 0.01
assert by_label.loc["oracle", column] == 1
assert by_label.loc["residual_gate_default", "parameters"] <= by_label.loc["shared_mlp", "parameters"]

# %% [markdown]
# ## Choice on validation
#
# The finalists are the original study's predictor, the best of the other published kinds, and the best of ours.

# %%
ours, published = (selection.best(fits, kind, column) for kind in ("ours", "published"))
finalists = [selection.finalist(label) for label in dict.fromkeys(["shared_mlp", published, ours])]
Markdown(f"Chosen on validation: ours **{ours}**, published **{published}**.")

# %% [markdown]
# ## Finalists: every horizon, several seeds
#
# What draws nothing has one fit per horizon, and so have the other published kinds. Last come fits on prompts of one source only, for
# the test across domains.

# %%
others = [item for item in selection.BASELINES + selection.ABLATIONS if item.label in selection.SHOWN]
plan = selection.jobs(finalists, horizons, finalist_seeds)
plan += selection.jobs(others, horizons, [seed])
for source in sources:
    plan += selection.jobs([finalists[0], finalists[-1]], [1], [seed], source)

# %%
fits = selection.fit_all(plan, train, validation, workspace.scores, budgets, workers, done=fits, epochs=epochs)
selection.write_index(fits, workspace, ours=ours, published=published)
kept = {item.label for item in others + finalists}
once = fits[(fits.seed == seed) & (fits.source == "") & fits.label.isin(kept)]
written = selection.write_scores(list(once.folder), store.split("test"), corpus, workspace)

# %% tags=["table"]
table = once.pivot(index="label", columns="horizon", values=column).sort_values(1, ascending=False)
report.table(table, "horizons_validation", f"recall at budget {choose_budget} on validation, by horizon", workspace)

# %% tags=["nbval-check-output"]
print(sorted(set(table.index) & set(predictors.REGISTRY)))
print(sorted(fits.horizon.unique().tolist()))

# %% [markdown]
# ## Records

# %%
recorder = record.Recorder("03_predictors", model, models.revision(model), workspace)
selection.add_records(recorder, fits, budgets, len(validation.prompt_ids))
rows = recorder.write()

# %% tags=["figure"]
chosen = record.read(workspace, "03_predictors", model).query(
    "metric == 'validation_recall' and `config.budget` == @choose_budget and `config.source` == 'all'")
first = chosen[(chosen["config.horizon"] == 1) & (chosen["config.seed"] == seed)].sort_values("median", ascending=False)
fig, ax = plt.subplots(figsize=(5.6, 5.2))
sns.barplot(first.rename(columns={"config.role": "role"}), x="median", y="variant", hue="role", dodge=False, ax=ax, width=0.7)
ax.set(xlabel=f"recall at {choose_budget} on validation", ylabel="", title=report.title(first, "Candidates, one layer ahead"))
report.save(fig, "03_candidates", workspace, first);

# %%
best = {label: by_label.loc[label, column] for label in (ours, "gate_ahead", "shared_mlp", "popularity")}
Markdown(f"**Answer.** One layer ahead and with {choose_budget} guesses, the validation prompts' routed experts are found to "
         + ", ".join(f"{value:.1%} by {report.label(name)}" for name, value in best.items()) + ".")

# %% [markdown]
# ## Limits
#
# Validation has chosen these predictors, so its figures flatter them a little; notebook 04 reports test and replication. Recall is no
# speed: which guesses are worth their bytes depends on what a cache already holds and on the link.
