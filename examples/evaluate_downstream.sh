#!/usr/bin/env bash
# Evaluate downstream accuracy as in the paper's tables: thirteen tasks with 0 to 5 shots, for every
# base run of an experiment.
#
#   bash examples/evaluate_downstream.sh                    # the base runs of runs/slimpajama
#   RUN=runs/pile bash examples/evaluate_downstream.sh
#   SIZE=tiny DATA_DIR=copies bash examples/evaluate_downstream.sh    # smoke test on 2 CPU ranks
#   bash examples/evaluate_downstream.sh -- --tasks sciq piqa --evaluation-dtype bfloat16
#
# The same command resumes after an interruption. The results are written to
# RUN/6-evaluation/NAME-downstream.json.
#
#   SIZE         tiny for a smoke test; other values have no effect, since runs record their size
#   RUN          folder of the experiment (runs/slimpajama)
#   CHECKPOINTS  the runs or checkpoints to evaluate (all of RUN/5-base)
#   DATA_DIR     folder with copies of the tasks' datasets as OWNER/NAME (the hub)
set -euo pipefail
SIZE=${SIZE:-any}
source "$(dirname "$0")/launch.sh"

ASK=(
  --tasks arc_easy copa hellaswag lambada_standard logiqa multirc openbookqa   # paper: its tables
  piqa qqp race sciq social_iqa winogrande
  --shots 0 1 2 3 4 5                # paper: the figures of its tables are means over 0 to 5 shots
)
if [ "$SIZE" = tiny ]; then
  CHECKPOINTS=${CHECKPOINTS:-$PRETRAINED}
  ASK+=(
    --shots 0 1                      # tiny
    --limit 4                        # tiny
  )
fi
RUN=${RUN:-runs/slimpajama}
[ -z "${DATA_DIR:-}" ] || ASK+=(--data-dir "$DATA_DIR")

shopt -s nullglob
RUNS=("$RUN"/5-base/*/)
[ -z "${CHECKPOINTS:-}" ] || read -ra RUNS <<< "$CHECKPOINTS"
[ "${#RUNS[@]}" != 0 ] || refuse "no run in $RUN/5-base; create one with" \
  "'bash $HERE/pretrain_684m.sh', or set CHECKPOINTS"
for CHECKPOINT in "${RUNS[@]}"; do
  NAME=$(basename "$CHECKPOINT")
  say "Downstream tasks, $NAME"
  within_limit torchrun "${RANKS[@]}" -m megatron_chameleon evaluate downstream "${PARALLEL[@]}" "${ASK[@]}" \
    --checkpoint "${CHECKPOINT%/}" --output "$RUN/6-evaluation/$NAME-downstream.json" "${EXTRA[@]}"
done
