"""Scripts that measure speed and memory; docs/benchmarks.md has their results.

Every script is run as a command and begins with its documentation, which --help prints. `*_h200`
scripts are meant for GPUs, but all of them run at a tiny size on a CPU, see
tests/repository/test_benchmarks.py. harness.py is what they share, shapes.py makes the models, and
make_*.py make data. The product imports nothing from here.
"""
