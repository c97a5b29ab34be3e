#!/usr/bin/env bash
# Make .venv-vllm, the environment of a vLLM teacher, match its requirements file; does nothing when it does already.
# With an NVIDIA GPU that is requirements-vllm-teacher.txt, else requirements-vllm-cpu.txt.
# Usage: [REQUIREMENTS=requirements-vllm-teacher.txt] [PYTHON=python3.11] bash tools/setup_vllm_venv.sh
#
# The stamp is written last, so an interrupted or failed installation is repeated by the next call.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-vllm
if [ -n "${REQUIREMENTS:-}" ]; then
    requirements=$REQUIREMENTS
elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    requirements=requirements-vllm-teacher.txt
else
    requirements=requirements-vllm-cpu.txt
fi

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 or 3.12 found (python3 is $(python3 -V 2>&1 || true));" \
        "install one, or name it: PYTHON=/path/to/python3.11" >&2
    return 1
}

stamp=$venv/.requirements
up_to_date() { [ -x "$venv/bin/python" ] && cmp -s "$requirements" "$stamp"; }

up_to_date && exit 0
exec 9>"$venv.lock"
if ! flock -n 9; then
    echo "setup: another process is setting up $venv; waiting for it" >&2
    flock 9
fi
up_to_date && exit 0

python=$(find_python)
start=$SECONDS
echo "setup: installing $requirements into $venv with $("$python" -V) (some minutes; the log is $venv/setup.log)" >&2
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null ||
    { rm -rf "$venv" && "$python" -m venv "$venv"; }
pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$venv/setup.log" 2>&1; }
: >"$venv/setup.log"
grep -v '# no-deps *$' "$requirements" >"$venv/with-deps.txt"
grep '# no-deps *$' "$requirements" >"$venv/no-deps.txt" || true
if ! pip_install -r "$venv/with-deps.txt" || { [ -s "$venv/no-deps.txt" ] && ! pip_install --no-deps -r "$venv/no-deps.txt"; }; then
    tail -n 15 "$venv/setup.log" >&2
    echo "setup: pip failed (above); fix the cause and run the same command again" >&2
    exit 1
fi
cp "$requirements" "$stamp"
echo "setup: $venv is ready after $((SECONDS - start)) s" >&2
