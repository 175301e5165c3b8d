"""Attention without softmax: ReLUFormer, its relatives, and document translation."""

__version__ = "0.1.0"
