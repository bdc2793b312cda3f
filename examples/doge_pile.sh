#!/usr/bin/env bash
# Compute DoGE's mixture of the Pile's 17 domains, as the paper did for its tables of the Pile
# (appendix, "Domain weights on Pile"), with an 82M proxy of 10,000 steps.
#
#   bash examples/doge_pile.sh                # on every GPU of this machine
#   SIZE=tiny bash examples/doge_pile.sh      # smoke test on 2 CPU ranks
#   bash examples/doge_pile.sh -- --global-batch-size 512
#
# The proxy's batch is 128: the paper prints the same FLOPs as for SlimPajama, although its text has
# batches of 512 for the Pile. The same command resumes after an interruption. The proxy is in
# RUN/4-mixture/doge.
#
#   SIZE         model size of the proxy (82m)
#   RUN          folder of the experiment (runs/pile)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-82m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/pile}

export SIZE RUN RECIPE=pile.sh
exec bash "$HERE/baselines/doge.sh" "$@"
