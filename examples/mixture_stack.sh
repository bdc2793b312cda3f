#!/usr/bin/env bash
# Compute weights for fine-tuning the 684M model of the Pile on seven programming languages of the
# Stack, in both modes, finetune and pretrain (section "Finetuning"). The model itself embeds the
# domains, so no proxy is trained.
#
#   bash examples/mixture_stack.sh
#   PRETRAINED=runs/other bash examples/mixture_stack.sh
#   SIZE=tiny bash examples/mixture_stack.sh      # smoke test on 2 CPU ranks
#   bash examples/mixture_stack.sh -- --temperature 0.5 --explain
#
# The same command resumes after an interruption. finetune_stack.sh starts with this step.
#
#   SIZE         model size of PRETRAINED (684m)
#   RUN          folder of the experiment (runs/stack)
#   CORPUS       corpus, with the tokenizer of PRETRAINED (RUN/1-corpus)
#   PRETRAINED   the run or checkpoint to embed with (runs/pile/5-base/chameleon-pretrain-seed1)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/stack}
PRETRAINED=${PRETRAINED:-runs/pile/5-base/chameleon-pretrain-seed1}

source "$HERE/compare_mixtures.sh"
choose finetune stack.sh
start_from "$PRETRAINED"
EMBED+=("${EXTRA[@]}")
weigh_domains "$PRETRAINED" finetune pretrain
