# make demo and make test install what they need (apt as root, pip into .venv); each can be run again at any time.
.DEFAULT_GOAL := help
.PHONY: help setup setup-lab demo test test-engine test-fast lint format bench bench-peers lock wheel clean

export PATH := $(CURDIR)/.venv/bin:$(PATH)
PYTEST_ARGS ?=
SWEEP ?= quick

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup:
	@scripts/setup.sh venv

setup-lab:
	@scripts/setup.sh lab

demo: setup-lab ## lab up, provision, a reboot, recover, a small sweep, the report
	@scripts/demo.sh $(SWEEP)

test: setup-lab ## every test, the nested lab included
	python scripts/test.py $(PYTEST_ARGS)

test-engine: setup-lab ## SGLang's own wheel on a CPU, served in the lab's guest: minutes, and 3 GB of disk
	pytest tests/engine $(PYTEST_ARGS)

test-fast: setup ## the tests that need no lab
	pytest -m 'not lab and not engine' $(PYTEST_ARGS)

lint: setup ## ruff, mypy, yamllint, ansible-lint
	ruff check .
	ruff format --check .
	mypy
	yamllint -s .
	ansible-lint --offline -q

format: setup ## ruff format and its safe fixes
	ruff format .
	ruff check --fix .

bench: setup ## the performance claims, as ratios measured in one run
	python bench/run.py

bench-peers: setup ## other load generators beside specrig's client: installs them (10 GB, below .cache), compares; 8 minutes
	python bench/peers.py --install

lock: setup ## make the hashed locks again from pyproject.toml
	scripts/lock.sh

wheel: setup ## dist/specrig-*.whl
	python -c 'from specrig.ops.bundle import build_wheel; print(build_wheel("dist"))'

clean: ## take the lab down, remove .venv and everything that was built
	@if [ -x .venv/bin/specrig ]; then .venv/bin/specrig lab down; fi
	rm -rf .venv .cache dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .ansible
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
