#!/usr/bin/env bash
# Make a virtual environment match a requirements file; does nothing when it does already.
# Usage: [VENV=.venv] [REQUIREMENTS=requirements.txt] [PYTHON=python3.11] bash tools/setup_venv.sh
#
# Lines that end in `# no-deps` are installed last, without what they ask for. The stamp is written after everything
# else, so an interrupted or failed installation is repeated by the next call.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
requirements=${REQUIREMENTS:-requirements.txt}
pythons=${PYTHONS:-3.10 3.11 3.12}  # versions that all of the requirements can be installed with

find_python() {
    local candidate version
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11 python3.10; do
        [ -n "$candidate" ] || continue
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case " $pythons " in *" $version "*) command -v "$candidate"; return ;; esac
    done
    echo "setup: none of Python ${pythons// /, } was found (python3 is $(python3 -V 2>&1 || true));" \
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
pip_install() {
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$venv/setup.log" 2>&1; then
        tail -n 15 "$venv/setup.log" >&2
        echo "setup: pip failed (above); fix the cause and run the same command again" >&2
        exit 1
    fi
}
: >"$venv/setup.log"
grep -v '# no-deps *$' "$requirements" >"$venv/with-deps.txt"
pip_install -r "$venv/with-deps.txt"
if grep '# no-deps *$' "$requirements" >"$venv/no-deps.txt"; then pip_install --no-deps -r "$venv/no-deps.txt"; fi
cp "$requirements" "$stamp"
echo "setup: $venv is ready after $((SECONDS - start)) s" >&2
