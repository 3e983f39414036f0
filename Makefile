# make study   everything: environment, notebooks, records, figures, tables, PDF (where LaTeX exists)
# make test    everything that CI checks
# Other Python: make PYTHON=python3.12 .venv. Parts: make study PROFILE=smoke ONLY=03,04 FROM=02 GRID="seed=0,1,2"

PROFILE ?= pilot
ONLY ?=
FROM ?=
GRID ?=
SCHEDULER ?=
FORCE ?=
TESTS ?= tests
# the first Python that fits; if none does, python3, so that lib/install.py says what is wrong with it
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && exit; done; \
	echo python3)
BIN := .venv/bin
STUDY := $(BIN)/python -m dualdeadline.study

.PHONY: study test .venv lab notebooks paper clean
.DEFAULT_GOAL := study

.venv:
	@$(PYTHON) lib/install.py .venv

study: .venv
	@$(STUDY) run --profile '$(PROFILE)' --only '$(ONLY)' --from '$(FROM)' --grid '$(GRID)' \
		--scheduler '$(SCHEDULER)' $(if $(FORCE),--force)

# two cores, two processes: the study in its smallest size and some files here, all other tests there; the first one's
# report is printed at the end. Without the slow ones, which MARK= (empty) adds.
MARK ?= not slow
BESIDE := $(addprefix tests/test_,smoke.py remote.py loading.py)
test: .venv
ifeq ($(TESTS),tests)
	@said=$$(mktemp); $(BIN)/python -m pytest -m '$(MARK)' $(BESIDE) > $$said 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest -m '$(MARK)' tests $(addprefix --ignore=,$(BESIDE)); rest=$$?; \
	wait $$beside; beside=$$?; cat $$said; rm -f $$said; [ $$rest -eq 0 ] && [ $$beside -eq 0 ]
else
	@$(BIN)/python -m pytest $(TESTS)
endif

# JupyterLab reads notebooks/jupytext.toml: the text file is the source, whatever the times of the two files say
lab: .venv
	@$(BIN)/jupyter lab notebooks

# puts the executed pilot runs beside their text files, without what differs from run to run
notebooks: .venv
	@$(STUDY) publish

paper:
	@command -v latexmk >/dev/null || { echo 'latexmk is missing; needed for the PDF: apt-get install latexmk \
	texlive-latex-recommended texlive-science lmodern'; exit 1; }
	@cd paper && latexmk -pdf -interaction=nonstopmode -halt-on-error -quiet main.tex
	@echo paper/main.pdf

clean:
	rm -rf .venv data paper/main.pdf
