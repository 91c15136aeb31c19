"""Around both training loops: setup and resume, signals, the output directory, and metrics.

The scripts fill a `Run` (run.py) step by step. What one algorithm needs beside that belongs to its
script or, for PPO, to rl/. Nothing here computes with a model.
"""
