#!/usr/bin/env bash
# Compute DoGE's mixture of SlimPajama, a baseline of Chameleon's paper (section "Experimental
# setup"), with an 82M proxy of 10,000 steps. The target is held-out text of all domains, as in
# DoGE's code (assumed); '-- --algorithm paper' selects the algorithm of DoGE's paper.
#
#   bash examples/baselines/doge.sh                # on every GPU of this machine
#   SIZE=tiny bash examples/baselines/doge.sh      # smoke test on 2 CPU ranks
#   bash examples/baselines/doge.sh -- --target book --output runs/slimpajama/4-mixture/doge-book.json
#
# --accept-uncertain trains the proxy whatever gain MixMin predicts: the baseline is the method itself.
#
# The same command resumes after an interruption. The proxy is in RUN/4-mixture/doge.
#
#   SIZE         model size of the proxy (82m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-82m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

DOGE=(
  --doge-eps 0                 # assumed: DoGE's paper
  --doge-dw-min 0              # assumed: DoGE's code
  --doge-dw-max 5              # assumed: DoGE's code
  --doge-max-norm 5            # assumed: DoGE's code
)
choose proxy slimpajama_627b.sh
if [ "$SIZE" != tiny ]; then
  DOGE+=(
    --train-iters 10000        # paper: training setup, "10k iterations"
  )
fi
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon compute_mixture --method doge "${TRAIN[@]}" \
  "${DOGE[@]}" "${LIMIT[@]}" --accept-uncertain --output "$RUN/4-mixture/doge.json" "${EXTRA[@]}"
