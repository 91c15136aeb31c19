"""Around both training loops: setup and resume, signals, the output directory, and metrics.

The scripts fill a `Run` (run.py) step by step. Code for one algorithm belongs in its script or, for
PPO, in rl/. Nothing here computes with a model.
"""
