"""Suites of the benchmark, one file for each family."""
