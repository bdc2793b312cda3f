"""Every option of every tool, as frozen dataclasses; the flags are made from them."""
