"""Stages that scores go through between a product and the next, one file each (chain.py has the protocol)."""
