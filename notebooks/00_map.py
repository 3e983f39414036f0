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
# # 00 Map of the study
#
# **Question.** Must a routed expert arrive as one piece, or may its gate and up matrices have an earlier deadline than its
# down matrix: when does that pay, and when does it lose? This notebook shows which notebook answers what, and how far the
# answers are.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml

# %%
from IPython.display import Markdown

from dualdeadline import manifest, paths
from dualdeadline.report import published, stages, verdicts

workspace = paths.Workspace(profile)
protocol = manifest.read_yaml("protocol.yaml")

# %% [markdown]
# **Answer so far**, from the records of this profile:

# %%
Markdown(verdicts.sentence(workspace, model))

# %% [markdown]
# **In:** the committed manifests and records. **Out:** nothing; this notebook only reads.
#
# ## From prompts to verdicts
#
# ```mermaid
# flowchart LR
#   corpus[01 prompts] --> traces[02 decode traces]
#   model[90 embedded model] --> traces
#   traces --> predictors[03 predictors]
#   predictors --> metrics[04 recall, calibration]
#   predictors --> replay[05 caches, stall replay]
#   gpu[one H200] --> kernels[06 kernels] & overlap[07 schedules] & wire[08 wire format] & decode[09 decode steps]
#   disk[SSD, remote worker] --> tiers[10 tiers below]
#   predictors --> decode & tiers
#   second[second model] --> confirmation[11 confirmation]
#   confirmation --> records
#   predictors --> kernels & overlap
#   overlap --> wire
#   kernels & overlap & wire & decode & tiers --> records
#   traces --> replay
#   metrics --> records[(records)]
#   replay --> records
#   records --> paper[12 tables, figures, paper]
# ```
#
# Arrows point one way. Traces and fitted predictors are large and stay in `data/`, which git ignores; what is published
# (prompt ids, one row per measurement, figures, tables) is committed. A notebook reads what earlier ones wrote and says which
# one to run if something is missing.

# %% tags=["table"]
stages.overview(workspace)

# %% tags=["nbval-check-output"]
print(sorted(stages.STAGES))

# %% [markdown]
# ## Hypotheses
#
# Fixed in `data_manifests/protocol.yaml` before the results they speak of. A hypothesis with several comparisons is supported
# only if every one of them is.

# %% tags=["table"]
stages.hypotheses(workspace, model)

# %% tags=["nbval-check-output"]
print(sorted(protocol["hypotheses"]), "amendments:", len(protocol["amendments"]))

# %% [markdown]
# ## Models and machines
#
# Every record row names one of these.

# %% tags=["table"]
stages.models()

# %% tags=["table"]
stages.machines(workspace)

# %% tags=["nbval-check-output"]
assert model in manifest.read_yaml("models.yaml")
print(protocol["grid"]["budgets"], protocol["grid"]["horizons"], protocol["statistics"]["resamples"])

# %% [markdown]
# ## Limits
#
# 01 to 05 need no GPU; 06 to 09, the second model's kernels and blocks (11) and both trainings (90) were measured on one H200, whose
# records are shown elsewhere. 10 measures this machine's disk and a worker beside it, and shows all machines' records, an H200 host's
# too. Whole decode steps have random weights, under the routes of the embedded models (09). Replayed and simulated are not measured.
