"""Tools of developers.

Programs are run by path, such as `python tools/build/aot.py`. A program adds the checkout to sys.path, and imports the
modules of this package by full names.
"""
