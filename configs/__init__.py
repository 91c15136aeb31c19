"""The keys of the configuration: YAML files with every default, and the modules that describe them.

files.py reads YAML, rules.py says which values a key may have, names.py knows what other projects
call our keys, and json_schema.py tells editors all of this. Loading and merging is in config.py.
"""
