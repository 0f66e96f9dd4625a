"""Launchers of the compiled core."""
