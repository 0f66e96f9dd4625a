"""The interfaces of HugeCTR's releases: calls and parameters in TOML files, and the validation by them."""
