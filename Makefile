# Two commands matter: `make book` and `make test`. The rest: `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help book test check run bench serve clean distclean setup lint sound html pytest

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CHAPTER ?=
PARAMS ?=
FORCE ?=
PORT ?= 8000
BIN := .venv/bin
OK := .venv/.ok
say = @printf '\n== %s\n'

help:
	@echo "make book    install into .venv, execute what is stale, render _build/html/index.html"
	@echo "make test    install, then every check: ruff, mypy, freshness and ledger, rendered pages,"
	@echo "             unit tests, nbval over every notebook"
	@echo "make check   the same, with nbval only on notebooks that changed since they last passed"
	@echo "make run     CHAPTER=slug[/notebook] [PARAMS=paper] [JOBS=n] [FORCE=1]  execute notebooks"
	@echo "make bench   correctness gate, then benchmarks against peers, into benchmarks/results"
	@echo "make serve   the rendered book on http://127.0.0.1:$(PORT)  [PORT=8000]"
	@echo "make clean   remove _build; make distclean removes .venv as well"
	@echo ".venv/bin/proofread --help lists: status, claims, run, check, data, new"

# The marker is touched last: a failed installation is never taken for done.
$(OK): requirements.txt pyproject.toml
	@rm -f $(OK)
	@echo "== setup: installing into .venv (2 to 10 minutes; 1 to 6 GB, see the README)"
	@command -v $(PYTHON) >/dev/null || { echo "setup: FAILED: there is no $(PYTHON); install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "setup: FAILED: needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv \
	  || { rm -rf .venv; echo "setup: FAILED: no venv; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(BIN)/pip install -r requirements.txt && $(BIN)/pip install --no-deps --no-build-isolation -e . \
	  && $(BIN)/pip check \
	  || { echo "setup: FAILED: the installation did not finish ; the first error above says why"; exit 1; }
	@touch $(OK)
	@echo "setup: done"

setup: $(OK)

book: $(OK)
	$(say) "book: executing what is stale"
	@$(BIN)/proofread run --jobs $(JOBS) || { echo "book: FAILED: a notebook did not execute"; exit 1; }
	@$(MAKE) --no-print-directory html
	@printf '\nbook: done. Open file://%s/_build/html/index.html\n' "$(CURDIR)"

# Sphinx repeats a page's warnings only when it reads the page again, so a build that failed is
# thrown away: no second try may pass by silence, and no stale page may stay.
html: $(OK)
	$(say) "html: rendering (about half a minute)"
	@mkdir -p _build
	@$(BIN)/jupyter-book build --all -W -n --keep-going . >_build/book.log 2>&1 \
	  || { grep -E 'WARNING|ERROR|rror:' _build/book.log | head -40; rm -rf _build/.doctrees _build/html; \
	       echo "html: FAILED, the whole log is _build/book.log"; exit 1; }
	@echo "html: done"

lint: $(OK)
	$(say) "lint: ruff and mypy"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

sound: $(OK)
	$(say) "check: freshness, pairs, figures, ledger"
	@$(BIN)/proofread check

pytest: $(OK)
	$(say) "pytest: unit tests, rendered pages, nbval on: $(or $(NOTEBOOKS),no notebook)"
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --nbval --nbval-kernel-startup-timeout 120 \
	  --nbval-cell-timeout 600 tests $(NOTEBOOKS)

test: $(OK)
	@$(MAKE) --no-print-directory lint sound html \
	  && $(MAKE) --no-print-directory pytest NOTEBOOKS=book/chapters \
	  && $(BIN)/proofread checked && echo "test: everything passed" \
	  || { echo "test: FAILED (see above)"; exit 1; }

check: $(OK)
	@$(MAKE) --no-print-directory lint sound html \
	  && $(MAKE) --no-print-directory pytest NOTEBOOKS="$$($(BIN)/proofread unchecked | tr '\n' ' ')" \
	  && $(BIN)/proofread checked && echo "check: everything passed" \
	  || { echo "check: FAILED (see above)"; exit 1; }

run: $(OK)
	@$(BIN)/proofread run $(CHAPTER) $(if $(PARAMS),--params $(PARAMS)) --jobs $(JOBS) $(if $(FORCE),--force)

bench: $(OK)
	@for script in benchmarks/*.py; do \
	  echo "== bench: $$script"; OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done
	@echo "bench: done, results in benchmarks/results"

serve: $(OK)
	@test -f _build/html/index.html || { echo "serve: run make book first"; exit 1; }
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html $(PORT)

clean:
	@rm -rf _build .pytest_cache .mypy_cache .ruff_cache .snakemake build src/*.egg-info
	@echo "clean: done"

distclean: clean
	@rm -rf .venv
