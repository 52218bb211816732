"""Measurements: they print times and ratios, and no test asserts one."""
