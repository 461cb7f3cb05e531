# `make train`, `make test`: each sets up .venv first. PIP_ARGS reaches pip, ARGS the training run, as ARGS=--long does.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed

.PHONY: setup train test lint docs bench curves clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dmuon needs Python >= 3.10")'
	@echo "Installing PyTorch, dmuon and its tests into $(VENV): one to a few minutes, about 3 GB with CUDA packages."
	@echo 'On a machine without a GPU: make setup PIP_ARGS="--extra-index-url URL of CPU builds", about 200 MB.'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[test,bench]'
	@echo "Done: source $(VENV)/bin/activate, then make train, make test, or torchrun --nproc-per-node 2 --no-python dmuon-check"
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

, := ,
# What the pages quote, on two idle cores; then the figures in the pages. Each record says how long it took.
MODELS = gpt2-124m gpt2-1.5b pi0 qwen2.5-7b llama-3-8b llama-3-70b
RECORD = $(VENV)/bin/python bench/$(1) --json bench/results/$(2).json
bench: $(STAMP)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt 'transformers>=5'
	$(call RECORD,step.py --rounds 9,step-modes-cpu)
	$(call RECORD,step.py --programs sweep --rounds 7,step-sweep-cpu)
	$(call RECORD,step.py --programs ablation --rounds 2,ablation-cpu)
	$(call RECORD,exchange.py,exchange-cpu)
	-$(call RECORD,exchange.py --rate 400mbit --rounds 5 --warmup 1,exchange-400mbit-cpu)
	$(call RECORD,memory.py,memory-cpu)
	$(call RECORD,memory.py --mode resident --world 2,memory-resident-cpu)
	$(call RECORD,scale.py --ranks 8$(,)1024$(,)16384 --matrices 2048,scale)
	$(call RECORD,planner_gaps.py --costs h200,planner-gaps-h200)
	$(call RECORD,simulate.py --fit,simulation-fit)
	$(call RECORD,simulate.py --products,products-published)
	$(call RECORD,simulate.py --worlds 64 128 256 512 1024 --table $(MODELS:%=examples/models/%.json),scaling-h200)
	$(call RECORD,numerics.py,numerics)
	$(call RECORD,ways.py --rounds 5,ways-cpu)
	$(VENV)/bin/python bench/figures.py --write

# Training curves of every member of the family and every format, three seeds, and the rates of two: as long again.
RATES = $(foreach rate,4e-3 8e-3 1.6e-2 3.2e-2 6.4e-2,adamuon@$(rate)) $(foreach rate,1e-2 2e-2 4e-2 8e-2 1.6e-1,hyperball@$(rate))
curves: $(STAMP)
	$(call RECORD,family.py --steps 100,family-cpu)
	$(call RECORD,family.py --steps 100 --seeds 0 --members $(subst $() ,$(,),$(RATES)),family-rates-cpu)
	$(VENV)/bin/python bench/figures.py --write

clean:
	rm -rf $(VENV) build *.egg-info runs
