"""`reluformer bench`: times every implementation of attention in one run.

cases.py         shapes, their inputs and their FLOPs
contestant.py    one implementation on one case
contestants.py   the backends of this package and torch's kernels
flex.py          FlexAttention
features.py      options of the fused ReLU kernels
gate.py          comparison with float64; only implementations that pass are timed
timing.py        interleaved rounds
measure.py       the run
report.py        its JSON and Markdown table
plot.py          its figure
"""
