"""What HugeCTR's releases accept: calls and their parameters as TOML files, and the code that validates by them."""
