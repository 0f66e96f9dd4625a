"""Launchers of the compiled core: they check what raw pointers cannot tell, and convert its reports to errors."""
