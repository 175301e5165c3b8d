"""`reluformer bench`: every implementation of attention against its peers, in one run.

cases.py what is measured · contestants.py who takes part · features.py what options of ours cost
gate.py nobody is timed before agreeing with float64 · timing.py interleaved rounds
measure.py the run · report.py its JSON and table · plot.py its picture
"""
