"""Responses that continue in the next step (rollout.partial): no step waits for the longest one.

A step begins more groups of responses than it trains on. When enough groups are complete, vLLM
stops. The other groups keep their tokens and log-probabilities, and continue in the next step with
the new weights.

    ledger   which groups have begun, and how many each replica completes in a draw
    groups   the tokens of the groups that one replica has begun
    drawing  begin, generate, grade and share, as rollout/drawing.py does for whole batches

Which groups are complete is decided without a clock: every replica counts its own groups, in steps
of vLLM. So a run with the same seed draws the same responses, also after it has been resumed.
"""
