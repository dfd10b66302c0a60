"""Rewrites that change the algorithm, each with its proof obligations."""
