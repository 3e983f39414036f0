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
# # 01 Prompts
#
# **Question.** On which prompts are traces taken, and does any split, prompt set or training text share one with another? The texts
# come from pinned packages at run time; what is committed are ids, groups, splits and hashes.

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml; its tokenizer counts the tokens
corpora = ["pilot", "replication", "ood"]  # prompt sets
prompts = 0  # at most so many prompts per set, shares kept; 0 = all

# %%
import seaborn as sns
from IPython.display import Markdown
from matplotlib import pyplot as plt

from dualdeadline import corpus, models, paths, record, report

workspace = paths.Workspace(profile)
report.style()

# %% [markdown]
# **In:** the manifests in `data_manifests/corpora` and the installed packages. **Out:** record rows with counts and lengths; for the
# real checkpoints' sets, which come from Hugging Face, also the manifest, written at the first fetch and pinned from then on.
#
# | set | prompts | what for |
# |---|---|---|
# | `pilot` | 80 word problems, 40 HumanEval tasks | fitting (train), choosing (validation), one look (test) |
# | `replication` | 200 and 100 others | one look, after the choice |
# | `ood` | 60 openings of docstrings, from packages that training never saw | reported, chooses nothing |
#
# A prompt's id is a hash of its source and key. Splits are 60/20/20 by *group*, so that near-twins never face each other across a
# split: word problems by template (same story, other numbers), docstrings by module, HumanEval by task.

# %%
loaded = {name: corpus.load(name, prompts) for name in corpora}  # checks every text's hash and what is shared
table = corpus.frame(loaded, models.tokenizer(model))

# %% tags=["nbval-check-output"]
print({name: sorted(set(part.source)) for name, part in table.groupby("corpus")})
print(sorted(set(table.split)))

# %% tags=["table"]
counts = table.pivot_table(index=["corpus", "source"], columns="split", values="id", aggfunc="count", margins=True)
report.table(counts.reset_index(), "prompts", "prompts by set, source and split", workspace)

# %% [markdown]
# ## Nothing is shared
#
# `corpus.load` has refused anything shared already; here the same is asserted in the open. Word problems use three disjoint sets of
# templates: for training text, `pilot` and `replication`.

# %%
assert table.id.is_unique and table.text.is_unique
assert (table.groupby(["source", "group"]).split.nunique() == 1).all()
used = {int(group.split()[1]) for group in table[table.source == "gsm_symbolic"].group}
assert not used & set(corpus.templates("pretrain"))
assert not set(corpus.templates("pilot")) & set(corpus.templates("replication"))

# %% [markdown]
# The committed manifests are what the rules in `corpus/build.py` give when applied to the installed packages now, line by line:

# %% tags=["nbval-check-output"]
again = {name: corpus.rebuilt(name) for name in corpora}
assert False not in again.values()
print("unlike the committed manifest:", sorted(name for name, same in again.items() if same is False))

# %% [markdown]
# ## One of each

# %% tags=["table"]
first = table.drop_duplicates("source")[["source", "corpus", "split", "group", "text"]]
report.table(first.assign(text=first.text.str.slice(0, 220)), "examples", "first prompt of each source", workspace)

# %% [markdown]
# ## Lengths

# %%
recorder = record.Recorder("01_corpus", model, models.revision(model), workspace)
for (name, source), part in table.groupby(["corpus", "source"]):
    keys = {"corpus": name, "source": source, "n": len(part)}
    low, middle, high = part.tokens.quantile([0.2, 0.5, 0.8])
    recorder.add("prompt", "prompt_tokens", middle, "tokens", "measured", low, high, **keys)
    for split, size in part.split.value_counts().items():
        recorder.add("prompt", "prompts", size, "prompts", "measured", **keys, split=split)
rows = recorder.write()

# %% tags=["figure"]
grid = sns.displot(table, x="tokens", hue="source", col="corpus", kind="ecdf", height=2.6, aspect=0.9)
grid.set(xlabel="tokens of the prompt", ylabel="share of prompts")
report.save(grid.figure, "01_lengths", workspace);

# %%
sizes = table.groupby("corpus", sort=False).size()
Markdown("**Answer.** " + ", ".join(f"`{name}` has {size} prompts" for name, size in sizes.items())
         + f"; all {len(table)} ids and texts differ, no group spans two splits, and no template of the training text is used.")

# %% [markdown]
# ## Limits
#
# Two families of prompts, English and Python, chosen to be comparable with the original study (grade-school mathematics and code), and
# a third family only for a look from outside. Templates make word problems more alike than real ones are. The embedded model was
# trained on problems made from *other* templates of the same generator, so word problems are familiar to it in form.
