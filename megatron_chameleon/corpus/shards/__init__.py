"""The work of preprocessing in shards: planned once, made anywhere, joined to a corpus."""
