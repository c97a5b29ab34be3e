# make test    sets up .venv and runs the tests
# make test-vllm   sets up .venv-vllm and runs the tests of the vLLM backend
# make check   sets up .venv and runs ruff and mypy
# make clean   removes what runs and tests left, not .venv

PYTHON_FILES := opd recipe tests bench
.PHONY: test test-vllm check clean setup

setup:
	@bash tools/setup_venv.sh

test: setup
	.venv/bin/python -m pytest tests -n 2 --dist loadfile $(PYTEST_ARGS)

test-vllm:
	@bash tools/setup_vllm_venv.sh
	.venv-vllm/bin/python -m pytest tests/test_vllm_backend.py -m vllm $(PYTEST_ARGS)

check: setup
	.venv/bin/ruff check $(PYTHON_FILES)
	.venv/bin/ruff format --check $(PYTHON_FILES)
	.venv/bin/mypy opd

clean:
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache
