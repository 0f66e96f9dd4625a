"""What people read: numbers as text, progress bars, and reports as one HTML file that fetches nothing."""
