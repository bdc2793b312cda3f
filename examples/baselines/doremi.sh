#!/usr/bin/env bash
# Compute DoReMi's mixture of SlimPajama, a baseline of Chameleon's paper (section "Experimental
# setup"), with an 82M reference on uniform weights and then an 82M proxy, of 10,000 steps each.
#
#   bash examples/baselines/doremi.sh                # on every GPU of this machine
#   SIZE=tiny bash examples/baselines/doremi.sh      # smoke test on 2 CPU ranks
#   DOREMI_VARIANT=original bash examples/baselines/doremi.sh
#   bash examples/baselines/doremi.sh -- --reference runs/slimpajama/2-proxy/82m-seed1
#
# The variant is 'fork', the DoReMi of DoGE's repository, to which Chameleon's repository points for
# its baselines. It sets step size and smoothing: 0.1 and 0 for 'fork', 1 and 1e-3 for 'original', as
# in DoReMi's paper and launch script (the default in DoReMi's code is 1e-4); --doremi-eta and
# --doremi-eps override both. The reference uses uniform weights (--reference-mixture), which is
# assumed from the baselines' code; --reference reuses a finished run.
#
# --accept-uncertain trains the models whatever gain MixMin predicts: the baseline is the method itself.
#
# The same command resumes after an interruption. The runs are in RUN/4-mixture/doremi.
#
#   SIZE         model size of reference and proxy (82m)
#   DOREMI_VARIANT  value of --doremi-variant (fork)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-82m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}
DOREMI_VARIANT=${DOREMI_VARIANT:-fork}

DOREMI=(
  --doremi-variant "$DOREMI_VARIANT"   # assumed: 'fork' is the baselines' code
)
choose proxy slimpajama_627b.sh
if [ "$SIZE" != tiny ]; then
  DOREMI+=(
    --train-iters 10000        # paper: training setup, "10k iterations"
  )
fi
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon compute_mixture --method doremi "${TRAIN[@]}" \
  "${DOREMI[@]}" "${LIMIT[@]}" --accept-uncertain --output "$RUN/4-mixture/doremi.json" "${EXTRA[@]}"
