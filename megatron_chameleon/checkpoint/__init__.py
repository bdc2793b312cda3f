"""Checkpoints in megatron's torch_dist format: written atomically, loadable under any layout."""
