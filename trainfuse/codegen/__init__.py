"""Kernel IR, schedules and the Triton printer."""
