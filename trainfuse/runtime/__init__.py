"""Plans: compiled programs, launches, CUDA graphs and the gate."""
