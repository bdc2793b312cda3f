#!/usr/bin/env bash
# Write the paper's printed weights for SlimPajama (appendix, "Final domain weights"), one mixture
# per column. The paper uses them for its 684M and 1.2B base models. This script needs no
# training or GPU.
#
#   bash examples/baselines/manual.sh
#   PUBLISHED="pile/human pile/doremi" bash examples/baselines/manual.sh    # into runs/pile
#   SIZE=tiny bash examples/baselines/manual.sh       # smoke test on a small corpus
#
# pretrain_684m.sh reads RUN/4-mixture/printed-COLUMN.json with MIXTURE=printed-COLUMN. With
# SIZE=tiny no column fits the corpus, so uniform weights are written instead: to a file in
# RUN/4-mixture/manual, from which the mixture is read.
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama, or that of the columns' dataset)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
#   PUBLISHED    columns of one dataset, slimpajama/, pile/, wiki40b/ or stack/; the error for an
#                unknown name lists all columns (slimpajama/ doremi, doge, chameleon and regmix)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
PUBLISHED=${PUBLISHED:-slimpajama/doremi slimpajama/doge slimpajama/chameleon slimpajama/regmix}
DATA_SET=${PUBLISHED%%/*}
RUN=${RUN:-runs/$DATA_SET}

case $DATA_SET in
  slimpajama) EXPERIMENT=base RECIPE=slimpajama_627b.sh ;;
  pile) EXPERIMENT=base-pile RECIPE=pile.sh ;;
  wiki40b | stack) EXPERIMENT=finetune RECIPE=$DATA_SET.sh ;;
  *) refuse "PUBLISHED=$PUBLISHED: the datasets are slimpajama/, pile/, wiki40b/ and stack/" ;;
esac
for column in $PUBLISHED; do
  [[ $column == "$DATA_SET"/* ]] ||
    refuse "$column is not a column of $DATA_SET/: a corpus has the domains of one dataset"
done

choose "$EXPERIMENT" "$RECIPE"
for column in $PUBLISHED; do
  say "$column"
  name=${column#*/}
  FROM=(--published "$column")
  if [ "$SIZE" = tiny ]; then
    FROM=(--weights "$RUN/4-mixture/manual/$name.json")
    on_first_node python -m megatron_chameleon compute_mixture --method uniform --corpus "$CORPUS" \
      --output "${FROM[1]}"
  fi
  on_first_node python -m megatron_chameleon compute_mixture --method manual --corpus "$CORPUS" \
    "${FROM[@]}" --token-budget "$BUDGET" --output "$RUN/4-mixture/printed-$name.json" "${EXTRA[@]}"
done
