# The two commands of the README. PYTHON may name any Python from 3.11 on.
PYTHON ?= python3
# ARENARL_SERVERS may name a folder, kept between builds, for the public tool servers that the tests talk to.
SERVERS := $(or $(ARENARL_SERVERS),.servers)
export OMP_NUM_THREADS = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: quickstart test servers lint clean

quickstart: .venv/ready
	.venv/bin/arenarl train experiments/quickstart.py

test: .venv/ready $(SERVERS)/ready
	.venv/bin/python -m pytest

servers: $(SERVERS)/ready

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-deps -r requirements.lock
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Needs npm of Node.js 20 or later. A server that is there already is left alone.
$(SERVERS)/ready: .venv/ready arenarl/mcp/catalogue.py $(wildcard arenarl/mcp/locks/*)
	mkdir -p $(SERVERS)
	.venv/bin/python -m arenarl.mcp.install
	touch $@

clean:
	rm -rf .venv .servers build *.egg-info
