# Everything a newcomer types. Each target builds what it needs; nothing outside .venv*, build and demo-output is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROGRAMS := $(VENV)/.programs
ROUNDS := 1
PEERS := .venv-peers
PEERS_PREPARE := .venv-peers-prepare
PEERS_FRAPPE := .venv-peers-frappe
PEERS_RECBOLE := .venv-peers-recbole
PEERS_SERVING := .venv-peers-serving
# The order of the files is kept: by their number of tests, the longest ones would come last and one core would wait.
# Two workers left the two cores idle for 30 % of the time (servers that stop, ranks that meet, Spark that starts);
# three took 4 % less (3m45 and 3m55, two Zen 5 cores).
IN_ORDER := --dist loadfile --no-loadscope-reorder
SHARED := -n 3 $(IN_ORDER)
# Beside four processes that compute all the time, three workers get a third of the cores: their tests often wait.
LOADED := -n 5 $(IN_ORDER)
# Where this variable forbids compiled modules, each worker rewrites the assertions of all tests (8 s of CPU time) and each
# process that a test starts compiles the package (0.3 s).
test test-loaded test-all: export PYTHONDONTWRITEBYTECODE :=
CORE := $(shell find CMakeLists.txt csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name CMakeLists.txt)

.PHONY: demo test test-loaded test-all lint docs bench peers peers-prepare peers-frappe peers-recbole peers-serving venv wheel clean help

help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 16

demo: $(STAMP)   ## the whole job on real and on Criteo-format data: train, evaluate, report, serve
	$(BIN)/python examples/demo.py

test: $(PROGRAMS) ## the test suite (6 to 12 minutes on 2 cores)
	$(BIN)/python -m pytest $(SHARED) -m "not slow" --run-seconds 1800

test-loaded: $(PROGRAMS) ## the test suite twice at once on a busy machine; ROUNDS=3 repeats it
	$(BIN)/python -m tests.loaded --rounds $(ROUNDS) -- $(LOADED) -m "not slow" -o faulthandler_timeout=900 --run-seconds 3600

test-all: $(PROGRAMS)-long ## the test suite with the long tests
	$(BIN)/python -m pytest $(SHARED) -o faulthandler_timeout=1800 --hypothesis-profile thorough --run-seconds 10800

lint: $(STAMP)   ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)   ## the documentation as a site in build/site
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet "mkdocs-material" "mkdocstrings[python]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

bench: $(STAMP)  ## every measurement of the README; appends rows to benchmarks/results
	$(BIN)/pip install --quiet -c constraints.txt polars duckdb
	$(BIN)/python benchmarks/all.py

peers: $(PEERS)/.installed  ## .venv-peers with the systems that benchmarks/peers.py and retrieval.py compare with

# FBGEMM's libraries load with the one torch they were built against. TorchRec comes without its dependencies, since it
# asks for FBGEMM's CUDA build by name.
$(PEERS)/.installed: constraints-peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet -c constraints-peers.txt torch fbgemm-gpu-cpu tensorflow-cpu polars faiss-cpu \
		tensordict torchmetrics tqdm pyre-extensions
	$(PEERS)/bin/pip install --quiet --no-deps -c constraints-peers.txt torchrec
	touch $@

peers-prepare: $(PEERS_PREPARE)/.installed ## .venv-peers-prepare with those of benchmarks/prepare_peers.py

$(PEERS_PREPARE)/.installed: constraints-peers-prepare.txt
	test -x $(PEERS_PREPARE)/bin/python || $(PYTHON) -m venv $(PEERS_PREPARE)
	$(PEERS_PREPARE)/bin/pip install --quiet --no-deps -r constraints-peers-prepare.txt
	touch $@

peers-frappe: $(PEERS_FRAPPE)/.installed ## .venv-peers-frappe with those of benchmarks/frappe_peers.py

$(PEERS_FRAPPE)/.installed: constraints-peers-frappe.txt
	test -x $(PEERS_FRAPPE)/bin/python || $(PYTHON) -m venv $(PEERS_FRAPPE)
	$(PEERS_FRAPPE)/bin/pip install --quiet -c constraints-peers-frappe.txt torch fuxictr deepctr-torch
	touch $@

peers-recbole: $(PEERS_RECBOLE)/.installed  ## .venv-peers-recbole with that of benchmarks/accuracy_recbole.py

$(PEERS_RECBOLE)/.installed: constraints-peers-recbole.txt
	test -x $(PEERS_RECBOLE)/bin/python || $(PYTHON) -m venv $(PEERS_RECBOLE)
	$(PEERS_RECBOLE)/bin/pip install --quiet -c constraints-peers-recbole.txt torch recbole
	touch $@

peers-serving: $(PEERS_SERVING)/.installed  ## .venv-peers-serving with those of benchmarks/serving.py --peers

# terarec and what it needs come from $(VENV), behind the packages of the peers.
$(PEERS_SERVING)/.installed: constraints-peers-serving.txt $(STAMP)
	test -x $(PEERS_SERVING)/bin/python || $(BIN)/python -m venv $(PEERS_SERVING)
	$(PEERS_SERVING)/bin/pip install --quiet -c constraints-peers-serving.txt mlserver litserve
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(PEERS_SERVING)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/terarec.pth
	touch $@

wheel: $(STAMP)  ## a wheel in dist/
	$(BIN)/pip wheel --no-deps -w dist .

venv: $(STAMP)   ## .venv with terarec and what its tests need

# Python files are used in place; the compiled core is rebuilt when its sources change. The first one has the version.
$(STAMP): pyproject.toml constraints.txt src/terarec/__init__.py $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet -e ".[dev]"
	touch $@

# Programs that tests start, as Debian's packages where the user is root; what is missing then is printed.
$(PROGRAMS): $(STAMP) tests/programs.py
	$(BIN)/python -m tests.programs
	touch $@

# Of the wheel, a Triton and its Python back end are used, and none of what PyTriton itself needs.
$(PROGRAMS)-long: $(PROGRAMS)
	$(BIN)/pip install --quiet --no-deps -c constraints.txt nvidia-pytriton
	$(BIN)/python -m tests.programs --long
	touch $@

clean:           ## remove what was built and written here
	rm -rf $(VENV) $(PEERS) $(PEERS_PREPARE) $(PEERS_FRAPPE) $(PEERS_SERVING) build dist demo-output
	find src -name '*.so' -delete
