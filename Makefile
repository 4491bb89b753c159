# Antiphon from a fresh clone. Needs make and Python 3.11 or newer; everything else goes into .venv in this folder.

PYTHON ?= python3
ARGS ?=
WITH ?=
MINUTES ?= 20
SEEDS ?= 10000
ABORTS ?= 10000

VENV := $(CURDIR)/.venv
ANTIPHON := "$(VENV)/bin/antiphon"
TEST := "$(VENV)/bin/python" scripts/test.py

# Where the system has no libnuma, the install puts one here for vLLM.
export LD_LIBRARY_PATH := $(VENV)/native$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo up test soak lint types unit compiled process real clean

help:  ## list the targets
	@echo 'usage: make <target> [PYTHON=python3.11] [ARGS="..."]'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

install:  ## make or update .venv from the lock files; WITH="ray tiers" adds those parts
	@$(PYTHON) scripts/install.py $(foreach part,$(WITH),--with $(part))

install-dev:  ## the same, with what the tests need
	@$(PYTHON) scripts/install.py --dev

demo: install  ## serve a small model with prefill and decode apart, ask it three questions, stop
	@$(ANTIPHON) demo $(ARGS)

up: install  ## the same, and stay up until Ctrl-C
	@$(ANTIPHON) demo --stay $(ARGS)

test: install-dev  ## everything: lint, types, unit, process and real-engine tests
	@$(TEST) $(ARGS)

lint: install-dev  ## rules of style and form
	@$(TEST) --only lint

types: install-dev  ## the type checker, strict, on src
	@$(TEST) --only types

unit: install-dev  ## tests that start no process (nine minutes)
	@$(TEST) --only unit $(ARGS)

compiled: install-dev  ## the router's tests on its compiled modules (two minutes)
	@$(TEST) --only compiled $(ARGS)

process: install-dev  ## tests with real processes and simulated engines (twenty minutes)
	@$(TEST) --only process $(ARGS)

real: install-dev  ## tests with real vLLM engines (twenty-one minutes)
	@$(TEST) --only real $(ARGS)

soak: install-dev  ## SEEDS (10000) of each simulation, ABORTS (10000) at the router, MINUTES (20) of traffic, the benches
	@$(ANTIPHON) sim cache --seeds $(SEEDS) --validate-every 4
	@$(ANTIPHON) sim cache --tiers --seeds $(SEEDS) --validate-every 4
	@$(ANTIPHON) sim peers --seeds $(SEEDS)
	@$(ANTIPHON) sim routing --seeds $(SEEDS) --validate-every 4
	@ANTIPHON_NUM_ABORTS=$(ABORTS) "$(VENV)/bin/python" -m pytest -q -s tests/process/test_abort_storm.py
	@ANTIPHON_SOAK=1 "$(VENV)/bin/python" -m pytest -q -s tests/real/test_two_networks.py
	@"$(VENV)/bin/python" scripts/soak.py --minutes $(MINUTES)
	@"$(VENV)/bin/python" scripts/flood.py
	@$(ANTIPHON) sim flood
	@$(ANTIPHON) sim fleet
	@$(ANTIPHON) bench cache
	@$(ANTIPHON) bench router
	@$(ANTIPHON) bench peers
	@"$(VENV)/bin/python" scripts/bench_tiers.py

clean:  ## remove .venv and every cache in this folder (the demo model stays in your cache folder)
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
