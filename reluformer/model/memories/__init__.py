"""Kinds of global memory: `table` lists them, the other modules define how slots are selected."""
