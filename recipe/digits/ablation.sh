#!/usr/bin/env bash
# What the KL to the teacher is worth: the same student, seed and steps with several coefficients, compared.
#
#   bash recipe/digits/ablation.sh                  six runs of some minutes each, then a table and a plot
#   STEPS=20 OUT=/tmp/try bash recipe/digits/ablation.sh
#
# Finished runs in OUT are kept: called again after an interruption, it goes on. The other knobs (SEED, TEACHER_PORT)
# and what follows the script's name are run_opd.sh's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-runs/ablation}  # one folder for each run, comparison.md, comparison.png
unset RUN_DIR TEACHER STUDENT KL_TYPE

runs=()
train() {  # name of the run, coefficient, what goes to Hydra
    local run=$OUT/$1 coef=$2; shift 2
    runs+=("$run")
    [ ! -e "$run/result.json" ] || { echo "ablation: $run is finished already" >&2; return; }
    echo "ablation: $run" >&2
    RECIPE=digits KL_COEF=$coef RUN_DIR=$run bash run_opd.sh "$@" >&2
}
for coef in 0 0.001 0.01 0.1 1; do train "kl-$coef" "$coef" "$@"; done
train policy-gradient-1 1 teacher.loss=policy_gradient "$@"
python=.venv/bin/python
[ -x "$python" ] || python=.venv-gpu/bin/python  # what run_opd.sh sets up with a GPU
"$python" -m opd.compare --out "$OUT" "${runs[@]}"
echo "ablation: $OUT/comparison.md, $OUT/comparison.png" >&2
