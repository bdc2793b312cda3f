#!/usr/bin/env bash
# Compute the surrogate's mixture of SlimPajama: train 200 proxies of 1M parameters, as for RegMix,
# fit a stack of models to their losses, and find the predicted optimum for the mean loss over all
# domains. If its gain over the natural mixture is not certain, the natural mixture is written, unless
# --accept-uncertain is passed; if MixMin predicts no certain gain over it, no proxy is trained either.
# Chameleon's paper does not cover this method.
#
#   bash examples/baselines/surrogate.sh                # on every GPU of this machine
#   SIZE=tiny bash examples/baselines/surrogate.sh      # smoke test on 2 CPU ranks
#   bash examples/baselines/surrogate.sh -- --kl 0.05 --min-weight 0.01 --accept-uncertain
#
# The same command resumes after an interruption. The proxies are in RUN/4-mixture/regmix: they are
# those of regmix.sh, and are trained only once for both methods.
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

SURROGATE=(
  --num-proxies 200            # assumed: as in regmix.sh, whose proxies these are
  --model regmix-1m            # assumed: as in regmix.sh
  --train-iters 1000           # assumed: as in regmix.sh
  --seq-length 2048            # assumed: as in regmix.sh
  --global-batch-size 512      # assumed: as in regmix.sh
  --lr 4e-4                    # assumed: as in regmix.sh
  --lr-warmup-iters 100        # assumed: as in regmix.sh
  --bf16                       # assumed: as in regmix.sh
)
if [ "$SIZE" = tiny ]; then
  SURROGATE+=(
    --num-proxies 16           # tiny: seconds
    --model nano               # tiny: seconds
    --train-iters 6            # tiny: seconds
    --seq-length 64            # tiny: seconds
    --global-batch-size 8      # tiny: seconds
    --lr 1e-2                  # tiny: learns in a few steps
    --lr-warmup-iters 2        # tiny: must be smaller than --train-iters
    --eval-tokens 512          # tiny: seconds
    --smallest-weight 0.02     # tiny: a corpus of three domains has few mixtures
    --num-draws 1000           # tiny: seconds
    --splits 2                 # tiny: seconds
    --no-bf16                  # tiny: slow on CPUs
  )
fi

choose base slimpajama_627b.sh
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon compute_mixture --method surrogate --corpus "$CORPUS" \
  "${SURROGATE[@]}" --seed "$SEED" "${LIMIT[@]}" --token-budget "$BUDGET" \
  --work-dir "$RUN/4-mixture/regmix" --output "$RUN/4-mixture/surrogate.json" "${EXTRA[@]}"
