# make demo | test | gallery | mutants | fuzz | tools | allocator | cuda | published | check | docs | schemas | format.
# Each makes .venv first where it is missing or out of date.
# PIP_ARGS goes to pip, for example the index of torch's CPU builds. Of the 15,000 files that it installs a tenth are
# imported: pip need not compile all, and a first plan leaves the byte code of these. Where Python is told to write none,
# every call would compile them again, which takes half as long as an answer.
PYTHON ?= python3.11
PIP_ARGS ?=
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test gallery mutants fuzz tools allocator cuda published check docs schemas format
.DELETE_ON_ERROR:

$(VENV)/.installed: pyproject.toml constraints.txt hatch_build.py src/pipefit/simulator/clock.c
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(RUN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		$(PIP_ARGS) 'torch==2.13.0' -e '.[dev]'
	PYTHONDONTWRITEBYTECODE= $(RUN)/python -c 'import pipefit.runtime.launch.worker'
	PYTHONDONTWRITEBYTECODE= $(RUN)/pipefit plan hf:gpt2 --set n_layer=1 --cluster 4x-titan-rtx --batch-size 4 > /dev/null
	touch $@

demo: $(VENV)/.installed
	$(RUN)/pipefit demo

# Tests leave byte code too: they start hundreds of processes, each of which would compile its modules again.
test: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= $(RUN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal --durations 20 --durations-min 20

gallery: $(VENV)/.installed
	$(RUN)/python -m pytest -m gallery

# Small mistakes in a module, each made in a clone, and whether the tests notice them: what survives is listed.
# make mutants MODULE=src/pipefit/memory/forward_backward.py TESTS=tests/cost; seconds a mistake. cosmic-ray stays out of .venv.
MODULE := src/pipefit/lowering
TESTS := tests/schedule tests/cost tests/simulator
mutants: $(VENV)/.installed
	rm -rf build/mutants && mkdir -p build/mutants
	git clone --quiet . build/mutants/tree
	$(PYTHON) -m venv build/mutants/venv
	build/mutants/venv/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray
	printf '[cosmic-ray]\nmodule-path = "%s"\ntimeout = 180.0\ntest-command = "%s"\n[cosmic-ray.distributor]\nname = "local"\n' \
		'$(MODULE)' '$(CURDIR)/$(RUN)/python -m pytest -q -x -p no:cacheprovider $(TESTS)' > build/mutants/tree/mutants.toml
	cd build/mutants/tree && export PYTHONPATH=$$PWD/src && ../venv/bin/cosmic-ray init mutants.toml ../session.sqlite \
		&& ../venv/bin/cosmic-ray exec mutants.toml ../session.sqlite
	build/mutants/venv/bin/cr-report --surviving-only --show-diff build/mutants/session.sqlite

fuzz: $(VENV)/.installed
	PYTHONPATH=tests $(RUN)/python tests/support/fuzz.py 10000 2000

# Other tools read what `pipefit export` writes, in their last two versions, which docs/export.md names. They stay out of
# .venv, whose trainers are of one of the two. Releases of torchtitan before 0.3 have other names.
TOOLS := megatron-core==0.16.1 torchtitan==0.3.0 nemo-automodel==0.7.0 deepspeed==0.19.8 kubernetes==37.0.2 \
	transformers==5.24.0
TOOLS_BEFORE := megatron-core==0.15.3 nemo-automodel==0.6.0 deepspeed==0.18.9 kubernetes==36.0.2 accelerate==1.14.0 \
	lightning==2.5.6 pytorch-lightning==2.5.6
TOOLS_NEED := tyro einops spmd_types==0.2.3 torchdata torch_checkpointing docstring-parser shtab typeguard hjson msgpack \
	py-cpuinfo psutil ninja python-dateutil durationpy websocket-client requests-oauthlib oauthlib six certifi urllib3 \
	requests idna charset-normalizer datasets==4.7.0 pandas pyarrow dill multiprocess xxhash pytz tzdata aiohttp aiosignal \
	attrs frozenlist multidict propcache yarl aiohappyeyeballs httpx httpcore anyio h11 sniffio wandb triton
tools: $(VENV)/.installed
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --upgrade \
		--target build/tools $(TOOLS) $(TOOLS_NEED)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --upgrade \
		--target build/tools_before $(TOOLS_BEFORE)
	PYTHONPATH=$(CURDIR)/build/tools $(RUN)/python -m pytest -m "gallery or not gallery" tests/export tests/zoo/test_configurations.py
	PYTHONPATH=$(CURDIR)/build/tools_before:$(CURDIR)/build/tools $(RUN)/python -m pytest tests/export/test_read_back.py \
		tests/export/test_trainers.py

# The simulated allocator beside torch's own, of torch's CUDA build: half a gigabyte for a library of 600 kB.
allocator: $(VENV)/.installed
	$(RUN)/python tests/allocator/own/build.py build/allocator
	$(RUN)/python -m pytest tests/allocator/test_torchs_own.py

# The tests that need a GPU, on torch's CUDA build over libraries without one: 2 GB, and half an hour on two cores.
cuda: $(VENV)/.installed
	$(RUN)/python tests/emulated/build.py build/cuda
	build/cuda/bin/python -m pytest -m gpu tests/emulated tests/fake tests/runtime

# Predictions beside published measurements of real training: most of an hour of a core, and longer for the rows of
# bigscience, whose pipelines have 48 to 384 GPUs. timm builds the image classifiers, in the release of its rows; what it
# requires is installed already, but for torchvision, of which only its data sets have a use.
published: $(VENV)/.installed
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps timm==0.6.7
	PYTHONPATH=src OMP_NUM_THREADS=1 $(RUN)/python benchmarks/published --json benchmarks/results/published.json \
		--page docs/against_reality.md

check: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

docs: $(VENV)/.installed
	PIP_CONSTRAINT=constraints.txt $(RUN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --strict --quiet

schemas: $(VENV)/.installed
	$(RUN)/python -m pipefit.schema.json_io docs/schemas

format: $(VENV)/.installed
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
