#!/usr/bin/env bash
# The paper's transfer of a proxy to other domains (section "Scalable to Pile"): weights for the 17
# domains of the Pile from the proxy that was trained on SlimPajama. Nothing is trained: the cost is
# that of the embeddings, which is printed in the end (paper: 4.6e15 FLOPs).
#
#   bash examples/transfer_pile.sh
#   SIZE=tiny bash examples/transfer_pile.sh      # tries it out on 2 CPU ranks
#   bash examples/transfer_pile.sh -- --recipe paper --explain
#
# The same command goes on with what was interrupted. The weights are what pretrain_684m_pile.sh
# trains by.
#
#   SIZE         model size of PROXY (82m)
#   RUN          folder of the experiment (runs/pile)
#   CORPUS       what tools/preprocess_data.py made with the tokenizer of PROXY (RUN/1-corpus)
#   PROXY        the run or checkpoint to embed with (runs/slimpajama/2-proxy/SIZE-seed1)
set -euo pipefail
SIZE=${SIZE:-82m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/pile}
CORPUS=${CORPUS:-$RUN/1-corpus}
PROXY=${PROXY:-runs/slimpajama/2-proxy/$SIZE-seed$SEED}

choose proxy pile.sh
[ -d "$PROXY" ] || refuse "there is no run $PROXY to embed with:" \
  "SIZE=$SIZE bash $HERE/pretrain_82m_proxy.sh makes one; or give PROXY=FOLDER"
WEIGH=(torchrun "${RANKS[@]}" "$TOOLS/compute_mixture.py" "${EMBED[@]}" --checkpoint "$PROXY"
  --store "$RUN/3-embeddings" --output "$RUN/4-mixture/chameleon-pretrain.json" "${EXTRA[@]}")
[ -n "${STOP_AT:-}" ] || exec "${WEIGH[@]}"
within_limit "${WEIGH[@]}"
