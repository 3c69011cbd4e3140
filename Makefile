# Everything a clone can do. The work is in scripts/; each target gets ready what it needs and is quick the second time.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick check bench secrets fuzz mutate soak compare compat wheel bundle clean

help: ## Show this
	@echo "Glovebox: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

setup: ## Install what is needed, build the sandboxes' Python; then use .venv/bin/glovebox
	@scripts/bootstrap demo
	@.venv/bin/glovebox setup
	@.venv/bin/glovebox doctor
	@printf '\nNext: .venv/bin/glovebox client-config --workspace PROJECT   prints what to paste into your client\n'

demo: ## Watch an MCP client analyse a CSV file in a sandbox, be refused twice, be asked about and be stopped
	@scripts/bootstrap demo
	@.venv/bin/python scripts/demo.py

test: ## Run every test this machine can run (PYTEST='-k word' runs some)
	@scripts/bootstrap test
	@scripts/test $(PYTEST)

test-quick: ## Run what shows most, soonest: units, properties, rules of this repository (PYTEST='-x')
	@scripts/bootstrap demo
	@.venv/bin/glovebox setup
	@DRAWS_PART=5 .venv/bin/python -m pytest --driver bubblewrap -m "not long" -n 3 --dist worksteal tests/unit tests/property \
		tests/repo $(PYTEST)

check: ## Lint, formatting, types, and the rules of this repository
	@scripts/bootstrap check
	@scripts/check

bench: ## Measure every promise about time and memory (BENCH='--quick'), or against another revision (AGAINST=main)
	@scripts/bootstrap demo
	@.venv/bin/glovebox setup
	@.venv/bin/python -m tests.perf.bench $(if $(AGAINST),--against $(AGAINST)) $(BENCH)

secrets: ## Measure how many documented forms of keys are found, and what is wrong in ordinary text
	@scripts/bootstrap check
	@.venv/bin/python -m tests.fixtures.secret_formats

fuzz: ## Search for inputs that break a reader (TARGET=wire, SECONDS=600; all targets, one after another)
	@scripts/bootstrap check
	@SECONDS_EACH=$(or $(SECONDS),600) scripts/fuzz $(TARGET)

mutate: ## Count which wrong versions of a guard its tests notice (GUARD=stops)
	@scripts/bootstrap check
	@.venv/bin/python -m tests.tools.mutate $(GUARD)

soak: ## Disturb many calls and look for what is left, as root (CALLS=1000 DRIVER=bubblewrap START=cold)
	@scripts/bootstrap demo
	@.venv/bin/glovebox setup
	@.venv/bin/python -m tests.soak.soak --calls $(or $(CALLS),1000) --driver $(or $(DRIVER),bubblewrap) \
		--start $(or $(START),cold)
	@.venv/bin/python -m tests.soak.kills --calls $(or $(CALLS),1000) --driver $(or $(DRIVER),bubblewrap)
	@.venv/bin/python -m tests.soak.stops --stops 100 --driver $(or $(DRIVER),bubblewrap)
	@PROCESS_1_CASES=2000000 .venv/bin/python -m pytest -q --timeout 1800 tests/unit/test_process_1.py
	@.venv/bin/python -m pytest -q --kills 200 --timeout 1800 -k kill \
		tests/unit/test_budget_kills.py tests/unit/test_promotions.py tests/unit/test_promotion_patches.py tests/escape/test_lifecycle.py

compare: ## Try the attacks on other systems too, as root, into docs/internals/comparison*.csv (COMPARE='--system docker-run')
	@scripts/bootstrap test
	@.venv/bin/glovebox setup
	@.venv/bin/python -m tests.comparison.compare $(COMPARE)

compat: ## Run CPython's own tests in a sandbox and on the host, into docs/internals/compat.csv (COMPAT='test_json')
	@scripts/bootstrap test
	@.venv/bin/glovebox setup
	@.venv/bin/python -m tests.compat.compat $(COMPAT)

wheel: ## Pack dist/*.whl with process 1 in C for x86-64 and ARM64, the same bytes on every machine (ziglang builds it)
	@scripts/bootstrap check
	@scripts/wheel

bundle: ## Pack dist/*.mcpb, which clients install by opening it (needs npm)
	@scripts/bootstrap check
	@.venv/bin/python scripts/bundle.py

clean: ## Remove .venv, caches and the demo's output (not the sandboxes' Python in your data directory)
	rm -rf .venv .venv-fuzz .venv-wheel .fuzz .venv-mutate .mutate .compare .compat .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-output tests/.node build dist
	rm -f sandboxes/_glovebox_guest/process_1/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
