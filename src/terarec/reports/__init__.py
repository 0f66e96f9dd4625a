"""Readable output: numbers as text, progress bars, and reports as one self-contained HTML file."""
