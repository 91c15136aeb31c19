"""The keys of the configuration: YAML files with every default, and the modules that describe them.

    arguments    reads a command's arguments: YAML files and key=value pairs
    files        reads YAML files and pairs
    checks       finds every mistake in keys and values
    rules        the valid values of each key
    values       conditions on single values
    paths        expands ~ and environment variables
    names        suggests a key in place of an unknown one
    help, usage  print groups of keys, and a command's usage
    packages     ends a command if a package is missing
    environment  checks the environment variables of torchrun and srun
    json_schema  describes the keys to editors
    errors       the error for all mistakes of the user

Layers are loaded and merged in config.py.
"""
