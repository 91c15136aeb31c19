"""Batches of sequences, and how they are divided: over steps, ranks and micro-batches.

batch.py holds the tokens; order.py chooses the rows of a step; packing.py divides them into equal
parts and into micro-batches; plan.py assigns ranks to sequences; groups.py plans dynamic context
parallelism, which is chosen per batch. Everything here is computed from values that all ranks have,
so all ranks reach the same result without communication.
"""
