"""Around all training loops: setup and resume, signals, the output directory, and metrics.

The scripts fill a `Run` (run.py) step by step. Code for one algorithm belongs in its script or in
rl/, preferences/ or reward_models/. Only distillation.py, for train_sft.py, computes with a model.
"""
