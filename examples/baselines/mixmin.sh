#!/usr/bin/env bash
# Compute MixMin's weights of SlimPajama for a target text, from n-gram models of the domains; this
# needs no training or GPU. With EXPERTS=SIZE, a model of this size is trained on each domain instead,
# on every GPU, if n-grams predict a gain. The paper does not include MixMin.
#
#   TARGET='mine=notes/*.txt' bash examples/baselines/mixmin.sh
#   SIZE=tiny bash examples/baselines/mixmin.sh       # smoke test on a small corpus
#   bash examples/baselines/mixmin.sh -- --prior natural --accept-uncertain
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
#   EXPERTS      size of the models that are trained on the domains (none: n-gram models)
#   TARGET       what the mixture is for, as for --target (the average over the domains, for which
#                there is nothing to gain over Uniform)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

choose base slimpajama_627b.sh
MIXMIN=(--token-budget "$BUDGET")   # the base model's tokens
[ -z "${TARGET:-}" ] || MIXMIN+=(--target "$TARGET")
START=(on_first_node python)
if [ -n "${EXPERTS:-}" ]; then
  SIZE=$EXPERTS choose proxy
  limit_time
  START=(torchrun "${RANKS[@]}")
  MIXMIN+=("${TRAIN[@]}" --model "$EXPERTS" --experts "$EXPERTS" "${LIMIT[@]}")
else
  MIXMIN+=(--corpus "$CORPUS")
fi
"${START[@]}" -m megatron_chameleon compute_mixture --method mixmin "${MIXMIN[@]}" \
  --output "$RUN/4-mixture/mixmin.json" "${EXTRA[@]}"
