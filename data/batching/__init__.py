"""Batches of sequences, and how they are divided: over steps, ranks and micro-batches.

batch.py holds the tokens; order.py says which rows a step takes; packing.py fills parts and
micro-batches; plan.py says which ranks work on which sequence; groups.py makes the plans of context
parallelism that is chosen per batch. Everything here follows from numbers that all ranks know, so
that all ranks come to the same result without talking to each other.
"""
