"""Models of transformers, with the plugin off and on.

- `programs`: Program that runs all models and compares errors and times.
- `program_models`: The models, as data.
- `program_table`: Summary and table of a run.
- `growing_cache`: Decoding from caches that grow by one key per token; also a program.
"""
