"""A rank's device, and its communication with other ranks, for both engines.

    device        the rank's device, the process group, and running work on rank 0 alone
    joining       joining the process group, or one line that says why that failed
    network       the network over which nodes talk to each other
    affinity      the CPUs next to the device
    collectives   collectives with a gradient, and groups of ranks
    varlen        attention over sequences laid end to end, on one rank or several
    offload       tensors that wait in host memory

Nothing here depends on a model or an engine.
"""
