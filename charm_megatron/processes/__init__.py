"""Starts the ranks of a job as processes, and lets none outlive it."""
