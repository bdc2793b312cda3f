#!/usr/bin/env bash
# Prepare SlimPajama-6B, a random sample of about 1% of SlimPajama: 7 domains with their own
# validation and test text. This is the quickest way to real data.
#
# Data: DKYoon/SlimPajama-6B on the Hugging Face hub; parquet, 5.5 million training documents, with
# the text in `text` and the domain in `meta.redpajama_set_name`. The data are streamed from the hub,
# or read from a folder:
#   hf download DKYoon/SlimPajama-6B --repo-type dataset --local-dir data/slimpajama-6b
#   INPUT=hf:data/slimpajama-6b TOKENIZER=tokenizer.json bash examples/data/slimpajama_6b.sh
# On n machines that share OUTPUT, set SHARD=1/n ... SHARD=n/n; then run once without SHARD.
set -euo pipefail

INPUT=${INPUT:-hf:DKYoon/SlimPajama-6B} # hf: and the dataset's name or folder
OUTPUT=${OUTPUT:-corpora/slimpajama-6b} # output corpus
TOKENIZER=${TOKENIZER:-tokenizer.json}  # --tokenizer-model of preprocess_data
WORKERS=${WORKERS:-}                    # processes; default: one fewer than cores
SHARD=${SHARD:-}                        # i/n: machine i of n

NAMES=(RedPajamaArXiv=arxiv RedPajamaBook=book RedPajamaCommonCrawl=cc RedPajamaC4=c4
  RedPajamaGithub=github RedPajamaStackExchange=stackexchange RedPajamaWikipedia=wikipedia)

python -m megatron_chameleon preprocess_data --input "$INPUT" --output "$OUTPUT" \
  --tokenizer-model "$TOKENIZER" --domain-key meta.redpajama_set_name \
  --rename-domain "${NAMES[@]}" ${WORKERS:+--workers "$WORKERS"} ${SHARD:+--shard "$SHARD"} "$@"
