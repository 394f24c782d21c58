.PHONY: install test fast lowest audit lint docs links bench gpu faults digits

install:  ## with everything that development needs
	pip install -e ".[test,dev]" && pre-commit install
test:  ## all tests
	pytest
fast:  ## without the slow ones
	pytest -m "not slow"
lowest:  ## the fast ones on the lowest versions that pyproject.toml allows, in an environment of their own; needs a network
	.ci/lowest
audit:  ## are vulnerabilities of the installed versions known? needs PyPI's lists of them
	pip freeze --exclude-editable | pip-audit --strict --no-deps --disable-pip -r /dev/stdin
lint:  ## what pre-commit checks
	ruff format . && ruff check --fix .
docs:  ## the documentation as a site, docs/_build/html/index.html; runs its notebooks
	python docs/build.py
links:  ## whether the links to other sites lead somewhere; needs a network
	python -m sphinx -b linkcheck -D nb_execution_mode=off docs docs/_build/links
bench:  ## speed beside plain references: a table, and runs/bench.json
	python -m benchmarks
gpu:  ## on a GPU: waits of the host, a run killed and resumed, doctor, speed and memory by size; 15 minutes
	python -m benchmarks.gpu
faults:  ## kills, faults and hostile files by the hundred, and their tables: half an hour on 2 cores
	pytest --exhaustive -n auto tests/faults tests/fuzz tests/test_machines.py tests/runtime tests/files \
		tests/evaluation tests/tasks/parallel/test_sharding.py tests/test_benchmarks.py
digits:  ## train the default and put it where sample.py finds it
	python train.py fit
	uvit-decay export "$$(ls -td runs/digits/version_* | head -1)/checkpoints/last.ckpt" checkpoints/digits.safetensors
