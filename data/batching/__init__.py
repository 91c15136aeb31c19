"""Batches of sequences, and how they are divided: over steps, ranks and micro-batches.

batch.py holds the tokens; order.py chooses the rows of a step, mixture.py those of several sources
in fixed shares, and sampler.py calls the user's function for it; packing.py divides them into equal
parts and into micro-batches; plan.py assigns ranks to sequences; groups.py plans dynamic context
parallelism, whose size is chosen per batch. All ranks compute the same results from values that
they all have, so they need not communicate.
"""
