#!/usr/bin/env bash
# Distil a teacher into a student on-policy, from nothing to a result: set-up, data, teacher, training, evaluation.
#
#   bash run_opd.sh                         recipe/digits on a CPU (3 to 6 minutes), recipe/gsm8k on a GPU
#   KL_COEF=0 bash run_opd.sh               the GRPO baseline; the KL to the teacher is reported all the same
#   bash run_opd.sh --dry-run               print the composed configuration and the commands, start nothing
#   bash run_opd.sh data.seed=7 ...         anything else goes to Hydra, on top of verl's configuration
#
# stdout: a small table and, as its last line, one JSON object. stderr: progress. Logs: RUN_DIR.
set -euo pipefail

# --- knobs: environment variables -----------------------------------------------------------------------------------
KL_COEF=${KL_COEF:-}             # weight of KL(student || teacher) in the loss; 0 is the GRPO baseline [the recipe's]
KL_TYPE=${KL_TYPE:-}             # estimator: k3+ k2 k3 k1+ abs ... [the recipe's]
TRAINER=${TRAINER:-}             # verl's: v0, or a mode of its V1: sync, colocate_async, separate_async [v0; GPU sync]
RECIPE=${RECIPE:-}               # folder under recipe/, or a path to one [digits; with a GPU gsm8k]
STUDENT=${STUDENT:-}             # Hugging Face folder or hub id [the recipe's]
TEACHER=${TEACHER:-}             # Hugging Face folder or hub id [the recipe's; none with teacher.teachers]
TEACHER_ADDR=${TEACHER_ADDR:-}   # running teachers, tcp://host:port, comma-separated; none is started then
TEACHER_PORT=${TEACHER_PORT:-15555} # where the teacher that this script starts listens, on 127.0.0.1
TEACHER_REPLICAS=${TEACHER_REPLICAS:-1} # teachers to start, on TEACHER_PORT and the ports after it
TEACHER_ARGS=${TEACHER_ARGS:-}   # more arguments for opd.teacher_server, such as "--dtype bfloat16 --device cuda:7"
STEPS=${STEPS:-}                 # training steps [the recipe's]
SEED=${SEED:-0}                  # of data order and sampling; the prepared models do not depend on it
RUN_DIR=${RUN_DIR:-}             # logs, metrics, checkpoints [runs/<recipe>-<time>]; one that was interrupted is resumed
# ---------------------------------------------------------------------------------------------------------------------

invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
say() { printf '%s\n' "$*" >&2; }
die() { say "run_opd.sh: $*"; exit 1; }
absolute() { case "$1" in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$invoked_from" "$1" ;; esac; }

dry_run=false
hydra=()
for word in "$@"; do
    case "$word" in
        -h | --help) sed -n '2,/^# ----.*-$/{/^# ---/!{/^set /!p}}' run_opd.sh | sed 's/^# \{0,1\}//'; exit 0 ;;
        --dry-run) dry_run=true ;;
        -*) die "$word is unknown; there are --help, --dry-run, and key=value for Hydra" ;;
        *) hydra+=("$word") ;;
    esac
done

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
device=cpu
if has_gpu; then device=cuda; fi
if [ -z "$RECIPE" ]; then if [ $device = cuda ]; then RECIPE=gsm8k; else RECIPE=digits; fi; fi
# V1 is what verl keeps; without a GPU its replay buffer, which looks for rows every 2 s, would be most of a step
if [ -z "$TRAINER" ]; then if [ $device = cuda ]; then TRAINER=sync; else TRAINER=v0; fi; fi
if [ -d "recipe/$RECIPE" ]; then RECIPE=$PWD/recipe/$RECIPE; else RECIPE=$(absolute "$RECIPE"); fi
recipe_name=$(basename "$RECIPE")
for file in prepare.py reward.py config.yaml; do
    [ -f "$RECIPE/$file" ] || die "RECIPE: $RECIPE has no $file; known recipes: $(ls recipe | tr '\n' ' ')"
done
case "$TRAINER" in v0 | sync | colocate_async | separate_async) ;;
*) die "TRAINER: $TRAINER is unknown; use v0, sync, colocate_async or separate_async" ;; esac
case "$TEACHER_PORT" in '' | 0* | *[!0-9]* | ??????*) die "TEACHER_PORT: $TEACHER_PORT is no port" ;; esac
case "$TEACHER_REPLICAS" in '' | 0* | *[!0-9]* | ????*) die "TEACHER_REPLICAS: $TEACHER_REPLICAS is not 1 to 999" ;; esac
last_port=$((TEACHER_PORT + TEACHER_REPLICAS - 1))
[ "$last_port" -le 65535 ] || die "TEACHER_PORT: the last of the teachers would listen on $last_port, which is no port"
# two local Rays, the trainer's and the teachers', would hand out the same GPUs
[ $device = cpu ] || [ "$TEACHER_REPLICAS" = 1 ] ||
    die "TEACHER_REPLICAS: with GPUs, start python -m opd.teacher_pool on its own and give its addresses as TEACHER_ADDR"
RUN_DIR=$(absolute "${RUN_DIR:-$PWD/runs/$recipe_name-$(date +%Y%m%d-%H%M%S)}")
[ ! -e "$RUN_DIR/result.json" ] || die "RUN_DIR: $RUN_DIR holds a finished run; choose another folder"

# an environment of its own with a GPU: the tests' packages, in .venv, are others
if [ $device = cuda ]; then venv=.venv-gpu requirements=requirements-gpu.txt; else venv=.venv requirements=requirements.txt; fi
VENV=$venv REQUIREMENTS=$requirements bash tools/setup_venv.sh
SECONDS=0  # the reported time starts after the set-up
python=$PWD/$venv/bin/python
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} PYTHONUNBUFFERED=1
if [ $device = cpu ]; then export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}; fi

# Everything started here runs in a session of its own, and only these sessions are ever signalled.
pids=()
start() { local log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null & pids+=($!); }
alive() { kill -0 "$1" 2>/dev/null; }
any_left() { local pid; for pid in "${pids[@]}"; do kill -0 -- "-$pid" 2>/dev/null && return 0; done; return 1; }
stop_all() {
    local signal pid
    # INT first: Ray replaces Python's handler of TERM by one that aborts, and its own processes would be killed late
    for signal in INT TERM KILL; do
        any_left || break
        for pid in "${pids[@]}"; do kill "-$signal" -- "-$pid" 2>/dev/null || true; done
        for _ in $(seq 40); do any_left || break; sleep 0.1; done
    done
    { wait "${pids[@]}" || true; } 2>/dev/null  # bash would report how each of them ended
    pids=()
}
trap stop_all EXIT
trap 'say "run_opd.sh: interrupted; stopping what it started"; exit 130' INT TERM HUP

prepared=runs/prepared/$recipe_name
prepare=("$python" "$RECIPE/prepare.py" --out "$prepared")
field() { "$python" -c 'import json, sys; print(json.load(sys.stdin).get(sys.argv[1]) or "")' "$1" <<<"$plan"; }
plan=$("${prepare[@]}" --plan) || die "preparing $recipe_name failed (above)"

STUDENT=${STUDENT:-$(field student)}
names_teachers() { grep -qE '^[[:space:]]+teachers:|^[+]*teacher\.teachers' "$RECIPE/config.yaml" <(printf '%s\n' "${hydra[@]}"); }
start_teacher=true own_teacher=false
if [ -n "$TEACHER_ADDR" ]; then
    start_teacher=false
elif [ -z "$TEACHER" ]; then  # with TEACHER it is started beside those that teacher.teachers names
    if names_teachers; then start_teacher=false; else own_teacher=true; fi
fi
TEACHER=${TEACHER:-$(field teacher)}
address=$TEACHER_ADDR
if [ -z "$address" ] && $start_teacher; then
    for ((i = 0; i < TEACHER_REPLICAS; i++)); do address+="${address:+,}tcp://127.0.0.1:$((TEACHER_PORT + i))"; done
fi

read -ra teacher_args <<<"$TEACHER_ARGS"
teacher=("$python" -m opd.teacher_server --bind "$address")
if [ "$TEACHER_REPLICAS" -gt 1 ]; then
    # a Ray of its own (hence -u), on which 0.1 lets any number of replicas share this machine's cores
    teacher=(env -u RAY_ADDRESS "$python" -m opd.teacher_pool --replicas "$TEACHER_REPLICAS" --base-port "$TEACHER_PORT"
        --cpus-per-replica 0.1)
fi
teacher+=(--model "$TEACHER" "${teacher_args[@]}")
overrides=(
    "data.train_files='$(field train)'"
    "data.val_files='$(field val)'"
    "data.seed=$SEED"
    "actor_rollout_ref.actor.data_loader_seed=$SEED"
    "actor_rollout_ref.rollout.seed=$SEED"
    "actor_rollout_ref.model.path='$STUDENT'"
    "reward.custom_reward_function.path='$RECIPE/reward.py'"
    "trainer.experiment_name='$recipe_name'"
    "teacher.address='$address'"
)
[ -z "$KL_COEF" ] || overrides+=("actor_rollout_ref.actor.kl_loss_coef=$KL_COEF")
[ -z "$KL_TYPE" ] || overrides+=("actor_rollout_ref.actor.kl_loss_type=$KL_TYPE")
[ -z "$STEPS" ] || overrides+=("trainer.total_training_steps=$STEPS")
trainer=("$python" -m opd.main_opd --recipe "$RECIPE" --device "$device" --trainer "$TRAINER" --run-dir "$RUN_DIR"
    "${overrides[@]}" "${hydra[@]}")

if $dry_run; then
    "${trainer[@]}" --print-config 2> >(grep -v platform_manager >&2)
    echo "# commands:"
    printf '# '; printf '%q ' "${prepare[@]}"; echo
    if $start_teacher; then printf '# '; printf '%q ' "${teacher[@]}"; echo; fi
    printf '# '; printf '%q ' "${trainer[@]}"; echo
    exit 0
fi

last_error() { grep -v '^[[:space:]]*$' "$1" | grep -iE 'error|exception' | tail -n 1 || true; }
fail_with() {  # what happened, the log to blame
    local line
    line=$(last_error "$2")
    die "$1${line:+: $line} (log: $2)"
}

mkdir -p "$RUN_DIR" || die "RUN_DIR: $RUN_DIR cannot be made"
check_pid=""
if [ ! -e "$prepared/prepared.json" ]; then  # preparing takes long: a typo in the settings should not wait for it
    start "$RUN_DIR/settings.log" "${trainer[@]}" --print-config
    check_pid=${pids[-1]}
fi
setsid "${prepare[@]}" >&2 </dev/null & pids+=($!)
prepare_pid=${pids[-1]}
if [ -n "$check_pid" ] && ! wait "$check_pid"; then
    kill -TERM -- "-$prepare_pid" 2>/dev/null || true
    { wait "$prepare_pid" || true; } 2>/dev/null
    fail_with "the settings are refused" "$RUN_DIR/settings.log"
fi
wait "$prepare_pid" || die "preparing $recipe_name failed (above)"
pids=()
teacher_accuracy=""  # known for the recipe's own teacher only
if $own_teacher; then plan=$(cat "$prepared/prepared.json") && teacher_accuracy=$(field teacher_accuracy); fi

teacher_pid=""
if $start_teacher; then
    say "teacher: $TEACHER on $address (log: $RUN_DIR/teacher.log)"
    start "$RUN_DIR/teacher.log" "${teacher[@]}"
    teacher_pid=${pids[-1]}
fi
check_teacher() { [ -z "$teacher_pid" ] || alive "$teacher_pid" || fail_with "the teacher died" "$RUN_DIR/teacher.log"; }

say "training: $recipe_name, student $STUDENT (log: $RUN_DIR/train.log)"
start "$RUN_DIR/train.log" "${trainer[@]}"
trainer_pid=${pids[-1]}
setsid "$python" -m opd.progress "$RUN_DIR" >&2 </dev/null & pids+=($!)
while alive "$trainer_pid"; do check_teacher; sleep 0.5; done
check_teacher
wait "$trainer_pid" || fail_with "training failed" "$RUN_DIR/train.log"

steps=$(cat "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt") || die "training left no checkpoint in $RUN_DIR"
checkpoint=$RUN_DIR/checkpoints/global_step_$steps/actor/huggingface
say "evaluating the student before and after, on held-out prompts"
start "$RUN_DIR/evaluate.log" "$python" -m opd.evaluate --config "$RUN_DIR/config.yaml" --seed "$SEED" \
    --models "$STUDENT" "$checkpoint" --out "$RUN_DIR/evaluation.json"
evaluate_pid=${pids[-1]}
while alive "$evaluate_pid"; do check_teacher; sleep 0.2; done
wait "$evaluate_pid" || fail_with "evaluation failed" "$RUN_DIR/evaluate.log"

"$python" -m opd.report --run-dir "$RUN_DIR" --recipe "$recipe_name" --checkpoint "$checkpoint" --steps "$steps" \
    --teacher-accuracy "${teacher_accuracy:-null}" --seconds "$SECONDS"
