"""Schedules: how a group becomes loops."""
