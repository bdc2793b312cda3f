"""From what ``--input`` names to documents: finding sources, cutting them up, reading them."""
