"""The keys of the configuration: YAML files with every default, and the modules that describe them.

arguments.py reads a command's arguments, files.py reads YAML, checks.py finds every mistake in keys
and values, rules.py lists the valid values of each key, paths.py expands ~ and environment
variables, names.py suggests a key in place of an unknown one, help.py prints groups of keys,
usage.py ends commands with their usage, packages.py ends them where a package is missing,
environment.py checks the environment variables of torchrun and srun, json_schema.py describes the
keys to editors, and errors.py has the error for all mistakes of the user. Layers are loaded and
merged in config.py.
"""
