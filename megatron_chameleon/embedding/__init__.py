"""Domain embeddings: mean hidden states of text windows at a layer of a proxy."""
