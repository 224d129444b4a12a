# Each target makes what it needs: a virtual environment in .venv, and the packages in it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
MODEL ?= examples/kjv-moe

.PHONY: help decode serve test test-slow test-all check docs format train bench bench-gpu gpu-check measure pictures clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.serve: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable '.[serve]'
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

decode: $(VENV)/.base  ## decode the bundled model; MODEL=DIR_OR_HUB_ID for another
	$(BIN)/python examples/decode.py --model $(MODEL) --max-new-tokens 60 \
		--temperature 0.7 --top-p 0.9 --seed 1 \
		--prompt "In the beginning God" --prompt "And Jesus said unto them," \
		--prompt "Blessed is the man that" --prompt "And it came to pass in those days, that"

serve: $(VENV)/.serve  ## serve the bundled model on port 8000; MODEL=DIR_OR_HUB_ID for another
	$(BIN)/tbo-jax serve $(MODEL)

# Two workers, a file to each: XLA compiles mostly on one core, and files share what they compile.
test: $(VENV)/.test  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.test $(VENV)/.docs  ## run the slow tests, those of the documentation among them
	$(BIN)/python -m pytest -m "slow and not real_model" -n 2 --dist loadfile

test-all: $(VENV)/.test $(VENV)/.docs  ## also slow tests and those on real models (TBO_REAL_MODEL, TBO_REAL_MODEL_MOE)
	$(BIN)/python -m pytest -m "real_model or not real_model"

check: $(VENV)/.dev  ## linter, formatter, type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs  ## build the documentation into build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train: $(VENV)/.base  ## train the bundled model anew (under an hour on 2 cores), into build/kjv-moe
	$(BIN)/python examples/train.py --out build/kjv-moe --steps 1800 --batch 8 \
		--learning-rate 2.5e-3 --save-every 150

bench: $(VENV)/.base  ## time decoding; MODEL=DIR for a checkpoint
	$(BIN)/python benchmarks/decode.py --model $(MODEL)

bench-gpu: $(VENV)/.base  ## time kernels and decode step on one NVIDIA GPU (ten minutes at most)
	$(BIN)/python -m pip install --quiet --editable '.[cuda12]'
	$(BIN)/python benchmarks/gpu.py --json build/gpu.json

gpu-check: $(VENV)/.base  ## check all kernels on one NVIDIA GPU and time them, in short; goes on where it ended
	$(BIN)/python -m pip install --quiet --editable '.[cuda12]'
	$(BIN)/python benchmarks/gpu.py --quick --resume --json build/gpu-check.json

measure: $(VENV)/.base  ## measure what overlap gains on all NVIDIA GPUs of this machine (two or more)
	$(BIN)/python -m pip install --quiet --editable '.[cuda12]'
	mkdir -p build
	$(BIN)/python examples/measure_overlap.py --json build/overlap.json --profile build/profile

# Compiles for GPUs that need not be there; the packages take 6 GB.
pictures: $(VENV)/.base  ## draw the pictures in docs/ anew
	$(BIN)/python -m pip install --quiet --editable '.[cuda12,plot]'
	$(BIN)/python -m tbo_jax.schedule --phase prefill --tokens 8192 --plot docs/schedule-prefill.svg
	$(BIN)/python -m tbo_jax.schedule --phase decode --tokens 256 --link-gbps 45 \
		--plot docs/schedule-decode.svg

clean:  ## remove what the targets made
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
