"""Scripts that measure speed and memory; docs/benchmarks.md has their results.

Every script is a command and begins with its documentation, which --help prints. `*_h200` scripts
are meant for GPUs, but tests/repository/test_benchmarks.py runs all of them at a tiny size on a
CPU. harness.py has shared helpers, shapes.py makes the models, and make_*.py make data. The product
imports nothing from here.
"""
