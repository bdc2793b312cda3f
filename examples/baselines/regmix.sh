#!/usr/bin/env bash
# Compute RegMix's mixture of SlimPajama, a baseline of Chameleon's paper (section "Experimental
# setup"): train 200 proxies of 1M parameters, fit a regression to their losses, and find the
# predicted optimum for Common Crawl, the paper's target for RegMix.
#
#   bash examples/baselines/regmix.sh                # on every GPU of this machine
#   SIZE=tiny bash examples/baselines/regmix.sh      # smoke test on 2 CPU ranks
#   bash examples/baselines/regmix.sh -- --target cc,c4 --num-proxies 512
#
# --accept-uncertain trains the proxies whatever gain MixMin predicts: the baseline is the method itself.
#
# The same command resumes after an interruption. The proxies are in RUN/4-mixture/regmix.
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

REGMIX=(
  --num-proxies 200            # paper: table of FLOPs, 200 proxies; RegMix's paper: 512
  --model regmix-1m            # paper: table of FLOPs, 1M parameters; shape: RegMix's code
  --train-iters 1000           # paper: table of FLOPs, 1B tokens
  --seq-length 2048            # assumed: RegMix's code
  --global-batch-size 512      # assumed: RegMix's code
  --lr 4e-4                    # assumed: RegMix's code; constant after the warm-up
  --lr-warmup-iters 100        # assumed: RegMix's code
  --bf16                       # assumed: usual on the paper's H100
)
if [ "$SIZE" = tiny ]; then
  REGMIX+=(
    --num-proxies 16           # tiny: seconds
    --model nano               # tiny: seconds
    --train-iters 6            # tiny: seconds
    --seq-length 64            # tiny: seconds
    --global-batch-size 8      # tiny: seconds
    --lr 1e-2                  # tiny: learns in a few steps
    --lr-warmup-iters 2        # tiny: must be smaller than --train-iters
    --eval-tokens 512          # tiny: seconds
    --smallest-weight 0.02     # tiny: a corpus of three domains has few mixtures
    --num-trees 50             # tiny: seconds
    --num-draws 2000           # tiny: seconds
    --no-bf16                  # tiny: slow on CPUs
  )
else
  REGMIX+=(
    --target cc                # paper: appendix, weights of RegMix on SlimPajama
  )
fi

choose base slimpajama_627b.sh
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon compute_mixture --method regmix --corpus "$CORPUS" \
  "${REGMIX[@]}" --seed "$SEED" "${LIMIT[@]}" --accept-uncertain --token-budget "$BUDGET" \
  --output "$RUN/4-mixture/regmix.json" "${EXTRA[@]}"
