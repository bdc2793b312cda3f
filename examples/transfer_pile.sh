#!/usr/bin/env bash
# Transfer a proxy to other domains, as in the paper (section "Scalable to Pile"): compute weights
# for the 17 domains of the Pile with the proxy that was trained on SlimPajama. Nothing is trained;
# the cost of the embeddings is printed at the end (paper: 4.6e15 FLOPs).
#
#   bash examples/transfer_pile.sh
#   SIZE=tiny bash examples/transfer_pile.sh      # smoke test on 2 CPU ranks
#   bash examples/transfer_pile.sh -- --recipe paper --explain
#
# The same command resumes after an interruption. pretrain_684m_pile.sh trains with these weights.
#
#   SIZE         model size of PROXY (82m)
#   RUN          folder of the experiment (runs/pile)
#   CORPUS       corpus, with the tokenizer of PROXY (RUN/1-corpus)
#   PROXY        the run or checkpoint to embed with (runs/slimpajama/2-proxy/SIZE-seed1)
set -euo pipefail
SIZE=${SIZE:-82m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/pile}
PROXY=${PROXY:-runs/slimpajama/2-proxy/$SIZE-seed$SEED}

choose proxy pile.sh
[ -d "$PROXY" ] || refuse "no run at $PROXY; create it with" \
  "'SIZE=$SIZE bash $HERE/pretrain_82m_proxy.sh', or set PROXY"
WEIGH=(torchrun "${RANKS[@]}" -m megatron_chameleon compute_mixture "${EMBED[@]}" --checkpoint "$PROXY"
  --store "$RUN/3-embeddings" --output "$RUN/4-mixture/chameleon-pretrain.json" "${EXTRA[@]}")
[ -n "${STOP_AT:-}" ] || exec "${WEIGH[@]}"
within_limit "${WEIGH[@]}"
