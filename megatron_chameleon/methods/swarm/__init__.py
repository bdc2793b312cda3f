"""Swarms of small proxies, one mixture each, and the methods that fit their losses."""
