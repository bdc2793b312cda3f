"""Domains for text without labels: clusters of document embeddings."""
