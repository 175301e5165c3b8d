"""Inspection of trained models: the paper's measures per layer and head, and attention maps."""
