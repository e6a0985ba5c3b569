# The two commands of the README. PYTHON may name any Python from 3.11 on.
PYTHON ?= python3
export OMP_NUM_THREADS = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: quickstart test lint clean

quickstart: .venv/ready
	.venv/bin/arenarl train experiments/quickstart.py

test: .venv/ready
	.venv/bin/python -m pytest

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-deps -r requirements.lock
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv build *.egg-info
