"""Proves schedules: all programs run on names (`programs`), or the tables alone (`tables`)."""
