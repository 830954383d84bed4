# Every target makes the virtual environment it needs. PYTHON names another interpreter (3.10 or newer), and VENV an
# environment that is there and is used as it is, with this package and its extra `dev`.
PYTHON ?= python3
VENV ?= .venv
INSTALLED := $(if $(filter file,$(origin VENV)),.venv/installed)
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
LOWEST := .venv-lowest/bin
COMFY := .venv-comfyui/bin

.PHONY: help quickstart real showcase test slow manual golden mutants lowest comfyui fuzz docs lint format \
	chromium wandb clean

help:  ## what can be made (this list)
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / {printf "%-11s %s\n", $$1, $$2}' Makefile

quickstart: $(INSTALLED)  ## the whole chain in a small world; what has been done is not done again
	$(BIN)/debias-diffusion quickstart

real: $(INSTALLED)  ## an SDXL checkpoint, BASE, on this machine: what must hold, time and memory, eight prompts in four ways
	$(BIN)/debias-diffusion check --base "$(BASE)"

showcase: $(INSTALLED)  ## 100 prompts in four ways by an SDXL checkpoint, BASE, and a page to mark facts on
	$(BIN)/python -m research showcase --base "$(BASE)" $(if $(JUDGE),--judge "$(JUDGE)" --server "$(SERVER)")

# Files of tests are handed out whole, in the order of tests/conftest.py, to a process for each core.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --no-loadscope-reorder --durations=10

test: $(INSTALLED)  ## the fast tests
	$(PYTEST) --dist loadfile tests

slow: $(INSTALLED)  ## real processes, servers, a browser, a wheel, true sizes, and a few seconds of each search for faults
	$(PYTEST) --dist loadfile tests/slow tests/fuzz

manual: $(INSTALLED)  ## lists the tests that need what few machines have: a GPU, a checkout of ComfyUI, wandb
	$(BIN)/python -m pytest --collect-only --quiet -m needs tests tests/slow

golden: $(INSTALLED)  ## are results still those of an earlier commit, to the last bit? NAMES picks cases
	$(BIN)/python tests/golden/compare.py $(NAMES)

mutants: $(INSTALLED)  ## do the tests notice the faults of tests/mutants/faults.yaml, or LIMIT changes to FILE?
	$(BIN)/python tests/mutants/$(if $(FILE),mutate.py "$(FILE)" --tests "$(TESTS)" $(if $(LIMIT),--limit $(LIMIT)),run.py $(NAMES))

lowest: .venv-lowest/installed  ## pipelines, loading and export with the oldest diffusers and transformers that may be installed
	$(LOWEST)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile \
		tests/test_long_prompt.py tests/test_sharpening.py tests/test_modular.py tests/test_wrapped_pipelines.py \
		tests/test_interchange.py tests/slow/test_light_install.py

comfyui: .venv-comfyui/installed  ## the node in ComfyUI's own text encoders, and in its server: COMFYUI=FOLDER
	COMFYUI="$(abspath $(COMFYUI))" $(COMFY)/python -m pytest --durations=10 tests/test_comfyui.py tests/slow/test_comfyui.py

# Searches for faults with new examples each time; SECONDS for each of its searches, an hour in all.
SECONDS ?= 200
fuzz: $(INSTALLED)  ## damaged data, models and folders, kills, and rude clients, for an hour or as long as you like
	FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest -s tests/fuzz

docs: $(INSTALLED:%=%-docs)  ## the documentation site in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)  ## ruff on style and form, import-linter on layers, ty on the types of the public API
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed
	cp -R debias_diffusion research pyproject.toml build/typed/
	cp -R pipelines eval app build/typed/debias_diffusion/
	cd build/typed && "$(abspath $(BIN))/lint-imports" --no-cache --no-logo
	$(BIN)/ty check --project build/typed --python $(VENV)

format: $(INSTALLED)  ## rewrite the code in the form that lint asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chromium:  ## Debian's browser, in which slow tests open pages
	command -v chromium >/dev/null || (timeout 120 apt-get update -qq && \
		timeout 600 apt-get install -y -qq --no-install-recommends chromium) >/dev/null

wandb: $(INSTALLED)  ## Weights & Biases, whose test is skipped without it
	$(BIN)/python -m pip install --quiet wandb

.venv/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

# The two environments below hold what differs: the rest, torch above all, is read from VENV.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
READ_VENV = echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > "$$($(@D)/bin/python $(PURELIB))/newer.pth"

.venv-lowest/installed: $(INSTALLED) .ci/lowest.txt
	$(BIN)/python -m venv --clear .venv-lowest
	$(LOWEST)/python -m pip install --quiet --no-deps --requirement .ci/lowest.txt
	$(READ_VENV)
	touch $@

.venv-comfyui/installed: $(INSTALLED) $(or $(COMFYUI),COMFYUI=FOLDER)/requirements.txt
	$(BIN)/python -m venv --clear .venv-comfyui
	$(READ_VENV)
	grep -v workflow-templates "$(COMFYUI)/requirements.txt" > .venv-comfyui/requirements.txt  # all but large images
	$(COMFY)/python -m pip install --quiet --requirement .venv-comfyui/requirements.txt
	touch $@

clean:  ## removes environments and what was built, not runs/: trained encoders lie there
	rm -rf .venv .venv-lowest .venv-comfyui build dist *.egg-info
