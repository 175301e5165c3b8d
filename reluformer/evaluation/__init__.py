"""Evaluation of translations: scores with signatures and significance tests."""
