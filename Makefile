# The two commands of the README: `make testnet` and `make test`. They need python3 (3.11 to
# 3.13) and make; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: testnet test test-all lint clean help

help:
	@echo "make testnet   run a swarm of 4 peers on this machine, to its report"
	@echo "make test      the fast tests and those with real p2pd daemons"
	@echo "make test-all  everything, the slow tiers too"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make clean     remove the virtual environment"

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "python3 is %d.%d, but 3.11 to 3.13 is needed: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

testnet: $(INSTALLED)
	$(BIN)/gasloc testnet --compare-solo --report testnet-report.json

test: SLOW := and not slow
test test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 tests/core -m 'not p2p $(SLOW)' --cov=gasloc_p2p.core --cov-branch --cov-fail-under=100
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore=tests/core -m 'not p2p $(SLOW)'
	$(BIN)/python -m pytest --ignore=tests/core -m 'p2p $(SLOW)'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV)
