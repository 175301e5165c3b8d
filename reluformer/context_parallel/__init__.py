"""Computations that several processes share: attention over a context no one of them holds."""
