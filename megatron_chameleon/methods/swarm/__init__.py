"""Many small proxies trained at once in each process: stacked weights, one mixture a member."""
