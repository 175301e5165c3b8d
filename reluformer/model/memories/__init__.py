"""The kinds of global memory: `table` names them, the other files say how each finds its slots."""
