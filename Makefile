# make train: everything needed into .venv, then eight ranks train on built-in events.
# make test:  the same for the tests.
# Both may be typed again: what is installed stays, until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
RANKS ?= 8
ARGS ?=

# Programs are started as modules of this Python, so that a folder with spaces in its name does no harm.
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: help train test test-slow test-faults test-slurm test-atoms lint bench table docs

help:
	@echo "make train   install into .venv, then train on built-in events with $(RANKS) ranks (RANKS=2 for two)"
	@echo "make test    install what the tests need, then run them (ARGS=-x goes to pytest)"
	@echo "make test-slow   the same law on more ranks, transports and sizes: ten to twenty minutes on two cores"
	@echo "make test-faults   ranks killed, frozen and cut off, disks full, files spoilt, at every place: some twenty minutes"
	@echo "make test-slurm   jobs of a real Slurm with two nodes on this machine (root): some minutes"
	@echo "make test-atoms   MACE, SevenNet, CHGNet and NequIP, each installed into an environment of its own (1.5 GB each): some minutes"
	@echo "make lint    style, types and the direction of imports"
	@echo "make bench   short runs of all benchmarks, minutes, into bench/RESULTS.md (ARGS=--help for real events and more)"
	@echo "make docs    build the pages as a site, into site/html, which opens from a disk"
	@echo "make table   run convolutions and models of torch_geometric whole and split, into docs/"

train: $(VENV)/.train-stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/mpiexec -n $(RANKS) $(VENV)/bin/python -m domainpar.train $(ARGS)
	@echo "a network that is trained already, on larger events: $(VENV)/bin/python -m domainpar.infer --run pretrained:quickstart --tracks greedy"

# Compiled modules and tests stay in __pycache__ also where the environment would not have it: some hundred processes
# of the tests read them.
test test-slow test-faults: export PYTHONDONTWRITEBYTECODE :=

# A share of the slow tests, also of the mistakes in tests/mistakes, is drawn by DRAW_SEED, which draws the same again.
test test-slow: export DRAW_SEED := $(or $(DRAW_SEED),$(shell date +%s))

# Three processes, also on two cores: many tests wait, for deadlines or for ranks that start. They take the files in the
# order of tests/conftest.py, which has those with long tests first. With SHARE=0.3 as much of the slow tests runs beside
# the others of its file, with the events, stores and runs that they have made already.
test: $(VENV)/.test-stamp
	@echo "some thousand tests: ten to twenty minutes on two cores"
	$(if $(SHARE),@echo "and this share of the slow tests: $(SHARE); drawn with DRAW_SEED=$(DRAW_SEED)")
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(if $(SHARE),-m "not faults and not slurm") $(ARGS)

test-slow: export SHARE ?= 1
test-slow: $(VENV)/.test-stamp
	@echo "share of the slow tests: $(SHARE); these and mistakes to plant are drawn with DRAW_SEED=$(DRAW_SEED)"
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

# A real Slurm on this machine, which takes root and Debian's packages; skipped, with the reason, where it cannot be.
test-slurm: $(VENV)/.test-stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slurm -rsx -v $(ARGS) tests/faults/test_slurm.py

# Packages of others whose pins differ, each beside what domainpar needs, in an environment of its own.
test-atoms: $(VENV)/.test-stamp .venv-mace/.stamp .venv-sevennet/.stamp .venv-chgnet/.stamp .venv-nequip/.stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -rsx -v $(ARGS) tests/atoms

.venv-mace/.stamp: PACKAGES := mace-torch==0.3.16 ase==3.29.0 matscipy==1.3.1 mpi4py==4.1.2 mpich==5.0.2
.venv-sevennet/.stamp: PACKAGES := sevenn==0.13.0 ase==3.29.0
.venv-chgnet/.stamp: PACKAGES := chgnet==0.4.2 ase==3.29.0
.venv-nequip/.stamp: PACKAGES := nequip==0.19.1 ase==3.29.0
.venv-%/.stamp:
	@echo "installing into .venv-$*: $(PACKAGES), one to five minutes ..."
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip --disable-pip-version-check install -qq \
	  "torch==$$(sed -n 's/^torch==//p' constraints.txt)" numba pymetis tqdm psutil rich $(PACKAGES)
	@touch $@

# One after the other: they measure how long the end of a job takes.
test-faults: $(VENV)/.test-stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m faults -s $(ARGS)

lint: $(VENV)/.test-stamp
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/lint-imports --no-logo

bench: $(VENV)/.test-stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/python bench/everything.py $(ARGS)

# Into other files first, so that a survey that finds something wrong leaves the tables as they were.
table: $(VENV)/.test-stamp
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(VENV)/bin/python tests/placed/survey.py > docs/reference/convolutions.md.new
	mv docs/reference/convolutions.md.new docs/reference/convolutions.md
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(VENV)/bin/python tests/placed/survey.py models > docs/reference/models.md.new
	mv docs/reference/models.md.new docs/reference/models.md

docs: $(VENV)/.test-stamp $(VENV)/.docs-stamp
	$(VENV)/bin/python docs/build_site.py

$(VENV)/.docs-stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) what builds the site ..."
	@$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/.train-stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV): torch and some 55 packages, one to five minutes ..."
	@$(PIP) -e ".[mpi,pyg,report]"
	@touch $@

$(VENV)/.test-stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV), with what the tests need, one to five minutes ..."
	@$(PIP) -e ".[mpi,pyg,report,parquet,acts,export,dev]"
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "domainpar needs Python 3.11 or newer, $(PYTHON) is `$(PYTHON) --version 2>&1`;" \
	       "name another one: make PYTHON=python3.12 train" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  rm -rf $(VENV); exit 2; }
