"""Process groups, seeds, and megatron-core on machines without CUDA."""
