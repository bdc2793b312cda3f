"""GPT on megatron-core: sizes, layers, initial weights, and forward-only inference."""
