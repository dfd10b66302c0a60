"""Training graphs: slicing, derivation, recompute and the reference evaluator."""
