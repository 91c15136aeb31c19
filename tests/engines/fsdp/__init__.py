"""Tests of the FSDP2 engine, by subject.

Engines need ranks, so most tests judge what a worker wrote down: a case (a function or an entry of
a table) stands above the tests that judge it, and names the numbers of ranks that run it. See
cases.py.
"""
