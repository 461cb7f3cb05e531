# `make train`, `make test`: each sets up .venv first. PIP_ARGS reaches pip, ARGS the training run.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed

.PHONY: setup train test lint docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dmuon needs Python >= 3.10")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[test,bench]'
	touch $@

train: $(STAMP)
	$(VENV)/bin/python bench/train.py $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python tests/run.py -m "not slow" $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

docs: $(STAMP)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build *.egg-info runs
