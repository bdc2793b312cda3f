#!/usr/bin/env bash
# Measure the stability of the paper's domain weights (section "Stability and Practicality", and its
# appendix): compute SlimPajama's weights for several numbers of proxy steps, proxy sizes, ridges
# and numbers of windows. Only one of these settings differs at a time from the 82M proxy of 2,000
# steps. The weights over steps are those of checkpoints of one run of 10,000 steps, as in the paper;
# its learning rate decays over 10,000 steps. Five proxies are trained.
#
#   bash examples/sweep_stability.sh                 # on every GPU of this machine
#   METHOD=doge bash examples/sweep_stability.sh     # a baseline's weights over proxy steps
#   SIZE=tiny bash examples/sweep_stability.sh       # smoke test on 2 CPU ranks
#   bash examples/sweep_stability.sh -- --sweep-ridge 0.1 1 10 100 1000
#
# The same command resumes after an interruption. Tables and RUN/7-report/stability.png show how the
# weights change.
#
#   SIZE         model size of the central proxy (82m)
#   METHOD       chameleon, doremi or doge; of the baselines, the paper has only the weights over steps
#                (chameleon)
#   RUN          folder of the experiment (runs/slimpajama; of a baseline: runs/sweep-METHOD)
#   CORPUS       output of preprocess_data (RUN/1-corpus; of a baseline: runs/slimpajama/1-corpus)
set -euo pipefail
SIZE=${SIZE:-82m}
source "$(dirname "$0")/launch.sh"
METHOD=${METHOD:-chameleon}
case $METHOD in
  chameleon) RUN=${RUN:-runs/slimpajama} CORPUS=${CORPUS:-$RUN/1-corpus} ;;
  doremi | doge) RUN=${RUN:-runs/sweep-$METHOD} CORPUS=${CORPUS:-runs/slimpajama/1-corpus} ;;
  *) refuse "METHOD=$METHOD: must be chameleon, doremi or doge" ;;
esac

choose proxy slimpajama_627b.sh
FLAGS=("${TRAIN[@]}" "${SWEEP_STEPS[@]}")
case $METHOD:$SIZE in
  chameleon:*) FLAGS+=("${EMBED[@]}" "${SWEEP[@]}") ;;
  *:tiny) FLAGS+=(--method "$METHOD") ;;
  *) FLAGS+=(--method "$METHOD" --train-iters 10000) ;;   # paper: training setup, "10k iterations"
esac
[ "$METHOD" != doremi ] || FLAGS+=(--doremi-variant fork)   # assumed: as in baselines/doremi.sh
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon sweep_mixture "${FLAGS[@]}" "${LIMIT[@]}" \
  --output "$RUN" "${EXTRA[@]}"
