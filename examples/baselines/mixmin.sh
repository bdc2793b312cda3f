#!/usr/bin/env bash
# Compute MixMin's weights of SlimPajama for a target text, from n-gram models of the domains. This
# script needs no training or GPU. The paper does not include MixMin.
#
#   TARGET='mine=notes/*.txt' bash examples/baselines/mixmin.sh
#   SIZE=tiny bash examples/baselines/mixmin.sh       # smoke test on a small corpus
#   bash examples/baselines/mixmin.sh -- --prior natural --accept-uncertain
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
#   TARGET       what the mixture is for, as for --target (the average over the domains, for which
#                there is nothing to gain over Uniform)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}
CORPUS=${CORPUS:-$RUN/1-corpus}

choose base slimpajama_627b.sh
MIXMIN=(--token-budget "$BUDGET")   # the base model's tokens
[ -z "${TARGET:-}" ] || MIXMIN+=(--target "$TARGET")
on_first_node python -m megatron_chameleon compute_mixture --method mixmin --corpus "$CORPUS" \
  "${MIXMIN[@]}" --output "$RUN/4-mixture/mixmin.json" "${EXTRA[@]}"
