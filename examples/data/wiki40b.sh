#!/usr/bin/env bash
# Prepare Wiki40b in seven languages of Latin script, one domain per language, with their own
# validation and test text. Wiki40b's markup (_START_ARTICLE_ and the like) stays in the text.
#
# Data: google/wiki40b on the Hugging Face hub; parquet, a config per language, with the text in
# `text`. The data are streamed from the hub, or read from a folder:
#   hf download google/wiki40b --repo-type dataset --local-dir data/wiki40b
#   INPUT=hf:data/wiki40b TOKENIZER=tokenizer.json bash examples/data/wiki40b.sh
# On n machines that share OUTPUT, set SHARD=1/n ... SHARD=n/n; then run once without SHARD.
set -euo pipefail

INPUT=${INPUT:-hf:google/wiki40b}      # hf: and the dataset's name or folder
OUTPUT=${OUTPUT:-corpora/wiki40b}      # output corpus
TOKENIZER=${TOKENIZER:-tokenizer.json} # --tokenizer-model of preprocess_data
WORKERS=${WORKERS:-}                   # processes; default: one fewer than cores
SHARD=${SHARD:-}                       # i/n: machine i of n

NAMES=(fr=french de=german it=italian es=spanish pt=portuguese nl=dutch pl=polish)
CONFIGS=("${NAMES[@]%=*}")

python -m megatron_chameleon preprocess_data --input "${CONFIGS[@]/#/$INPUT:}" \
  --output "$OUTPUT" --tokenizer-model "$TOKENIZER" --domain-from-config \
  --rename-domain "${NAMES[@]}" ${WORKERS:+--workers "$WORKERS"} ${SHARD:+--shard "$SHARD"} "$@"
