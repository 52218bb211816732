"""Other libraries' context-parallel attention, to be timed beside our schedules."""
