"""Launchers of the compiled core: they check what its raw pointers cannot, and turn its reports into errors."""
