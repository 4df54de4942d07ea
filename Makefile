# Everything starts from a bare python3: uv lives in .uv, the project in .venv.
PYTHON ?= python3
export UV_PROJECT_ENVIRONMENT := .venv
export UV_PYTHON_DOWNLOADS := never
# Where this is set, each of the suite's some hundred processes would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
RUN := .venv/bin

.PHONY: setup test test-clients test-zoo test-search test-faults test-kills test-recipes lint demo pictures docs test-docs clean

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@test -x .uv/bin/uv || { $(PYTHON) -m venv .uv && .uv/bin/pip install --quiet --disable-pip-version-check uv; }
	.uv/bin/uv sync --quiet --python $(PYTHON) --all-extras --group dev
	@touch .venv/.ready

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

# Two processes of two OpenMP threads each on two cores: who waits for another thread must not keep a core busy.
test: lint
	OMP_WAIT_POLICY=passive $(RUN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not slow and not quiet"
	$(RUN)/python -m pytest -m "quiet and not gpu and not slow"

# All jobs with a known cause, one by one, alone on the machine. About twelve minutes.
test-zoo: setup
	$(RUN)/python -m pytest -p no:xdist tests/test_zoo.py tests/recorder

# Small jobs of 18 training libraries, which are installed for it into .venv-clients; some are tuned. About twenty minutes.
CLIENTS := torchdata fastai ultralytics lightning transformers accelerate skorch torch_geometric webdataset litdata \
	monai timm sentence-transformers keras stable-baselines3 datasets trl "ray[train,data]"
test-clients: setup
	@test -x .venv-clients/bin/python || .uv/bin/uv venv --quiet --python $(PYTHON) .venv-clients
	.uv/bin/uv pip install --quiet --python .venv-clients/bin/python --editable . pytest pytest-timeout $(CLIENTS)
	.venv-clients/bin/python -m pytest -p no:xdist tests/clients

# Every property, on examples that no run has had before. About five minutes.
test-search: setup
	HYPOTHESIS_PROFILE=search $(RUN)/python -m pytest -n 2 -m "hypothesis and not gpu"

# The longer suite: a hundred kills in each of eight configurations, ten thousand damaged checkpoints, ranks, studies. About an hour.
test-faults: setup
	$(RUN)/python -m pytest -p no:xdist -m "slow and not recipes and not kills" tests/faults tests/train tests/feed tests/tuning tests/cli tests/recipes tests/test_benches.py tests/test_examples.py

# A thousand kills over all recipes and cache fills. About an hour.
test-kills: setup
	$(RUN)/python -m pytest -p no:xdist -s -m kills tests/faults

# Each recipe trained until it has learnt, and every command line of the guides. Alone on two cores: about half an hour.
test-recipes: setup
	$(RUN)/python -m pytest -p no:xdist -m recipes tests/recipes

# A starved job explained, then tuned while it trains. Less than three minutes.
demo: setup
	$(RUN)/fulltilt demo

# The pictures of the documents, of the demo's script or of the run in FOLDER. Needs Chromium and its driver.
pictures: setup
	PYTHONPATH=. $(RUN)/python docs/pictures/make_pictures.py $(FOLDER)

# The site, strictly: a link that leads nowhere fails. Into site/.
docs: setup
	.uv/bin/uv sync --quiet --inexact --python $(PYTHON) --all-extras --group dev --group docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

# The script of each finding, the example notebooks, wheel and sdist in clean environments. About fifteen minutes.
test-docs: docs
	$(RUN)/python -m pytest -p no:xdist -m "slow and not gpu" tests/test_docs.py tests/integrations/test_notebook.py tests/test_packaging.py

clean:
	rm -rf .uv .venv .venv-clients .mypy_cache .ruff_cache .pytest_cache
