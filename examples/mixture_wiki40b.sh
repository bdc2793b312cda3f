#!/usr/bin/env bash
# Compute weights for fine-tuning the 684M model of the Pile on seven languages of Wiki40b, in both
# modes, finetune and pretrain (section "Finetuning"). The model itself embeds the domains, so no
# proxy is trained.
#
#   bash examples/mixture_wiki40b.sh
#   PRETRAINED=runs/other bash examples/mixture_wiki40b.sh
#   SIZE=tiny bash examples/mixture_wiki40b.sh      # smoke test on 2 CPU ranks
#   bash examples/mixture_wiki40b.sh -- --temperature 0.5 --explain
#
# The same command resumes after an interruption. finetune_wiki40b.sh starts with this step.
#
#   SIZE         model size of PRETRAINED (684m)
#   RUN          folder of the experiment (runs/wiki40b)
#   CORPUS       corpus, with the tokenizer of PRETRAINED (RUN/1-corpus)
#   PRETRAINED   the run or checkpoint to embed with (runs/pile/5-base/chameleon-pretrain-seed1)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/wiki40b}
PRETRAINED=${PRETRAINED:-runs/pile/5-base/chameleon-pretrain-seed1}

source "$HERE/compare_mixtures.sh"
choose finetune wiki40b.sh
start_from "$PRETRAINED"
EMBED+=("${EXTRA[@]}")
weigh_domains "$PRETRAINED" finetune pretrain
