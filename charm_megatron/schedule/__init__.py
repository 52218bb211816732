"""Schedules as data: decisions, lowering, programs, text, checker, accounting, pictures."""
