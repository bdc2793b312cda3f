#!/usr/bin/env bash
# Fine-tune the 684M model of the Pile on seven languages of Wiki40b, with uniform weights and with
# Chameleon's fine-tuning and pretraining weights, as in the paper (section "Finetuning", appendix
# "PPL of finetuning").
#
#   bash examples/finetune_wiki40b.sh
#   PRETRAINED=runs/other bash examples/finetune_wiki40b.sh
#   SIZE=tiny bash examples/finetune_wiki40b.sh      # smoke test on 2 CPU ranks
#   MIXTURE=chameleon-finetune bash examples/finetune_wiki40b.sh -- --micro-batch-size 4
#
# The launcher prints a table of perplexities at the end. The same command resumes after an
# interruption.
#
#   SIZE         model size of PRETRAINED (684m)
#   RUN          folder of the experiment (runs/wiki40b)
#   CORPUS       corpus, with the tokenizer of PRETRAINED (RUN/1-corpus)
#   PRETRAINED   the run or checkpoint to start from (runs/pile/5-base/chameleon-pretrain-seed1)
#   MIXTURE      mixtures to fine-tune with ("uniform chameleon-finetune chameleon-pretrain")
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/wiki40b}
PRETRAINED=${PRETRAINED:-runs/pile/5-base/chameleon-pretrain-seed1}
MIXTURE=${MIXTURE:-uniform chameleon-finetune chameleon-pretrain}

source "$HERE/compare_mixtures.sh"
fine_tune_and_compare wiki40b.sh
