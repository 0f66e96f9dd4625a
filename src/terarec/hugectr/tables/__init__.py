"""The tables of the facade: for every callable of HugeCTR, one row per parameter."""
