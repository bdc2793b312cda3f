#!/usr/bin/env bash
# Weights for fine-tuning the 684M model of the Pile on seven programming languages of the Stack
# (section "Finetuning"): those for fine-tuning, and those for pretraining beside them. The model
# embeds the domains itself, so that no proxy is trained.
#
#   bash examples/mixture_stack.sh
#   PRETRAINED=runs/other bash examples/mixture_stack.sh
#   SIZE=tiny bash examples/mixture_stack.sh      # tries it out on 2 CPU ranks
#   bash examples/mixture_stack.sh -- --temperature 0.5 --explain
#
# The same command goes on with what was interrupted. finetune_stack.sh begins with the same.
#
#   SIZE         model size, that of PRETRAINED (684m)
#   RUN          folder of the experiment (runs/stack)
#   CORPUS       what tools/preprocess_data.py made with the tokenizer of PRETRAINED (RUN/1-corpus)
#   PRETRAINED   the run or checkpoint to embed with (runs/pile/5-base/chameleon-pretrain-seed1)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/stack}
CORPUS=${CORPUS:-$RUN/1-corpus}
PRETRAINED=${PRETRAINED:-runs/pile/5-base/chameleon-pretrain-seed1}

source "$HERE/compare_mixtures.sh"
choose finetune stack.sh
start_from "$PRETRAINED"
EMBED+=("${EXTRA[@]}")
weigh_domains
