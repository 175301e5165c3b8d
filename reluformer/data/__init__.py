"""Data: text files to tokens to batches, and generated tasks."""
