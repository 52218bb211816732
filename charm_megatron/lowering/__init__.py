"""Planners' decisions -> tables of hops and blocks -> the program of each rank, by pure passes."""
