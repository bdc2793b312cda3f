"""Losses of proxies on many mixtures, fitted: RegMix and Data Mixing Laws."""
