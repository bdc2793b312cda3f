"""Text in, token ids out: tokenizer files of all kinds, and the libraries that encode."""
