# make setup, make demo, make test, make check: each does all the set-up on a fresh machine.
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := .venv/.installed

.PHONY: setup demo test test-slow check wheel clean

setup: $(INSTALLED)

$(INSTALLED): requirements/torch.txt requirements/runtime.txt requirements/serving.txt requirements/torchx.txt requirements/dev.txt requirements/data.txt setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or name another with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install -q -r requirements/torch.txt
	$(PIP) install -q --no-deps -r requirements/runtime.txt -r requirements/serving.txt -r requirements/torchx.txt -r requirements/dev.txt -r requirements/data.txt
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m recipes.demo --output build/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -q

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "slow and not gpu"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

wheel: $(INSTALLED)
	$(BIN)/python -m build --wheel --no-isolation --outdir build/dist

clean:
	rm -rf build .venv *.egg-info
