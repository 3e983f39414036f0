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
# # 12 Tables, numbers and the paper
#
# **Question.** Does everything that README and paper say follow from the records?

# %% tags=["parameters"]
profile = "pilot"  # name of a file in notebooks/profiles
model = "pilot-olmoe"  # key in data_manifests/models.yaml
corpus = "pilot"  # prompt set whose test split the tables show
build_pdf = True  # typeset the paper where latexmk exists
preview_page = 1  # page of the PDF shown below

# %%
from IPython.display import Markdown, display

from dualdeadline import paths, record
from dualdeadline.report import check, numbers, paper, published, readme, runtime, verdicts
from dualdeadline.report.tables import Subject

workspace = paths.Workspace(profile)
about = Subject(workspace, model, corpus)
is_published = profile == "pilot"  # other profiles leave README alone

# %% [markdown]
# **In:** `records/*.csv`, figures, `paper/main.tex`. **Out:** `paper/generated/tables.tex` and `numbers.tex`, the marked
# blocks of README, the PDF, and a record of how long each stage took.
#
# **Answer:** filled in below, after the checks. First the run times, since README quotes them.

# %%
recorder = record.Recorder("12_paper", model, "run", workspace, scope={"profile": profile})
stages_timed = runtime.add(recorder, workspace)
print(f"{stages_timed} executed stages found in {workspace.runs.name}/")

# %%
if stages_timed:  # none in a Lab session that never called the runner: the committed times stay
    recorder.write()

# %% [markdown]
# ## Tables and numbers
#
# Each is one function from records to text. The same rows are shown here, typeset in the paper and, some of them, put into
# README.

# %%
written = paper.write(about)
display(*[str(path.name) for path in written])

# %% tags=["nbval-check-output"]
print(sorted(published.TABLES))

# %% tags=["table"]
display(*[published.show(name, workspace, model, corpus) for name in published.TABLES])

# %% tags=["table"]
numbers.frame(about)

# %% [markdown]
# ## Does the paper hold?
#
# No result is typed, every command is defined, every definition names its source, and every figure still shows what its
# records say.

# %% tags=["nbval-check-output"]
problems = check.problems(workspace)
assert not problems, "\n".join(problems)
print("problems:", len(problems))

# %% tags=["nbval-check-output"]
outdated = [name for name, is_fresh in check.fresh(workspace).items() if not is_fresh]
assert not outdated, f"figures drawn before their records changed: {outdated}; run their notebooks again"
print("outdated figures:", outdated)

# %%
if is_published:
    print("README changed" if readme.fill(about) else "README is up to date")

# %% [markdown]
# ## Answer

# %%
Markdown(f"Yes: {len(published.TABLES)} tables and {len(numbers.every(about))} numbers were made from records. "
         + verdicts.sentence(workspace, model))

# %% [markdown]
# ## The PDF

# %%
pdf = paper.build(workspace) if build_pdf else None
print(pdf.name if pdf else f"no PDF from this run; to make it: {paper.INSTALL}")

# %% tags=["figure"]
if pdf:
    display(paper.preview(pdf, preview_page))

# %% [markdown]
# ## Limits
#
# Provenance shows where a number comes from, not that it is right: the tests of each stage do that. Run times include what
# the machine did besides.
