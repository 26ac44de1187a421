"""Faults of other packages that the tour warns of."""
