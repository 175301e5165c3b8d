"""Fused rectified attention in Triton: `op` is the entry point; Triton is imported on first use."""
