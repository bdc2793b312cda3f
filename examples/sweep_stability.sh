#!/usr/bin/env bash
# Measure the stability of the paper's domain weights (section "Stability and Practicality", and its
# appendix): compute SlimPajama's weights for several numbers of proxy steps, proxy sizes, ridges
# and numbers of windows. Only one of these settings differs at a time from the 82M proxy of 2,000
# steps. Seven proxies are trained, the longest for 10,000 steps.
#
#   bash examples/sweep_stability.sh                 # on every GPU of this machine
#   SIZE=tiny bash examples/sweep_stability.sh       # smoke test on 2 CPU ranks
#   bash examples/sweep_stability.sh -- --sweep-ridge 0.1 1 10 100 1000
#
# The same command resumes after an interruption. Tables and RUN/7-report/stability.png show how the
# weights change.
#
#   SIZE         model size of the central proxy (82m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-82m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/slimpajama}
CORPUS=${CORPUS:-$RUN/1-corpus}

choose proxy slimpajama_627b.sh
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon sweep_mixture "${TRAIN[@]}" "${EMBED[@]}" "${SWEEP[@]}" \
  "${LIMIT[@]}" --output "$RUN" "${EXTRA[@]}"
