"""The head-to-head of methods: many base runs with paired seeds, and one table of them."""
