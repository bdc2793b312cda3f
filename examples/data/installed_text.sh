#!/usr/bin/env bash
# Prepare real text without a data set: the quickstart's 8 domains from the installed packages, in
# half a minute. The text depends on the installed packages. registers_text.sh and code_text.sh call
# this script with another COLLECTION, whose text they read from Debian packages.
#   OUTPUT=corpora/installed-text bash examples/data/installed_text.sh
set -euo pipefail

COLLECTION=${COLLECTION:-installed}                   # or a --collection of debian_text.py
[ "$COLLECTION" = installed ] || OUTPUT=${OUTPUT:-corpora/$COLLECTION/corpus}
OUTPUT=${OUTPUT:-corpora/installed-text}              # output corpus
INPUT=${INPUT:-$(dirname "$OUTPUT")/text}             # text folder, created if missing
TOKENIZER=${TOKENIZER:-$(dirname "$OUTPUT")/tokenizer.json}   # trained if missing
MAX_BYTES=${MAX_BYTES:-3500000}                       # maximum bytes of text per domain
VOCAB_SIZE=${VOCAB_SIZE:-8192}                        # entries of a new tokenizer

GATHER=(-m megatron_chameleon gather_installed_text)
[ "$COLLECTION" = installed ] || GATHER=("$(dirname "$0")/debian_text.py" --collection "$COLLECTION")
[ -e "$INPUT/gathered.json" ] ||
  python "${GATHER[@]}" --output-dir "$INPUT" --max-bytes-per-domain "$MAX_BYTES"
FOUND=$(sed -n 's/.*"collection": "\([a-z]*\)".*/\1/p' "$INPUT/gathered.json")
if [ "${FOUND:-installed}" != "$COLLECTION" ]; then
  echo "error: $INPUT holds the collection $FOUND; pass OUTPUT in another folder, or INPUT" >&2
  exit 2
fi
DOMAINS=()
for file in "$INPUT"/*.jsonl; do
  name=${file##*/}
  DOMAINS+=(--input "${name%.jsonl}=$file")
done
[ -e "$TOKENIZER" ] ||
  python -m megatron_chameleon train_tokenizer "${DOMAINS[@]}" --output "$TOKENIZER" --vocab-size "$VOCAB_SIZE"
python -m megatron_chameleon preprocess_data "${DOMAINS[@]}" --output "$OUTPUT" \
  --tokenizer-model "$TOKENIZER" --split 80,10,10 --min-tokens-per-split 2000 "$@"
