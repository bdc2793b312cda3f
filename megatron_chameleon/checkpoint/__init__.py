"""Checkpoints in megatron's torch_dist format, written atomically and loadable in any layout."""
