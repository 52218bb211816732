"""Schedules for people: grids, pictures of timelines, traces."""
