"""Distinct values of columns: how often each occurs, also where memory does not hold them, and which id each has."""
